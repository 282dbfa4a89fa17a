"""The weight policies side by side, as their papers have them: one virtual worker of 2 stages, no parameter servers.

Model, data, batch, optimizer and N are the same for all; only which weights a minibatch sees, and in which order the
stages compute, differ. All contenders take turns within one run, so that a machine that drifts slows them alike; the
round that is measured begins at another one each time.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.model import LEARNING_RATE, MICROBATCH
from benchmarks.stages import NUM_STAGES, Setting, StageFigures, hetpipe_stage, two_processes
from hetpipe.planner.costs import MemoryModel, minibatches_per_tick, ticks
from hetpipe.spec.job import OptimizerSpec
from hetpipe.spec.policies import Schedule, WeightPolicy

OPTIMIZER = OptimizerSpec(name="SGD", lr=LEARNING_RATE, momentum=0.9)
MINIBATCHES_PER_WAVE = 4
#: Of which the first and the last are not measured: the pipeline fills and drains.
NUM_WAVES = 7
#: N of the memory table, and its waves: in the second one every version is in use.
SIZES = (2, 4, 8, 16)
NUM_WAVES_OF_SIZES = 2


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy with a schedule."""

    weights: WeightPolicy
    schedule: Schedule = "1f1b"

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.weights}, {self.schedule}" if self.weights == "flush" else self.weights

    def run(self, minibatches_per_wave: int, num_waves: int) -> list[StageFigures]:
        """Train; what each stage did."""
        setting = Setting(
            minibatches_per_wave, num_waves, OPTIMIZER, self.weights, self.schedule, has_shards=False
        )
        return two_processes(hetpipe_stage, setting)

    def memory(self, minibatches_per_wave: int) -> MemoryModel:
        """What the planner's closed forms need."""
        return MemoryModel(self.weights, minibatches_per_wave, schedule=self.schedule, with_shards=False)


FLUSH, GPIPE, TWO_BUFFERS = Contender("flush"), Contender("flush", "gpipe"), Contender("double_buffer")
STASH, PREDICT = Contender("stash"), Contender("predict")
ASYNCHRONOUS = (
    Contender("wave"),
    STASH,
    Contender("vertical"),
    TWO_BUFFERS,
    PREDICT,
    Contender("spectrain"),
)
CONTENDERS = (*ASYNCHRONOUS, FLUSH, GPIPE)

#: Contender → what its stages did in each round.
Runs = Mapping[Contender, Sequence[Sequence[StageFigures]]]


def measure(rounds: int) -> dict[Contender, list[list[StageFigures]]]:
    """Run every contender `rounds` times, in turn."""
    runs: dict[Contender, list[list[StageFigures]]] = {contender: [] for contender in CONTENDERS}
    for number in range(rounds):
        begin = number * 3 % len(CONTENDERS)
        for contender in (*CONTENDERS[begin:], *CONTENDERS[:begin]):
            runs[contender].append(contender.run(MINIBATCHES_PER_WAVE, NUM_WAVES))
        sys.stderr.write(f"policies: round {number + 1} of {rounds}\n")
    return runs
