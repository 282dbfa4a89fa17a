"""The decision log's records: everything whose order matters, and nothing else (`wsp.md` §4).

The clock shard appends them; every shard and every stage follows them in order of `index`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.spec.ids import Clock, Incarnation, Term, VirtualWorkerIndex, Wave


@dataclass(frozen=True, slots=True)
class TermRecord:
    """From here on requests carry `term`."""

    index: int
    term: Term


@dataclass(frozen=True, slots=True)
class JoinRecord:
    """A virtual worker's stages are all there; it counts from `clock` on."""

    index: int
    vw: VirtualWorkerIndex
    incarnation: Incarnation
    clock: Clock


@dataclass(frozen=True, slots=True)
class InitializeRecord:
    """The first weights are staged on all shards and become w^(clock)."""

    index: int
    clock: Clock


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """A whole wave of a virtual worker counts. `samples` is 0 for an empty wave."""

    index: int
    vw: VirtualWorkerIndex
    incarnation: Incarnation
    wave: Wave
    samples: int


@dataclass(frozen=True, slots=True)
class EvictRecord:
    """A virtual worker no longer counts; its uncommitted waves are dropped. It had committed `clock` waves."""

    index: int
    vw: VirtualWorkerIndex
    incarnation: Incarnation
    clock: Clock


@dataclass(frozen=True, slots=True)
class BarrierRecord:
    """The next barrier is at `clock`; replaces an earlier record that is not reached yet."""

    index: int
    clock: Clock
    reason: str
    epoch: int
    """The epoch of the segment that the barrier ends."""


@dataclass(frozen=True, slots=True)
class PublishRecord:
    """w^(clock) is complete on all shards. Published clocks outside of `retained` may be freed."""

    index: int
    clock: Clock
    retained: tuple[Clock, ...]


Record = TermRecord | JoinRecord | InitializeRecord | CommitRecord | EvictRecord | BarrierRecord | PublishRecord
