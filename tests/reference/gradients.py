"""From the gradients of minibatches to the gradient of one update, in the reference executor: average, then clip.

g_j is the gradient of the unscaled mean loss of minibatch j, n_j its weight: samples, or what `mean_over` counts. A
parameter that a minibatch did not use has no gradient there (None or absent) and counts as zero; if none used it, the
update has none either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

#: Parameter name → its gradient, or None, in chain order.
Gradients = Mapping[str, Tensor | None]


@dataclass(frozen=True, slots=True)
class MinibatchGradients:
    """What one minibatch contributes."""

    gradients: Gradients
    weight: int


def weighted_sum(group: Sequence[MinibatchGradients]) -> dict[str, Tensor]:
    """G = g_1·n_1, then += g_j·n_j in the order of p."""
    total: dict[str, Tensor] = {}
    for part in group:
        for name, gradient in part.gradients.items():
            if gradient is None:
                continue
            if name in total:
                total[name].add_(gradient, alpha=part.weight)
            else:
                total[name] = gradient.mul(part.weight)
    return total


def average(group: Sequence[MinibatchGradients]) -> Gradients:
    """G / Σ n_j; the gradient as it is if the group is one minibatch."""
    if len(group) == 1:
        return group[0].gradients
    weight = sum(part.weight for part in group)
    return {name: total.div_(weight) for name, total in weighted_sum(group).items()}


def all_reduced(groups: Sequence[Sequence[MinibatchGradients]]) -> Gradients:
    """Σ of the virtual workers' G in their order, divided once by the samples of all; groups may be empty."""
    total: dict[str, Tensor] = {}
    for group in groups:
        for name, own in weighted_sum(group).items():
            total[name] = total[name] + own if name in total else own
    weight = sum(part.weight for group in groups for part in group)
    return {name: gradient.div_(weight) for name, gradient in total.items()}


def clipped(gradients: Gradients, names: Sequence[str], max_norm: float) -> Gradients:
    """The gradients of `names`, scaled so that their common norm is at most `max_norm`.

    c = min(1, max_norm / (norm + 1e-6)), as in `torch.nn.utils.clip_grad_norm_`; the squared norms are added in chain
    order, as Python floats.

    Args:
        gradients: by parameter name.
        names: the parameters that the norm is over, in chain order.
        max_norm: above 0.
    """
    present = {name: gradient for name in names if (gradient := gradients.get(name)) is not None}
    squared_norm = 0.0
    for gradient in present.values():
        squared_norm += float(gradient.double().square().sum())
    factor = min(1.0, max_norm / (math.sqrt(squared_norm) + 1e-6))
    return {name: gradient.mul(factor) for name, gradient in present.items()} if factor < 1.0 else present
