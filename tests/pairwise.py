"""Of all combinations of some values, those in which every two of them meet for `make test`; all for `make exhaustive`.

Most faults need one value, or two that meet, to show. A pairwise part of a product grows with its two longest axes, the
product with all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

#: Whether `all_pairs` gives more than its part for `make test`. `tests/conftest.py` says no where the marks that are
#: asked for leave the rest out anyway: each worker would make thousands of tests of it, and drop them.
gives_all = True

_Met = frozenset[tuple[int, int, str, str]]


def all_pairs(
    points: Iterable[tuple[Any, ...]],
    *,
    by: Callable[..., tuple[Any, ...]] | None = None,
    name: Callable[..., str] | None = None,
    every: int = 1,
    step: int = 1,
) -> list[Any]:
    """All points as parameters of a test; those that `covering` leaves out are marked `exhaustive`.

    A point is the arguments of a test. `by` makes of them the values that are to meet, where these are not the
    arguments themselves; values are told apart by their `repr`. `name` makes the test's id. Of the points marked
    `exhaustive`, those whose position is no multiple of `every` are dropped: for products too long even for that. Of
    those in which every two values meet, `make test` takes each `step`-th: for products whose code others try as well.
    """
    listed = list(points)
    left = set(sorted(covering([point if by is None else by(*point) for point in listed]))[::step])
    return [
        pytest.param(
            *point,
            marks=() if number in left else pytest.mark.exhaustive,
            id=None if name is None else name(*point),
        )
        for number, point in enumerate(listed)
        if number in left or (gives_all and number % every == 0)
    ]


def every_nth(step: int, cases: Iterable[Any]) -> list[Any]:
    """Cases of a test of which `make test` takes each `step`-th, from the first one on; the others are `exhaustive`.

    For lists whose neighbours fail for the same reasons. Several arguments of a test are a tuple.
    """
    return [
        case
        if number % step == 0
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.exhaustive)
        for number, case in enumerate(cases)
    ]


def covering(points: Sequence[tuple[Any, ...]]) -> set[int]:
    """Positions of some points in which every two values meet that meet in any of them.

    Greedy: always the first of those that add most. So it is the same in every run, and near the smallest there is.
    """
    adds = [_met(point) for point in points]
    missing = set().union(*adds)
    chosen = set[int]()
    while missing:
        best = max(range(len(points)), key=lambda number: len(adds[number] & missing))
        chosen.add(best)
        missing -= adds[best]
    return chosen


def _met(point: tuple[Any, ...]) -> _Met:
    """Which values meet in a point: pairs of axes with their values; an axis meets itself, so that one axis will do."""
    told = [repr(value) for value in point]
    axes = [*combinations(range(len(told)), 2), *((axis, axis) for axis in range(len(told)))]
    return frozenset((one, other, told[one], told[other]) for one, other in axes)
