"""Dynamic loss scale of `precision: fp16` (`docs/semantics/precision.md`). Pure.

The loss of a minibatch is multiplied by its scale before the backward, so that small gradients do not vanish in
float16, and gradients are divided by it afterwards. An update with an infinite or NaN gradient is skipped, and the
scale halved; after many updates without one it is doubled, as in `torch.amp.GradScaler`. Scales are powers of two,
given by their exponents: they change no gradient but by overflow and underflow.

A virtual worker has several minibatches in flight, so the scale of one follows from the verdicts on the updates that
its weights include, and from no later one: it does not depend on timing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hetpipe.values.precision import LARGEST_SCALE_EXPONENT

#: Exponent of the scale at the start, and number of updates in a row without overflow after which the scale is doubled:
#: those of `torch.amp.GradScaler`.
INITIAL_EXPONENT: Final = 16
GROWTH_INTERVAL: Final = 2000

_EXPONENT, _FINITE = "exponent", "finite_updates"


@dataclass(frozen=True, slots=True)
class LossScale:
    """The scale after some update."""

    exponent: int = INITIAL_EXPONENT
    finite_updates: int = 0
    """Updates in a row without overflow since the exponent last changed."""

    def after_overflow(self, exponent: int) -> LossScale:
        """The scale after an update that overflowed at 2^`exponent`.

        Minibatches that were in flight with the scale that has been halved already do not halve it again.
        """
        return LossScale(max(0, min(self.exponent, exponent - 1)))

    def after_success(self) -> LossScale:
        """The scale after an update without overflow."""
        if self.finite_updates + 1 < GROWTH_INTERVAL:
            return LossScale(self.exponent, self.finite_updates + 1)
        return LossScale(min(LARGEST_SCALE_EXPONENT, self.exponent + 1))


class LossScales:
    """The scales of one virtual worker by the updates they follow from. Every stage has the same."""

    def __init__(self) -> None:
        """Initialize for the start of training."""
        #: Last minibatch of an update → the scale after it, oldest first.
        self._after: dict[int, LossScale] = {0: LossScale()}
        #: Number of updates skipped.
        self.skipped_updates = 0

    @property
    def newest(self) -> LossScale:
        """The scale after all verdicts."""
        return self._after[max(self._after)]

    def start(self, through: int) -> None:
        """Start a segment after minibatch `through`: all verdicts so far count for it."""
        self._after = {through: self.newest}

    def exponent(self, through: int) -> int:
        """Exponent of the scale of a minibatch whose weights include own updates through minibatch `through`."""
        return self._after[max(p for p in self._after if p <= through)].exponent

    def judge(self, p: int, exponent: int, *, overflowed: bool) -> None:
        """Receive the verdict on the update that ends with minibatch `p`, computed at 2^`exponent`."""
        newest = self.newest
        self._after[p] = newest.after_overflow(exponent) if overflowed else newest.after_success()
        self.skipped_updates += overflowed

    def forget_before(self, through: int) -> None:
        """No later minibatch has weights that lack own updates through minibatch `through`."""
        needed = max(p for p in self._after if p <= through)
        self._after = {p: scale for p, scale in self._after.items() if p >= needed}

    def state(self) -> dict[str, float | int]:
        """The state for a checkpoint."""
        return {_EXPONENT: self.newest.exponent, _FINITE: self.newest.finite_updates}

    def load_state(self, state: Mapping[str, object]) -> None:
        """Restore `state`; without effect if it is empty, as in checkpoints of another precision."""
        exponent, finite = state.get(_EXPONENT), state.get(_FINITE)
        if isinstance(exponent, int) and isinstance(finite, int):
            self._after = {max(self._after): LossScale(min(LARGEST_SCALE_EXPONENT, max(0, exponent)), max(0, finite))}
