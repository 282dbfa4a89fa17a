"""What is left of a product: every two values still meet, in few points; and what is left out is marked."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import pairwise
from tests.pairwise import all_pairs, covering, every_nth

SIX_AXES = list(product("ab", "abc", "abc", "abc", "abc", "abc"))


def _pairs(points: list[tuple[Any, ...]]) -> set[tuple[int, int, Any, Any]]:
    return {(i, j, point[i], point[j]) for point in points for i, j in combinations(range(len(point)), 2)}


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans(), st.integers(0, 1)), max_size=40))
def test_any_two_values_that_meet_somewhere_meet_in_what_is_left(points: list[tuple[Any, ...]]) -> None:
    assert _pairs([points[number] for number in covering(points)]) == _pairs(points)


def test_few_points_are_left_of_a_large_product() -> None:
    """Nine are the fewest for two axes of three; 486 are all."""
    assert 9 <= len(covering(SIX_AXES)) <= 16


def test_every_value_of_a_single_axis_is_left() -> None:
    assert covering([("a",), ("b",), ("a",)]) == {0, 1}


def test_what_is_left_out_is_marked_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairwise, "gives_all", True)
    found = all_pairs(SIX_AXES, name=lambda *values: "".join(values))
    assert [one.values for one in found] == SIX_AXES
    left = [number for number, one in enumerate(found) if not one.marks]
    assert left == sorted(covering(SIX_AXES))
    assert {mark.name for one in found for mark in one.marks} == {"exhaustive"}
    assert found[0].id == "aaaaaa"
    some = [number for number, one in enumerate(all_pairs(SIX_AXES, step=3)) if not one.marks]
    assert some == left[::3]
    monkeypatch.setattr(pairwise, "gives_all", False)
    assert [one.values for one in all_pairs(SIX_AXES)] == [SIX_AXES[number] for number in left]


def test_of_a_list_the_first_of_every_few_is_left_and_nothing_is_lost() -> None:
    found = every_nth(2, ["a", ("b", 1), "c", "d"])
    assert [found[0], found[2]] == ["a", "c"]
    assert [one.values for one in found[1::2]] == [("b", 1), ("d",)]
    assert {mark.name for one in found[1::2] for mark in one.marks} == {"exhaustive"}


@pytest.mark.parametrize(("point", "values"), all_pairs([(1, {"n": 1}), (2, {"n": 1})], by=lambda _, values: (values,)))
def test_only_the_values_that_are_named_have_to_meet(point: int, values: dict[str, int]) -> None:
    """Without `exhaustive` one point is left: the values of the second argument are the same in both."""
    assert values == {"n": 1}
    assert covering([(values,), (values,)]) == {0}
    assert point in {1, 2}
