"""What the shards must know of a job to keep its virtual workers in step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from hetpipe.values.ids import Clock, VirtualWorkerIndex
from hetpipe.values.policies import POLICIES, Policy, PullTiming, WeightPolicy

#: Bytes that become hexadecimal text in JSON.
HexBytes = Annotated[
    bytes,
    PlainSerializer(bytes.hex, return_type=str, when_used="json"),
    BeforeValidator(lambda value: bytes.fromhex(value) if isinstance(value, str) else value),
]


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
