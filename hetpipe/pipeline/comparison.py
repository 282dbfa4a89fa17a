"""Comparison of two computations: equal to the bit, equal within rounding, or different and by how much."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

#: Gradients below this share of the model's largest gradient may be pure rounding error (the gradient of a bias before
#: a normalisation is zero, but is computed as noise).
_NOISE_SHARE = 1e-4

#: Units in the last place by which two summation orders may differ; short dtypes have few units to lose.
_LAST_PLACES = 128
_LAST_PLACES_OF_SHORT = 4
_SHORT = frozenset({torch.float16, torch.bfloat16})


class TensorComparison:
    """Compares tensors, and records whether all of them were equal to the bit."""

    def __init__(self, *, is_loose: bool = False) -> None:
        """Start with no comparison made.

        Args:
            is_loose: whether the compared tensors were computed in different memory layouts, so that rounding adds up.
        """
        self._is_loose = is_loose
        self.is_exact = True

    def difference(
        self, found: Tensor | None, expected: Tensor | None, among: Mapping[str, Tensor | None] | None = None
    ) -> str | None:
        """Describe how `found` differs from `expected`; None if it does not, except for rounding.

        Args:
            found: a tensor, or None for no tensor.
            expected: a tensor, or None for no tensor.
            among: the gradients of the whole model, relative to which a small one may be rounding error.
        """
        if found is None or expected is None:
            return None if found is expected else f"{_there(found)} instead of {_there(expected)}"
        if found.shape != expected.shape:
            return f"shape {list(found.shape)} instead of {list(expected.shape)}"
        if found.dtype != expected.dtype:
            return f"{found.dtype} instead of {expected.dtype}"
        if _same_elements(found, expected):
            return None
        self.is_exact = False
        if not (found.is_floating_point() or found.is_complex()):
            return f"{int((found != expected).sum())} of {found.numel()} elements"
        wide = torch.complex128 if found.is_complex() else torch.float64
        distance = float((found.to(wide) - expected.to(wide)).abs().max())
        largest = max(float(expected.to(wide).abs().max()), 0.0 if among is None else _noise_of(among))
        return None if distance <= self._rounding(found.dtype) * largest else short(distance)

    def _rounding(self, dtype: torch.dtype) -> float:
        """Relative rounding error, as a share of the largest element."""
        places = _LAST_PLACES_OF_SHORT if dtype in _SHORT else _LAST_PLACES
        share = places * torch.finfo(dtype).eps
        return float(max(share, share**0.5 / 4)) if self._is_loose else float(share)


def same(one: Any, other: Any) -> bool:
    """Whether two samples, targets or parts of them are equal to the bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and _same_elements(one, other)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return bool(one == other or (one != one and other != other))  # noqa: PLR0124 - not a number equals not itself


def short(value: float) -> str:
    """Format a magnitude for a message.

    >>> short(0.0314), short(12.0), short(float("nan"))
    ('3.1e-2', '1.2e+1', 'nan')
    """
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def _noise_of(gradients: Mapping[str, Tensor | None]) -> float:
    """Magnitude below which a gradient is negligible among the others."""
    present = (value for value in gradients.values() if value is not None and value.numel())
    return _NOISE_SHARE * max((float(torch.linalg.vector_norm(value, torch.inf)) for value in present), default=0.0)


def _same_elements(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124 - as above


def _there(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"one of shape {list(tensor.shape)}"
