"""Of all combinations of some values, a part for `make test` and the rest for `make exhaustive`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest


def thinned(*axes: Sequence[Any], every: int, rounds: int = 1, name: Callable[..., str] | None = None) -> list[Any]:
    """The product of `axes` as parameters of a test; of `every ** rounds` points one is left in `make test`.

    Any two values of any two axes meet in a point that is left, if one other axis has at least `every` values; with two
    rounds, if among the others are two such axes whose positions differ modulo `every`.
    """
    return [
        pytest.param(
            *(value for _, value in point),
            marks=() if _is_left(tuple(place for place, _ in point), every, rounds) else pytest.mark.exhaustive,
            id=name(*(value for _, value in point)) if name else None,
        )
        for point in itertools.product(*(tuple(enumerate(axis)) for axis in axes))
    ]


def _is_left(places: tuple[int, ...], every: int, rounds: int) -> bool:
    """Whether the places of a point fulfil `rounds` independent linear conditions modulo `every`."""
    return all(sum(axis**power * place for axis, place in enumerate(places)) % every == 0 for power in range(rounds))
