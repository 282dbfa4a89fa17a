"""Where layers go when a stage takes other times than planned, against every other cut; and what that promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.decide.elastic.replanning import (
    Basis,
    basis_if_known,
    basis_of,
    can_recut,
    expected,
    left_over,
    played,
    rate,
    recut,
)
from hetpipe.decide.lifecycle.inspections import Inspected
from hetpipe.decide.lifecycle.planning import PlannedRun, plan_run
from hetpipe.decide.planner.choose import choose_plan, closed_form
from hetpipe.decide.planner.partition import plan_job
from hetpipe.job.file import Job
from hetpipe.values.ids import AgentId, Term
from hetpipe.values.plan import ModelReport, VirtualWorkerPlan
from hetpipe.values.run import AgentInfo, StageEmulation
from tests.job.test_job_cluster import CLUSTER, LAYER, PROFILE
from tests.server.coordinator.builders import BASE, JOB_ID, agent_info, layer, model

PLANNER = partial(choose_plan, predict=closed_form)
AGENTS = (agent_info("n0", devices=2), agent_info("n1", devices=2))


def as_cut(*parameters: int, stages: int = 2, agents: Sequence[AgentInfo] = AGENTS) -> tuple[Basis, VirtualWorkerPlan]:
    """A virtual worker of a job that says its own plan, with layers of so many parameters."""
    report = ModelReport(tuple(layer(at, parameters=size, activation=0) for at, size in enumerate(parameters)), 40, 10)
    of = Job(**{**BASE, "workers": {"count": 1, "stages": stages}})
    run = PlannedRun(of, plan_job(of, report, agents, Term(1), JOB_ID), model=report)
    return basis_of(run, agents), run.plan.virtual_workers[0]


def cuts(worker: VirtualWorkerPlan) -> list[int]:
    """Layers of each stage."""
    return [stage.last_layer - stage.first_layer for stage in worker.stages]


def test_layers_go_from_where_it_is_slow_and_come_back_when_that_is_over() -> None:
    basis, worker = as_cut(*[100] * 8)
    assert cuts(worker) == [4, 4]
    assert can_recut(basis, worker)
    assert expected(basis, worker)[0].seconds is None
    slow = recut(basis, worker, (0.4, 4.0), (0.4, 0.4))
    assert slow is not None
    assert cuts(slow.worker) == [7, 1]
    assert slow.seconds == pytest.approx((0.7, 1.0))
    assert slow.healthy == pytest.approx((0.7, 0.1))
    assert (slow.before, slow.after) == pytest.approx((0.25, 1.0), rel=0.01)
    same = recut(basis, slow.worker, slow.seconds, slow.healthy)
    assert same is not None
    assert same.worker == slow.worker
    well = recut(basis, slow.worker, (0.7, 0.1), slow.healthy)

    assert well is not None
    assert cuts(well.worker) == [4, 4]
    assert well.healthy == pytest.approx((0.4, 0.4))


def test_devices_stay_where_they_are() -> None:
    basis, worker = as_cut(*[100] * 8, stages=4)
    found = recut(basis, worker, (2.0, 0.2, 0.2, 0.2), (0.2, 0.2, 0.2, 0.2))

    assert found is not None
    assert [(stage.agent, stage.device) for stage in found.worker.stages] == [
        (stage.agent, stage.device) for stage in worker.stages
    ]
    assert cuts(found.worker)[0] == 1


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 1000), min_size=3, max_size=7),
    st.integers(2, 3),
    st.lists(st.floats(0.5, 20.0), min_size=3, max_size=3),
)
def test_no_other_cut_is_faster(sizes: list[int], stages: int, factors: list[float]) -> None:
    basis, worker = as_cut(*sizes, stages=stages)
    weights = [1 + size for size in sizes]
    healthy = [sum(weights[stage.first_layer : stage.last_layer]) / 100.0 for stage in worker.stages]
    seconds = [factor * one for factor, one in zip(factors, healthy, strict=False)]
    found = recut(basis, worker, seconds, healthy)

    def slowest(bounds: Sequence[int]) -> float:
        return max(factors[at] * sum(weights[first:last]) / 100.0 for at, (first, last) in enumerate(pairwise(bounds)))

    every = [(0, *inner, len(sizes)) for inner in combinations(range(1, len(sizes)), stages - 1)]
    assert found is not None
    assert max(found.seconds) == pytest.approx(min(map(slowest, every)), rel=1e-3)
    assert found.after >= found.before * 0.999


def test_a_life_that_nobody_knows_the_model_of_any_more_goes_by_its_parameters() -> None:
    of = Job(**{**BASE, "workers": {"count": 1, "stages": 2}})
    run = PlannedRun(of, plan_job(of, model(8), AGENTS, Term(1), JOB_ID))
    found = recut(basis_of(run, AGENTS), run.plan.virtual_workers[0], (0.4, 4.0), (0.4, 0.4))

    assert found is not None
    assert cuts(found.worker) == [7, 1]


def test_without_a_forecast_nothing_is_known_of_other_types_of_devices() -> None:
    (first, second) = AGENTS[0].devices
    agents = (replace(AGENTS[0], devices=(first, replace(second, type="gpu"))),)
    basis, worker = as_cut(*[100] * 4, agents=agents)

    assert not can_recut(basis, worker)
    assert not can_recut(*as_cut(*[100] * 4, stages=1))


# -- with a forecast ---------------------------------------------------------------------------------------------------

LAYERS = [
    {
        **LAYER,
        "name": str(index),
        "parameter_bytes": 40,
        "parameters": [{"name": f"{index}.weight", "shape": [10], "dtype": "float32"}],
    }
    for index in range(8)
]


def forecast(**cluster: Any) -> tuple[Basis, PlannedRun]:
    """A job that two devices of two types were chosen for."""
    values = {
        **BASE,
        "workers": {"stages": "auto", "devices": [["n0/0", "n1/0"]]},
        "sync": {"minibatches_per_wave": 2},
        "cluster": {"file": CLUSTER, "profile": {**PROFILE, "layers": LAYERS}, **cluster},
    }
    agents = (agent_info("n0", devices=2), agent_info("n1", devices=1))
    run = plan_run(Job(**values), Inspected(model(8)), agents, PLANNER, term=Term(1), job_id=JOB_ID, now=0.0)
    return basis_of(run, agents), run


def played_seconds(worker: VirtualWorkerPlan, emulations: Sequence[StageEmulation]) -> list[float]:
    """What each stage takes for a minibatch."""
    found = zip(worker.stages, emulations, strict=True)
    return [
        played.forward_of(stage.first_layer, stage.last_layer) + played.backward_of(stage.first_layer, stage.last_layer)
        for stage, played in found
    ]


def test_what_was_foreseen_is_what_stages_are_compared_with() -> None:
    basis, run = forecast(emulate=True)
    of = expected(basis, run.plan.virtual_workers[0])

    assert [one.seconds for one in of] == pytest.approx(played_seconds(run.plan.virtual_workers[0], run.emulations[0]))
    assert can_recut(basis, run.plan.virtual_workers[0])


def test_a_layer_that_moves_takes_what_its_new_device_takes_for_it() -> None:
    basis, run = forecast(emulate=True, stragglers={"n0/0": 6.0})
    (worker,), (emulations,) = run.plan.virtual_workers, run.emulations
    seconds = played_seconds(worker, emulations)
    healthy = [one.seconds or 0.0 for one in expected(basis, worker)]
    found = recut(basis, worker, seconds, healthy)
    assert found is not None
    assert found.worker != worker
    assert found.after > 1.5 * found.before
    plays = played(worker, found.worker, emulations)

    assert played_seconds(found.worker, plays) == pytest.approx(found.seconds)
    assert [one.upstream for one in plays] == [one.upstream for one in emulations]


def with_memory(basis: Basis, memory_bytes: int) -> Basis:
    """The same where layers keep 10 MiB each, and devices have so much."""
    layers = tuple(one.model_copy(update={"activation_bytes": 10 << 20}) for one in basis.profile.layers)
    types = {
        name: kind.model_copy(update={"memory_bytes": memory_bytes})
        for name, kind in basis.cluster.device_types.items()
    }
    return replace(
        basis,
        profile=basis.profile.model_copy(update={"layers": layers}),
        cluster=basis.cluster.model_copy(update={"device_types": types}),
    )


def test_no_device_gets_more_than_it_has_memory_for() -> None:
    basis, run = forecast()
    (worker,) = run.plan.virtual_workers
    healthy = [one.seconds or 0.0 for one in expected(basis, worker)]
    slow = [1000.0 * healthy[0], healthy[1]]
    large = recut(with_memory(basis, 1 << 30), worker, slow, healthy)
    small = recut(with_memory(basis, 64 << 20), worker, slow, healthy)
    assert large is not None
    assert small is not None

    assert cuts(large.worker) == [1, 7]
    assert cuts(small.worker) == [2, 6], "six layers of 10 MiB are what fits on the last device"
    assert recut(with_memory(basis, 1 << 20), worker, slow, healthy) is None


def test_the_rate_is_that_of_the_slowest_stage() -> None:
    basis, _ = as_cut(*[100] * 4)

    assert rate(basis, (0.25, 0.5)) == pytest.approx(2.0)


def test_what_is_left_of_the_devices_shares_the_layers() -> None:
    basis, worker = as_cut(*[100] * 8, stages=4)
    found = left_over(basis, worker, {AgentId("n1")})
    alone = left_over(basis, worker, {AgentId("n0")})

    assert found is not None
    assert alone is not None
    assert [(stage.agent, stage.device) for stage in found.stages] == [("n0", "n0/0"), ("n0", "n0/1")]
    assert cuts(found) == cuts(alone) == [4, 4]
    assert left_over(basis, worker, {AgentId("n0"), AgentId("n1")}) is None


def test_one_device_takes_all_layers_if_it_has_the_memory() -> None:
    basis, run = forecast(emulate=True)
    (worker,), (emulations,) = run.plan.virtual_workers, run.emulations
    here, there = worker.stages
    first = replace(worker, stages=(here, replace(there, agent=AgentId("n9"))))
    names = {**basis.names, (AgentId("n9"), there.device): basis.names[there.agent, there.device]}
    basis = replace(basis, names=names)
    alone = left_over(basis, first, {AgentId("n9")})
    assert alone is not None
    assert cuts(alone) == [8]
    (plays,) = played(first, alone, emulations)

    assert (plays.upstream, plays.downstream) == (None, None)
    assert played_seconds(alone, [plays])[0] > played_seconds(first, emulations)[0]
    assert left_over(with_memory(basis, 32 << 20), first, {AgentId("n9")}) is None


def test_where_a_device_has_no_memory_to_tell_of_nothing_is_known() -> None:
    of = Job(**{**BASE, "workers": {"count": 1, "stages": 2}})
    agents = tuple(replace(one, devices=tuple(replace(d, memory_bytes=0) for d in one.devices)) for one in AGENTS)
    run = PlannedRun(of, plan_job(of, model(8), agents, Term(1), JOB_ID))

    assert basis_if_known(run, agents) is None
    assert basis_if_known(run, AGENTS) is not None


# -- cuts of a model that is cut by its own forward --------------------------------------------------------------------


def with_borders(basis: Basis, *, no_cut: Sequence[int] = (), returning: Sequence[int] | None = None) -> Basis:
    """The same with cuts forbidden after these layers, and so many bytes back at each cut, of none forward."""
    layers = tuple(
        layer.model_copy(
            update={
                "no_cut": "a write in place" if at in no_cut else "",
                "output_bytes": 0,
                "gradient_bytes": returning[at] if returning else 0,
            }
        )
        for at, layer in enumerate(basis.profile.layers)
    )
    return replace(basis, profile=basis.profile.model_copy(update={"version": 2, "layers": layers}))


@pytest.mark.parametrize("allowed", [1, 2, 5, 7])
def test_no_forbidden_cut_is_chosen(allowed: int) -> None:
    basis, run = forecast(emulate=True)
    (worker,) = run.plan.virtual_workers
    basis = with_borders(basis, no_cut=[at for at in range(7) if at != allowed - 1])
    healthy = [one.seconds or 0.0 for one in expected(basis, worker)]
    for slow in ([6.0, 1.0], [1.0, 6.0]):
        found = recut(basis, worker, [factor * one for factor, one in zip(slow, healthy, strict=True)], healthy)
        assert found is not None
        assert cuts(found.worker) == [allowed, 8 - allowed]
    nowhere = with_borders(basis, no_cut=range(7))
    assert recut(nowhere, worker, healthy, healthy) is None
    alone = left_over(nowhere, worker, {AgentId("n1")})
    assert alone is not None
    assert cuts(alone) == [8]


def test_each_direction_has_its_own_bytes() -> None:
    """Nothing moves forward, and 10 s of gradients come back everywhere but after the second layer."""
    basis, run = forecast(emulate=True)
    (worker,) = run.plan.virtual_workers
    healthy = [one.seconds or 0.0 for one in expected(basis, worker)]
    free = recut(with_borders(basis), worker, healthy, healthy)
    heavy = [0 if at == 1 else 10**10 for at in range(8)]
    found = recut(with_borders(basis, returning=heavy), worker, healthy, healthy)
    assert free is not None
    assert found is not None
    assert cuts(free.worker) != [2, 6]
    assert cuts(found.worker) == [2, 6]
