"""Inputs of the decision log as data: the clock shard journals them, and a restarted one replays them.

The log is a deterministic state machine, so replaying its accepted events in order restores it. `tell` returns the
records that the log appended; rejected inputs are not recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hetpipe.decide.sync.decision_log import DecisionLog
from hetpipe.decide.sync.records import Record
from hetpipe.values.ids import Clock, Incarnation, ShardIndex, StageIndex, VirtualWorkerIndex, Wave
from hetpipe.values.requests import Blocks
from hetpipe.values.run_document import RunDocument
from hetpipe.values.sync import PlanMove


@dataclass(frozen=True, slots=True)
class Joined:
    """A stage joined and listens at these addresses; it is ready, or still only connects to its neighbours."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    stage: StageIndex
    link_address: str
    replicas_address: str
    ready: bool
    kind: Literal["joined"] = "joined"

    def apply(self, log: DecisionLog) -> Sequence[Record]:
        """Apply by `DecisionLog.join`."""
        return log.join(self.vw, self.incarnation, self.stage, ready=self.ready)


@dataclass(frozen=True, slots=True)
class Initialized:
    """A stage staged its part of the initial weights."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    stage: StageIndex
    kind: Literal["initialized"] = "initialized"

    def apply(self, log: DecisionLog) -> Sequence[Record]:
        """Apply by `DecisionLog.initialized`."""
        return log.initialized(self.vw, self.incarnation, self.stage)


@dataclass(frozen=True, slots=True)
class Staged:
    """A stage staged its part of a wave."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    wave: Wave
    stage: StageIndex
    blocks: Blocks | None
    segment: Clock
    squares: dict[int, float] = field(default_factory=dict, hash=False)
    kind: Literal["staged"] = "staged"

    def apply(self, log: DecisionLog) -> Sequence[Record]:
        """Apply by `DecisionLog.staged`."""
        return log.staged(
            self.vw, self.incarnation, self.wave, self.stage, self.blocks, segment=self.segment, squares=self.squares
        )


@dataclass(frozen=True, slots=True)
class Held:
    """A virtual worker was assigned its clock for a switch point."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    switch: int
    kind: Literal["held"] = "held"

    def apply(self, log: DecisionLog) -> Sequence[Record]:
        """Apply by `DecisionLog.hold`."""
        log.hold(self.vw, self.incarnation, self.switch)
        return ()


@dataclass(frozen=True, slots=True)
class BarrierRequested:
    """A barrier was requested."""

    reason: str
    kind: Literal["barrier"] = "barrier"

    def apply(self, log: DecisionLog) -> Sequence[Record]:
        """Apply by `DecisionLog.request_barrier`."""
        return log.request_barrier(self.reason)


@dataclass(frozen=True, slots=True)
class Evicted:
    """An incarnation of a virtual worker was evicted."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    kind: Literal["evicted"] = "evicted"

    def apply(self, log: DecisionLog) -> Sequence[Record]:
        """Apply by `DecisionLog.evict`."""
        return log.evict(self.vw, self.incarnation)


@dataclass(frozen=True, slots=True)
class StateWritten:
    """A stage that leaves has written its part of the barrier's checkpoint, or could not."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    stage: StageIndex
    clock: Clock
    whole: bool
    kind: Literal["state_written"] = "state_written"

    def apply(self, log: DecisionLog) -> Sequence[Record]:
        """Apply by `DecisionLog.state_written`."""
        return log.state_written(self.vw, self.incarnation, self.stage, self.clock, whole=self.whole)


@dataclass(frozen=True, slots=True)
class Drained:
    """A virtual worker is to leave at the next barrier."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    kind: Literal["drained"] = "drained"

    def apply(self, log: DecisionLog) -> Sequence[Record]:
        """Apply by `DecisionLog.drain`."""
        return log.drain(self.vw, self.incarnation)


@dataclass(frozen=True, slots=True)
class Moved:
    """Layers of a virtual worker are to move."""

    vw: VirtualWorkerIndex
    move: PlanMove
    kind: Literal["moved"] = "moved"

    def apply(self, log: DecisionLog) -> Sequence[Record]:
        """Apply by `DecisionLog.move`."""
        return log.move(self.vw, self.move)


@dataclass(frozen=True, slots=True)
class StagePrepared:
    """A stage is prepared for a move of layers without a barrier, or cannot be."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    stage: StageIndex
    index: int
    can: bool
    kind: Literal["prepared"] = "prepared"

    def apply(self, log: DecisionLog) -> Sequence[Record]:
        """Apply by `DecisionLog.prepared`."""
        return log.prepared(self.vw, self.incarnation, self.stage, self.index, can=self.can)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A new incarnation of a virtual worker was admitted."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    num_stages: int
    kind: Literal["admitted"] = "admitted"
    minibatches_per_wave: int | None = None
    """Its N_v; None: the one it has, or that of the job."""
    bounds: tuple[int, ...] = ()
    """The cut with which its processes start; empty: not known."""

    def apply(self, log: DecisionLog) -> Sequence[Record]:
        """Apply by `DecisionLog.admit`."""
        return log.admit(self.vw, self.incarnation, self.num_stages, self.minibatches_per_wave, self.bounds)


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A shard executed records."""

    shard: ShardIndex
    num_records: int
    durable: int | None
    kind: Literal["acknowledged"] = "acknowledged"

    def apply(self, log: DecisionLog) -> Sequence[Record]:
        """Apply by `DecisionLog.acknowledge`."""
        return log.acknowledge(self.shard, self.num_records, self.durable)


@dataclass(frozen=True, slots=True)
class RunKept:
    """A coordinator replaced the run document. No effect on the log."""

    run: RunDocument
    kind: Literal["run_kept"] = "run_kept"

    def apply(self, _log: DecisionLog) -> Sequence[Record]:
        """No-op."""
        return ()


DecisionEvent = (
    Joined
    | Initialized
    | Staged
    | Held
    | BarrierRequested
    | Evicted
    | StateWritten
    | Drained
    | Moved
    | StagePrepared
    | Admitted
    | Acknowledged
    | RunKept
)
