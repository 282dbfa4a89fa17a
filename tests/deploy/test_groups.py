"""The plan decides which agent has which devices."""

from __future__ import annotations

from typing import Any

import pytest

from hetpipe.decide.lifecycle.job_queue import claim_devices
from hetpipe.decide.planner.partition import plan_job
from hetpipe.deploy.groups import AgentGroup, groups_of, job_of_plan, needs_a_plan
from hetpipe.errors import UserError
from hetpipe.values.ids import AgentId, JobId, LayerIndex, Term
from hetpipe.values.plan import LayerReport, ModelReport
from hetpipe.values.run import AgentDevice, AgentInfo
from tests.deploy.deployments import cpus, gpus, job, plan, stage
from tests.job.test_job_cluster import CLUSTER


def shape(groups: tuple[AgentGroup, ...]) -> list[tuple[str, list[str]]]:
    return [(group.node, [device.device for device in group.devices]) for group in groups]


def test_nothing_known_is_one_agent_with_everything() -> None:
    assert shape(groups_of(None, cpus(3))) == [("box", ["here/0", "here/1", "here/2"])]


def test_each_virtual_worker_gets_an_agent_with_a_device_per_stage() -> None:
    wanted = job(workers={"stages": [[1, 1, 1], [3]]})
    assert shape(groups_of(wanted, gpus("A", "A", "A", "B"))) == [
        ("vw-0", ["here/0", "here/1", "here/2"]),
        ("vw-1", ["here/3"]),
    ]


def test_a_plan_says_which_and_in_which_order() -> None:
    planned = plan([stage("here/2", "A", 0, 1), stage("here/0", "A", 1, 3)], [stage("here/1", "A", 0, 3)])
    groups = groups_of(job(), gpus("A", "A", "A"), planned)
    assert shape(groups) == [("vw-0", ["here/2", "here/0"]), ("vw-1", ["here/1"])]
    assert [device.gpu for device in groups[0].devices] == ["GPU-2", "GPU-0"]


def test_a_plan_for_other_nodes_gets_devices_of_its_types() -> None:
    planned = plan([stage("n0/0", "B", 0, 1), stage("n1/0", "A", 1, 3)])
    assert shape(groups_of(job(), gpus("A", "A", "B"), planned)) == [("vw-0", ["here/2", "here/0"])]
    assert shape(groups_of(job(), cpus(2), planned)) == [("vw-0", ["here/0", "here/1"])]


def test_the_nodes_of_a_cluster_file_become_the_agents() -> None:
    """The coordinator knows the devices of such a job by their names, or plays them in this order."""
    wanted = job(workers={"stages": "auto"}, cluster={"file": {"version": 1, **CLUSTER}})
    assert shape(groups_of(wanted, gpus("slow", "fast", "slow"))) == [("n0", ["here/1", "here/0"]), ("n1", ["here/2"])]
    assert shape(groups_of(wanted, cpus(3))) == [("n0", ["here/0", "here/1"]), ("n1", ["here/2"])]


def test_the_coordinator_deals_the_same_devices_to_the_same_virtual_workers() -> None:
    """Agents that register in starting order give each virtual worker its own agent, whatever the shapes."""
    wanted = job(workers={"stages": [[2, 1], [1, 1, 1], [3]]})
    agents = [
        AgentInfo(
            AgentId(group.node), "", 0, tuple(AgentDevice(f"{group.node}/{i}", "cpu", 1, "cpu") for i in range(n))
        )
        for group in groups_of(wanted, cpus(6))
        for n in [len(group.devices)]
    ]
    layers = tuple(LayerReport(LayerIndex(index), str(index), (), (), 1) for index in range(3))
    claimed = claim_devices(wanted.num_devices, agents)
    dealt = plan_job(wanted, ModelReport(layers, 4, None), claimed, Term(1), JobId("j"))
    for vw, worker in enumerate(dealt.virtual_workers):
        assert [part.device for part in worker.stages] == [f"vw-{vw}/{i}" for i in range(len(worker.stages))]


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        (job(workers={"count": 2, "stages": 2}), "needs 4 devices, one per stage, and 3 of 3"),
        (job(cluster={"file": {"version": 1, **CLUSTER}}), "needs a device of type fast, and 3 of 3"),
    ],
)
def test_too_few_devices(wanted: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        groups_of(wanted, gpus("A", "A", "A"))


def test_who_needs_a_plan() -> None:
    assert needs_a_plan(job())
    assert not needs_a_plan(job(workers={"stages": 2}))
    assert not needs_a_plan(job(cluster={"file": {"version": 1, **CLUSTER}}))


def test_a_job_takes_the_cut_of_its_plan() -> None:
    planned = plan([stage("a/0", "A", 0, 1), stage("a/1", "A", 1, 3)], [stage("a/2", "A", 0, 3)])
    taken = job_of_plan(job(), planned)
    assert taken.workers.stages == ((1, 2), (3,))
    assert taken.sync.minibatches_per_wave == 3


@pytest.mark.parametrize(
    ("changes", "of_plan", "sentence"),
    [
        ({"workers": {"stages": 2}}, {}, "leave one out"),
        ({}, {"batch_size": 8}, "minibatches of 8 samples, the job has 4"),
        ({}, {"weights": "flush"}, "weight policy flush, the job has wave"),
        ({"parameter_servers": {"placement": "ed_local"}}, {}, "use balanced or round_robin"),
    ],
)
def test_plans_that_a_run_cannot_follow(changes: dict[str, Any], of_plan: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        job_of_plan(job(**changes), plan([stage("a/0", "A", 0, 3)], **of_plan))


def test_a_run_recomputes_as_its_plan_does() -> None:
    recomputed, kept = stage("a/0", "A", 0, 3, recompute=True), stage("a/1", "A", 0, 3)
    assert job_of_plan(job(memory="recompute"), plan([recomputed])).memory == "recompute"
    with pytest.raises(UserError, match="recomputes all layers; add `memory: recompute`"):
        job_of_plan(job(), plan([recomputed]))
    with pytest.raises(UserError, match="recomputes some stages and keeps others"):
        job_of_plan(job(memory="recompute"), plan([recomputed], [kept]))
