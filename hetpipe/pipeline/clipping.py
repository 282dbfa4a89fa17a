"""Gradient clipping: gradients whose norm is too large are scaled down (`policies.md`, global gradient clipping).

The norm is computed from the squared norms of single parameters, added as Python floats in the order of the chain. It
is therefore independent of the partition, and partial results can be passed from stage to stage.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

#: Same value as in `torch.nn.utils.clip_grad_norm_`.
_TINY = 1e-6

_FLOAT32_BYTES = 4

#: Elements of a product in float32, which is off by 10⁻⁵ for so many; those of larger gradients are added in float64.
_DOT_ELEMENTS = 1 << 20


def squared_norms(gradients: Mapping[str, Tensor | None], names: Sequence[str]) -> list[float]:
    """Σ of the squares of each gradient of `names`, in that order, computed in float64; 0 for a missing gradient.

    All gradients must be on one device; synchronises with it once.
    """
    return _read(gradients, names, lambda gradient: gradient.double().square().sum())


def layer_squares(gradients: Mapping[str, Tensor | None], layers: Mapping[int, Sequence[str]]) -> dict[int, float]:
    """Σ of the squares of the gradients of each layer, parameter by parameter in the order of the chain.

    Source: freezing.md §2. Each gradient's sum is computed in its own precision, at least float32: a copy in float64
    takes longer than the layer's backward. What is not finite is the largest
    finite number: an update that overflowed makes no layer look converged. All gradients must be on one device;
    synchronises with it once.

    Args:
        gradients: by parameter name.
        layers: layer → its parameters.
    """
    squares = iter(_read(gradients, [name for names in layers.values() for name in names], _sum_of_squares))
    found: dict[int, float] = {}
    for layer, names in layers.items():
        total = 0.0
        for _ in names:
            total += next(squares)
        found[layer] = total if math.isfinite(total) else sys.float_info.max
    return found


def _read(
    gradients: Mapping[str, Tensor | None], names: Sequence[str], square: Callable[[Tensor], Tensor]
) -> list[float]:
    """`square` of each gradient of `names`, all read from the device at once; 0 for a missing one."""
    found = [gradients.get(name) for name in names]
    sums = [square(gradient) for gradient in found if gradient is not None]
    values = iter(torch.stack(sums).tolist() if sums else ())
    return [0.0 if gradient is None else next(values) for gradient in found]


def _sum_of_squares(gradient: Tensor) -> Tensor:
    flat = (gradient.float() if gradient.itemsize < _FLOAT32_BYTES else gradient).reshape(-1)
    if flat.numel() <= _DOT_ELEMENTS:  # a quarter of the time for small ones
        return torch.dot(flat, flat).double()
    parts = [torch.dot(part, part).double() for part in torch.split(flat, _DOT_ELEMENTS)]
    return torch.stack(parts).sum()


def norm_of(squares: Iterable[float]) -> float:
    """√ of the sum of `squares`, added sequentially (`sum` rounds differently in newer Pythons)."""
    total = 0.0
    for square in squares:
        total += square
    return math.sqrt(total)


def clip_factor(norm: float, max_norm: float) -> float:
    """min(1, max_norm / (norm + 1e-6)): the factor for gradients whose common norm is `norm`.

    1 if the norm is infinite or NaN. No factor makes such gradients usable, and 0 or NaN would spread to parameters
    with finite gradients; unchanged, the check for non-finite updates can identify the parameter where it began.

    >>> clip_factor(0.5, 1.0), round(clip_factor(4.0, 1.0), 4), clip_factor(math.inf, 1.0)
    (1.0, 0.25, 1.0)
    """
    return min(1.0, max_norm / (norm + _TINY)) if math.isfinite(norm) else 1.0


def scaled(gradients: dict[str, Tensor | None], factor: float) -> dict[str, Tensor | None]:
    """The gradients multiplied by `factor`, as new tensors; `gradients` itself if `factor` is 1."""
    if factor == 1.0:
        return gradients
    return {name: None if gradient is None else gradient.mul(factor) for name, gradient in gradients.items()}
