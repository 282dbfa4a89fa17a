"""The decision log's records: everything whose order matters, and nothing else (`wsp.md` §4).

The clock shard appends them; every shard and every stage follows them in order of `index`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetpipe.values.ids import Clock, Incarnation, Term, VirtualWorkerIndex, Wave


@dataclass(frozen=True, slots=True)
class TermRecord:
    """From here on requests carry `term`."""

    index: int
    term: Term
    kind: Literal["term"] = "term"


@dataclass(frozen=True, slots=True)
class InitializeRecord:
    """The first weights, staged on all shards by this life of a virtual worker, become w^(clock)."""

    index: int
    clock: Clock
    vw: VirtualWorkerIndex
    incarnation: Incarnation
    kind: Literal["initialize"] = "initialize"


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """A whole wave of a virtual worker counts. `samples` is 0 for an empty wave."""

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
class BarrierRecord:
    """The next barrier is at `clock`; replaces an earlier record that is not reached yet."""

    index: int
    clock: Clock
    reason: str
    epoch: int
    """The epoch of the segment that the barrier ends."""
    kind: Literal["barrier"] = "barrier"


@dataclass(frozen=True, slots=True)
class PublishRecord:
    """w^(clock) is complete on all shards. Published clocks outside of `retained` may be freed."""

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
    """It is new in this segment: it starts from w^(start), with whatever its process brought along."""


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """A barrier is passed, and these virtual workers share what comes next, all of them with `start` waves committed.

    The first one says that w_0 is published. Nobody joins anywhere else. Whoever knows this record needs no earlier
    one: newcomers begin to follow the log here.
    """

    index: int
    start: Clock
    reasons: tuple[str, ...]
    """Of the barrier that is passed; none at the start of the job."""
    epoch: int
    """The epoch of the segment that the barrier ended."""
    members: tuple[SegmentMember, ...]
    """In order of their indices."""
    left: tuple[SegmentMember, ...] = ()
    """Who was drained: members of the segment before, which do their part of the barrier's work and end."""
    kind: Literal["segment"] = "segment"

    @property
    def present(self) -> tuple[SegmentMember, ...]:
        """Who is at the barrier: those who go on from it, and those who leave."""
        return (*self.members, *self.left)


Record = TermRecord | InitializeRecord | CommitRecord | EvictRecord | BarrierRecord | PublishRecord | SegmentRecord
