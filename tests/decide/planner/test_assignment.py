"""Plans on paper become plans of runs: devices by name, bytes as slices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from hetpipe.decide.planner.assignment import assign
from hetpipe.errors import PlanError
from hetpipe.values.ids import AgentId, DeviceId, JobId, LayerIndex, Term
from hetpipe.values.plan import LayerReport, ModelReport, Plan, TensorSpec
from hetpipe.values.plan_document import PlanDocument, PlannedStage, PlannedWorker, Predicted

JOB = JobId("job-1")
OFFERED = {
    DeviceId(f"n{node}/{i}"): (AgentId(f"agent-{node}"), DeviceId(f"box/{i}")) for node in (0, 1) for i in (0, 1)
}
WEIGHT, BIAS = TensorSpec("0.weight", (3, 5), "float32"), TensorSpec("0.bias", (3,), "float32")
OTHER, EMPTY = TensorSpec("1.weight", (4,), "float64"), TensorSpec("1.none", (0,), "float32")
MODEL = ModelReport(
    (
        LayerReport(LayerIndex(0), "0", (WEIGHT, BIAS), (), 1),
        LayerReport(LayerIndex(1), "1", (OTHER, EMPTY), (), 1),
    ),
    train_samples=10,
    eval_samples=None,
)


def stage(device: str, first: int, last: int) -> PlannedStage:
    return PlannedStage(
        device=DeviceId(device),
        type="t",
        layers=(first, last),
        time_ms=1.0,
        memory_bytes=1,
        receive_ms=0.0,
        recompute=False,
        in_flight=1,
    )


def document(
    placement: Mapping[str, Any], *stages: PlannedStage, shards: tuple[str, ...] = ("n0", "n1")
) -> PlanDocument:
    worker = PlannedWorker(
        stages=stages or (stage("n1/0", 0, 1), stage("n0/1", 1, 2)), bottleneck_ms=1.0, samples_per_second=1.0
    )
    return PlanDocument(
        version=1,
        model="m",
        batch_size=1,
        allocation="explicit",
        weights="wave",
        staleness=0,
        virtual_workers=(worker,),
        minibatches_per_wave=2,
        max_minibatches_per_wave=(2,),
        shards=shards,
        placement=dict(placement),
        idle_devices=(),
        predicted=Predicted(samples_per_second=1.0, cross_node_bytes_per_minibatch=0.0),
        alternatives=(),
    )


def slices(plan: Plan) -> list[tuple[str, int, int, int]]:
    return [(s.parameter.name, s.shard, s.start, s.stop) for s in plan.slices]


def test_stages_are_on_the_offered_devices() -> None:
    plan = assign(document({"0": 0, "1": 1}), MODEL, OFFERED, term=Term(3), job_id=JOB)
    (worker,) = plan.virtual_workers
    assert [(s.agent, s.device, s.first_layer, s.last_layer) for s in worker.stages] == [
        ("agent-1", "box/0", 0, 1),
        ("agent-0", "box/1", 1, 2),
    ]
    assert (plan.term, plan.num_shards, plan.job_id) == (3, 2, JOB)


def test_a_layers_name_stands_for_its_parameters() -> None:
    plan = assign(document({"0": 1, "1": 0}), MODEL, OFFERED, term=Term(1), job_id=JOB)
    assert slices(plan) == [("0.weight", 1, 0, 15), ("0.bias", 1, 0, 3), ("1.weight", 0, 0, 4), ("1.none", 0, 0, 0)]


def test_pieces_of_a_layer_fall_on_its_parameters_in_order() -> None:
    pieces = ((0, 0, 20), (1, 20, 64), (0, 64, 72))  # the weight has 60 bytes, the bias 12
    plan = assign(document({"0": pieces, "1": 0}), MODEL, OFFERED, term=Term(1), job_id=JOB)
    assert slices(plan)[:4] == [("0.weight", 0, 0, 5), ("0.weight", 1, 5, 15), ("0.bias", 1, 0, 1), ("0.bias", 0, 1, 3)]


def test_a_cut_of_a_layer_moves_down_to_an_element_of_the_parameter_that_it_falls_on() -> None:
    """Who cuts a layer by its bytes does not know its parameters: planning again would give the same cut."""
    plan = assign(document({"0": ((0, 0, 50), (1, 50, 72)), "1": 0}), MODEL, OFFERED, term=Term(1), job_id=JOB)
    assert slices(plan)[:3] == [("0.weight", 0, 0, 12), ("0.weight", 1, 12, 15), ("0.bias", 1, 0, 3)]


def test_parameters_are_placed_one_by_one_where_they_are_named() -> None:
    placement = {"0.weight": ((1, 0, 40), (0, 40, 60)), "0.bias": 0, "1.weight": 1, "1.none": 1}
    plan = assign(document(placement), MODEL, OFFERED, term=Term(1), job_id=JOB)
    assert slices(plan) == [
        ("0.weight", 1, 0, 10),
        ("0.weight", 0, 10, 15),
        ("0.bias", 0, 0, 3),
        ("1.weight", 1, 0, 4),
        ("1.none", 1, 0, 0),
    ]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (document({"0": 0, "1": 0}, stage("n0/0", 0, 3)), "for a model of 3 layers, but the job's model has 2"),
        (document({"0": 0, "1": 0}, stage("n9/0", 0, 2)), "uses device n9/0, which no agent offers; offered are n0/0"),
        (document({"0": 0}), "does not place parameter 1.weight"),
        (document({"0": ((0, 0, 48),), "1": 0}), "places 48 of the 60 bytes of parameter 0.weight"),
        (
            document({"0.weight": ((0, 0, 50), (1, 50, 60)), "0.bias": 0, "1": 0}),
            "cuts parameter 0.weight within an element",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused(made: PlanDocument, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        assign(made, MODEL, OFFERED, term=Term(1), job_id=JOB)
