"""The bound of the round trip of weights: the simulation is never above it, and reaches it where it binds."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.decide.planner.costs import APPLY_BYTES_PER_SECOND, Costs, MemoryModel
from hetpipe.decide.planner.options import schedule_for
from hetpipe.decide.planner.round_trip import round_trip
from hetpipe.decide.simulator.options import SimulationOptions
from hetpipe.decide.simulator.plan import SimulatedPlan
from hetpipe.decide.simulator.simulate import simulate
from hetpipe.values.policies import WeightPolicy
from tests.decide.simulator.case import random_case
from tests.decide.simulator.jobs import plan_of
from tests.decide.simulator.regular import BATCH, Regular
from tests.pairwise import all_pairs

#: What a window of whole waves can show beyond the long run.
WINDOW = 0.01


def bound(plan: SimulatedPlan, costs: Costs, options: SimulationOptions) -> float:
    """Samples per second of all virtual workers."""
    schedule = schedule_for(options.weights, options.schedule)
    memory = MemoryModel(weights=options.weights, minibatches_per_wave=plan.minibatches_per_wave[0], schedule=schedule)
    cards = {node.name: costs.cluster.network_card(node.name) for node in costs.cluster.nodes}
    trip = round_trip(
        plan.workers,
        costs=costs,
        placed=plan.placed,
        memory=memory,
        staleness=options.staleness,
        network_cards=cards,
        pull=options.pull,
    )
    return trip.minibatches_per_tick * 1e12 * len(plan.workers) * costs.profile.batch_size


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6))
def test_no_simulation_is_faster_than_the_round_trip(seed: int) -> None:
    staleness = random.Random(seed).choice([0, 0, 1, 4])
    case = replace(
        random_case(seed),
        contention=True,
        staleness=staleness,
        apply_bytes_per_second=APPLY_BYTES_PER_SECOND,
        exchange_seconds=0.0,
    )
    plan, costs, options = plan_of(replace(case, minibatches=case.n * 24 * (staleness + 2)))

    assert simulate(plan, costs, options).samples_per_second <= bound(plan, costs, options) * (1 + WINDOW)


def job(num_workers: int, n: int, num_stages: int = 2) -> Regular:
    """Weights take longer than minibatches: 40 ms each way for 2 ms of computing."""
    return Regular(
        forward_ms=[1.0] * num_stages,
        backward_ms=[1.0] * num_stages,
        num_workers=num_workers,
        n=n,
        parameter_bytes=4_000_000,
        shards=tuple(f"n{vw}" for vw in range(num_workers)),
        bandwidth=1e8,
    )


@pytest.mark.parametrize(
    ("num_workers", "staleness", "weights"),
    all_pairs(product((1, 2, 4), (0, 1, 3), ("wave", "stash", "double_buffer", "flush"))),
)
def test_the_round_trip_is_reached_where_it_binds(weights: WeightPolicy, staleness: int, num_workers: int) -> None:
    """One stage alone exactly; of several, whose pulls and pushes queue one after the other, within a factor of 2.2."""
    regular = job(num_workers, n=4, num_stages=min(num_workers, 2))
    options = SimulationOptions(staleness=staleness, minibatches=4 * 60 * (staleness + 1), weights=weights)
    found = regular.run(options).samples_per_second
    limit = bound(regular.plan, regular.costs, options)

    assert found <= limit * (1 + WINDOW)
    assert found >= limit * (0.99 if num_workers == 1 else 1 / 2.2)


def test_with_two_buffers_whole_waves_are_in_flight() -> None:
    """((D + 1)·N + 1)/(Λ + T_sync) would be below what is simulated: the minibatches of a wave wait together."""
    regular = Regular(forward_ms=[0.5], backward_ms=[0.5], n=4, parameter_bytes=450_000, bandwidth=1e8)
    options = SimulationOptions(staleness=0, minibatches=4 * 200, weights="double_buffer")
    limit = bound(regular.plan, regular.costs, options)
    latency_seconds = 0.001 + 2 * 0.0045 + 450_000 / APPLY_BYTES_PER_SECOND

    found = regular.run(options).samples_per_second
    assert found == pytest.approx(limit, rel=WINDOW)
    assert found > 1.1 * BATCH * (4 + 1) / latency_seconds
