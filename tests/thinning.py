"""Of all combinations of some values, a part for `make test` and the rest for `make exhaustive`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest


def thinned(*axes: Sequence[Any], every: int, name: Callable[..., str] | None = None) -> list[Any]:
    """The product of `axes` as parameters of a test; one point of `every` is left in `make test`.

    Any two values of any two axes meet in a point that is left, if another axis has at least `every` values.
    """
    return [
        pytest.param(
            *(value for _, value in point),
            marks=() if sum(place for place, _ in point) % every == 0 else pytest.mark.exhaustive,
            id=name(*(value for _, value in point)) if name else None,
        )
        for point in itertools.product(*(tuple(enumerate(axis)) for axis in axes))
    ]
