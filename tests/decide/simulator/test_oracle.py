"""The simulator agrees, event for event, with one written a second time on simpy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetpipe.decide.simulator.result import SimulatedActivity
from hetpipe.decide.simulator.simulate import simulate
from tests.decide.simulator.case import Case, many_shards_case, random_case, unequal_case
from tests.decide.simulator.jobs import plan_of
from tests.decide.simulator.oracle import run_oracle
from tests.decide.simulator.oracle_network import Happening

NUM_CASES, NUM_UNEQUAL, NUM_SHARDED = 200, 60, 20


def _happening(activity: SimulatedActivity) -> Happening:
    vw, stage, shard = (-1 if part is None else part for part in (activity.vw, activity.stage, activity.shard))
    return activity.kind.value, vw, stage, shard, activity.number, activity.start_ticks, activity.end_ticks


def marks(seed: int) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.exhaustive,) if seed % 2 else ()


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(random_case(seed), id=str(seed), marks=marks(seed)) for seed in range(NUM_CASES)),
        *(pytest.param(unequal_case(seed), id=f"own N, {seed}", marks=marks(seed)) for seed in range(NUM_UNEQUAL)),
        *(pytest.param(many_shards_case(seed), id=f"shards, {seed}", marks=marks(seed)) for seed in range(NUM_SHARDED)),
    ],
)
def test_same_events(case: Case) -> None:
    result = simulate(*plan_of(case), with_activities=True)
    assert replace(simulate(*plan_of(case)), num_events=0) == replace(result, num_events=0, activities=())
    judged = run_oracle(case)
    assert sorted(map(_happening, result.activities)) == judged.happened
    assert result.max_clock_distance == judged.max_distance
    assert result.waiting_seconds == tuple(ticks / 1e12 for ticks in judged.waited)
    assert result.idle_seconds == tuple(sum(idle) / len(idle) / 1e12 for idle in judged.idle)
