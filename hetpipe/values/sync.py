"""Synchronization of a job's virtual workers: its kinds, and the parameters shards need (docs/semantics/wsp.md).

Code that depends on a property of a kind of synchronization reads it from the row in `SYNC_KINDS`, and never compares
names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BeforeValidator, PlainSerializer

from hetpipe.values.bounds import Name, Sentence
from hetpipe.values.ids import Clock, Incarnation, Minibatch, VirtualWorkerIndex
from hetpipe.values.policies import POLICIES, Policy, PullTiming, WeightPolicy

#: Bytes encoded as hexadecimal text in JSON.
HexBytes = Annotated[
    bytes,
    PlainSerializer(bytes.hex, return_type=str, when_used="json"),
    BeforeValidator(lambda value: bytes.fromhex(value) if isinstance(value, str) else value),
]


SyncKind = Literal["wsp", "bsp", "asp", "none", "allreduce"]

#: Rounding of what is pushed (docs/semantics/wsp.md, section 12).
PushCompression = Literal["none", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTraits:
    """Properties of a kind of synchronization."""

    name: SyncKind
    bound: Literal["given", "zero", "none"] = "none"
    """The staleness bound D: given by the job, 0, or unbounded."""
    has_shards: bool = True
    """Whether parameter servers hold the weights; else only the stages do."""
    averages_gradients: bool = False
    """Whether corresponding stages of the virtual workers average the gradients of whole waves."""
    single_worker: bool = False
    """Whether there is only one virtual worker."""
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

#: Kinds by name; a row's name equals its `SyncKind`.
SYNC_KINDS: Mapping[str, SyncTraits] = {row.name: row for row in _KINDS}


@dataclass(frozen=True, slots=True)
class SyncSpec:
    """The synchronization rule (docs/semantics/wsp.md, sections 2 and 3)."""

    minibatches_per_wave: int
    """N ≥ 1; of a whole job, that of the virtual workers without one of their own."""
    staleness: int | None
    """D ≥ 0, or None for D = ∞ (`asp`)."""
    combine: str = "sum"
    """`sum` adds the ũ of every virtual worker unscaled, `mean` scales them so that every sample counts alike."""
    deterministic: bool = False
    """W* depends on the minibatch alone: it is the required clock, or, with `pull: required`, the newest usable one."""
    weights: WeightPolicy = "wave"
    pull: PullTiming = "every_wave"
    """`required`: the clock in use stays until the staleness bound forbids it."""
    compress_pushes: PushCompression = "none"
    """`bfloat16`: what a `float32` parameter's ũ is rounded to on its way to the shards."""

    @property
    def policy(self) -> Policy:
        """The row of `weights`."""
        return POLICIES[self.weights]


@dataclass(frozen=True, slots=True)
class DataSpec:
    """Distribution of data to the virtual workers, and the end of the run (docs/semantics/wsp.md, section 5)."""

    num_samples: int
    batch_size: int
    seed: int
    epochs: int | None
    """Passes over the data, or None when `total_minibatches` bounds the run."""
    total_minibatches: int | None
    """Minibatches of the whole run, over all virtual workers; None when `epochs` bounds it."""
    homes: tuple[int, ...] = ()
    """Where samples belong to nodes: number of the node of each virtual worker's first stage, in index order."""


def layer_counts(bounds: tuple[int, ...]) -> tuple[int, ...]:
    """Layers of each stage, where stage k has the layers [bounds[k], bounds[k + 1])."""
    return tuple(last - first for first, last in pairwise(bounds))


@dataclass(frozen=True, slots=True)
class PlanVersion:
    """The cut of a virtual worker's layers into stages, and the number of its changes (plan-versions.md)."""

    version: int
    """0 for the plan of the run; it only grows, also over incarnations."""
    bounds: tuple[int, ...]
    """Stage k has the layers [bounds[k], bounds[k + 1])."""
    planned: tuple[int, ...]
    """The cut with which its processes are started: the coordinator's newest plan, from which this one descends."""

    @staticmethod
    def following(known: PlanVersion | None, planned: tuple[int, ...]) -> PlanVersion:
        """The first version of processes that the coordinator starts with the cut `planned`.

        It is the known version if that descends from the same plan, so that layers moved since then stay in place.
        """
        if known is not None and known.planned == planned:
            return known
        return PlanVersion(0 if known is None else known.version + 1, planned, planned)

    @property
    def num_stages(self) -> int:
        """K."""
        return len(self.bounds) - 1

    def can_become(self, bounds: tuple[int, ...]) -> bool:
        """Whether a move can cut the layers at `bounds`: as many stages, none of them empty, and the same layers."""
        rises = all(last > first for first, last in pairwise(bounds))
        return rises and len(bounds) == len(self.bounds) and (bounds[0], bounds[-1]) == (0, self.bounds[-1])

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return layer_counts(self.bounds)


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A change of a virtual worker's plan that is decided before the run (plan-versions.md)."""

    clock: Clock
    """The barrier at which it takes effect, or, live, the first wave of the new cut; ≥ 1."""
    vw: VirtualWorkerIndex
    bounds: tuple[int, ...] = ()
    """Stage k has the layers [bounds[k], bounds[k + 1]); empty: the cut stays, only a barrier is needed."""
    live: bool = False
    """Whether it sets no barrier: layers move while minibatches are in flight."""


@dataclass(frozen=True, slots=True)
class WaveChange:
    """Another N, decided before the run (wsp.md §11)."""

    clock: Clock
    """The barrier at which it takes effect; ≥ 1."""
    minibatches_per_wave: tuple[int, ...]
    """N of all virtual workers, or N_v of each by index."""

    def of(self, vw: VirtualWorkerIndex) -> int:
        """N_v of a virtual worker from there on."""
        return self.minibatches_per_wave[vw if len(self.minibatches_per_wave) > 1 else 0]


@dataclass(frozen=True, slots=True)
class MemberChange:
    """A virtual worker that leaves or comes back at a barrier, decided before the run (plan-versions.md §3)."""

    clock: Clock
    """The barrier; ≥ 1."""
    vw: VirtualWorkerIndex
    joins: bool
    """Whether it joins; else it leaves."""


def is_absent(changes: Iterable[MemberChange], vw: int, clock: int) -> bool:
    """Whether a virtual worker takes no part in the segment that a barrier at `clock` begins, by decided changes.

    One whose first change is that it joins is not there before.

    >>> changes = [MemberChange(Clock(4), VirtualWorkerIndex(1), joins=True)]
    >>> [is_absent(changes, vw, clock) for vw, clock in ((0, 0), (1, 0), (1, 4))]
    [False, True, False]
    """
    own = [change for change in changes if change.vw == vw]
    done = [change for change in own if change.clock <= clock]
    return not done[-1].joins if done else bool(own) and own[0].joins


@dataclass(frozen=True, slots=True)
class PlanMove:
    """Another cut of a virtual worker, decided while the job trains; it takes effect by the next barrier."""

    incarnation: Incarnation
    """The one whose layers move; a later one would have others."""
    bounds: tuple[int, ...]
    """Stage k has the layers [bounds[k], bounds[k + 1])."""
    by: Name
    """What decided it: `straggler`, `operator`, or `freeze`."""
    reason: Sentence
    """Why, as a sentence."""
    predicted_gain: float | None = None
    """Speed-up of the job that is expected, as a fraction; None: not predicted."""
    live: bool = False
    """Whether it sets no barrier: its stages prepare it, and layers move while minibatches are in flight."""


@dataclass(frozen=True, slots=True)
class DecidedMove:
    """A move that takes effect, or has done so."""

    clock: Clock
    """The barrier at which it does, or, live, the first wave of the new cut."""
    version: int
    """The plan version that it makes."""
    move: PlanMove
    p: Minibatch | None = None
    """Live: the first minibatch of that wave."""


@dataclass(frozen=True, slots=True)
class WaveNumbers:
    """The numbering of a virtual worker's minibatches from a barrier on (wsp.md §11)."""

    minibatches_per_wave: int
    """N_v."""
    origin: int
    """The last minibatch before the barrier: wave c, from the clock s of the barrier on, begins with minibatch
    origin + (c − s)·N_v + 1."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run at a barrier, sufficient to continue from there. Part of every checkpoint."""

    clock: Clock
    epoch: int
    """Completed passes over the data; the current pass is displayed as one more."""
    used: HexBytes
    """Bitmap (bit i of byte i // 8, least significant first) of the samples of `epoch` that committed waves used."""
    minibatches: int
    """Minibatches committed since the start of the run, over all virtual workers."""
    samples: int
    """Samples committed since the start of the run."""
    plans: dict[VirtualWorkerIndex, PlanVersion] = field(default_factory=dict, hash=False)
    """The plan version of each virtual worker from this barrier on; empty before the run has begun, and in checkpoints
    of earlier versions."""
    frozen: int = 0
    """F: the frozen layers with trainable parameters from this barrier on; it never falls (freezing.md)."""
    waves: dict[VirtualWorkerIndex, WaveNumbers] = field(default_factory=dict, hash=False)
    """N_v of each virtual worker from this barrier on, and its number of minibatches before; empty where N has never
    changed: then it is that of the job, and they number clock·N."""
    lineup: int = 0
    """F of those who train from this barrier on, which is below `frozen` where they are about to change
    (freezing.md §4)."""
    inactive: tuple[int, ...] = ()
    """The layers that are inactive from this barrier on (dynamic-models.md)."""
    fresh: tuple[int, ...] = ()
    """The layers that are built anew at this barrier: the weights of its clock are the old ones."""


@dataclass(frozen=True, slots=True)
class Membership:
    """The virtual workers of a run, in index order: the number of stages of each, and its minibatches per wave."""

    num_stages: dict[VirtualWorkerIndex, int]
    minibatches_per_wave: dict[VirtualWorkerIndex, int] = field(default_factory=dict)
    """N_v of each virtual worker; empty: that of the job, the same for all."""
    plans: dict[VirtualWorkerIndex, PlanVersion] = field(default_factory=dict)
    """The plan version with which each begins; empty in state stored by earlier versions."""

    @property
    def members(self) -> tuple[VirtualWorkerIndex, ...]:
        """The member indices in order."""
        return tuple(sorted(self.num_stages))
