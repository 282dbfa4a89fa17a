"""(i) The weight policies side by side, as their papers have them: 2 stages, 1 thread each, no parameter servers.

Model, data, batch, optimizer and N are the same for all; only which weights a minibatch sees, and in which order the
stages compute, differ. The model is that of the pipeline benchmark: its stages compute for hundreds of milliseconds per
minibatch, send 1 MiB to each other, and hold 50 MB of weights, which is about a transformer's share of each.

All contenders take turns within one run, so that a machine that drifts slows them alike; every round begins with
another one, and every other round goes backwards.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.model import LEARNING_RATE, MICROBATCH
from benchmarks.sizes import sized
from benchmarks.stages import Setting, StageFigures, hetpipe_stage, two_processes
from hetpipe.decide.planner.costs import MemoryModel, minibatches_per_tick, ticks
from hetpipe.job.file import OptimizerSpec
from hetpipe.values.policies import Schedule, WeightPolicy

OPTIMIZER = OptimizerSpec.model_validate({"name": "SGD", "lr": LEARNING_RATE, "momentum": 0.9})
MINIBATCHES_PER_WAVE = 4
#: The first and the last wave are not measured: the pipeline fills and drains.
NUM_WAVES = sized(7, 3)
#: N of the memory table, and waves of its runs: in the second wave every version is in use.
SIZES = sized((2, 4, 8, 16), (2,))
NUM_WAVES_OF_SIZES = 2

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Contender:
    """A weight policy and a schedule."""

    weights: WeightPolicy
    schedule: Schedule = "1f1b"

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.weights} + {self.schedule}" if self.weights == "flush" else self.weights

    def run(self, minibatches_per_wave: int, num_waves: int) -> list[StageFigures]:
        """Train; returns what each stage did."""
        setting = Setting(minibatches_per_wave, num_waves, OPTIMIZER, self.weights, self.schedule, has_shards=False)
        return two_processes(hetpipe_stage, setting)

    def ideal_rate(self, stage_seconds: Sequence[float]) -> float:
        """Samples per second of stages that lose no time, by the closed forms of the planner."""
        memory = MemoryModel(self.weights, MINIBATCHES_PER_WAVE, schedule=self.schedule)
        per_tick = minibatches_per_tick([ticks(1e3 * seconds) for seconds in stage_seconds], memory)
        return MICROBATCH * per_tick * ticks(1e3)


FLUSH, GPIPE, TWO_BUFFERS = Contender("flush"), Contender("flush", "gpipe"), Contender("double_buffer")
STASH, PREDICT = Contender("stash"), Contender("predict")
ASYNCHRONOUS = (Contender("wave"), STASH, Contender("vertical"), TWO_BUFFERS, PREDICT, Contender("spectrain"))
CONTENDERS = (*ASYNCHRONOUS, FLUSH, GPIPE)


@dataclass(frozen=True, slots=True)
class Rates:
    """What the rounds found."""

    samples_per_second: dict[Contender, list[float]]
    """Round by round."""
    stage_seconds: tuple[float, ...]
    """Of a minibatch's forward and backward at each stage: the median over all runs."""

    def table(self) -> dict[str, Any]:
        """Samples per second."""
        return {
            one.name: {"median": round(median(found), 2), "least": round(min(found), 2), "most": round(max(found), 2)}
            for one, found in self.samples_per_second.items()
        }

    def ratios(self) -> dict[str, Any]:
        """The figures that count: of each round, then the median; and what the closed forms say."""
        fastest = max(CONTENDERS, key=lambda contender: median(self.samples_per_second[contender]))
        pairs = ((TWO_BUFFERS, FLUSH), (PREDICT, STASH), (GPIPE, FLUSH), *((one, fastest) for one in ASYNCHRONOUS))
        return {f"{one.name} / {other.name}": self._over(one, other) for one, other in pairs if one != other}

    def _over(self, one: Contender, other: Contender) -> dict[str, float]:
        rates = self.samples_per_second
        measured = median(a / b for a, b in zip(rates[one], rates[other], strict=True))
        ideal = one.ideal_rate(self.stage_seconds) / other.ideal_rate(self.stage_seconds)
        return {"measured": round(measured, 3), "ideal": round(ideal, 3)}


def measure(rounds: int) -> Rates:
    """Run every contender `rounds` times, in turn."""
    rates: dict[Contender, list[float]] = {contender: [] for contender in CONTENDERS}
    seconds: list[list[float]] = []
    first, last = MINIBATCHES_PER_WAVE, MINIBATCHES_PER_WAVE * (NUM_WAVES - 1)
    for number in range(rounds):
        begin = 3 * number % len(CONTENDERS)
        turn = (*CONTENDERS[begin:], *CONTENDERS[:begin])
        for contender in turn if number % 2 == 0 else reversed(turn):
            stages = contender.run(MINIBATCHES_PER_WAVE, NUM_WAVES)
            rates[contender].append(MICROBATCH * stages[0].minibatches_per_second(first, last))
            seconds.append([stage.seconds_per_minibatch for stage in stages])
        sys.stderr.write(f"policies: round {number + 1} of {rounds}\n")
    return Rates(rates, tuple(median(found) for found in zip(*seconds, strict=True)))


def memory() -> dict[str, Any]:
    """Per stage and N: bytes kept for backwards at most at once, and weight buffers at rest."""
    found: dict[str, Any] = {}
    for contender in (GPIPE, FLUSH, TWO_BUFFERS):
        for n in SIZES:
            stages = contender.run(n, NUM_WAVES_OF_SIZES)
            found[f"{contender.name}, N = {n}"] = {
                "activation MiB": [round(stage.activation_bytes / _MIB, 1) for stage in stages],
                "weight buffers": [stage.weight_buffers for stage in stages],
                "peak resident MiB": [round(stage.peak_resident_bytes / _MIB) for stage in stages],
            }
    return found
