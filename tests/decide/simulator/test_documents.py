"""A plan file becomes what is simulated, or the reason why not."""

from __future__ import annotations

from typing import Any

import pytest

from hetpipe.decide.planner.costs import Costs
from hetpipe.decide.simulator.documents import (
    frozen_plan,
    placed_parameters,
    schedule_in,
    simulated_plan,
    weight_policy,
)
from hetpipe.decide.simulator.options import SimulationOptions, check_options
from hetpipe.decide.simulator.plan import SimulatedStage
from hetpipe.errors import DocumentError, PlanError
from hetpipe.values.document import document_of
from hetpipe.values.ids import DeviceId
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.profile import LayerProfile, ParameterProfile
from tests.decide.simulator.regular import Regular

JOB = Regular(forward_ms=[1, 2, 3], backward_ms=[1, 2, 3], parameter_bytes=1000, shards=("n0",))


def plan_file(**changes: Any) -> PlanDocument:
    """A plan for `JOB` on two devices and two shards."""
    stage = {"type": "t0", "time_ms": 1.0, "memory_bytes": 1, "receive_ms": 0.0, "recompute": False, "in_flight": 1}
    stages = [{"device": "n0/0", "layers": [0, 1], **stage}, {"device": "n0/2", "layers": [1, 3], **stage}]
    plan = {
        "model": "regular",
        "batch_size": 8,
        "allocation": "explicit",
        "weights": "wave",
        "staleness": 1,
        "virtual_workers": [{"stages": stages, "bottleneck_ms": 1.0, "samples_per_second": 1.0}],
        "minibatches_per_wave": 2,
        "max_minibatches_per_wave": [8],
        "shards": ["n0", "n0"],
        "placement": {"layer0": 0, "layer1": [[0, 0, 400], [1, 400, 1000]], "layer2": 1},
        "idle_devices": [],
        "predicted": {"samples_per_second": 1.0, "cross_node_bytes_per_minibatch": 0.0},
        "alternatives": [],
    }
    return document_of(PlanDocument, plan | changes, what="plan.json")


def _with_stage(**changes: Any) -> PlanDocument:
    plan = plan_file().model_dump(mode="json")
    plan["virtual_workers"][0]["stages"][1] |= changes
    return document_of(PlanDocument, plan, what="plan.json")


def test_a_plan_file() -> None:
    plan = simulated_plan(plan_file(), JOB.costs)
    assert plan.workers == (
        (SimulatedStage(DeviceId("n0/0"), "t0", 0, 1), SimulatedStage(DeviceId("n0/2"), "t0", 1, 3)),
    )
    assert plan.minibatches_per_wave == (2,)
    assert [(p.name, p.layer, p.shard, p.stop - p.start) for p in plan.placed.pieces] == [
        ("layer0", 0, 0, 1000),
        ("layer1", 1, 0, 400),
        ("layer1", 1, 1, 600),
        ("layer2", 2, 1, 1000),
    ]


def test_without_shards_they_are_on_the_nodes_that_compute() -> None:
    """In the cluster's order, as the planner puts them; a placement that names more of them goes round again."""
    job = Regular(forward_ms=[1, 2, 3], backward_ms=[1, 2, 3], parameter_bytes=1000, num_workers=3)
    file = plan_file(shards=[], placement={"layer0": 1, "layer1": 0, "layer2": 0}).model_dump(mode="json")
    last, first = file["virtual_workers"][0]["stages"]
    last["device"], last["type"], first["device"] = "n2/0", "t2", "n0/1"
    assert simulated_plan(document_of(PlanDocument, file, what="plan"), job.costs).placed.shards == ("n0", "n2")
    file["placement"]["layer1"] = [[0, 0, 400], [2, 400, 1000]]
    assert simulated_plan(document_of(PlanDocument, file, what="plan"), job.costs).placed.shards == ("n0", "n2", "n0")


def test_parameters_are_placed_by_name_where_the_profile_has_names() -> None:
    profile = JOB.costs.profile
    parameters = (
        ParameterProfile(name="w", shape=(10, 20), dtype="float32"),
        ParameterProfile(name="b", shape=(50,), dtype="float32"),
    )
    layer = LayerProfile(**{**profile.layers[0].model_dump(), "parameters": parameters})
    other = profile.model_copy(update={"layers": (layer,)})
    placement = {"w": 1, "b": 0}
    placed = placed_parameters(placement, ("n0", "n1"), Costs(other, JOB.costs.cluster))
    assert [(p.name, p.shard, p.stop) for p in placed.pieces] == [("w", 1, 800), ("b", 0, 200)]
    assert placed.pulled.by_shard == [[0, 200], [0, 800]]
    frozen = placed_parameters(placement, ("n0", "n1"), Costs(other, JOB.costs.cluster, 1))
    assert frozen.pieces == placed.pieces, "they stay where they are"
    assert (frozen.pulled.by_shard, frozen.pulled.bytes_on) == ([[0, 0], [0, 0]], {"n0": 0, "n1": 0})
    assert frozen.held_by_shard == [200, 800]


def test_rounded_pushes_stay_rounded_while_layers_freeze() -> None:
    profile, cluster = JOB.costs.profile, JOB.costs.cluster
    rounded = plan_file(compress_pushes="bfloat16")

    placed = simulated_plan(rounded, JOB.costs).placed
    assert placed.pushed.by_shard == [[0, 500, 700, 700], [0, 0, 300, 800]]
    assert placed.pulled.by_shard == simulated_plan(plan_file(), JOB.costs).placed.pushed.by_shard
    frozen, _ = frozen_plan(rounded, profile, cluster, 1)
    assert frozen.placed.pushed.by_shard == [[0, 0, 200, 200], [0, 0, 300, 800]]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (plan_file(shards=["n0", "n7"]), "a shard of the plan is on 'n7', which the cluster lacks; use n0"),
        (plan_file(placement={"layer0": 0, "layer1": 1}), "does not place each of the 1000 bytes of 'layer2' once"),
        (plan_file(placement={"layer0": 0, "layer1": [[0, 0, 400]], "layer2": 0}), "1000 bytes of 'layer1'"),
        (_with_stage(device="n0/9"), "the cluster has no device n0/9"),
        (_with_stage(type="t9"), "n0/2 is a t9 in the plan and a t0 in the cluster"),
        (_with_stage(layers=[1, 4]), "the plan has 4 layers, the profile 3"),
    ],
)
def test_a_plan_of_another_profile_or_cluster(document: PlanDocument, said: str) -> None:
    with pytest.raises(PlanError, match=said.replace("'", ".")):
        simulated_plan(document, JOB.costs)


def test_a_plan_without_shards() -> None:
    plan = simulated_plan(plan_file(has_shards=False, shards=[], placement={}), JOB.costs)
    assert plan.placed.shards == ()
    assert plan.placed.pieces == ()


def test_the_schedule_of_a_plan_file() -> None:
    assert schedule_in(plan_file()) == schedule_in(plan_file(schedule="1f1b")) == "1f1b"
    assert schedule_in(plan_file(schedule="gpipe", weights="flush")) == "gpipe"
    with pytest.raises(PlanError, match="did you mean `gpipe`"):
        schedule_in(plan_file(schedule="g-pipe"))
    with pytest.raises(PlanError, match=r"the schedule is gpipe, but .* use auto, 1f1b"):
        schedule_in(plan_file(schedule="gpipe"))


def test_weight_policies_by_name() -> None:
    assert weight_policy("flush") == "flush"
    with pytest.raises(PlanError, match="did you mean `flush`"):
        weight_policy("flsh")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"minibatches": 0}, "at least 1, not 0"),
        ({"staleness": -1}, "D must be at least 0"),
        ({"staleness": None, "deterministic": True}, "no required clock"),
        ({"staleness": None, "pull": "required"}, "D = inf never requires a pull"),
        ({"jitter_cv": -0.1}, "jitter"),
        ({"apply_bytes_per_second": 0.0}, "more than 0 bytes per second"),
        ({"exchange_seconds": -0.1}, "an exchange must take at least 0 seconds, not -0.1"),
        ({"schedule": "1f2b"}, "did you mean `1f1b`"),
        ({"schedule": "gpipe"}, "the schedule is gpipe, but `gpipe` drains .*; use auto, 1f1b"),
        ({"schedule": "fifo", "weights": "stash"}, "versions of `stash` are defined by the strict 1F1B order"),
        ({"weights": "stash"}, "stash with 3 stages needs N of at least 3, not 1"),
        ({"stragglers": {"n9/9": 2.0}}, "no device 'n9/9'"),
        ({"stragglers": {"n0/1": 0.0}}, "above 0"),
    ],
)
def test_options_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    options = SimulationOptions(**{"staleness": 0, "minibatches": 1} | changes)
    with pytest.raises(PlanError, match=said):
        check_options(JOB.plan, options)


def test_a_plan_that_takes_no_time() -> None:
    with pytest.raises(PlanError, match="times above 0"):
        Regular(forward_ms=[0], backward_ms=[0]).run(SimulationOptions(staleness=0, minibatches=4))


def test_a_list_of_waves_has_one_number_for_each_virtual_worker() -> None:
    assert plan_file(minibatches_per_wave=[2]).waves == (2,)
    with pytest.raises(DocumentError, match="minibatches_per_wave: has 2 numbers for 1 virtual workers; give one for"):
        plan_file(minibatches_per_wave=[2, 3])
