"""The job that chaos is done to: a model that counts samples, at a steady pace, with next to nothing to compute.

Every sample owns a digit in every layer (`tests.pipeline.witness`), so the final weights tell of each sample how often
it was added where. The pace is set by the data set, which hands out a sample after a rest: runs then take the same time
on fast and slow machines, and leave the processors to the processes that start again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.clock import SYSTEM_CLOCK
from tests.pipeline.witness import WitnessDataset, witness_loss, witness_model

#: Layers, each with a count of every sample.
NUM_LAYERS = 4

MINIBATCHES_PER_WAVE = 2

#: Digits have two bits, so this many passes over the data can be counted.
MAX_EPOCHS = 3

#: Samples in the data set, and seconds between two that one virtual worker takes; in the environment of the agents.
SAMPLES_VARIABLE, PACE_VARIABLE = "HETPIPE_CHAOS_SAMPLES", "HETPIPE_CHAOS_PACE"


#: Names a file with seconds that take the place of those, as long as it is there; in the environment of the agents.
PACE_FILE_VARIABLE = "HETPIPE_CHAOS_PACE_FILE"

#: Names a file with the number of a first or last stage's process that is to be slow; in the environment of the agents.
SLOW_VARIABLE = "HETPIPE_CHAOS_SLOW"

#: How much longer such a stage takes for a minibatch: many times as long as for all the rest of it. So it stands out
#: where everybody takes several times as long, as on a busy machine.
DRAG_SECONDS = 0.6


def num_samples() -> int:
    """Samples in the data set."""
    return int(os.environ.get(SAMPLES_VARIABLE, "8000"))


def pace_seconds() -> float:
    """Between two samples that one virtual worker takes."""
    return float(os.environ.get(PACE_VARIABLE, "0.04"))


def model() -> nn.Module:
    """The chain that counts."""
    return witness_model(NUM_LAYERS, num_samples(), torch.float64)


def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Adds one to every digit of the minibatch."""
    return witness_loss(output, target)


class PacedData:
    """The samples, one after a rest."""

    def __init__(self) -> None:
        self._samples = WitnessDataset(num_samples(), torch.float64)
        self._rest_seconds = pace_seconds()
        self._pace = Path(os.environ.get(PACE_FILE_VARIABLE, os.devnull))
        self._slow = Path(os.environ.get(SLOW_VARIABLE, os.devnull))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int, /) -> tuple[tuple[Tensor, Tensor], Tensor]:
        SYSTEM_CLOCK.sleep(float(self._pace.read_text() or self._rest_seconds))
        if self._slow.exists() and self._slow.read_text() == str(os.getpid()):
            SYSTEM_CLOCK.sleep(DRAG_SECONDS)
        return self._samples[index]


def data() -> PacedData:
    """What is trained on."""
    return PacedData()


def job(**changes: Any) -> dict[str, Any]:
    """Two virtual workers of two stages on two shards, D = 1, a checkpoint about every second."""
    values: dict[str, Any] = {
        "name": "chaos",
        "model": f"{__name__}:model",
        "loss": f"{__name__}:loss",
        "data": {"train": f"{__name__}:data"},
        "batch_size": 1,
        "epochs": MAX_EPOCHS,
        "seed": 3,
        "optimizer": {"name": "SGD", "lr": 1.0},
        "workers": {"count": 2, "stages": 2},
        "sync": {"kind": "wsp", "D": 1, "minibatches_per_wave": MINIBATCHES_PER_WAVE},
        "parameter_servers": {"count": 2},
        "checkpoint": {"every_waves": 12, "keep": 2},
    }
    return {**values, **changes}
