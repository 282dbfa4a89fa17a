"""How many minibatches per wave: bounds, and that the planner's choice is the best one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hetpipe.decide.planner.jobs import is_better
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.decide.planner.waves import (
    MOST_MINIBATCHES,
    check_given,
    choices,
    in_proportion,
    max_minibatches_per_wave,
)
from hetpipe.errors import PlanError
from hetpipe.values.ids import DeviceId
from tests.decide.planner.job_cases import MIB, chain, cluster_of, jobs_for, jobs_of
from tests.decide.planner.job_oracle import FULL, pipelines
from tests.decide.planner.partition_cases import Shape, random_case

SHAPE = Shape(num_layers=(2, 5), num_devices=(1, 3), num_nodes=(1, 2), zeros=False)


@given(st.integers(0, 1500))
def test_max_m_is_looked_for_up_to_1024(fitting: int) -> None:
    assert max_minibatches_per_wave(lambda n: n <= fitting) == min(fitting, MOST_MINIBATCHES) <= 1024


@pytest.mark.parametrize("weights", FULL)
def test_full_waves(weights: str) -> None:
    assert choices([4, 8], [1, 2], weights) == range(2, 5)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="needs at least 2 minibatches per wave, not 1"):
        check_given(1, [1, 2], weights)  # type: ignore[arg-type]


def test_n_is_a_multiple_of_what_makes_an_update() -> None:
    assert choices([9, 8], [2, 2], "wave", 3) == range(3, 9, 3)
    assert list(choices([3], [1], "wave", 4)) == []
    check_given(6, [2], "wave", 3)
    with pytest.raises(
        PlanError, match=r"an update takes 3 minibatches, so a wave cannot have 4; take a multiple of 3"
    ):
        check_given(4, [2], "wave", 3)


@given(
    st.integers(1, 9),
    st.integers(1, 3),
    st.lists(st.tuples(st.floats(0.1, 10), st.integers(1, 6), st.integers(6, 200)), min_size=1, max_size=5),
)
def test_waves_in_proportion_are_at_most_half_an_update_off(n: int, accumulate: int, workers: list[Any]) -> None:
    rates, least, most = (list(column) for column in zip(*workers, strict=True))
    found = in_proportion(n * accumulate, rates, least, most, accumulate)
    for own, rate, low, high in zip(found, rates, least, most, strict=True):
        ideal = n * accumulate * rate / min(rates)
        assert own % accumulate == 0
        assert low <= own <= high
        assert (
            abs(own - ideal) <= accumulate / 2 + 1e-9
            or (ideal < own < low + accumulate)
            or high - accumulate < own < ideal
        )


def test_an_update_of_more_minibatches_than_are_searched_has_its_n() -> None:
    options = PlanOptions(accumulate=6)
    jobs = jobs_for(chain([1.0], {"V": 1.0}), cluster_of(["V"]), options)

    assert jobs.best([[DeviceId("n0/0")]]).minibatches_per_wave == 6


@settings(max_examples=40)
@given(st.integers(0, 10**9))
def test_max_m_is_the_last_n_with_a_partition(seed: int) -> None:
    case = random_case(seed, SHAPE)
    devices = list(case.cluster.devices)

    def fits(n: int) -> bool:
        return bool(pipelines(replace(case, minibatches_per_wave=n), devices))

    found = jobs_of(case).max_minibatches_per_wave(devices)
    assert found == 0 or fits(found)
    assert found == MOST_MINIBATCHES or not fits(found + 1)


@settings(max_examples=40)
@given(st.integers(0, 10**9))
@example(502270572)  # with N = K a slower cut spares the network; with a larger N the fastest one is possible
def test_no_other_n_is_better(seed: int) -> None:
    case = random_case(seed, SHAPE)
    jobs = jobs_of(case, any_n=True)
    groups = [list(case.cluster.devices)]
    plans = [plan for n in jobs.choices(groups) if (plan := jobs.best_with(n, groups)) is not None]
    assume(plans)

    best = jobs.best(groups)

    assert not any(is_better(plan, best) for plan in plans)
    assert best.minibatches_per_wave == min(
        plan.minibatches_per_wave for plan in plans if not is_better(best, plan) or plan.rate == best.rate
    )


def test_a_given_n_may_exceed_4_k() -> None:
    jobs = jobs_for(chain([1.0], {"V": 1.0}), cluster_of(["V"], gib={"V": 1}), PlanOptions(minibatches_per_wave=50))

    assert jobs.best([[DeviceId("n0/0")]]).minibatches_per_wave == 50


def test_a_given_n_needs_memory() -> None:
    profile = chain([1.0], {"V": 1.0}, parameters=100 * MIB)
    jobs = jobs_for(profile, cluster_of(["V"], gib={"V": 1}), PlanOptions(minibatches_per_wave=50))

    with pytest.raises(PlanError, match=r"virtual worker 0 .* lacks [\d.]+ [MG]iB on n0/0"):
        jobs.best([[DeviceId("n0/0")]])
