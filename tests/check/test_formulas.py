"""The checker's formulas against the tables of `wsp.md` §2 and the paper's definition of s_global."""

from __future__ import annotations

import doctest

import pytest

from hetpipe.check import formulas
from hetpipe.check.formulas import Rule, WeightRule, is_switch_point, local_through, required_clock


@pytest.mark.parametrize(
    ("staleness", "num", "first", "last", "clock"),
    [
        (0, 1, 1, 1, 0),
        (0, 1, 2, 2, 1),
        (0, 1, 3, 3, 2),
        (0, 1, 4, 4, 3),
        (0, 4, 1, 7, 0),
        (0, 4, 8, 11, 1),
        (0, 4, 12, 15, 2),
        (1, 4, 1, 11, 0),
        (1, 4, 12, 15, 1),
        (1, 4, 16, 19, 2),
        (4, 5, 1, 29, 0),
        (4, 5, 30, 34, 1),
    ],
)
def test_required_clock_is_the_table_of_the_design(staleness: int, num: int, first: int, last: int, clock: int) -> None:
    rule = Rule(num, staleness)
    assert {required_clock(rule, p, 0) for p in range(first, last + 1)} == {clock}


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("num", [1, 2, 3, 5])
def test_required_clock_follows_from_s_global(staleness: int, num: int) -> None:
    s_local = num - 1
    s_global = (staleness + 1) * (s_local + 1) + s_local - 1
    for p in range(1, 60):
        clock = required_clock(Rule(num, staleness), p, 0)
        due = max(0, p - (s_global + 1))
        assert clock * num >= due > (clock - 1) * num or clock == due == 0


@pytest.mark.parametrize(
    ("weights", "clocks", "through"),
    [
        (WeightRule.FLUSH, [0, 0, 0, 0, 1, 1], [0, 0, 2, 2, 4, 4]),
        (WeightRule.DOUBLE_BUFFER, [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 2, 2]),
        (WeightRule.WAVE, [0, 0, 0, 0, 0, 1], [0, 0, 1, 2, 3, 4]),
    ],
)
def test_other_policies(weights: WeightRule, clocks: list[int], through: list[int]) -> None:
    rule = Rule(2, 1, weights)
    assert [required_clock(rule, p, 0) for p in range(1, 7)] == clocks
    assert [local_through(rule, p, 0) for p in range(1, 7)] == through


def test_a_barrier_is_a_floor() -> None:
    rule = Rule(2, 1)
    assert [required_clock(rule, p, 3) for p in (7, 8, 9)] == [3, 3, 3]
    assert [local_through(rule, p, 3) for p in (7, 8, 9)] == [6, 6, 7]
    assert [p for p in range(7, 13) if is_switch_point(rule, p, 3)] == [7, 8, 10, 12]


def test_unbounded_staleness_requires_only_the_barrier() -> None:
    assert required_clock(Rule(2, None), 1000, 3) == 3


def test_doctests() -> None:
    assert doctest.testmod(formulas).failed == 0
