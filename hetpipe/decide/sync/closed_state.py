"""What a shard knows of one job beside its tensors when a clock is complete; with it, a restarted shard goes on."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.values.ids import Clock, Incarnation, VirtualWorkerIndex, Wave


@dataclass(slots=True)
class Worker:
    """A member, as a shard knows it."""

    incarnation: Incarnation
    start: Clock
    """The clock at which it became one."""
    committed: Clock


@dataclass(frozen=True, slots=True)
class CommittedWave:
    """A wave that counts and is not added yet."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    wave: Wave
    is_empty: bool


@dataclass(frozen=True, slots=True)
class ClosedState:
    """A shard's state at the moment at which the weights of `built` were complete, and nothing of the next clock added.

    With w^(built), the pushes that were staged, and the decision log from record `followed` on, a shard continues.
    """

    built: Clock
    followed: int
    workers: dict[VirtualWorkerIndex, Worker]
    lives: dict[VirtualWorkerIndex, Incarnation]
    order: tuple[VirtualWorkerIndex, ...]
    num_members: int
    barrier: Clock
    published: Clock
    committed: tuple[CommittedWave, ...]
