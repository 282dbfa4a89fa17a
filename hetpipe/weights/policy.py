"""Interface to the weight versions of a stage.

Two implementations: `anchored` where parameter servers publish weights (`wsp.md` §3), `direct` where only the stages
hold them (`sync: none`, `sync: allreduce`). Both look up the version of a minibatch in a `VersionTable`; they differ in
what the optimizer steps on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hetpipe.decide.schedule.versions import VersionTable
from hetpipe.values.ids import Clock, Minibatch, Wave
from hetpipe.weights.flat import BufferPool, FlatBuffer
from hetpipe.weights.optimizer import StageOptimizer


@dataclass(frozen=True, slots=True)
class Version:
    """The weights of one minibatch in one direction."""

    buffer: FlatBuffer
    weights: Mapping[str, Tensor]
    """Leaves by parameter name: views of `buffer` that require gradients."""
    through: Minibatch
    """The last own minibatch of an update that they actually contain, not counting predicted ones."""


def version_of(buffer: FlatBuffer, through: int) -> Version:
    """A version whose weights are the tensors of `buffer`."""
    weights = {name: view.detach().requires_grad_() for name, view in buffer.views.items()}
    return Version(buffer, weights, Minibatch(through))


def predicted_version(
    newest: FlatBuffer, steps: int, *, through: int, pool: BufferPool, optimizer: StageOptimizer
) -> Version:
    """The weights `steps` updates ahead of `newest`, which include `through`; with a holder of their own."""
    if steps == 0:
        return version_of(pool.hold(newest), through)
    ahead = pool.take().copy_(newest)
    optimizer.predict_(ahead, steps)
    return version_of(ahead, through)


@dataclass(frozen=True, slots=True)
class Succession:
    """What the weights of the next version of a plan go on from, after a whole wave (plan-versions.md §9)."""

    clock: Clock
    """W* of the anchor."""
    through: Wave
    """The own whole waves in the anchor."""
    terms: Mapping[int, Mapping[str, Tensor]]
    """`ANCHOR`: parameter name → B, or the newest weights; a wave: → its ũ, as far as anchors may still need it."""


#: The key of the anchor among the terms of a `Succession`.
ANCHOR = -1


class StageWeights(Protocol):
    """The versions of one stage. Not thread-safe: one compute thread uses it.

    Per minibatch: `forward`, `forwarded`, later `backward`, `backwarded`; `step` after the last minibatch of an update.
    Buffers returned (`close_wave`) or passed in (`start`, `switch`) have one holder, which is transferred.
    """

    optimizer: StageOptimizer
    #: Peak number of buffers held between two actions.
    peak_at_rest: int

    def number_by(self, table: VersionTable, shift: int) -> None:
        """Use another table of versions in the segment that starts next; messages add `shift` to its minibatches."""
        ...

    def start(self, clock: Clock, published: FlatBuffer | None) -> None:
        """Start a segment at the barrier at `clock`, from w^(clock), or from the newest weights if that is None."""
        ...

    def switch(self, p: Minibatch, clock: Clock, published: FlatBuffer) -> None:
        """From minibatch `p` on, build on w^(clock)."""
        ...

    def forward(self, p: Minibatch) -> Version:
        """The weights of the forward of `p`."""
        ...

    def forwarded(self, p: Minibatch) -> None:
        """Mark the forward of `p` as ended."""
        ...

    def backward(self, p: Minibatch) -> Version:
        """The weights of the backward of `p`; different from those of its forward if the policy predicts."""
        ...

    def backwarded(self, p: Minibatch) -> None:
        """Mark the backward of `p` as ended."""
        ...

    def step(self, p: Minibatch, gradients: dict[str, Tensor | None] | None) -> None:
        """Make the update after minibatch `p`.

        Args:
            p: the last minibatch whose gradient it includes.
            gradients: parameter name → gradient or None; they are removed, and freed during the step. None: nothing
                changes, neither weights nor the optimizer's state, and later minibatches use the same weights.
        """
        ...

    def close_wave(self, wave: Wave, last: Minibatch) -> FlatBuffer | None:
        """Finish a wave after its last update, made after minibatch `last`.

        Returns:
            ũ in host memory, with the caller as its only holder; None where nothing is pushed.

        Raises:
            NonFiniteUpdate: names parameter and minibatch.
        """
        ...

    def lend(self, p: Minibatch, clock: Clock, published: FlatBuffer | None) -> dict[str, Tensor]:
        """Copies of the weights of `p`, which the next version of the plan computes; nothing here changes.

        Args:
            p: beyond the last minibatch of this version, all of whose forwards may not have started yet.
            clock: W* of `p`.
            published: w^(clock), anywhere; None where that is the clock in use, or nothing is published.
        """
        ...

    def begin(self, start: Clock, through: int) -> None:
        """Begin inside the segment from `start`, after minibatch `through`, the last of a wave."""
        ...

    def borrow(self, minibatches: range, weights: Mapping[str, Tensor]) -> None:
        """Take the weights of some minibatches from the version before; those of this stage's layers are copied."""
        ...

    def hand_over(self) -> Succession:
        """After the last wave of this version: what the next one goes on from; the tensors are live."""
        ...

    def take_over(self, found: Succession) -> None:
        """Go on from the version before, after its last wave; the terms have all parameters of this stage."""
        ...

    @property
    def at_barrier(self) -> FlatBuffer:
        """The weights of the barrier, right after `start`."""
        ...

    def evaluated(self, p: Minibatch, published: FlatBuffer | None) -> FlatBuffer:
        """The weights of an evaluation right before `switch` or `forward` of `p`; the holder does not change.

        Args:
            p: the next minibatch.
            published: w^(clock) where `p` switches to it; None before the first forward after `start`, and where
                nothing is published: then the own weights that `p` uses, without its prediction.
        """
        ...
