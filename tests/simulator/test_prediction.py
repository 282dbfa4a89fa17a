"""What a planned job will do: the simulation of its plan file says the same."""

from __future__ import annotations

import pytest

from hetpipe.planner.allocation.equal_distribution import equal_distribution
from hetpipe.planner.choose import choose_plan
from hetpipe.planner.costs import Costs
from hetpipe.planner.jobs import Jobs
from hetpipe.planner.options import PlanOptions
from hetpipe.planner.partitioner import Partitioner
from hetpipe.simulator import prediction
from hetpipe.simulator.documents import simulated_plan, weight_policy
from hetpipe.simulator.options import SimulationOptions
from hetpipe.simulator.prediction import predicted, steady_waves
from hetpipe.simulator.simulate import simulate
from tests.cli import plans


@pytest.mark.matrix
@pytest.mark.parametrize(("staleness", "weights"), [(0, "wave"), (3, "wave"), (None, "wave"), (1, "stash")])
def test_the_plan_file_simulates_to_what_it_says(staleness: int | None, weights: str) -> None:
    profile, cluster = plans.profile(6), plans.cluster(2)
    options = PlanOptions(allocation="ED", staleness=staleness, weights=weight_policy(weights))
    document = choose_plan(profile, cluster, options, predict=predicted)
    n = document.minibatches_per_wave
    again = simulate(
        simulated_plan(document, Costs(profile, cluster)),
        Costs(profile, cluster),
        SimulationOptions(
            staleness=staleness,
            minibatches=n * steady_waves(staleness),
            weights=weight_policy(weights),
            staggered=True,
        ),
    )
    assert document.predicted.samples_per_second == again.samples_per_second
    assert document.predicted.cross_node_bytes_per_minibatch == again.cross_node_bytes_per_minibatch


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
