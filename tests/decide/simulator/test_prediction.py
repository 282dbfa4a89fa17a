"""What a planned job will do: the simulation of its plan file says the same."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import ClassVar

import pytest

from hetpipe.decide.planner import simulation_length
from hetpipe.decide.planner.allocation.equal_distribution import equal_distribution
from hetpipe.decide.planner.choose import choose_plan
from hetpipe.decide.planner.costs import Costs
from hetpipe.decide.planner.jobs import Jobs
from hetpipe.decide.planner.options import PlanOptions, ScheduleChoice
from hetpipe.decide.planner.partitioner import Partitioner
from hetpipe.decide.planner.simulation_length import steady_waves
from hetpipe.decide.simulator import prediction
from hetpipe.decide.simulator.documents import schedule_in, simulated_plan
from hetpipe.decide.simulator.options import SimulationOptions
from hetpipe.decide.simulator.plan import SimulatedPlan
from hetpipe.decide.simulator.prediction import predicted, run_forecast
from hetpipe.decide.simulator.result import SimulationResult
from hetpipe.decide.simulator.simulate import simulate
from hetpipe.decide.sync.segment import SegmentLength
from hetpipe.values.cluster import Links, LinkSpec
from hetpipe.values.policies import WeightPolicy
from tests.cli import plans
from tests.pairwise import every_nth


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("staleness", "weights", "schedule"),
    [
        (3, "wave", "fifo"),
        pytest.param(0, "flush", "gpipe", marks=pytest.mark.exhaustive),
        pytest.param(0, "wave", "auto", marks=pytest.mark.exhaustive),
        pytest.param(None, "wave", "1f1b", marks=pytest.mark.exhaustive),
        pytest.param(1, "stash", "auto", marks=pytest.mark.exhaustive),
    ],
)
def test_the_plan_file_simulates_to_what_it_says(
    staleness: int | None, weights: WeightPolicy, schedule: ScheduleChoice
) -> None:
    profile, cluster = plans.profile(6), plans.cluster(2)
    options = PlanOptions(
        allocation="ED", staleness=staleness, weights=weights, schedule=schedule, minibatches_per_wave=4
    )
    document = choose_plan(profile, cluster, options, predict=predicted)
    n = document.waves[0]
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
    monkeypatch.setattr(simulation_length, "MOST_COMPUTATIONS", 1)
    assert predicted(plan, options).samples_per_second == pytest.approx(whole, rel=0.02)
    assert asked == [steady_waves(0), 12]


class TestRunForecast:
    """A run is foreseen for its own length."""

    N: ClassVar = 3

    @staticmethod
    @cache
    def parts(staleness: int | None = 4) -> tuple[SimulatedPlan, Costs, SimulationOptions]:
        profile, cluster = plans.profile(6), plans.cluster(2)
        options = PlanOptions(allocation="ED", staleness=staleness, minibatches_per_wave=TestRunForecast.N)
        document = choose_plan(profile, cluster, options, predict=predicted)
        costs = Costs(profile, cluster)
        options_of_runs = SimulationOptions(staleness=staleness, minibatches=1, staggered=True)
        return simulated_plan(document, costs), costs, options_of_runs

    @pytest.mark.parametrize("minibatches", [1, 2, 7, 30])
    def test_a_short_run_is_simulated_to_its_end(self, minibatches: int) -> None:
        plan, costs, options = self.parts()
        batch = costs.profile.batch_size * len(plan.workers)

        found = run_forecast(plan, costs, options, [SegmentLength(minibatches, minibatches * batch)])

        whole = simulate(plan, costs, replace(options, minibatches=minibatches))
        assert found.seconds == whole.seconds
        assert found.samples_per_second == pytest.approx(minibatches * batch / whole.seconds)

    def test_every_segment_fills_and_drains(self) -> None:
        plan, costs, options = self.parts()
        batch = costs.profile.batch_size * len(plan.workers)
        segments = [SegmentLength(6, 6 * batch), SegmentLength(6, 6 * batch), SegmentLength(2, 2 * batch - 1)]

        found = run_forecast(plan, costs, options, segments)

        six, two = (simulate(plan, costs, replace(options, minibatches=m)).seconds for m in (6, 2))
        assert found.seconds == pytest.approx(2 * six + two)
        assert found.samples_per_second == pytest.approx((14 * batch - 1) / (2 * six + two))

    @pytest.mark.parametrize("staleness", every_nth(3, [4, 0, None]))
    def test_a_long_run_costs_no_more_and_is_as_if_simulated_whole(self, staleness: int | None) -> None:
        plan, costs, options = self.parts(staleness)
        minibatches = self.N * steady_waves(staleness) * 3
        length = SegmentLength(minibatches, minibatches * costs.profile.batch_size * len(plan.workers))

        found = run_forecast(plan, costs, options, [length])

        whole = simulate(plan, costs, replace(options, minibatches=minibatches))
        assert found.seconds == pytest.approx(whole.seconds, rel=0.01)

    def test_a_run_of_many_segments_is_simulated_within_a_budget(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plan, costs, options = self.parts()
        batch = costs.profile.batch_size * len(plan.workers)
        segments = [SegmentLength(m, m * batch) for m in range(20, 90, 2)]
        exact = sum(simulate(plan, costs, replace(options, minibatches=m)).seconds for m in range(20, 90, 2))
        simulated: list[int] = []

        def counted(plan: SimulatedPlan, costs: Costs, how: SimulationOptions) -> SimulationResult:
            simulated.append(how.minibatches)
            return simulate(plan, costs, how)

        monkeypatch.setattr(prediction, "simulate", counted)
        monkeypatch.setattr(simulation_length, "MOST_COMPUTATIONS", 3000)
        found = run_forecast(plan, costs, options, segments)

        assert len(simulated) < 10
        assert found.seconds == pytest.approx(exact, rel=0.1)

    def test_a_very_long_run_is_as_fast_as_full_pipelines_also_where_links_bind(self) -> None:
        profile, cluster = plans.profile(6), plans.cluster(2)
        slow = Links(intra_node=cluster.links.intra_node, inter_node=LinkSpec(bandwidth_bytes_per_second=1e8))
        cluster = cluster.model_copy(update={"links": slow})
        document = choose_plan(
            profile, cluster, PlanOptions(allocation="ED", staleness=4, minibatches_per_wave=self.N), predict=predicted
        )
        costs = Costs(profile, cluster)
        minibatches = 9000
        length = SegmentLength(minibatches, minibatches * profile.batch_size * len(document.virtual_workers))

        found = run_forecast(
            simulated_plan(document, costs), costs, SimulationOptions(staleness=4, minibatches=1), [length]
        )

        assert found.samples_per_second == pytest.approx(document.predicted.samples_per_second, rel=0.01)
