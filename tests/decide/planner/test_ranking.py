"""What `auto` promises, by simulation: nothing of the same sync is faster, and another device does no harm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from hetpipe.decide.planner.choose import choose_plan
from hetpipe.decide.planner.costs import Costs
from hetpipe.decide.planner.jobs import JobPlan, Jobs
from hetpipe.decide.planner.options import AllocationName, PlanOptions
from hetpipe.decide.planner.partitioner import Partitioner
from hetpipe.decide.planner.ranking import ALIKE, PLACEMENTS
from hetpipe.decide.planner.round_trip import Exchanges, Places
from hetpipe.decide.simulator.prediction import predicted
from hetpipe.values.ids import DeviceId
from hetpipe.values.plan_document import PlanDocument, Predicted
from hetpipe.values.policies import PlacementName, WeightPolicy
from tests.decide.planner import models
from tests.decide.planner.job_cases import chain, cluster_of, jobs_for

#: Under these the time of the whole pipeline counts, too.
FEW_IN_FLIGHT: tuple[WeightPolicy, ...] = ("wave", "flush")

PROFILES = {
    "vgg": models.vgg19(),
    "resnet": models.resnet152(),
    "gpt2": models.gpt2(),
    "random": models.random_model(),
}

#: Every other one has all but the last node of the one before it.
CLUSTERS: tuple[tuple[str, ...], ...] = (
    models.PAPER,
    ("VVVV", "RRRR", "QQQQ"),
    ("VVVV", "RRRR"),
    ("VVVV",),
    ("VV", "VV", "QQ"),
    ("VV", "VV"),
    ("VRGQ", "VRGQ"),
    ("VRGQ",),
    ("V", "R", "G", "Q"),
    ("RRRR", "RRRR", "RRRR"),
)


@cache
def plan(
    model: str,
    nodes: tuple[str, ...],
    staleness: int = 0,
    *,
    allocation: AllocationName = "auto",
    placement: PlacementName | None = None,
    n: int | None = None,
) -> PlanDocument:
    """The plan of a cluster."""
    options = PlanOptions(
        allocation=allocation, placement=placement, staleness=staleness, minibatches_per_wave=n, optimizer_slots=1
    )
    return choose_plan(PROFILES[model], models.cluster(*nodes), options, predict=predicted)


def check(model: str, nodes: tuple[str, ...], staleness: int) -> None:
    found = plan(model, nodes, staleness)
    rate = found.predicted.samples_per_second
    for other in found.alternatives:
        if other.name in ("NP", "ED", "HD"):
            assert rate * ALIKE >= (other.samples_per_second or 0.0), other
    for fewer in models.subsets(nodes) if len(nodes) > 1 else ():
        assert rate >= 0.98 * plan(model, fewer, staleness).predicted.samples_per_second, fewer


@pytest.mark.parametrize("model", ["vgg", "gpt2"])
def test_nothing_is_faster_and_another_node_does_no_harm(model: str) -> None:
    check(model, ("VV", "QQ"), staleness=0)


def test_larger_waves_are_found_where_the_round_trip_binds() -> None:
    """With four equal devices N = 1, 2, 4 differ by the pushes that each saves; the closed form has to see that."""
    rates = [plan("vgg", ("VVVV",), n=n).predicted.samples_per_second for n in (1, 2, 4)]
    free = plan("vgg", ("VVVV",))

    assert rates[0] * 1.5 < rates[1] < rates[2]
    assert free.predicted.samples_per_second * ALIKE >= rates[2]
    assert free.waves[0] > 1


def test_of_bounds_that_are_as_fast_the_smallest_is_taken() -> None:
    """`max_staleness` of 8 is worth a smaller one as soon as that does as well; with a given N it is not 0."""
    profile, cluster = PROFILES["vgg"], models.cluster("VV", "VV")
    options = PlanOptions(allocation="NP", minibatches_per_wave=2, max_staleness=8, placement="round_robin")
    found = choose_plan(profile, cluster, options, predict=predicted)
    by_bound = {
        bound: choose_plan(
            profile, cluster, replace(options, staleness=bound, max_staleness=None), predict=predicted
        ).predicted.samples_per_second
        for bound in (0, 1, 2, 4, 8)
    }

    assert found.staleness is not None
    assert by_bound[found.staleness] == found.predicted.samples_per_second
    assert by_bound[found.staleness] * ALIKE >= max(by_bound.values())
    smaller = [rate for bound, rate in by_bound.items() if bound < found.staleness]
    assert found.staleness > 0
    assert all(rate * ALIKE < max(by_bound.values()) for rate in smaller)


def test_devices_that_are_named_get_the_best_cut() -> None:
    """With fewer minibatches than stages the min-max cut is not the fastest."""
    profile = chain([9.0, 1.0, 1.0, 1.0], {"V": 1.0, "Q": 1.5}, output=0)
    workers = (tuple(map(DeviceId, ("n0/0", "n0/1"))),)
    for weights in FEW_IN_FLIGHT:
        options = PlanOptions(
            allocation="explicit", workers=workers, minibatches_per_wave=1, weights=weights, staleness=None
        )
        jobs = jobs_for(profile, cluster_of(["VQ"], gib={"V": 12, "Q": 12}), options)
        least = jobs.pipelines.min_max_rate(workers[0], 1)
        found = choose_plan(profile, jobs.costs.cluster, options, predict=predicted)
        assert found.virtual_workers[0].samples_per_second > 1.05 * 32e12 * least


def test_a_placement_that_is_asked_for_is_kept() -> None:
    for placement in PLACEMENTS:
        found = plan("gpt2", ("VV", "VV"), placement=placement)
        assert found.placement_policy == placement


def test_nothing_is_simulated_twice() -> None:
    """Several allocations think of the same groups; here ED is what `auto` finds, too."""
    asked: list[object] = []

    def predict(plan: JobPlan, options: PlanOptions, *, waves: int | None = None) -> Predicted:
        asked.append((plan.workers, plan.minibatches_per_wave, plan.placed.pieces, options.staleness, waves))
        return predicted(plan, options, waves=waves)

    choose_plan(PROFILES["gpt2"], models.cluster("VV", "QQ"), PlanOptions(), predict=predict)

    assert len(asked) == len(set(asked)) > 1


def test_who_sends_what_is_asked_once_for_many_n(monkeypatch: pytest.MonkeyPatch) -> None:
    """For N of the same cuts, and for stages of one node with the same layers: large clusters have hundreds of each."""
    made: list[object] = []
    transfers: list[object] = []

    class Counted(Exchanges):
        def __init__(self, places: Places, **options: Any) -> None:
            made.append(places)
            super().__init__(places, **options)

        def _transfer(self, *arguments: Any) -> Any:
            transfers.append(arguments)
            return super()._transfer(*arguments)

    monkeypatch.setattr("hetpipe.decide.planner.jobs.Exchanges", Counted)
    jobs = Jobs(costs := Costs(PROFILES["gpt2"], models.cluster("VVVV", "QQQQ")), PlanOptions(), Partitioner(costs))
    groups = [tuple(jobs.devices)[at::4] for at in range(4)]

    ladder = list(jobs.ladder(groups))

    assert len(ladder) > len({plan.workers[0].stages[0].last for plan in ladder})
    assert len(made) == len(set(made)) < len(ladder)
    assert len(transfers) <= len(made) * 2 * 2, "stages at two places, two shards"


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("nodes", CLUSTERS, ids="+".join)
@pytest.mark.parametrize("model", PROFILES)
def test_the_sweep(model: str, nodes: Sequence[str], staleness: int) -> None:
    """Ten clusters × four models × three bounds: every allocation under every placement, and every node left out."""
    chosen = tuple(nodes)
    check(model, chosen, staleness)
    rate = plan(model, chosen, staleness).predicted.samples_per_second
    for placement in PLACEMENTS:
        found = plan(model, chosen, staleness, allocation="ED", placement=placement) if len(chosen) > 1 else None
        assert found is None or rate * ALIKE >= found.predicted.samples_per_second, placement
