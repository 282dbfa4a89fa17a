"""Rules of a run: the keys of its job file that select the formulas to verify it by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class WeightRule(StrEnum):
    """The weights that a minibatch uses (`policies.md`)."""

    WAVE = "wave"
    STASH = "stash"
    VERTICAL = "vertical"
    DOUBLE_BUFFER = "double_buffer"
    FLUSH = "flush"
    PREDICT = "predict"
    SPECTRAIN = "spectrain"


class OrderRule(StrEnum):
    """Order of computation of a stage."""

    ONE_F_ONE_B = "1f1b"
    FIFO = "fifo"
    GPIPE = "gpipe"


class SyncRule(StrEnum):
    """Synchronization of virtual workers."""

    WSP = "wsp"
    BSP = "bsp"
    ASP = "asp"
    NONE = "none"
    ALLREDUCE = "allreduce"


class PullRule(StrEnum):
    """The rule for pulling published weights."""

    EVERY_WAVE = "every_wave"
    REQUIRED = "required"


class HistoryRule(StrEnum):
    """Level of detail of the history."""

    FULL = "full"
    SUMMARY = "summary"
    OFF = "off"


_PREDICTING = (WeightRule.PREDICT, WeightRule.SPECTRAIN)
_ANY_ORDER = (WeightRule.WAVE, WeightRule.FLUSH)


@dataclass(frozen=True, slots=True)
class StagePosition:
    """One stage of a pipeline."""

    stage: int = 0
    """i, 0-based."""
    num_stages: int = 1
    """K."""

    @property
    def from_end(self) -> int:
        """K − i: 1 on the last stage."""
        return self.num_stages - self.stage


@dataclass(frozen=True, slots=True)
class RunRule:
    """Rules of a run on clocks, weights and order."""

    minibatches_per_wave: int
    """N ≥ 1, of one virtual worker."""
    staleness: int | None
    """D ≥ 0, or None for D = ∞."""
    weights: WeightRule = WeightRule.WAVE
    deterministic: bool = False
    order: OrderRule = OrderRule.ONE_F_ONE_B
    sync: SyncRule = SyncRule.WSP
    accumulate: int = 1
    """A ≥ 1; of no meaning where a policy makes one update per wave."""
    pulls_when_required: bool = False
    """`pull: required`: another clock comes into use only where the staleness bound forbids the old one."""
    start: int = 0
    """The barrier from which on a virtual worker has this N."""
    origin: int = 0
    """Its last minibatch before that barrier."""

    def with_wave_of(self, minibatches: int, start: int = 0, origin: int = 0) -> RunRule:
        """The same rule for a virtual worker with another N, from a barrier on."""
        return replace(self, minibatches_per_wave=minibatches, start=start, origin=origin)

    def through(self, clock: int) -> int:
        """The last minibatch of the waves before `clock`, which is not below `start`."""
        return self.origin + (clock - self.start) * self.minibatches_per_wave

    @property
    def bound_clock_distance(self) -> int | None:
        """D + 1, the largest legal c_v - c_g; None if unbounded."""
        return None if self.staleness is None else self.staleness + 1

    @property
    def has_shards(self) -> bool:
        """Whether weights are pushed to and pulled from shards."""
        return self.sync not in (SyncRule.NONE, SyncRule.ALLREDUCE)

    @property
    def determines_clock(self) -> bool:
        """Whether W* is a function of p (`formulas.determined_clock`).

        Without shards it is the clock of the barrier: nothing newer is published.
        """
        return self.deterministic or not self.has_shards

    @property
    def updates_per_wave(self) -> bool:
        """Whether there is one update per wave, regardless of `accumulate`."""
        return self.weights in (WeightRule.DOUBLE_BUFFER, WeightRule.FLUSH)

    @property
    def minibatches_per_update(self) -> int:
        """Minibatches accumulated into one update; fewer only before a barrier."""
        return self.minibatches_per_wave if self.updates_per_wave else self.accumulate

    @property
    def predicts(self) -> bool:
        """Whether the backward of a minibatch uses newer weights than its forward."""
        return self.weights in _PREDICTING

    @property
    def is_strict(self) -> bool:
        """Whether stages keep strict 1F1B order, on which the table's versions are based."""
        return self.weights not in _ANY_ORDER
