"""Why a plan is as it is: what binds it, and what a change would bring."""

from __future__ import annotations

from dataclasses import replace

from hetpipe.decide.planner.costs import Costs, MemoryModel
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.report.plan_reasons import reasons_of
from hetpipe.report.plan_view import PlanFacts, view_of
from tests.cli import plans


def two_stages(
    *, bandwidth: float = 7e9, minibatches_per_wave: int = 2, cut: int = 8, staleness: int | None = None
) -> PlanFacts:
    """One virtual worker over two nodes."""
    base = plans.cluster(1)
    inter = base.links.inter_node.model_copy(update={"bandwidth_bytes_per_second": bandwidth})
    cluster = base.model_copy(update={"links": base.links.model_copy(update={"inter_node": inter})})
    costs = Costs(plans.profile(estimated=()), cluster)
    document = plans.plan(
        [[("n0/0", cut), ("n1/0", 12)]], costs=costs, minibatches_per_wave=minibatches_per_wave, alternatives=()
    )
    document = document.model_copy(update={"staleness": staleness})
    return PlanFacts(document, costs, PlanOptions(minibatches_per_wave=minibatches_per_wave))


def test_the_parts_of_a_stage_add_up() -> None:
    facts = plans.equal_mix()
    memory = MemoryModel(minibatches_per_wave=4)
    pipeline = view_of(facts).pipelines[0]
    for index, (shown, stage) in enumerate(zip(pipeline.stages, facts.plan.virtual_workers[0].stages, strict=True)):
        assert abs(shown.time_ms - stage.time_ms) < 1e-9
        assert shown.memory_bytes == stage.memory_bytes
        layers = facts.costs.profile.layers[stage.layers[0] : stage.layers[1]]
        assert shown.parameter_bytes == memory.copies(index, 4) * sum(layer.parameter_bytes for layer in layers)
        assert abs(shown.forward_ms - sum(layer.forward_ms[stage.type] for layer in layers)) < 1e-9


def test_compute_binds() -> None:
    bound = reasons_of(two_stages(cut=8)).bound
    assert bound.startswith("Stage 0 of virtual worker 0 on n0/0 (TITAN_V) binds, by its compute: ")


def test_the_round_trip_of_weights_binds() -> None:
    bound = reasons_of(two_stages(minibatches_per_wave=2, staleness=0)).bound
    assert bound.startswith(
        "The round trip of weights (push, sum, publish, pull) is the bottleneck, with D = 0 and N = 2: it allows "
    )
    assert "a larger D or N raises the limit." in bound


def test_a_network_card_binds() -> None:
    bound = reasons_of(two_stages(bandwidth=5e8, minibatches_per_wave=2)).bound
    assert bound.startswith("The network card of n0 is the bottleneck: it allows ")


def test_too_few_minibatches_in_flight_bind() -> None:
    reasons = reasons_of(two_stages(minibatches_per_wave=1))
    assert reasons.bound.startswith(
        "The minibatches in flight are the bottleneck: virtual worker 0 has at most 1 in a pipeline of "
    )
    assert reasons.waves[0] == "N = 1 was given."
    assert reasons.waves[-1].startswith("With these cuts N = 2 gives ")
    assert "more" in reasons.waves[-1]


def test_the_next_n_is_one_that_updates_divide() -> None:
    facts = two_stages(minibatches_per_wave=4)
    by_two = replace(facts, options=PlanOptions(minibatches_per_wave=4, accumulate=2))
    assert [sentence.split(" ")[5] for sentence in reasons_of(facts).waves[1:]] == ["3", "5"]
    assert [sentence.split(" ")[5] for sentence in reasons_of(by_two).waves[1:]] == ["2", "6"]


def test_memory_keeps_n_down() -> None:
    facts = two_stages(minibatches_per_wave=2)
    needed = facts.plan.virtual_workers[0].stages[0].memory_bytes
    tight = {
        **facts.costs.cluster.device_types,
        "TITAN_V": facts.costs.cluster.device_types["TITAN_V"].model_copy(update={"memory_bytes": needed + 1}),
    }
    costs = Costs(facts.costs.profile, facts.costs.cluster.model_copy(update={"device_types": tight}))
    reasons = reasons_of(replace(facts, costs=costs, options=PlanOptions()))
    assert reasons.waves[0].startswith("N = 2 is the smallest within 2 % of the fastest")
    assert reasons.waves[-1].startswith("With these cuts N = 3 does not fit: stage 0 of virtual worker 0 would lack ")
    assert reasons.waves[-1].endswith(" on n0/0.")


def test_moving_the_cut_makes_the_neighbour_longer() -> None:
    reasons = reasons_of(two_stages(cut=8))
    assert reasons.cuts[0].startswith("The longest stage of virtual worker 0 is stage 0 on n0/0, ")
    assert reasons.cuts[1].startswith(
        "With its last layer, block7.conv, on stage 1 instead, the longest would be stage"
    )
    assert len(reasons.cuts) == 2


def test_one_layer_is_not_cut() -> None:
    costs = Costs(plans.profile(2, estimated=()), plans.cluster(1))
    facts = PlanFacts(
        plans.plan([[("n0/0", 1), ("n1/0", 2)]], costs=costs, minibatches_per_wave=2), costs, PlanOptions()
    )
    assert reasons_of(facts).cuts[1:] == ("A single layer cannot be cut further.",)


def test_a_single_stage_has_no_cut() -> None:
    costs = Costs(plans.profile(2, estimated=()), plans.cluster(1))
    facts = PlanFacts(plans.plan([[("n0/0", 2)]], costs=costs, minibatches_per_wave=1), costs, PlanOptions())
    assert reasons_of(facts).cuts[1:] == ("It is the only one, so there is no cut to move.",)


def test_in_2bw_the_global_batch_decides_on_n() -> None:
    facts = two_stages(minibatches_per_wave=4)
    facts = replace(facts, plan=facts.plan.model_copy(update={"allocation": "parallel"}))
    assert reasons_of(facts).waves == ("N = 4 gives the global batch: 1 virtual worker × 4 × 32 samples = 128.",)


def test_what_crosses_nodes_is_told_by_kind() -> None:
    mixed = dict(view_of(plans.equal_mix()).facts)["over the network"]
    assert "activations and gradients, " in mixed
    within = dict(view_of(plans.node_by_node()).facts)["over the network"]
    assert within.endswith("between nodes per minibatch: all of it pushes and pulls")
    facts = plans.node_by_node()
    less = {"cross_node_bytes_per_minibatch": 0.75 * facts.plan.predicted.cross_node_bytes_per_minibatch}
    changes = {"compress_pushes": "bfloat16", "predicted": facts.plan.predicted.model_copy(update=less)}
    rounded = replace(facts, plan=facts.plan.model_copy(update=changes))
    assert dict(view_of(rounded).facts)["over the network"].endswith("all of it pushes (in bfloat16) and pulls")
