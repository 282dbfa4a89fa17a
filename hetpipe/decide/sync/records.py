"""Records of the decision log: all events whose order matters (`wsp.md` §4).

The clock shard appends them; every shard and every stage processes them in order of `index`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetpipe.values.ids import Clock, Incarnation, Term, VirtualWorkerIndex, Wave


@dataclass(frozen=True, slots=True)
class TermRecord:
    """Subsequent requests carry `term`."""

    index: int
    term: Term
    kind: Literal["term"] = "term"


@dataclass(frozen=True, slots=True)
class InitializeRecord:
    """The initial weights, staged on all shards by this incarnation of a virtual worker, become w^(clock)."""

    index: int
    clock: Clock
    vw: VirtualWorkerIndex
    incarnation: Incarnation
    kind: Literal["initialize"] = "initialize"


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """A complete wave of a virtual worker counts. `samples` is 0 for an empty wave."""

    index: int
    vw: VirtualWorkerIndex
    incarnation: Incarnation
    wave: Wave
    samples: int
    kind: Literal["commit"] = "commit"


@dataclass(frozen=True, slots=True)
class EvictRecord:
    """A virtual worker no longer counts; its uncommitted waves are dropped. It had committed `clock` waves."""

    index: int
    vw: VirtualWorkerIndex
    incarnation: Incarnation
    clock: Clock
    kind: Literal["evict"] = "evict"


@dataclass(frozen=True, slots=True)
class HandoverRecord:
    """What a virtual worker that left at the barrier at `clock` leaves to those that take over its state there.

    One for each that leaves, unless its own next incarnation comes first.
    """

    index: int
    vw: VirtualWorkerIndex
    incarnation: Incarnation
    clock: Clock
    whole: bool
    """All its stages have written their parts of the barrier's checkpoint; else it ended before, or one could not."""
    kind: Literal["handover"] = "handover"


@dataclass(frozen=True, slots=True)
class NewCut:
    """A cut that was requested for a barrier; it is in force there only if the segment record has it."""

    vw: VirtualWorkerIndex
    bounds: tuple[int, ...]
    """Stage k has the layers [bounds[k], bounds[k + 1])."""


@dataclass(frozen=True, slots=True)
class BarrierRecord:
    """The next barrier is at `clock`; replaces an earlier record whose barrier is not reached yet."""

    index: int
    clock: Clock
    reason: str
    epoch: int
    """The epoch of the segment that the barrier ends."""
    cuts: tuple[NewCut, ...] = ()
    """Requested for it, so that stages are built while they wait for it."""
    kind: Literal["barrier"] = "barrier"

    def cut_of(self, vw: VirtualWorkerIndex) -> tuple[int, ...]:
        """The bounds that were requested for a virtual worker; empty: none."""
        return next((cut.bounds for cut in self.cuts if cut.vw == vw), ())


@dataclass(frozen=True, slots=True)
class PublishRecord:
    """w^(clock) is complete on all shards. Published clocks that are not in `retained` may be freed."""

    index: int
    clock: Clock
    retained: tuple[Clock, ...]
    kind: Literal["publish"] = "publish"


@dataclass(frozen=True, slots=True)
class SegmentMember:
    """One virtual worker of a segment."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    num_stages: int
    joined: bool
    """It is new in this segment: it starts from w^(start), with the state restored by its process."""
    minibatches_per_wave: int | None = None
    """Its N_v; None: that of the job, the same for all."""
    version: int = 0
    """The version of its plan in this segment."""
    bounds: tuple[int, ...] = ()
    """Of that version: stage k has the layers [bounds[k], bounds[k + 1]); empty in logs of earlier versions."""
    moved: bool = False
    """Whether the version has changed at this barrier."""
    origin: int | None = None
    """The last of its minibatches before this segment; None: start·N_v, as N has never changed."""


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """A barrier is passed; these virtual workers share the next segment, all with `start` waves committed.

    The first one states that w_0 is published. Virtual workers join only here. It makes all earlier records
    unnecessary: newcomers start to follow the log here.
    """

    index: int
    start: Clock
    reasons: tuple[str, ...]
    """Reasons of the barrier passed; none at the start of the job."""
    epoch: int
    """The epoch of the segment that the barrier ended."""
    members: tuple[SegmentMember, ...]
    """In index order."""
    left: tuple[SegmentMember, ...] = ()
    """Drained members of the previous segment, which do their part of the barrier's work and end."""
    frozen: int = 0
    """F: the frozen layers with trainable parameters in this segment (freezing.md)."""
    frozen_layers: int = 0
    """The leading layers of the chain that are frozen with F: the slices of all others, as far as these are active,
    make a wave whole."""
    inactive: tuple[int, ...] = ()
    """The layers that are inactive in this segment (dynamic-models.md)."""
    inactive_before: tuple[int, ...] = ()
    """Those of the segment that the barrier ended, with which it is evaluated, also by whoever joins there."""
    fresh: tuple[int, ...] = ()
    """The layers that every member builds anew for this segment, and stages with its first wave."""
    kind: Literal["segment"] = "segment"

    @property
    def present(self) -> tuple[SegmentMember, ...]:
        """All at the barrier: members that continue, and those that leave."""
        return (*self.members, *self.left)

    @property
    def has_moves(self) -> bool:
        """Whether layers of a member that continues change their stages."""
        return any(member.moved and not member.joined for member in self.members)

    def per_wave(self, default: int) -> dict[VirtualWorkerIndex, int]:
        """Member → N_v, in index order; `default` where the record has none."""
        return {member.vw: member.minibatches_per_wave or default for member in self.members}


@dataclass(frozen=True, slots=True)
class PrepareRecord:
    """Layers of a virtual worker are to move without a barrier: its stages get ready for it, and say so.

    Void from the next barrier on, or if a later one names the same virtual worker.
    """

    index: int
    vw: VirtualWorkerIndex
    incarnation: Incarnation
    bounds: tuple[int, ...]
    """Stage k will have the layers [bounds[k], bounds[k + 1])."""
    kind: Literal["prepare"] = "prepare"


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """Layers of a virtual worker move without a barrier: from wave `clock` on it is cut at `bounds`.

    It stands before the record of the segment's first barrier, or of a publication without which no minibatch of that
    wave may start; without a staleness bound, before the first stage is told a clock for one (`HeldClock.moves`). A
    barrier at or below `clock` makes it void: then the layers move at that barrier, or later.
    """

    index: int
    vw: VirtualWorkerIndex
    incarnation: Incarnation
    clock: Clock
    """The first wave of the new version; above the start of the segment."""
    version: int
    """Of its plan from there on."""
    bounds: tuple[int, ...]
    """Stage k has the layers [bounds[k], bounds[k + 1])."""
    kind: Literal["plan"] = "plan"


Record = (
    TermRecord
    | InitializeRecord
    | CommitRecord
    | EvictRecord
    | HandoverRecord
    | BarrierRecord
    | PublishRecord
    | SegmentRecord
    | PrepareRecord
    | PlanRecord
)
