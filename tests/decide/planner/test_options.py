"""What a user may ask of the planner, as values."""

from __future__ import annotations

import pytest

from hetpipe.decide.planner.costs import MemoryModel
from hetpipe.decide.planner.options import SCHEDULE_CHOICES, PlanOptions, schedule_for
from hetpipe.errors import PlanError
from hetpipe.values.policies import POLICIES, WEIGHT_POLICIES, WeightPolicy


@pytest.mark.parametrize("weights", WEIGHT_POLICIES)
def test_a_policy_takes_its_own_schedules(weights: WeightPolicy) -> None:
    assert PlanOptions(weights=weights).memory(4).schedule == POLICIES[weights].schedules[0]
    for choice in SCHEDULE_CHOICES:
        if choice == "auto" or choice in POLICIES[weights].schedules:
            PlanOptions(weights=weights, schedule=choice)
            continue
        with pytest.raises(PlanError, match=f"the schedule is {choice}, but .*; use auto"):
            PlanOptions(weights=weights, schedule=choice)


def test_a_schedule_that_there_is_not() -> None:
    with pytest.raises(PlanError, match="there is no schedule '1f2b'; did you mean `1f1b`"):
        schedule_for("wave", "1f2b")


def test_the_memory_model_of_the_options() -> None:
    options = PlanOptions(
        weights="flush",
        schedule="gpipe",
        accumulate=2,
        waits_for_norm=True,
        with_shards=False,
        optimizer_slots=3,
        reserve_bytes=5,
    )
    assert options.memory(4) == MemoryModel(
        weights="flush",
        minibatches_per_wave=4,
        optimizer_slots=3,
        reserve_bytes=5,
        with_shards=False,
        schedule="gpipe",
        accumulate=2,
        waits_for_norm=True,
    )
