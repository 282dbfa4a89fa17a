"""What a decision asks of whoever holds a shard's tensors: `sync.shard_state` says it, `shard.shard` does it."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.values.ids import Clock, Incarnation, VirtualWorkerIndex, Wave
from hetpipe.values.requests import PushHeader

#: What a shard stages a wave under; the first weights have no wave.
StageKey = tuple[VirtualWorkerIndex, Incarnation, Wave | None]


def stage_key(header: PushHeader) -> StageKey:
    """What a push is staged under."""
    return header.requester.vw, header.requester.incarnation, header.wave


@dataclass(frozen=True, slots=True)
class Initialize:
    """Make w^(clock) from the first weights staged under `key`."""

    clock: Clock
    key: StageKey


@dataclass(frozen=True, slots=True)
class Apply:
    """Add the wave staged under `key` to the weights of `clock`, which are being built."""

    clock: Clock
    key: StageKey
    is_empty: bool
    num_members: int
    """V at the last barrier, for `combine: mean`."""


@dataclass(frozen=True, slots=True)
class Close:
    """The weights of `clock` are complete: every wave they need is added."""

    clock: Clock


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget what is staged under `key`; it will never count."""

    key: StageKey


@dataclass(frozen=True, slots=True)
class Free:
    """Forget w^(clock)."""

    clock: Clock


Instruction = Initialize | Apply | Close | Drop | Free
