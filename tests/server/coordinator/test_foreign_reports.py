"""An agent tells of its own node: what it says of other agents' stages and inspections is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetpipe.decide.lifecycle.stage_table import StageState
from hetpipe.errors import JobFailed, PermissionDenied
from hetpipe.values.commands import ChildExit, InspectCommand, InspectionResult, KeyedStageReport, StageKey
from hetpipe.values.events import JobState
from hetpipe.values.ids import Clock, JobId
from hetpipe.values.run import StageDone, StageFailed
from tests.server.coordinator.builders import JOB_ID, clocks, model
from tests.server.coordinator.fakes import Cluster, state, submit


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "run").usual()


def life_of(cluster: Cluster, key: StageKey) -> tuple[bool, StageState]:
    host = cluster.coordinator.host(JOB_ID)
    assert host is not None
    life = host.machine.stages.get(key)
    assert life is not None
    return life.exited, life.state


class TestStages:
    @pytest.fixture
    def running(self, cluster: Cluster) -> Cluster:
        submit(cluster)
        cluster.train()
        assert state(cluster) is JobState.RUNNING
        return cluster

    def test_no_agent_ends_the_virtual_workers_of_another(self, running: Cluster) -> None:
        theirs = running.stages("n1", JOB_ID)[0]
        for reports in (
            ChildExit(theirs, 1, -9),
            KeyedStageReport(theirs, StageFailed(JobFailed.__name__, "made up")),
            KeyedStageReport(theirs, StageDone(Clock(1), "end")),
        ):
            with pytest.raises(
                PermissionDenied, match=r"agent n0 reports stage . of virtual worker 1 .* not on its node"
            ):
                running.tell("n0", reports)
        running.wait(10.0)
        assert life_of(running, theirs) == (False, StageState.READY)
        assert state(running) is JobState.RUNNING
        assert {worker.deaths for worker in running.coordinator.hosts()[0].machine.workers} == {0}

    def test_its_own_news_in_the_same_batch_count(self, running: Cluster) -> None:
        own, theirs = running.stages("n0", JOB_ID)[0], running.stages("n1", JOB_ID)[0]
        with pytest.raises(PermissionDenied, match="1 of 2 reports are rejected"):
            running.tell("n0", ChildExit(theirs, 1, -9), ChildExit(own, 1, -9))
        host = running.coordinator.host(JOB_ID)
        assert host is not None
        assert {worker.vw: worker.deaths for worker in host.machine.workers} == {0: 1, 1: 0}

    def test_no_shard_tells_the_clocks_of_another(self, running: Cluster) -> None:
        running.beat("ps0", clocks={JOB_ID: clocks(2, 2)})
        running.beat("ps1", clocks={JOB_ID: clocks(9, 9)})
        host = running.coordinator.host(JOB_ID)
        assert host is not None
        assert host.machine.clocks == clocks(2, 2)

    def test_agents_tell_no_clocks_and_lose_no_jobs(self, running: Cluster) -> None:
        for told in ({"clocks": {JOB_ID: clocks(9, 9)}}, {"lost": {JobId(JOB_ID): "gone"}}):
            with pytest.raises(PermissionDenied, match="which only parameter servers have"):
                running.beat("n0", **told)


def test_no_agent_answers_for_the_one_that_inspects(cluster: Cluster) -> None:
    submit(cluster)
    cluster.executor.run_all()
    [inspect] = cluster.take("n0")
    assert isinstance(inspect, InspectCommand)
    with pytest.raises(PermissionDenied, match="agent n1 reports an inspection"):
        cluster.tell("n1", InspectionResult(JOB_ID, None, "JobError", ("made up",)))
    assert state(cluster) is JobState.INSPECTING
    cluster.tell("n0", InspectionResult(JOB_ID, model()))
    cluster.train()
    assert state(cluster) is JobState.RUNNING
