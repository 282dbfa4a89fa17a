"""Cuts are exact, errors show the numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpipe.decide.planner.options import PlanOptions
from hetpipe.decide.planner.partition import equal_cost_cut, layer_cost, plan_job
from hetpipe.decide.planner.placement import PLACEMENTS
from hetpipe.decide.planner.shard_bytes import place_bytes
from hetpipe.errors import PlanError
from hetpipe.values.ids import JobId, LayerIndex, Term
from hetpipe.values.plan import DTYPE_BYTES, LayerReport, ModelReport, Plan, TensorSpec
from hetpipe.values.policies import DEFAULT_PLACEMENT, PlacementName
from hetpipe.values.profile import LayerProfile, ParameterProfile, Profile
from hetpipe.values.wire import from_json, to_json
from tests.server.coordinator.builders import agent_info, job, layer, model

JOB = JobId("digits-1")


def stage_costs(costs: list[int], counts: tuple[int, ...]) -> list[int]:
    ends = list(accumulate(counts))
    return [sum(costs[end - count : end]) for end, count in zip(ends, counts, strict=True)]


def all_cuts(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    borders = ((0, *inner, num_layers) for inner in combinations(range(1, num_layers), num_stages - 1))
    return [tuple(stop - start for start, stop in pairwise(cut)) for cut in borders]


@given(st.data())
def test_no_cut_is_better(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    num_stages = data.draw(st.integers(1, len(costs)))

    def badness(counts: tuple[int, ...]) -> tuple[int, int]:
        stages = stage_costs(costs, counts)
        return max(stages), sum(stage**2 for stage in stages)

    cut = equal_cost_cut(costs, num_stages)

    assert badness(cut) == min(badness(other) for other in all_cuts(len(costs), num_stages))
    assert all(count >= 1 for count in cut)
    assert len(cut) == num_stages


def test_a_layer_costs_its_parameters_and_activations() -> None:
    assert layer_cost(layer(0, parameters=10, activation=5)) == 15


def test_more_stages_than_layers_are_refused_with_the_fix() -> None:
    with pytest.raises(PlanError, match=r"5 stages cannot share 4 layers; set workers.stages to at most 4"):
        plan_job(job("workers.stages=5"), model(4), [agent_info(devices=10)], Term(1), JOB)


def test_a_plan_is_complete() -> None:
    plan = plan_job(job(), model(4), [agent_info("n0", devices=3), agent_info("n1", devices=3)], Term(7), JOB)

    assert (plan.job_id, plan.term, plan.num_shards) == (JOB, 7, 2)
    stages = [
        (vw.index, stage.agent, stage.device, stage.first_layer, stage.last_layer)
        for vw in plan.virtual_workers
        for stage in vw.stages
    ]
    assert stages == [
        (0, "n0", "n0/0", 0, 2),
        (0, "n0", "n0/1", 2, 4),
        (1, "n0", "n0/2", 0, 2),
        (1, "n1", "n1/0", 2, 4),
    ]
    assert [(part.parameter.name, part.layer, part.shard, part.start, part.stop) for part in plan.slices] == [
        ("0.weight", 0, 0, 0, 10),
        ("1.weight", 1, 1, 0, 10),
        ("2.weight", 2, 0, 0, 10),
        ("3.weight", 3, 1, 0, 10),
    ]
    assert from_json(Plan, to_json(Plan, plan)) == plan


def test_given_layer_counts_are_kept() -> None:
    plan = plan_job(job("workers.stages=[[1, 3], [2, 1, 1]]"), model(4), [agent_info(devices=5)], Term(1), JOB)

    counts = [[stage.last_layer - stage.first_layer for stage in vw.stages] for vw in plan.virtual_workers]
    assert counts == [[1, 3], [2, 1, 1]]


@pytest.mark.parametrize(("counts", "fix"), [("[1, 2]", "add 1"), ("[3, 3]", "remove 2")])
def test_given_layer_counts_must_add_up(counts: str, fix: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_job(job(f"workers.stages=[[2, 2], {counts}]"), model(4), [agent_info()], Term(1), JOB)

    total = sum(map(int, counts.strip("[]").split(",")))
    assert f"virtual worker 1 the layer counts {counts}, which sum to {total}" in str(caught.value)
    assert f"the model has 4 layers; {fix} so that they sum to 4" in str(caught.value)


def test_too_few_devices_are_refused_with_the_numbers() -> None:
    with pytest.raises(PlanError, match="needs 4 devices, one per stage, and 3 are free"):
        plan_job(job(), model(4), [agent_info(devices=3)], Term(1), JOB)


def test_a_model_without_parameters_has_no_slices() -> None:
    bare = ModelReport(tuple(layer(index, parameters=0) for index in range(4)), 40, None)

    plan = plan_job(job(), bare, [agent_info()], Term(1), JOB)

    assert all(part.start == part.stop == 0 for part in plan.slices)


def test_a_placement_that_only_the_planner_makes_is_refused() -> None:
    with pytest.raises(PlanError, match=r"set workers\.stages: auto, or use balanced or round_robin"):
        plan_job(job("parameter_servers.placement=ed_local"), model(4), [agent_info(devices=4)], Term(1), JOB)


def chained_weights_and_biases(num_layers: int = 6) -> tuple[LayerReport, ...]:
    """Layers of a large weight, a bias of two-byte elements, and nothing."""
    return tuple(
        LayerReport(
            LayerIndex(at),
            f"layer{at}",
            (
                TensorSpec(f"{at}.weight", (300 + 97 * at, 512), "float32"),
                TensorSpec(f"{at}.bias", (511,), "bfloat16"),
                TensorSpec(f"{at}.none", (0,), "float32"),
            ),
            (),
            5,
        )
        for at in range(num_layers)
    )


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_run_places_as_the_planner_does(placement: PlacementName, num_shards: int) -> None:
    """The slices of a run in bytes are the pieces that planner and simulator count with, for the same model."""
    layers = chained_weights_and_biases()
    of = job(f"parameter_servers.placement={placement}", f"parameter_servers.count={num_shards}")
    plan = plan_job(of, ModelReport(layers, 40, None), [agent_info()], Term(1), JOB)
    profile = Profile(
        version=1,
        model="m",
        batch_size=4,
        input_bytes=0,
        layers=tuple(
            LayerProfile(
                name=layer.name,
                parameter_bytes=sum(spec.num_bytes for spec in layer.parameters),
                activation_bytes=0,
                output_bytes=0,
                forward_ms={"cpu": 1.0},
                backward_ms={"cpu": 1.0},
                parameters=tuple(
                    ParameterProfile(name=spec.name, shape=spec.shape, dtype=spec.dtype) for spec in layer.parameters
                ),
            )
            for layer in layers
        ),
    )
    placed = place_bytes(profile, shards=["n0"] * num_shards, placement=placement)

    in_bytes = [
        (s.parameter.name, s.layer, s.shard, s.start * size, s.stop * size)
        for s in plan.slices
        for size in [DTYPE_BYTES[s.parameter.dtype]]
    ]
    assert in_bytes == [(p.name, p.layer, p.shard, p.start, p.stop) for p in placed.pieces]


def test_a_job_leaves_the_placement_to_the_planner_as_its_options_do() -> None:
    assert job().parameter_servers.placement == "auto"
    assert PlanOptions().placement is None
    assert DEFAULT_PLACEMENT == "balanced", "where nobody searches"


@pytest.mark.parametrize("placement", [None, "round_robin"])
def test_weights_and_biases_do_not_get_a_shard_each(placement: str | None) -> None:
    """Dealt parameter by parameter, one of two shards would have more than 99 % of the elements."""
    layers = tuple(replace(layer, parameters=layer.parameters[:2]) for layer in chained_weights_and_biases())
    of = job() if placement is None else job(f"parameter_servers.placement={placement}")

    plan = plan_job(of, ModelReport(layers, 40, None), [agent_info()], Term(1), JOB)

    held = [sum(s.stop - s.start for s in plan.slices if s.shard == shard) for shard in range(2)]
    assert max(held) <= 0.6 * sum(held)
