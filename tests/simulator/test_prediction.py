"""What a planned job will do: the simulation of its plan file says the same."""

from __future__ import annotations

import pytest

from hetpipe.planner.allocation.equal_distribution import equal_distribution
from hetpipe.planner.choose import choose_plan
from hetpipe.planner.costs import Costs
from hetpipe.planner.jobs import Jobs
from hetpipe.planner.options import PlanOptions, ScheduleChoice
from hetpipe.planner.partitioner import Partitioner
from hetpipe.simulator import prediction
from hetpipe.simulator.documents import schedule_in, simulated_plan
from hetpipe.simulator.options import SimulationOptions
from hetpipe.simulator.prediction import predicted, steady_waves
from hetpipe.simulator.simulate import simulate
from hetpipe.spec.policies import WeightPolicy
from tests.cli import plans


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("staleness", "weights", "schedule"),
    [(0, "wave", "auto"), (3, "wave", "fifo"), (None, "wave", "1f1b"), (1, "stash", "auto"), (0, "flush", "gpipe")],
)
def test_the_plan_file_simulates_to_what_it_says(
    staleness: int | None, weights: WeightPolicy, schedule: ScheduleChoice
) -> None:
    profile, cluster = plans.profile(6), plans.cluster(2)
    options = PlanOptions(allocation="ED", staleness=staleness, weights=weights, schedule=schedule)
    document = choose_plan(profile, cluster, options, predict=predicted)
    n = document.minibatches_per_wave
    again = simulate(
        simulated_plan(document, Costs(profile, cluster)),
        Costs(profile, cluster),
        SimulationOptions(
            staleness=staleness,
            minibatches=n * steady_waves(staleness),
            weights=weights,
            schedule=schedule_in(document),
            staggered=True,
        ),
    )
    assert document.predicted.samples_per_second == again.samples_per_second
    assert document.predicted.cross_node_bytes_per_minibatch == again.cross_node_bytes_per_minibatch


def test_a_plan_without_shards_is_foreseen() -> None:
    profile, cluster = plans.profile(6), plans.cluster(1)
    options = PlanOptions(with_shards=False, minibatches_per_wave=4)
    document = choose_plan(profile, cluster, options, predict=predicted)
    assert (document.has_shards, document.shards, document.placement) == (False, (), {})
    assert len(document.virtual_workers) == 1
    # Stages compute while others send, so the closed form, which counts transfers, is at most exceeded.
    assert document.predicted.samples_per_second >= document.virtual_workers[0].samples_per_second * (1 - 1e-3)


def test_a_large_plan_is_simulated_for_less_long(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, options = Costs(plans.profile(6), plans.cluster(1)), PlanOptions(allocation="ED")
    plan = equal_distribution(Jobs(costs, options, Partitioner(costs)))
    asked: list[int] = []

    def observed(simulated: object, _: Costs, how: SimulationOptions) -> object:
        asked.append(how.minibatches // plan.minibatches_per_wave)
        return simulate(simulated, costs, how)  # type: ignore[arg-type]

    monkeypatch.setattr(prediction, "simulate", observed)
    whole = predicted(plan, options).samples_per_second
    monkeypatch.setattr(prediction, "_MOST_COMPUTATIONS", 1)
    assert predicted(plan, options).samples_per_second == pytest.approx(whole, rel=0.02)
    assert asked == [steady_waves(0), 12]
