"""The upper bound of all allocations: against every mix of devices, every plan of a few, and where it is reached."""

from __future__ import annotations

import math
import random
from itertools import combinations, pairwise, product

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hetpipe.decide.planner.allocation.bound import most_workers, upper_bound
from hetpipe.decide.planner.allocation.exhaustive import exhaustive
from hetpipe.decide.planner.costs import TICKS_PER_MS, Costs
from tests.decide.planner.job_cases import chain, cluster_of, jobs_for, jobs_of, roomy
from tests.decide.planner.partition_cases import Shape, random_case
from tests.decide.planner.partition_milp import Programme

GIB = {"V": 64, "Q": 64}
FEW_LAYERS = Shape(num_layers=(2, 4), num_devices=(1, 1), num_nodes=(1, 1))
FEW_DEVICES = Shape(num_layers=(2, 6), num_devices=(2, 5), num_nodes=(1, 3), zeros=False)
quick = settings(max_examples=20, suppress_health_check=[HealthCheck.filter_too_much])
seeds = st.integers(0, 10**9)


def chains(costs: Costs, kinds: list[str], longest_ticks: int) -> set[tuple[int, ...]]:
    """The number of devices of each type in every chain without a longer stage."""
    found = set()
    for size in range(1, costs.max_stages + 1):
        for inner, order in product(combinations(costs.allowed, size - 1), product(kinds, repeat=size)):
            stages = zip(order, pairwise((0, *inner, costs.num_layers)), strict=True)
            if all(costs.compute_ticks(kind, *layers) <= longest_ticks for kind, layers in stages):
                found.add(tuple(map(order.count, kinds)))
    return found


def fractional_packing(mixes: set[tuple[int, ...]], counts: list[int]) -> float:
    """The most virtual workers, not necessarily whole ones."""
    programme = Programme()
    numbers = {programme.variable(integer=False, upper=sum(counts)): mix for mix in sorted(mixes)}
    for kind, count in enumerate(counts):
        programme.row(0.0, {number: float(mix[kind]) for number, mix in numbers.items()}, count)
    for number in numbers:
        programme.solver.changeColCost(number, -1.0)
    programme.solver.run()
    return -float(programme.solver.getInfo().objective_function_value)


@given(seeds)
def test_as_many_virtual_workers_as_every_mix_of_devices_allows(seed: int) -> None:
    source = random.Random(seed)
    case = random_case(seed, FEW_LAYERS)
    costs = Costs(case.profile, case.cluster)
    kinds = sorted(costs.compute)
    counts = [source.randint(1, 9) for _ in kinds]
    longest_ticks = max(1, source.randint(0, max(costs.compute[kind][-1] for kind in kinds)))

    found = most_workers(costs, kinds, counts, longest_ticks)

    assert found == pytest.approx(fractional_packing(chains(costs, kinds, longest_ticks), counts), rel=1e-5)


@quick
@given(seeds, st.sampled_from([1.0, 50.0]))
def test_no_plan_is_faster(seed: int, divisor: float) -> None:
    jobs = jobs_of(roomy(random_case(seed, FEW_DEVICES), network_divisor=divisor), any_n=True)
    best = exhaustive(jobs, jobs.devices)
    assume(best is not None)
    assert best is not None

    assert best.rate.samples_per_second <= upper_bound(jobs) * (1 + 1e-9)


def test_layers_are_whole() -> None:
    """V takes two layers while Q takes one: 7.5 ms, though 1.4 devices like V would need 6.4 ms."""
    speeds = {"V": 1.0, "Q": 0.4}
    jobs = jobs_for(chain([3.0] * 3, speeds, batch_size=1), cluster_of(["V", "Q"], gib=GIB))

    assert upper_bound(jobs) == pytest.approx(1000 / 7.5, rel=1e-3)


def test_virtual_workers_are_whole() -> None:
    """The second Q is a third of another virtual worker of 7.5 ms, and V and two Q make no two faster than 15 ms."""
    speeds = {"V": 1.0, "Q": 0.4}
    jobs = jobs_for(chain([3.0] * 3, speeds, batch_size=1), cluster_of(["VQ", "Q"], gib=GIB))

    assert upper_bound(jobs) == pytest.approx(1000 / 7.5, rel=1e-3)


def test_slow_devices_stay_idle() -> None:
    """A tenth as fast, they would hold the others back: the best two of four."""
    speeds = {"V": 1.0, "Q": 0.1}
    jobs = jobs_for(chain([8.0], speeds, batch_size=1), cluster_of(["VQ", "VQ"], gib=GIB))

    assert upper_bound(jobs) == pytest.approx(2 * 1000 / 8, rel=1e-3)


def test_layers_without_time_are_no_limit() -> None:
    jobs = jobs_for(chain([0.0, 0.0], {"V": 1.0}), cluster_of(["V"], gib=GIB))

    assert upper_bound(jobs) == math.inf
    assert most_workers(jobs.costs, ["V"], [3], TICKS_PER_MS) == 3
