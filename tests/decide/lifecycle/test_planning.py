"""Plans of runs: as the job says, or as the planner finds; on real devices, or on devices that play others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest

from hetpipe.decide.elastic.compressing import with_freeze_plans
from hetpipe.decide.elastic.freezing import with_freeze_levels
from hetpipe.decide.lifecycle.configs import fresh_progress
from hetpipe.decide.lifecycle.inspections import Inspected
from hetpipe.decide.lifecycle.planning import (
    PlannedRun,
    check_script_memory,
    num_devices_wanted,
    options_of,
    plan_run,
)
from hetpipe.decide.planner.choose import choose_plan, closed_form
from hetpipe.errors import InfeasiblePlan, PlanError
from hetpipe.job.file import Job
from hetpipe.values.ids import Clock, Term
from hetpipe.values.link_measurement import MeasuredLinks
from hetpipe.values.run import AgentInfo, LinkTime
from tests.decide.lifecycle.test_known_links import NOW, link
from tests.job.test_job_cluster import CLUSTER, LAYER, PROFILE
from tests.server.coordinator.builders import BASE, JOB_ID, agent_info, measured, model

PLANNER = partial(choose_plan, predict=closed_form)


def layers_of(count: int) -> list[dict[str, Any]]:
    """Those of `model(count)`, with the times of `LAYER`."""
    return [
        {
            **LAYER,
            "name": str(index),
            "parameter_bytes": 40,
            "parameters": [{"name": f"{index}.weight", "shape": [10], "dtype": "float32"}],
        }
        for index in range(count)
    ]


LAYERS = layers_of(2)
NAMED: dict[str, Any] = {"file": CLUSTER, "profile": {**PROFILE, "layers": LAYERS}}
PLAYED = {**NAMED, "emulate": True, "emulate_links": True}


def job(**changes: Any) -> Job:
    return Job(**{**BASE, "workers": {"stages": "auto"}, "cluster": NAMED, **changes})


def planned(of: Job, *agents: AgentInfo, num_layers: int = 2) -> PlannedRun:
    return plan_run(of, Inspected(model(num_layers)), agents, PLANNER, term=Term(1), job_id=JOB_ID, now=NOW)


def planned_by_measurement(of: Job, *agents: AgentInfo, num_layers: int = 2) -> PlannedRun:
    inspected = Inspected(model(num_layers), (measured("cpu", num_layers),))
    return plan_run(of, inspected, agents, PLANNER, term=Term(1), job_id=JOB_ID, now=NOW)


def devices(run: PlannedRun) -> list[list[str]]:
    return [[stage.device for stage in vw.stages] for vw in run.plan.virtual_workers]


def test_a_job_that_says_everything_is_not_planned() -> None:
    run = planned(Job(**BASE), agent_info(devices=4), num_layers=4)
    assert run.document is None
    assert run.emulations == ()
    assert devices(run) == [["n0/0", "n0/1"], ["n0/2", "n0/3"]]


def test_the_planner_finds_the_stages_on_the_agents_devices() -> None:
    of = job(workers={"stages": "auto", "devices": [["n1/0", "n0/0"]]}, sync={"minibatches_per_wave": 3})
    run = planned(of, agent_info("n0", devices=2), agent_info("n1", devices=1))
    assert run.document is not None
    assert run.job.is_planned
    assert (run.job.num_workers, run.job.num_devices, run.job.sync.minibatches_per_wave) == (1, 2, 3)
    assert sorted(devices(run)[0]) == ["n0/0", "n1/0"]
    assert {piece.shard for piece in run.plan.slices} == {0, 1}
    assert run.emulations == ()


def test_parameters_on_the_nodes_that_compute_them() -> None:
    workers = {"stages": "auto", "devices": [["n1/0", "n0/0"]]}
    of = job(workers=workers, parameter_servers={"count": 2, "placement": "ed_local"})
    run = planned(of, agent_info("n0", devices=2), agent_info("n1", devices=1))
    assert run.document is not None
    nodes = [stage.device.partition("/")[0] for stage in run.document.virtual_workers[0].stages]
    assert [run.document.shards[piece.shard] for piece in run.plan.slices] == nodes


def test_without_files_the_devices_that_are_there_are_planned_for() -> None:
    run = planned_by_measurement(job(cluster={}, workers={}), agent_info("n0", devices=1), agent_info("n1", devices=1))
    assert run.document is not None
    assert run.described is not None
    assert run.described.known.sources == ("assumed",)
    assert {device for names in devices(run) for device in names} == {"n0/0", "n1/0"}
    assert {stage.type for worker in run.document.virtual_workers for stage in worker.stages} == {"cpu"}
    assert run.job.is_planned


def test_links_that_agents_have_measured_are_planned_with_and_told() -> None:
    """A plan says of each link among its nodes whether it was measured, is stated, or is assumed."""
    n0 = replace(agent_info("n0", devices=1), links=MeasuredLinks(links=(link("n0", "n0", 7e8),)))
    n1 = replace(agent_info("n1", devices=1), links=MeasuredLinks(links=(link("n0", "n1", 3e8, age=60.0),)))
    run = planned_by_measurement(job(cluster={}, workers={}), n0, n1)
    assert run.described is not None and run.document is not None
    assert run.described.cluster.link("n0", "n1").bandwidth_bytes_per_second == 3e8
    told = {link.between: (link.source, link.bytes_per_second, link.measured_at) for link in run.document.links}
    assert told == {
        ("n0", "n0"): ("measured", 7e8, NOW),
        ("n1", "n1"): ("assumed", 2e9, None),
        ("n0", "n1"): ("measured", 3e8, NOW - 60.0),
    }
    assert run.links_sentence == "links: measured within n0, between n0 and n1; assumed within n1"
    document = planned(job(), agent_info("n0", devices=2), agent_info("n1", devices=1)).document
    assert document is not None
    assert {link.source for link in document.links} == {"stated"}


def test_devices_keep_their_names_where_another_job_uses_some() -> None:
    free = replace(agent_info("n0", devices=3), devices=agent_info("n0", devices=3).devices[1:])
    run = planned_by_measurement(job(cluster={}, workers={}), free)
    assert {device for names in devices(run) for device in names} == {"n0/1", "n0/2"}
    with pytest.raises(PlanError, match="names devices of nodes that another job partly uses; wait for its end"):
        planned_by_measurement(job(cluster={}, workers={"devices": [["n0/1"]]}), free)


def test_devices_that_nobody_has_are_played_by_estimate() -> None:
    types = {"device_types": {"T4": {}}, "nodes": [{"name": "a", "devices": ["T4", "T4"]}]}
    played = {"file": {**CLUSTER, **types}, "emulate": True}
    for workers in ({}, {"stages": 2}):
        run = planned_by_measurement(job(cluster=played, workers=workers), agent_info(devices=2))
        assert run.described is not None
        assert run.described.profile.estimated == ("T4",)
        forward_ms = sum(layer.forward_ms["T4"] for layer in run.described.profile.layers)
        played_seconds = sum(sum(stage.forward_seconds) for stage in run.emulations[0]) / len(run.emulations[0])
        assert 1000 * played_seconds == pytest.approx(forward_ms)


def test_devices_may_play_those_of_the_cluster() -> None:
    run = planned(job(workers={"stages": "auto", "devices": [["n0/0", "n1/0"]]}, cluster=PLAYED), agent_info(devices=3))
    ((first, second),) = run.emulations
    assert devices(run) == [["n0/0", "n0/2"]], "the third device here plays n1/0"
    assert (first.forward_seconds[0], second.forward_seconds[1]) == (0.001, 0.0025)
    assert (first.downstream, second.upstream) == (LinkTime(0.001, 1e9), LinkTime(0.001, 1e9))
    assert len(first.shards) == 2


def test_a_given_cut_may_play_a_cluster_too() -> None:
    of = job(workers={"stages": [[1, 1], [2]]}, cluster={**PLAYED, "stragglers": {"n1/0": 4.0}})
    run = planned(of, agent_info(devices=3))
    assert run.document is None
    (first, second), (only,) = run.emulations
    assert (first.forward_seconds[0], second.forward_seconds[1]) == (0.001, 0.0025)
    assert only.forward_of(0, 2) == pytest.approx(4 * 2 * 0.0025)


#: Two virtual workers of two stages that average their gradients, and play devices on two nodes.
REPLICAS: dict[str, Any] = {
    "workers": {"stages": [[2, 2]] * 2},
    "sync": {"kind": "allreduce", "minibatches_per_wave": 4},
    "weights": "flush",
    "parameter_servers": {},
    "cluster": {
        **PLAYED,
        "file": {**CLUSTER, "nodes": [{"name": name, "devices": ["slow", "slow"]} for name in ("n0", "n1")]},
        "profile": {**PROFILE, "layers": layers_of(4)},
    },
}
WITHIN, ACROSS = LinkTime(0.0, 8e9), LinkTime(0.001, 1e9)


def test_replicas_of_another_number_of_stages_average_among_themselves() -> None:
    """Those of the script are on one node, those of the job on two."""
    script = [{"at": {"clock": 3}, "do": "drop", "vw": vw} for vw in range(2)]
    script += [{"at": {"clock": 3}, "do": "add", "vw": 2 + k, "devices": [k], "stages": [4]} for k in range(2)]
    run = planned(job(**REPLICAS, elastic={"script": script}), agent_info(devices=4), num_layers=4)
    assert [[stage.replicas for stage in stages] for stages in run.emulations] == [[ACROSS] * 2] * 2 + [[WITHIN]] * 2
    assert [len(stages[0].forward_seconds) for stages in run.emulations] == [4] * 4


def test_replicas_of_a_compressed_lineup_average_among_themselves() -> None:
    """Four of one stage, on the devices of two of two."""
    freeze = {"schedule": [{"epoch": 1, "layers": 3}], "compress": True, "compress_by": "parameters"}
    agents, of = [agent_info(devices=4)], job(**REPLICAS, freeze=freeze)
    run = planned(of, *agents, num_layers=4)
    plan = with_freeze_levels(run.plan, of, model(4).layers, fresh_progress(40))
    run = with_freeze_plans(replace(run, plan=plan), agents)
    assert [len(lineup.workers) for lineup in run.plan.freeze_lineups] == [2, 4]
    assert [[stage.replicas for stage in stages] for stages in run.emulations] == [[ACROSS] * 2] * 2 + [[ACROSS]] * 4


@pytest.mark.parametrize(
    ("of", "wanted"),
    [(job(), None), (job(cluster=PLAYED), 3), (job(workers={"stages": 2, "count": 2}, cluster=PLAYED), 4)],
)
def test_how_many_devices_are_claimed(of: Job, wanted: int | None) -> None:
    assert num_devices_wanted(of) == wanted


def test_the_job_is_what_the_planner_is_asked_for() -> None:
    options = options_of(job(optimizer={"name": "Adam"}, sync={"D": 3, "minibatches_per_wave": 5}))
    assert (options.allocation, options.minibatches_per_wave, options.staleness) == ("auto", 5, 3)
    assert (options.optimizer_slots, options.num_shards, options.weights) == (2, 2, "wave")


def test_the_jobs_policies_reach_the_planner() -> None:
    options = options_of(job(optimizer={"name": "SGD", "lr": 0.1}, weights="predict", sync={"minibatches_per_wave": 4}))
    assert (options.weights, options.schedule, options.optimizer_slots) == ("predict", "auto", 1)
    options = options_of(job(gradients={"accumulate": 2, "max_norm": 1.0}))
    assert (options.accumulate, options.waits_for_norm, options.with_shards) == (2, True, True)
    assert not options_of(job(gradients={"max_norm": 1.0, "clip": "stage"})).waits_for_norm
    assert options_of(job(sync={"compress_pushes": "bfloat16"})).compress_pushes == "bfloat16"
    alone = {"sync": {"kind": "none"}, "workers": {"stages": 2, "count": 1}, "parameter_servers": {}}
    options = options_of(job(weights="flush", schedule="gpipe", **alone))
    assert (options.schedule, options.with_shards, options.num_shards) == ("gpipe", False, None)


SMALL = {**CLUSTER, "device_types": {kind: {"memory_bytes": 1 << 20} for kind in ("fast", "slow")}}
LARGE = {**PROFILE, "layers": [{**layer, "parameter_bytes": 1 << 20, "parameters": []} for layer in LAYERS]}


@pytest.mark.parametrize(
    ("of", "num_layers", "error", "words"),
    [
        (job(batch_size=8), 2, PlanError, "minibatches of 4 samples, but batch_size is 8"),
        (job(), 3, PlanError, "cluster.profile has 2 layers, but the model has 3"),
        (job(optimizer={"name": "LBFGS"}), 2, PlanError, "the memory that LBFGS keeps"),
        (job(cluster=PLAYED, workers={"stages": 1, "count": 4}), 2, PlanError, "has 3 devices to emulate; lower"),
        (job(cluster=PLAYED), 2, PlanError, "has 3 devices to emulate, and 1 are free"),
        (
            job(cluster={**PLAYED, "file": SMALL, "profile": LARGE}, workers={"stages": 1}),
            2,
            InfeasiblePlan,
            r"stage 0 of virtual worker 0 \(layers 0 to 1\) needs [\d.]+ [KM]iB, but n0/0, a fast, has 1 MiB",
        ),
    ],
)
def test_what_cannot_be_planned(of: Job, num_layers: int, error: type[PlanError], words: str) -> None:
    agents = [agent_info(devices=4 if of.is_planned else 1)]
    with pytest.raises(error, match=words):
        planned(of, *agents, num_layers=num_layers)


def test_what_is_foreseen_of_played_devices_is_what_they_play() -> None:
    slow = {name: {**link, "latency_seconds": 0.5} for name, link in CLUSTER["links"].items()}
    workers = {"stages": "auto", "devices": [["n0/0", "n1/0"]]}

    def foreseen(**cluster: Any) -> float:
        played = {**PLAYED, "file": {**CLUSTER, "links": slow}, **cluster}
        run = planned(job(workers=workers, cluster=played), agent_info(devices=3))
        assert run.document is not None
        return run.document.predicted.samples_per_second

    played, alone, slower = foreseen(), foreseen(emulate_links=False), foreseen(stragglers={"n1/0": 1000.0})
    assert slower < played < alone / 10


def test_alternatives_are_foreseen_as_they_would_be_played() -> None:
    """So that they compare with the plan: here the links would hold everything back, were they played."""
    slow = {name: {**link, "latency_seconds": 0.5} for name, link in CLUSTER["links"].items()}
    played = {**PLAYED, "file": {**CLUSTER, "links": slow}, "emulate_links": False, "stragglers": {"n1/0": 2.0}}
    run = planned(job(workers={"stages": "auto", "devices": [["n0/0"]]}, cluster=played), agent_info(devices=3))
    assert run.document is not None
    rates = {one.name: one.samples_per_second for one in run.document.alternatives}
    assert rates["NP"] is not None
    assert rates["NP"] > 100.0
    (reason,) = [one.reason for one in run.document.alternatives if one.name == "NP"]
    change = 100 * (rates["NP"] / run.document.predicted.samples_per_second - 1)
    assert reason.startswith((f"loses {-change:.1f} %", f"gains {change:.1f} %"))


def memory_of(
    memory_bytes: int,
    *,
    cluster: dict[str, Any] | None = None,
    memory: Any = "keep",
    layer: Mapping[str, Any] = MappingProxyType({"parameters": []}),
    **changes: Any,
) -> PlannedRun:
    """Stages of one, one and two layers with three, two and one minibatches in flight, 4 MiB per layer in each."""
    file = {**CLUSTER, "device_types": {kind: {"memory_bytes": memory_bytes} for kind in ("fast", "slow")}}
    layers = [
        {**LAYERS[0], "name": str(index), "activation_bytes": 4 << 20, "output_bytes": 1024, **layer}
        for index in range(4)
    ]
    played = {**PLAYED, "file": file, "profile": {**PROFILE, "layers": layers}, **(cluster or {})}
    of = job(workers={"stages": [[1, 1, 2]]}, cluster=played, memory=memory, **changes)
    return planned(of, agent_info(devices=3), num_layers=4)


def policies_in(run: PlannedRun) -> list[tuple[str, ...]]:
    return [stage.memory for worker in run.plan.virtual_workers for stage in worker.stages]


def test_where_everything_fits_all_is_kept_under_auto() -> None:
    run = memory_of(1 << 30, memory="auto")
    assert policies_in(run) == [("keep",), ("keep",), ("keep", "keep")]
    assert run.emulations == memory_of(1 << 30).emulations


def test_stages_that_do_not_fit_recompute_under_auto_and_take_the_time() -> None:
    run, kept = memory_of(9 << 20, memory="auto"), memory_of(1 << 30)
    assert policies_in(run) == [("recompute",), ("keep",), ("keep", "keep")]
    assert run.emulations == kept.emulations, "a stage adds what it recomputes itself"
    smaller = memory_of(7 << 20, memory="auto")
    # The last stage has one minibatch in flight: its kept layer has freed it before the other is recomputed.
    assert policies_in(smaller) == [("recompute",), ("recompute",), ("recompute", "keep")]


def test_a_stage_swaps_where_the_link_to_host_memory_is_fast() -> None:
    run = memory_of(9 << 20, memory="auto", cluster={"host_bytes_per_second": 1e12})
    assert policies_in(run) == [("swap",), ("keep",), ("keep", "keep")]
    assert run.emulations == memory_of(1 << 30).emulations, "it takes no time"


def test_a_device_that_is_too_small_is_told_with_what_is_missing_and_what_helps() -> None:
    helps = (
        r"needs [\d.]+ MiB, but n0/0, a fast, has 9 MiB, [\d.]+ [KM]iB too few; .*; or set `memory: auto`, with which "
        r"[\d.]+ [KM]iB suffice"
    )
    with pytest.raises(InfeasiblePlan, match=helps):
        memory_of(9 << 20)
    with pytest.raises(InfeasiblePlan, match=r"needs [\d.]+ MiB, but a fast, has 1 MiB, [\d.]+ MiB too few"):
        memory_of(1 << 20, memory="auto")


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ({"at": {"clock": 3}, "do": "move", "vw": 0, "stages": [1, 1, 2]}, ""),
        (
            {"at": {"clock": 3}, "do": "move", "vw": 0, "stages": [2, 1, 1]},
            r"elastic.script\[0\]: stage 0 of virtual worker 0 \(layers 0 to 1\) needs .*; or give its layers other",
        ),
        ({"at": {"clock": 3}, "do": "memory", "vw": 0, "layers": ["*"], "policy": "recompute"}, ""),
    ],
)
def test_a_line_behind_which_a_device_is_too_small_is_refused(line: dict[str, Any], wrong: str) -> None:
    run = memory_of(17 << 20, elastic={"script": (line,)})
    start = fresh_progress(40)
    if not wrong:
        check_script_memory(run, start)
        return
    with pytest.raises(InfeasiblePlan, match=wrong):
        check_script_memory(run, start)
    check_script_memory(run, replace(start, clock=Clock(3)))
    recomputed = {"at": {"clock": 2}, "do": "memory", "vw": 0, "layers": [0, 1], "policy": "recompute"}
    check_script_memory(memory_of(17 << 20, elastic={"script": (recomputed, line)}), start)


def test_a_live_move_is_refused_where_a_stage_has_no_room_for_both_cuts() -> None:
    """Stage 1 needs 64 MiB behind the move, and besides the weights of the layer that it had: six copies of 4 MiB."""
    line = {"do": "move", "vw": 0, "stages": [1, 2, 1]}
    sync = {"kind": "wsp", "D": 1, "minibatches_per_wave": 3, "deterministic": True}
    layer = {"parameter_bytes": 4 << 20, "parameters": []}

    def check(memory_bytes: int, at: dict[str, int]) -> None:
        run = memory_of(memory_bytes, layer=layer, sync=sync, elastic={"script": ({"at": at, **line},)})
        check_script_memory(run, fresh_progress(40))

    check(65 << 20, {"clock": 2})
    wrong = r"elastic.script\[0\]: stage 1 of virtual worker 0 computes by both cuts .* 88 MiB .*; give a `clock`"
    with pytest.raises(InfeasiblePlan, match=wrong):
        check(88 << 20, {"p": 7})
    check(89 << 20, {"p": 7})


def test_auto_requires_costs() -> None:
    with pytest.raises(PlanError, match=r"memory: is `auto`, which requires the costs"):
        planned(job(workers={"stages": 2}, cluster={}, memory="auto"), agent_info(devices=2))


def test_a_planned_run_has_policies_for_each_layer_under_auto() -> None:
    run = planned(job(cluster=PLAYED, memory="auto"), agent_info(devices=3))
    assert run.document is not None
    printed = [stage.memory for worker in run.document.virtual_workers for stage in worker.stages]
    assert policies_in(run) == printed == [("keep",) * (last - first) for first, last in spans(run)]


def spans(run: PlannedRun) -> list[tuple[int, int]]:
    return [(int(s.first_layer), int(s.last_layer)) for worker in run.plan.virtual_workers for s in worker.stages]


def test_a_planned_stage_that_does_not_fit_recomputes_the_layers_that_the_plan_prints() -> None:
    file = {**CLUSTER, "device_types": {kind: {"memory_bytes": 9 << 20} for kind in ("fast", "slow")}}
    layers = [{**layer, "activation_bytes": 6 << 20, "output_bytes": 1024} for layer in LAYERS]
    cluster = {**PLAYED, "file": file, "profile": {**PROFILE, "layers": layers}}
    run = planned(job(cluster=cluster, memory="auto"), agent_info(devices=3))
    assert run.document is not None
    assert policies_in(run) == [stage.memory for worker in run.document.virtual_workers for stage in worker.stages]
    assert "recompute" in {policy for policies in policies_in(run) for policy in policies}
