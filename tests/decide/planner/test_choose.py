"""The plan document: what is in it, and what the alternatives say."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hetpipe.decide.planner.choose import choose_plan, closed_form
from hetpipe.decide.planner.costs import Costs, MemoryModel
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.errors import DocumentError, InfeasiblePlan, PlanError
from hetpipe.values.document import document_of, to_plain
from hetpipe.values.ids import DeviceId
from hetpipe.values.plan_document import PlanDocument
from tests.decide.planner.job_cases import MIB, PAPER_CLUSTER, chain, cluster_of

PROFILE = chain([3.0, 5.0, 2.0, 4.0] * 4)
FAST = PlanOptions(allocation="HD", minibatches_per_wave=4, optimizer_slots=1, staleness=None)


@pytest.fixture(scope="module")
def plan() -> PlanDocument:
    return choose_plan(PROFILE, PAPER_CLUSTER, FAST, predict=closed_form)


def test_every_figure_follows_from_the_definitions(plan: PlanDocument) -> None:
    costs, memory = Costs(PROFILE, PAPER_CLUSTER), MemoryModel(minibatches_per_wave=4, optimizer_slots=1)
    for worker in plan.virtual_workers:
        for index, stage in enumerate(worker.stages):
            compute_ms = sum(
                layer.forward_ms[stage.type] + layer.backward_ms[stage.type]
                for layer in PROFILE.layers[slice(*stage.layers)]
            )
            assert stage.time_ms == pytest.approx(compute_ms + stage.receive_ms)
            assert stage.memory_bytes == costs.stage_bytes(*stage.layers, stage=index, num_stages=4, memory=memory)
            assert stage.in_flight == 4 - index
            assert PAPER_CLUSTER.devices[stage.device] == stage.type
        assert worker.bottleneck_ms == max(stage.time_ms for stage in worker.stages)
        assert worker.samples_per_second == pytest.approx(32 * 1000 / worker.bottleneck_ms)
    assert (plan.minibatches_per_wave, plan.max_minibatches_per_wave) == (4, (599, 599, 862, 862))
    assert plan.shards == ("n0", "n1", "n2", "n3")
    assert plan.placement["layer5"] == 1
    assert plan.idle_devices == ()
    slowest = min(worker.samples_per_second for worker in plan.virtual_workers)
    assert plan.predicted.samples_per_second == pytest.approx(4 * slowest)


def test_a_plan_counts_half_of_rounded_pushes() -> None:
    """Each node is a virtual worker, so that only weights leave it."""
    options = replace(FAST, allocation="NP")
    exact = choose_plan(PROFILE, PAPER_CLUSTER, options, predict=closed_form)
    rounded = choose_plan(PROFILE, PAPER_CLUSTER, replace(options, compress_pushes="bfloat16"), predict=closed_form)

    assert (exact.compress_pushes, rounded.compress_pushes) == ("none", "bfloat16")
    moved = exact.predicted.cross_node_bytes_per_minibatch
    assert rounded.predicted.cross_node_bytes_per_minibatch == 0.75 * moved > 0


def test_a_plan_says_how_far_n_was_searched(plan: PlanDocument) -> None:
    """Up to Max_m where larger waves gain, as far as a larger one could gain where not; nothing where N was given."""
    assert plan.searched_minibatches_per_wave is None
    free = replace(FAST, minibatches_per_wave=None)

    held_back = choose_plan(PROFILE, cluster_of(["V", "V"], gib={"V": 2}, network=1e8), free, predict=closed_form)
    not_held_back = choose_plan(PROFILE, cluster_of(["VV", "RR"]), replace(free, staleness=None), predict=closed_form)

    assert held_back.searched_minibatches_per_wave == min(held_back.max_minibatches_per_wave)
    assert 4 < min(held_back.max_minibatches_per_wave) < 1024
    most = not_held_back.searched_minibatches_per_wave
    assert most is not None
    assert not_held_back.waves[0] <= most < min(not_held_back.max_minibatches_per_wave)


def test_alternatives_say_how_much_they_lose(plan: PlanDocument) -> None:
    by_name = {one.name: one for one in plan.alternatives}

    assert list(by_name) == ["NP", "ED", "auto", "allreduce", "single:G", "single:Q", "single:R", "single:V"]
    lost = 100 * (1 - (by_name["NP"].samples_per_second or 0) / plan.predicted.samples_per_second)
    assert by_name["NP"].reason == (f"loses {lost:.1f} %; of its 4 virtual workers number 3, 4 × Q, is the slowest")
    assert (by_name["auto"].samples_per_second or 0) >= plan.predicted.samples_per_second


def test_it_is_a_file(plan: PlanDocument) -> None:
    plain = json.loads(json.dumps(to_plain(plan)))

    assert document_of(PlanDocument, plain, what="plan") == plan


def test_the_same_question_has_the_same_answer() -> None:
    first, second = (choose_plan(PROFILE, cluster_of(["VV", "RG", "QV"]), FAST, predict=closed_form) for _ in range(2))
    assert first == second


def test_idle_devices_hold_no_shard() -> None:
    options = PlanOptions(allocation="explicit", workers=((DeviceId("n2/0"), DeviceId("n0/1")),))

    plan = choose_plan(PROFILE, cluster_of(["VV", "R", "G"]), options, predict=closed_form)

    assert plan.shards == ("n0", "n2")
    assert plan.idle_devices == ("n0/0", "n1/0")
    assert {stage.device for stage in plan.virtual_workers[0].stages} == {"n2/0", "n0/1"}


def test_shards_can_be_counted() -> None:
    options = PlanOptions(allocation="NP", num_shards=3, minibatches_per_wave=1)

    assert choose_plan(PROFILE, cluster_of(["VV", "RR"]), options, predict=closed_form).shards == ("n0", "n1", "n0")


def test_what_is_not_possible_says_why() -> None:
    options = PlanOptions(allocation="ED", placement="ed_local", minibatches_per_wave=4)

    plan = choose_plan(PROFILE, cluster_of(["VV", "RR"]), options, predict=closed_form)

    np = next(one for one in plan.alternatives if one.name == "NP")
    assert np.samples_per_second is None
    assert "ed_local keeps a layer's parameters on the node that computes it" in np.reason


def test_a_model_that_does_not_fit() -> None:
    with pytest.raises(InfeasiblePlan, match=r"virtual worker 2 \(n2/0.*lacks [\d.]+ [MG]iB on n2"):
        choose_plan(
            chain([3.0] * 4, parameters=1300 * MIB),
            PAPER_CLUSTER,
            PlanOptions(allocation="NP", minibatches_per_wave=2),
            predict=closed_form,
        )


def test_a_type_without_times() -> None:
    with pytest.raises(DocumentError, match="no times for this type"):
        choose_plan(chain([1.0], {"V": 1.0}), cluster_of(["VQ"]), PlanOptions(), predict=closed_form)


def test_a_profile_without_times() -> None:
    with pytest.raises(PlanError, match="0 ms"):
        choose_plan(chain([0.0], {"V": 1.0}, output=0), cluster_of(["V"]), PlanOptions(), predict=closed_form)


def test_parallel_plans_for_its_own_batch_size() -> None:
    cluster = cluster_of(["VV", "VV"], gib={"V": 3})
    options = PlanOptions(allocation="parallel", weights="double_buffer", max_batch=24)

    plan = choose_plan(chain([3.0] * 8, {"V": 1.0}, batch_size=32), cluster, options, predict=closed_form)

    assert plan.batch_size is not None
    assert plan.batch_size * plan.minibatches_per_wave * len(plan.virtual_workers) == 24
    assert plan.batch_size < 32
