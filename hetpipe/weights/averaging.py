"""Gradient accumulation: the average over several minibatches, as if they were one batch (`wsp.md` §3).

G = Σ n_j·g_j in the order of the minibatches, then G / Σ n_j, where n_j is the weight of minibatch j (its samples, or
what `mean_over` says) and g_j is the gradient of its mean loss. The gradient of a single minibatch is not changed. A
minibatch of weight 0 has no gradient.
"""

from __future__ import annotations

from torch import Tensor

GradientsByName = dict[str, Tensor | None]


class GradientSum:
    """Accumulates the gradients of one update after another."""

    def __init__(self) -> None:
        self._sum: GradientsByName = {}
        #: Whether the sum is still the unweighted gradient of the first minibatch.
        self._is_plain = True
        #: Weight and minibatches accumulated since the last update.
        self.weight = 0
        self.minibatches = 0

    def add(self, gradients: GradientsByName, weight: int) -> None:
        """Add one minibatch's gradients (parameter name → gradient, None where it was not used)."""
        if self.minibatches == 0:
            self._sum, self._is_plain = gradients, True
        else:
            self._weigh()
            for name, gradient in gradients.items():
                if gradient is None:
                    continue
                before = self._sum.get(name)
                if before is None:
                    self._sum[name] = gradient.mul(weight)
                else:
                    before.add_(gradient, alpha=weight)
        self.weight += weight
        self.minibatches += 1

    def take_sum(self) -> tuple[GradientsByName, int]:
        """Return Σ n_j·g_j and Σ n_j, and reset."""
        self._weigh()
        return self._taken(), self._taken_weight()

    def take_average(self) -> GradientsByName:
        """Return the average gradient of the update, and reset."""
        is_plain, weight = self._is_plain, self._taken_weight()
        found = self._taken()
        return found if is_plain else divided(found, weight)

    def _weigh(self) -> None:
        if not self._is_plain:
            return
        # A new tensor: autograd may return the same one for two parameters, or an expanded one.
        self._sum = {name: None if g is None else g.mul(self.weight) for name, g in self._sum.items()}
        self._is_plain = False

    def _taken(self) -> GradientsByName:
        found, self._sum, self._is_plain = self._sum, {}, True
        return found

    def _taken_weight(self) -> int:
        weight, self.weight, self.minibatches = self.weight, 0, 0
        return weight


def divided(gradients: GradientsByName, weight: int) -> GradientsByName:
    """Divide each of `gradients` in place."""
    for gradient in gradients.values():
        if gradient is not None:
            gradient.div_(weight)
    return gradients
