"""(v) Frozen layers whose results are cached, against computing them in each pass: pairs of runs, in turn.

One virtual worker of two stages on one node, a frozen trunk of eight layers and a trained head; the data are dealt in
order, so that units are minibatches, or shuffled, so that they are samples. Once the trunk is heavy, so that reading
pays; once it is so light that reading and computing take about as long, where `auto` may cost no more than 2 %. Speeds
are those of all passes but the first, by the history of the last stage.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from benchmarks.sizes import sized

ROOT = Path(__file__).resolve().parents[1]
_BATCH = 32
_BATCHES = sized(40, 4)
_EPOCHS = sized(6, 3)
_NUM_FROZEN = 8
#: Width of the trunk.
WIDTHS: Mapping[str, int] = {"heavy": sized(1024, 64), "light": 16}
MODES = ("auto", "off")
_TIMEOUT_SECONDS = 600.0


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Inputs of the trunk's width, by index."""

    def __init__(self, width: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._inputs = torch.randn(_BATCH * _BATCHES, width, generator=generator)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._inputs[index], torch.tensor(index % 2)


def model(width: int) -> nn.Module:
    """The trunk, and the head."""
    trunk = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(_NUM_FROZEN)]
    return nn.Sequential(*trunk, nn.Linear(width, 2))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy."""
    return nn.functional.cross_entropy(output, target)


def _job(width: int, cache: str, *, shuffle: bool) -> dict[str, Any]:
    arguments = {"args": {"width": width}}
    return {
        "name": "frozen-cache",
        "model": {"call": "benchmarks.frozen_cache:model", **arguments},
        "loss": "benchmarks.frozen_cache:loss",
        "data": {"train": {"call": "benchmarks.frozen_cache:Samples", **arguments}, "shuffle": shuffle},
        "batch_size": _BATCH,
        "epochs": _EPOCHS,
        "optimizer": {"name": "SGD", "lr": 0.001},
        "workers": {"count": 1, "stages": [[4, 5]]},
        "sync": {"kind": "none", "minibatches_per_wave": 2},
        "freeze": {"layers": _NUM_FROZEN, "cache": cache},
    }


def train(width: int, cache: str, *, shuffle: bool) -> tuple[float, int]:
    """Samples per second after the first pass, and the minibatches read from the cache."""
    with tempfile.TemporaryDirectory(prefix="hetpipe-bench-") as name:
        folder = Path(name)
        (folder / "job.yaml").write_text(yaml.safe_dump(_job(width, cache, shuffle=shuffle)))
        run_dir = folder / "run"
        program = str(Path(sys.executable).with_name("hetpipe"))
        command = [program, "train", str(folder / "job.yaml"), "--json", "--run-dir", str(run_dir)]
        subprocess.run(
            command,
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_SECONDS,
        )
        lines = map(json.loads, (run_dir / "history" / "vw-0-stage-1.jsonl").read_text().splitlines())
        steps = [line["t"] for line in lines if line["event"] == "step"]
        result = json.loads((run_dir / "result.json").read_text())
    later = steps[_BATCHES:]
    return _BATCH * (len(later) - 1) / (later[-1] - later[0]), result["cache"]["reads"]


def measure(rounds: int) -> dict[str, Any]:
    """Ratio of `auto` to `off` for each trunk and order: the median, all of them, and the minibatches read."""
    found: dict[str, Any] = {}
    for (name, width), shuffle in itertools.product(WIDTHS.items(), (False, True)):
        ratios, reads = [], 0
        for number in range(rounds):
            order = MODES if number % 2 == 0 else MODES[::-1]
            speeds = {mode: train(width, mode, shuffle=shuffle) for mode in order}
            ratios.append(speeds["auto"][0] / speeds["off"][0])
            reads = speeds["auto"][1]
        found[f"{name}, {'shuffled' if shuffle else 'in order'}"] = {
            "auto / off": round(statistics.median(ratios), 3),
            "each": [round(ratio, 3) for ratio in ratios],
            "minibatches read": reads,
        }
    return found
