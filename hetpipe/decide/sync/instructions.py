"""Instructions to the owner of a shard's tensors: issued by `sync.shard_state`, executed by `shard.shard`."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.values.ids import Clock, Incarnation, VirtualWorkerIndex, Wave
from hetpipe.values.requests import PushHeader

#: Key of a staged wave; initial weights have no wave, nor have those of layers that are built anew.
StageKey = tuple[VirtualWorkerIndex, Incarnation, Wave | None]


def stage_key(header: PushHeader) -> StageKey:
    """The key under which a push is staged."""
    return header.requester.vw, header.requester.incarnation, None if header.fresh else header.wave


@dataclass(frozen=True, slots=True)
class Initialize:
    """Build w^(clock) from the initial weights staged under `key`."""

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
    wave_share: tuple[int, int] | None = None
    """N_v and Σ N_u at the last barrier; None: all members have the same N."""
    fresh: StageKey | None = None
    """Under which the weights of layers that are built anew are staged, to which it is the first to be added."""

    def mean_factor(self, *, one_update_per_wave: bool) -> float:
        """The factor of the wave's ũ under `combine: mean`, so that every sample counts alike (`wsp.md` §10).

        >>> wave = Apply(Clock(1), (VirtualWorkerIndex(0), Incarnation(0), Wave(0)), False, 2, (3, 4))
        >>> wave.mean_factor(one_update_per_wave=True), wave.mean_factor(one_update_per_wave=False)
        (0.75, 0.5)
        """
        if self.wave_share is None or not one_update_per_wave:
            return 1.0 / self.num_members
        own, all_members = self.wave_share
        return own / all_members


@dataclass(frozen=True, slots=True)
class Close:
    """The weights of `clock` are complete: all required waves have been added."""

    clock: Clock


@dataclass(frozen=True, slots=True)
class Drop:
    """Discard what is staged under `key`; it will never count."""

    key: StageKey


@dataclass(frozen=True, slots=True)
class Free:
    """Free w^(clock)."""

    clock: Clock


Instruction = Initialize | Apply | Close | Drop | Free
