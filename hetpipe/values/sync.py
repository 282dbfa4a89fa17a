"""How the virtual workers of a job are kept in step: the kinds of it, and what shards must know (`wsp.md` §2, §3, §5).

Whoever must know something of a kind of synchronisation asks its row of `SYNC_KINDS`, never for its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, PlainSerializer

from hetpipe.values.ids import Clock, VirtualWorkerIndex
from hetpipe.values.policies import POLICIES, Policy, PullTiming, WeightPolicy

#: Bytes that become hexadecimal text in JSON.
HexBytes = Annotated[
    bytes,
    PlainSerializer(bytes.hex, return_type=str, when_used="json"),
    BeforeValidator(lambda value: bytes.fromhex(value) if isinstance(value, str) else value),
]


SyncKind = Literal["wsp", "bsp", "asp", "none", "allreduce"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTraits:
    """What a kind of synchronisation is, as far as anybody asks."""

    name: SyncKind
    bound: Literal["given", "zero", "none"] = "none"
    """The staleness bound D: the job gives it, it is 0, or there is none."""
    has_shards: bool = True
    """Whether parameter servers hold the weights; else only the stages do."""
    averages_gradients: bool = False
    """Whether stages of equal virtual workers average the gradients of whole waves among themselves."""
    single_worker: bool = False
    """Whether there is one virtual worker, and no other to keep in step with."""
    why_not_combined: str | None = None
    """Why no updates of virtual workers are combined; None: they are."""


_KINDS = (
    SyncTraits(name="wsp", bound="given"),
    SyncTraits(name="bsp", bound="zero"),
    SyncTraits(name="asp"),
    SyncTraits(
        name="none",
        has_shards=False,
        single_worker=True,
        why_not_combined="under `none` there are no other virtual workers to combine with",
    ),
    SyncTraits(
        name="allreduce",
        has_shards=False,
        averages_gradients=True,
        why_not_combined="`allreduce` averages gradients over all samples",
    ),
)

#: Kinds by name; a row's name is the same text as a `SyncKind`.
SYNC_KINDS: Mapping[str, SyncTraits] = {row.name: row for row in _KINDS}


@dataclass(frozen=True, slots=True)
class SyncSpec:
    """The synchronisation rule (`wsp.md` §2, §3)."""

    minibatches_per_wave: int
    """N ≥ 1."""
    staleness: int | None
    """D ≥ 0, or None for D = ∞ (`asp`)."""
    combine: str = "sum"
    """`sum` adds every VW's ũ as it is, `mean` scales each by 1/V first."""
    deterministic: bool = False
    """W* depends on nothing but the minibatch: the required clock, or, with `pull: required`, the newest usable one."""
    weights: WeightPolicy = "wave"
    pull: PullTiming = "every_wave"
    """`required`: the clock in use stays until the staleness bound forbids it."""

    @property
    def policy(self) -> Policy:
        """The row of `weights`."""
        return POLICIES[self.weights]


@dataclass(frozen=True, slots=True)
class DataSpec:
    """What is dealt to the virtual workers, and when the run ends (`wsp.md` §5)."""

    num_samples: int
    batch_size: int
    seed: int
    epochs: int | None
    """Passes over the data, or None when `total_minibatches` bounds the run."""
    total_minibatches: int | None
    """Minibatches of the whole run, over all virtual workers; None when `epochs` bounds it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is at a barrier: enough to go on from there. Part of every checkpoint."""

    clock: Clock
    epoch: int
    """Passes over the data that are complete; people count the one that is under way as this and one."""
    used: HexBytes
    """Bitmap (bit i of byte i // 8, least significant first) of the samples of `epoch` that committed waves used."""
    minibatches: int
    """Minibatches committed since the start of the run, over all virtual workers."""
    samples: int
    """Samples committed since the start of the run."""


@dataclass(frozen=True, slots=True)
class Membership:
    """The virtual workers of a run and the number of stages of each, in index order."""

    num_stages: dict[VirtualWorkerIndex, int]

    @property
    def members(self) -> tuple[VirtualWorkerIndex, ...]:
        """The member indices in order."""
        return tuple(sorted(self.num_stages))
