"""What the reference executor is given and what it returns.

A `ReferenceRun` says what to train and under which rule, a `ReferenceState` is everything that is alive at a barrier,
and a `ReferenceResult` holds the state at every barrier and one record per minibatch. V, N and D are those of `wsp.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from hetpipe.values.ids import Clock, Minibatch, VirtualWorkerIndex
from hetpipe.values.precision import Precision
from tests.reference.policies import POLICIES

#: Parameter or buffer name (the model's own) → tensor, in chain order.
Tensors = Mapping[str, Tensor]

#: Parameter name → what the optimizer keeps for it (its `state` entry).
OptimizerState = Mapping[str, Mapping[str, object]]

#: A scalar from (output, target): the mean over the samples of the minibatch.
ScalarCallable = Callable[[Any, Any], Tensor | float]


class MapDataset(Protocol):
    """Samples by index; each is (input, target), where input is a tensor or a flat tuple of tensors."""

    def __len__(self) -> int:
        """How many samples there are."""

    def __getitem__(self, index: int, /) -> Any:
        """Sample `index`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRun:
    """One deterministic run.

    Raises:
        ValueError: a value out of range, values that do not go together, or not exactly one of `epochs` and
            `total_minibatches`.
    """

    model: Callable[[], nn.Module]
    """Builds a new model; called under `torch.manual_seed(seed)`, for w_0 and once per virtual worker."""
    loss: Callable[[Any, Any], Tensor] | None
    """(output, target) → scalar mean; `output` is a tuple only if the last layer returns several tensors. None: the
    model computes it."""
    train: MapDataset
    batch_size: int
    """Samples per minibatch."""
    seed: int
    optimizer: str
    """A class of `torch.optim`."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """The arguments of `optimizer`, `weight_decay` included."""
    num_virtual_workers: int = 1
    """V."""
    minibatches_per_wave: int | tuple[int, ...] = 1
    """N, or N_v of each virtual worker."""
    waves: Mapping[int, int | tuple[int, ...]] = field(default_factory=dict)
    """Clock → N, or N_v of each virtual worker, from the barrier there on; there is a barrier."""
    staleness: int | None = 0
    """D; None (∞) lets the virtual workers meet at barriers only."""
    combine: Literal["sum", "mean"] = "sum"
    pull: Literal["every_wave", "required"] = "every_wave"
    """`required`: published weights are fetched only where D forbids the ones in use."""
    compress_pushes: Literal["none", "bfloat16"] = "none"
    """`bfloat16`: shards add ũ with every `float32` element rounded to that; its virtual worker adds ũ itself."""
    weights: str = "wave"
    """The weight policy, one of `reference_policies.POLICIES`."""
    stages: tuple[tuple[int, ...], ...] | None = None
    """Layers of each stage, first to last, per virtual worker; None: each is one stage."""
    plans: Mapping[int, Mapping[int, tuple[int, ...]]] = field(default_factory=dict)
    """Clock → virtual worker → layers of each of its stages from the barrier there on; there is a barrier."""
    frozen: Mapping[int, int] = field(default_factory=dict)
    """Clock → number of leading layers of the chain that are frozen from the barrier there on; there is a barrier."""
    frozen_mode: Literal["eval", "train"] = "eval"
    """Training flags of frozen layers."""
    frozen_modules: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Number of frozen layers → the modules with the flags of frozen layers, by their paths; only of a model that does
    not state its layers."""
    inactive: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Clock → layers of the chain that are left out from the barrier there on; there is a barrier."""
    fresh: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Clock → layers that are built anew at the barrier there: the model as built under another seed has their weights
    and buffers, and all optimizers forget them."""
    sync: Literal["wsp", "none", "allreduce"] = "wsp"
    """`wsp`: shards hold the weights. `none`: one virtual worker holds them, and D and `combine` mean nothing.
    `allreduce`: equal virtual workers hold them and average the gradients of each wave."""
    accumulate: int = 1
    """Minibatches whose average gradient makes one update; for the policies that do not make one per wave anyway."""
    max_norm: float | None = None
    """Gradients of an update with a larger norm are scaled down to it; None: no clipping."""
    clip: Literal["global", "stage"] = "global"
    """What the norm is over."""
    precision: Precision = "fp32"
    """What forwards and backwards compute in; weights and updates keep the model's dtype."""
    groups: Sequence[tuple[Sequence[str], Mapping[str, object]]] = ()
    """(patterns of parameter names, optimizer arguments that differ for them); the first that matches counts."""
    lr_schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    """Builds the schedule of the learning rate, which steps once per update."""
    device: str = "cpu"
    """The torch device that computes."""
    weigh: Callable[[Any], int] | None = None
    """The weight of a minibatch in means over several, from its target; None: its samples."""
    include_decay: bool = True
    """Whether a prediction counts on the decoupled weight decay."""
    recompute: tuple[tuple[int, int], ...] = ()
    """Runs of layers [first, last) that the backward recomputes; none crosses a border between stages."""
    recompute_from: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Clock → such runs from there on."""
    homes: Sequence[int] = ()
    """Node of each virtual worker, if samples belong to nodes."""
    order: Callable[[int], Sequence[int]] | None = None
    """Epoch → its samples in the order in which they are dealt; None: those that are left are permuted at barriers."""
    epochs: int | None = None
    total_minibatches: int | None = None
    """Minibatches of the whole run, over all virtual workers."""
    checkpoint_every_waves: int | None = None
    """A barrier at every multiple of this clock."""
    extra_barriers: tuple[int, ...] = ()
    """Clocks of further barriers, to repeat what an unplanned one did to another run."""
    stop_at_clock: int | None = None
    """One more barrier; the run ends there."""
    taken_over: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    """Clock of a barrier → virtual worker that joins there → the one with whose optimizer's state it begins."""
    membership: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Clock of a barrier → the virtual workers that share what comes after it, in order; at the start all do. Who
    leaves keeps its optimizer's state, and may come back with it."""

    def __post_init__(self) -> None:
        """Check the values."""
        for problem in chain(_out_of_range(self), _no_membership(self), _contradictions(self)):
            raise ValueError(problem)

    def stages_at(self, vw: int, clock: int) -> tuple[int, ...] | None:
        """Layers of each stage of `vw` in the segment that begins at `clock`; None: it is one stage."""
        newest = None if self.stages is None else self.stages[vw]
        for at, plans in sorted(self.plans.items()):
            newest = plans.get(vw, newest) if at <= clock else newest
        return newest

    def frozen_at(self, clock: int) -> int:
        """Frozen layers in the segment that begins at `clock`."""
        return max((layers for at, layers in self.frozen.items() if at <= clock), default=0)

    def inactive_at(self, clock: int) -> tuple[int, ...]:
        """Layers that are left out in the segment that begins at `clock`."""
        newest = max((at for at in self.inactive if at <= clock), default=None)
        return () if newest is None else self.inactive[newest]

    def members(self, clock: int) -> tuple[VirtualWorkerIndex, ...]:
        """Who shares what comes after the barrier at `clock`."""
        newest = max((barrier for barrier in self.membership if barrier <= clock), default=None)
        members = range(self.num_virtual_workers) if newest is None else self.membership[newest]
        return tuple(VirtualWorkerIndex(vw) for vw in members)

    def num_in_wave(self, vw: VirtualWorkerIndex, clock: int) -> int:
        """N_v of virtual worker `vw` in the wave from `clock` to the next."""
        begun = [at for at in self.waves if at <= clock]
        given = self.waves[max(begun)] if begun else self.minibatches_per_wave
        return given if isinstance(given, int) else given[vw]

    def numbered_before(self, vw: VirtualWorkerIndex, clock: int) -> int:
        """The minibatches that `vw` may compute before `clock`: as many as its waves up to there have room for."""
        return sum(self.num_in_wave(vw, wave) for wave in range(clock))

    def num_stages(self, vw: VirtualWorkerIndex) -> int:
        """K of virtual worker `vw`."""
        return 1 if self.stages is None else len(self.stages[vw])


def _out_of_range(run: ReferenceRun) -> Iterator[str]:
    counts = {
        "batch_size": run.batch_size,
        "num_virtual_workers": run.num_virtual_workers,
        "minibatches_per_wave": min(_waves(run)),
        "accumulate": run.accumulate,
        "checkpoint_every_waves": run.checkpoint_every_waves,
        "the number of training samples": len(run.train),
    }
    for name, count in counts.items():
        if count is not None and count < 1:
            yield f"{name} is {count}; it must be at least 1"
    if run.staleness is not None and run.staleness < 0:
        yield f"staleness is {run.staleness}; it must be at least 0"
    if run.max_norm is not None and not run.max_norm > 0:
        yield f"max_norm is {run.max_norm}; it must be above 0"
    for name, value, known in (
        ("weights", run.weights, tuple(POLICIES)),
        ("sync", run.sync, ("wsp", "none", "allreduce")),
        ("clip", run.clip, ("global", "stage")),
    ):
        if value not in known:
            yield f"{name} is {value}; it must be one of {', '.join(known)}"
    if (run.epochs is None) == (run.total_minibatches is None):
        yield f"give exactly one of epochs ({run.epochs}) and total_minibatches ({run.total_minibatches})"


def _waves(run: ReferenceRun) -> tuple[int, ...]:
    given = run.minibatches_per_wave
    return (given,) * run.num_virtual_workers if isinstance(given, int) else given


def _no_membership(run: ReferenceRun) -> Iterator[str]:
    known = set(range(run.num_virtual_workers))
    for clock, members in run.membership.items():
        if not members or list(members) != sorted(set(members)) or not known.issuperset(members):
            yield f"from clock {clock} on the members are {members}; give some of {len(known)}, in order"
    for clock, taken in run.taken_over.items():
        joining = set(run.members(clock)) - set(run.members(clock - 1)) if clock else set()
        if not joining.issuperset(taken) or not set(run.members(max(clock - 1, 0))).issuperset(taken.values()):
            yield f"at clock {clock} {taken} take states over; who joins there takes that of one who was there"


def _contradictions(run: ReferenceRun) -> Iterator[str]:
    """Between values that are right by themselves."""
    policy, waves, num_workers = POLICIES[run.weights], _waves(run), run.num_virtual_workers
    if len(waves) != num_workers:
        yield f"minibatches_per_wave is {waves}; give one number, or one for each of {num_workers} virtual workers"
    stages = run.stages or ((1,),) * num_workers
    if len(stages) != num_workers or not all(counts and min(counts) > 0 for counts in stages):
        yield f"stages are {stages}; give {num_workers} virtual workers stages of at least one layer each"
    for n, counts in zip(waves, stages, strict=False):
        if policy.fills_pipeline and n < len(counts):
            deepest = len(counts)
            yield f"minibatches_per_wave is {n}; {run.weights} needs at least as many as there are stages, {deepest}"
        if run.accumulate > 1 and (policy.once_per_wave or n % run.accumulate):
            yield (
                f"accumulate is {run.accumulate}; it must divide minibatches_per_wave, {n}, and be 1 under a policy "
                f"that makes one update per wave, as flush and double_buffer do"
            )
    present = [run.members(clock) for clock in (0, *run.membership)]
    if run.sync == "none" and any(len(members) > 1 for members in present):
        yield f"num_virtual_workers is {num_workers}; sync none is for one, use wsp or allreduce"
    if run.sync == "allreduce" and not policy.once_per_wave:
        yield f"weights is {run.weights}; allreduce averages whole waves, use flush or double_buffer"
    if run.sync == "allreduce" and stages and any(len({stages[vw] for vw in members}) > 1 for members in present):
        yield f"stages are {stages}; allreduce needs equal replicas"
    if run.max_norm is not None and run.clip == "global" and not policy.clips_globally:
        yield f"clip is global; under {run.weights} the norm over all stages would hold up the pipeline, use stage"


@dataclass(frozen=True, slots=True)
class ReferenceScale:
    """A loss scale 2^e, as `torch.amp.GradScaler` changes its own: by verdicts on updates."""

    exponent: int = 16
    in_a_row: int = 0
    """Updates since the last change, none of which overflowed."""

    def after(self, used: int, *, overflowed: bool) -> ReferenceScale:
        """After the verdict on an update of minibatches at 2^`used`: halved if that is not done yet, or doubled."""
        if overflowed:
            return ReferenceScale(max(min(self.exponent, used - 1), 0))
        if self.in_a_row == 1999:
            return ReferenceScale(min(self.exponent + 1, 24))
        return ReferenceScale(self.exponent, self.in_a_row + 1)


@dataclass(frozen=True, slots=True)
class ReferenceState:
    """Everything that is alive at a barrier; a run that starts from it equals one that went through it."""

    clock: Clock
    epoch: int
    """Pass over the data that is under way, 0-based."""
    used: frozenset[int]
    """Samples of `epoch` that committed waves used; never all of them, for then the next epoch is under way."""
    minibatches: int
    """Minibatches done since the start of the run, over all virtual workers."""
    samples: int
    """Samples of those minibatches."""
    weights: Tensors
    """w^(clock)."""
    buffers: Tensors
    optimizers: tuple[OptimizerState, ...]
    """Per virtual worker."""
    updates: tuple[int, ...]
    """Per virtual worker, updates it has made: the position of its learning rate's schedule."""
    last_gradients: tuple[Tensors, ...]
    """Per virtual worker, the gradients that its optimizer last saw, by parameter name; empty unless it predicts."""
    scales: tuple[ReferenceScale, ...]
    """Per virtual worker, that of its losses, under fp16."""


@dataclass(frozen=True, slots=True)
class MinibatchRecord:
    """What one minibatch did."""

    vw: VirtualWorkerIndex
    p: Minibatch
    clock: Clock
    """W*, the published clock its forward used; without shards the clock of the last barrier."""
    local_through: Minibatch
    """v(p), the last of its own updates that its forward used on the first stage."""
    samples: tuple[int, ...]
    """Sample indices in the order in which they were read."""
    loss: float
    squares: Mapping[int, float] = field(default_factory=dict)
    """Layer with trainable parameters → squared norm of its gradient in this minibatch, before any clipping."""


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """A finished run."""

    final: ReferenceState
    barriers: Mapping[Clock, ReferenceState]
    """The state at every barrier, at the start of the run (the clock it began from) and at its end."""
    minibatches: Mapping[tuple[VirtualWorkerIndex, Minibatch], MinibatchRecord]
    """By (virtual worker, p), in the order of computation."""

    @property
    def weights(self) -> Tensors:
        """The last published weights."""
        return self.final.weights

    @property
    def buffers(self) -> Tensors:
        """The buffers as merged at the last barrier."""
        return self.final.buffers

    @property
    def clocks(self) -> dict[VirtualWorkerIndex, Clock]:
        """Local clock per virtual worker: at a barrier every one has committed every wave below it."""
        return {VirtualWorkerIndex(vw): self.final.clock for vw in range(len(self.final.optimizers))}


@dataclass(frozen=True, slots=True)
class ReferenceEvaluation:
    """The outcome of an evaluation."""

    samples: int
    means: Mapping[str, float]
    """`loss` and every metric, as the mean over all samples."""
