"""Where nothing travels and all stages are equal, the simulator plays the same timeline as `schedule.timeline`."""

from __future__ import annotations

import pytest

from hetpipe.decide.planner.costs import TICKS_PER_MS
from hetpipe.decide.schedule.policy import Kind
from hetpipe.decide.schedule.timeline import Pipeline, play
from hetpipe.decide.simulator.options import SimulationOptions
from hetpipe.decide.simulator.result import ActivityKind
from hetpipe.values.policies import POLICIES, WEIGHT_POLICIES, Schedule, WeightPolicy
from tests.decide.simulator.regular import Regular

KINDS = {ActivityKind.FORWARD: Kind.FORWARD, ActivityKind.BACKWARD: Kind.BACKWARD}


@pytest.mark.parametrize(
    ("weights", "schedule"),
    [(weights, schedule) for weights in WEIGHT_POLICIES for schedule in POLICIES[weights].schedules],
)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("backward", [1, 2])
def test_the_same_timeline(weights: WeightPolicy, schedule: Schedule, num_stages: int, backward: int) -> None:
    least = POLICIES[weights].least_minibatches_per_wave(num_stages)
    for n in {least, 4, 7}:
        pipeline = Pipeline(
            num_stages=num_stages,
            num_minibatches=3 * n + 1,
            weights=weights,
            schedule=schedule,
            minibatches_per_wave=n,
            backward_units=backward,
        )
        job = Regular(forward_ms=[1] * num_stages, backward_ms=[backward] * num_stages, n=n)
        options = SimulationOptions(
            staleness=None, minibatches=pipeline.num_minibatches, weights=weights, schedule=schedule
        )
        simulated = {
            (one.stage, KINDS[one.kind], one.number, one.start_ticks, one.end_ticks)
            for one in job.run(options).activities
            if one.kind in KINDS
        }
        assert simulated == {
            (stage.stage, box.action.kind, box.action.p, box.start * TICKS_PER_MS, box.end * TICKS_PER_MS)
            for stage in play(pipeline).stages
            for box in stage.boxes
        }
