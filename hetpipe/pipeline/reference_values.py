"""What the reference executor is given and what it returns.

A `ReferenceRun` says what to train and under which rule, a `ReferenceState` is everything that is alive at a barrier,
and a `ReferenceResult` holds the state at every barrier and one record per minibatch. V, N and D are those of `wsp.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from hetpipe.spec.ids import Clock, Minibatch, VirtualWorkerIndex

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
    """One deterministic run under the `wave` policy.

    Raises:
        ValueError: a number out of range, or not exactly one of `epochs` and `total_minibatches`.
    """

    model: Callable[[], nn.Module]
    """Builds a new model; called under `torch.manual_seed(seed)`, for w_0 and once per virtual worker."""
    loss: Callable[[Any, Any], Tensor]
    """(output, target) → scalar mean; `output` is a tuple only if the last layer returns several tensors."""
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
    minibatches_per_wave: int = 1
    """N."""
    staleness: int | None = 0
    """D; None (∞) lets the virtual workers meet at barriers only."""
    combine: Literal["sum", "mean"] = "sum"
    epochs: int | None = None
    total_minibatches: int | None = None
    """Minibatches of the whole run, over all virtual workers."""
    checkpoint_every_waves: int | None = None
    """A barrier at every multiple of this clock."""
    extra_barriers: tuple[int, ...] = ()
    """Clocks of further barriers, to repeat what an unplanned one did to another run."""
    stop_at_clock: int | None = None
    """One more barrier; the run ends there."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        counts = {
            "batch_size": self.batch_size,
            "num_virtual_workers": self.num_virtual_workers,
            "minibatches_per_wave": self.minibatches_per_wave,
            "checkpoint_every_waves": self.checkpoint_every_waves,
            "the number of training samples": len(self.train),
        }
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ValueError(f"{name} is {count}; it must be at least 1")
        if self.staleness is not None and self.staleness < 0:
            raise ValueError(f"staleness is {self.staleness}; it must be at least 0")
        if (self.epochs is None) == (self.total_minibatches is None):
            raise ValueError(
                f"give exactly one of epochs ({self.epochs}) and total_minibatches ({self.total_minibatches})"
            )


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


@dataclass(frozen=True, slots=True)
class MinibatchRecord:
    """What one minibatch did."""

    vw: VirtualWorkerIndex
    p: Minibatch
    clock: Clock
    """W*, the published clock it used."""
    local_through: Minibatch
    """v(p), the last of its own updates it used."""
    samples: tuple[int, ...]
    """Sample indices in the order in which they were read."""
    loss: float


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
