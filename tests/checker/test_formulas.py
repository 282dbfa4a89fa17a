"""The checker's formulas against the tables of `wsp.md` §2 and the paper's definition of s_global."""

from __future__ import annotations

import pytest

from hetpipe.checker.formulas import (
    backward_through,
    ends_update,
    forward_through,
    is_switch_point,
    most_in_flight,
    required_clock,
)
from hetpipe.checker.rules import OrderRule, RunRule, StagePosition, WeightRule
from hetpipe.decide.schedule.in_flight import in_flight
from hetpipe.decide.schedule.versions import VersionTable
from hetpipe.values.policies import POLICIES, WEIGHT_POLICIES, WeightPolicy
from tests.support.gates import gate_of


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
    rule = RunRule(num, staleness)
    assert {required_clock(rule, p, 0) for p in range(first, last + 1)} == {clock}


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("num", [1, 2, 3, 5])
def test_required_clock_follows_from_s_global(staleness: int, num: int) -> None:
    s_local = num - 1
    s_global = (staleness + 1) * (s_local + 1) + s_local - 1
    for p in range(1, 60):
        clock = required_clock(RunRule(num, staleness), p, 0)
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
    rule = RunRule(2, 1, weights)
    assert [required_clock(rule, p, 0) for p in range(1, 7)] == clocks
    assert [forward_through(rule, p, 0, StagePosition()) for p in range(1, 7)] == through


@pytest.mark.parametrize(
    ("weights", "forwards", "backwards"),
    [
        (WeightRule.STASH, [[0, 0, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6]], None),
        (WeightRule.VERTICAL, [[0, 0, 0, 1, 2, 3, 4]] * 3, None),
        (WeightRule.DOUBLE_BUFFER, [[0, 0, 0, 0, 0, 0, 3]] * 3, None),
        (
            WeightRule.PREDICT,
            [[0, 0, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6]],
            [[0, 1, 2, 3, 4, 5, 6]] * 3,
        ),
    ],
)
def test_versions_of_three_stages(weights: WeightRule, forwards: list[list[int]], backwards: list[list[int]]) -> None:
    """The table of `policies.md`, by hand: K = N = 3, p = 1 … 7."""
    rule = RunRule(3, None, weights)
    for stage, forward in enumerate(forwards):
        place = StagePosition(stage, 3)
        assert [forward_through(rule, p, 0, place) for p in range(1, 8)] == forward
        backward = forward if backwards is None else backwards[stage]
        assert [backward_through(rule, p, 0, place) for p in range(1, 8)] == backward


def test_an_update_of_several_minibatches_counts_when_it_is_whole() -> None:
    rule = RunRule(4, None, WeightRule.PREDICT, accumulate=2)
    assert [forward_through(rule, p, 0, StagePosition(0, 3)) for p in range(1, 8)] == [0, 0, 0, 0, 2, 2, 4]
    assert [backward_through(rule, p, 0, StagePosition(0, 3)) for p in range(1, 8)] == [0, 0, 2, 2, 4, 4, 6]
    assert [forward_through(rule, p, 2, StagePosition(0, 3)) for p in range(9, 14)] == [8, 8, 8, 8, 10]


@pytest.mark.parametrize("weights", WEIGHT_POLICIES)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_two_writings_agree(weights: WeightPolicy, num_stages: int, accumulate: int) -> None:
    num = 4
    rule = RunRule(num, 1, WeightRule(weights), accumulate=accumulate)
    for stage in range(num_stages):
        place, table = StagePosition(stage, num_stages), VersionTable(weights, stage, num_stages, num, accumulate)
        for floor in (0, 2):
            for p in range(floor * num + 1, floor * num + 20):
                assert forward_through(rule, p, floor, place) == table.forward_through(p, start=floor)
                assert backward_through(rule, p, floor, place) == table.backward_through(p, start=floor)
                assert ends_update(rule, p) == table.is_update(p)
                required = gate_of(num, 1, start=floor, weights=weights).required(p)
                assert required_clock(rule, p, floor) == required
                switch = gate_of(num, start=floor, weights=weights).is_switch_point(p)
                assert is_switch_point(rule, p, floor) == switch


@pytest.mark.parametrize("weights", [weights for weights in WEIGHT_POLICIES if weights != "wave"])
def test_the_two_bounds_on_what_is_in_flight_agree(weights: WeightPolicy) -> None:
    for schedule in POLICIES[weights].schedules:
        for stage in range(4):
            rule = RunRule(6, None, WeightRule(weights), order=OrderRule(schedule))
            limit = in_flight(stage=stage, num_stages=4, minibatches_per_wave=6, weights=weights, schedule=schedule)
            assert most_in_flight(rule, StagePosition(stage, 4)) == limit


def test_a_barrier_is_a_floor() -> None:
    rule = RunRule(2, 1)
    assert [required_clock(rule, p, 3) for p in (7, 8, 9)] == [3, 3, 3]
    assert [forward_through(rule, p, 3, StagePosition()) for p in (7, 8, 9)] == [6, 6, 7]
    assert [p for p in range(7, 13) if is_switch_point(rule, p, 3)] == [7, 8, 10, 12]


def test_unbounded_staleness_requires_only_the_barrier() -> None:
    assert required_clock(RunRule(2, None), 1000, 3) == 3
