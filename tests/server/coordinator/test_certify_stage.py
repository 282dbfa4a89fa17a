"""Whom the coordinator certifies: stages that are to run on the node of the agent that asks, and nobody else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.certs.authority import facts_of, new_key, request_for
from hetpipe.errors import HetpipeError, MemberReplaced, PermissionDenied, ProtocolViolation, UnknownMember, UserError
from hetpipe.server.coordinator.coordinator import Coordinator
from hetpipe.values.commands import ChildExit, StageKey
from hetpipe.values.ids import AgentId, Incarnation, JobId, StageIndex, VirtualWorkerIndex
from hetpipe.values.members import Registration
from tests.certs.cluster import AGENT
from tests.certs.cluster import cluster as certificates
from tests.server.coordinator.builders import JOB_ID, agent_member, job, submission
from tests.server.coordinator.fakes import Cluster

REQUEST = request_for(AGENT, new_key())


class TlsCluster(Cluster):
    """A cluster whose coordinator has a signer."""

    def new_coordinator(self) -> Coordinator:
        tools = replace(self.shards.tools, certify=certificates().signer().sign_stage)
        return Coordinator(self.store, tools, clock=self.clock, executor_of=lambda _: self.executor)

    def certify(self, agent: str, stage: StageKey, request: bytes = REQUEST) -> bytes:
        return self.coordinator.certify_stage(AgentId(agent), self.registrations[agent], stage, request)


def started(cluster: Cluster) -> Cluster:
    """With a job whose stages are started."""
    cluster.usual()
    cluster.coordinator.submit_job(submission(job(), str(cluster.run_dir)))
    cluster.train()
    return cluster


@pytest.fixture
def cluster(tmp_path: Path) -> TlsCluster:
    cluster = TlsCluster(tmp_path / "run")
    started(cluster)
    return cluster


def test_the_agent_of_a_stage_gets_its_certificate(cluster: TlsCluster) -> None:
    for agent in ("n0", "n1"):
        for stage in cluster.stages(agent, JOB_ID):
            facts = facts_of(cluster.certify(agent, stage))
            assert facts.peer == stage.peer


def test_it_may_ask_again_while_the_stage_lives(cluster: TlsCluster) -> None:
    stage = cluster.stages("n0", JOB_ID)[0]
    assert cluster.certify("n0", stage) != cluster.certify("n0", stage)


def test_stages_of_other_agents(cluster: TlsCluster) -> None:
    stage = cluster.stages("n1", JOB_ID)[0]
    with pytest.raises(PermissionDenied, match="is to run on agent n0"):
        cluster.certify("n0", stage)


@pytest.mark.parametrize(
    "changes",
    [
        {"job_id": JobId("another")},
        {"vw": VirtualWorkerIndex(7)},
        {"stage": StageIndex(7)},
        {"incarnation": Incarnation(1)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_stages_that_are_not_planned(cluster: TlsCluster, changes: dict[str, JobId]) -> None:
    stage = replace(cluster.stages("n0", JOB_ID)[0], **changes)
    with pytest.raises(PermissionDenied, match="is to run on agent n0"):
        cluster.certify("n0", stage)


def test_a_life_that_is_over(cluster: TlsCluster) -> None:
    stage = cluster.stages("n0", JOB_ID)[0]
    cluster.tell("n0", ChildExit(stage, 1, 0))
    with pytest.raises(PermissionDenied):
        cluster.certify("n0", stage)


@pytest.mark.parametrize(
    ("agent", "error"), [("n0", MemberReplaced), ("stranger", UnknownMember)], ids=["replaced", "never registered"]
)
def test_who_is_no_member_any_more(cluster: TlsCluster, agent: str, error: type[HetpipeError]) -> None:
    stage = cluster.stages("n0", JOB_ID)[0]
    old = cluster.registrations.get(agent, Registration("none"))
    cluster.join(agent_member("n0", devices=2, pid=101))
    with pytest.raises(error):
        cluster.coordinator.certify_stage(AgentId(agent), old, stage, REQUEST)


def test_a_request_that_cannot_be_read(cluster: TlsCluster) -> None:
    with pytest.raises(UserError, match="a certificate request cannot be read"):
        cluster.certify("n0", cluster.stages("n0", JOB_ID)[0], b"garbage")


def test_without_tls_there_is_nothing_to_certify(tmp_path: Path) -> None:
    plain = started(Cluster(tmp_path / "run"))
    with pytest.raises(ProtocolViolation, match="it was started without --tls"):
        plain.coordinator.certify_stage(
            AgentId("n0"), plain.registrations["n0"], plain.stages("n0", JOB_ID)[0], REQUEST
        )
