"""What people ask of virtual workers, and what an agent asks that is about to leave: done, done already, or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.errors import Unavailable, UnknownJob, UnknownMember, UserError
from hetpipe.server.coordinator.worker_wishes import WorkerWishes
from hetpipe.values.commands import ChildExit, StageNews, StartStageCommand
from hetpipe.values.events import JobState, StopMode, WorkerLeft, WorkerRejoined
from hetpipe.values.ids import AgentId, Clock, Incarnation, JobId
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.members import Registration
from hetpipe.values.run import StageDone
from hetpipe.values.run_document import RunDescription
from tests.server.coordinator.builders import JOB_ID, agent_member, clocks, job, submission
from tests.server.coordinator.fakes import Cluster, events

STATES = tuple[tuple[int, str], ...]


def started(folder: Path, *overrides: str) -> Cluster:
    cluster = Cluster(folder / "run").usual()
    cluster.coordinator.submit_job(submission(job(*overrides), str(cluster.run_dir)))
    cluster.train()
    return cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return started(tmp_path)


def drain(cluster: Cluster, vw: int, job_id: str | None = None) -> str:
    return WorkerWishes(cluster.coordinator).drain(None if job_id is None else JobId(job_id), Vw(vw)).state


def add(cluster: Cluster, vw: int | None = None) -> STATES:
    workers = WorkerWishes(cluster.coordinator).add(None, None if vw is None else Vw(vw))
    return tuple((worker.vw, worker.state) for worker in workers)


def pass_barrier(cluster: Cluster, agent: str = "n1", *, exits: bool = True) -> None:
    """All stages of an agent come to the barrier at which they leave, and end."""
    cluster.executor.run_all()
    keys = cluster.stages(agent, JOB_ID)
    for key in keys:
        cluster.tell(agent, StageNews(key, StageDone(Clock(4), "drain")))
    for key in keys if exits else ():
        cluster.tell(agent, ChildExit(key, 1, 0))


class TestDrainAndAdd:
    def test_one_leaves_and_comes_back(self, cluster: Cluster) -> None:
        assert drain(cluster, 1) == "leaving"
        assert drain(cluster, 1, JOB_ID) == "leaving"
        pass_barrier(cluster)
        assert cluster.shards.asked("drain") == [("shards.host:7000", (JOB_ID, 1, 1, 0))]
        assert events(cluster, WorkerLeft) == [WorkerLeft(Vw(1), Incarnation(0), returns=False)]
        assert drain(cluster, 1) == "out"

        assert add(cluster) == ((1, "admitting"),)
        assert add(cluster, 1) == ((1, "admitting"),)
        cluster.train()
        assert add(cluster, 1) == ((1, "ready"),)
        assert events(cluster, WorkerRejoined) == [WorkerRejoined(Vw(1), Incarnation(1))]
        assert cluster.shards.asked("admit") == [("shards.host:7000", (JOB_ID, 1, 1, 1, 2))]

    def test_one_that_is_still_leaving_is_asked_back(self, cluster: Cluster) -> None:
        drain(cluster, 1)
        assert add(cluster) == ((1, "leaving"),)
        pass_barrier(cluster)
        cluster.train()

        assert len(events(cluster, WorkerRejoined)) == 1

    def test_the_clock_shard_may_be_away_for_a_while(self, cluster: Cluster) -> None:
        cluster.shards.dead.add("shards.host:7000")
        drain(cluster, 1)
        cluster.wait(2.5)
        cluster.shards.dead.clear()
        cluster.wait(5.0)

        assert len(cluster.shards.asked("drain")) == 4

    def test_the_clock_shard_keeps_who_is_out(self, cluster: Cluster) -> None:
        drain(cluster, 1)
        cluster.wait(1.5)
        assert cluster.shards.asked("keep_run") == [], "this one has nobody described to it"
        run = cluster.shards.asked("configure")[0][1].run
        described = RunDescription(run.plan.term, run, (), clocks(1, 1), (), is_over=False)
        cluster.shards.descriptions[JOB_ID] = described
        cluster.wait(1.5)

        assert cluster.shards.asked("keep_run") == [("shards.host:7000", (JOB_ID, 1, replace(run, out=(1,))))]


class TestRefusals:
    def test_the_last_one_stays(self, cluster: Cluster) -> None:
        drain(cluster, 1)
        with pytest.raises(
            UserError,
            match=r"virtual worker 0 is the last one of job .* add another one first \(`hetpipe workers add`\)",
        ):
            drain(cluster, 0)
        add(cluster, 1)
        assert drain(cluster, 0) == "leaving"

    def test_it_must_be_there(self, cluster: Cluster) -> None:
        for ask in (drain, add):
            with pytest.raises(UserError, match="has no virtual worker 7; name one of these: 0, 1"):
                ask(cluster, 7)
        with pytest.raises(UserError, match=r"all virtual workers of job .* are active, and no device is free"):
            add(cluster)

    def test_the_job_must_be_there_and_run(self, cluster: Cluster) -> None:
        with pytest.raises(UnknownJob, match="nonsense"):
            drain(cluster, 1, "nonsense")
        cluster.coordinator.stop_job(None, StopMode.CHECKPOINT)
        with pytest.raises(UserError, match="is about to stop"):
            drain(cluster, 1)
        cluster.finish(JOB_ID, "stop")
        for ask in (drain, add):
            with pytest.raises(UserError, match="has stopped: it has no virtual workers any more"):
                ask(cluster, 1)

    def test_a_new_coordinator_must_have_heard_of_it(self, cluster: Cluster) -> None:
        cluster.coordinator = cluster.new_coordinator()
        with pytest.raises(
            Unavailable, match="its parameter servers have not reached the new coordinator yet; try again"
        ):
            drain(cluster, 1)

    def test_it_must_have_begun(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path / "run")
        cluster.coordinator.submit_job(submission(job(), str(cluster.run_dir)))
        with pytest.raises(UserError, match="is pending: it has no virtual workers yet; try again when it runs"):
            add(cluster)

    def test_stages_that_alone_hold_the_weights_stay(self, tmp_path: Path) -> None:
        cluster = started(tmp_path, "sync=allreduce", "weights=flush", "parameter_servers.count=1")
        with pytest.raises(UserError, match="under `allreduce` only the stages hold the weights; stop the job"):
            drain(cluster, 1)


class TestDepart:
    def depart(self, cluster: Cluster, agent: str = "n1") -> None:
        cluster.coordinator.depart(AgentId(agent), cluster.registrations[agent])

    def test_it_ends_its_stages_and_gets_them_back_when_it_is_back(self, cluster: Cluster) -> None:
        self.depart(cluster)
        self.depart(cluster)
        pass_barrier(cluster)
        cluster.coordinator.leave(agent_member("n1").id, cluster.registrations["n1"])
        cluster.wait(2.0, silent=("n1",))
        assert events(cluster, WorkerLeft) == [WorkerLeft(Vw(1), Incarnation(0), returns=True)]
        assert len(cluster.shards.asked("drain")) == 1
        cluster.join(agent_member("n1", devices=2, pid=777))
        cluster.train()

        assert events(cluster, WorkerRejoined) == [WorkerRejoined(Vw(1), Incarnation(1))]

    def test_it_is_claimed_by_nobody_until_it_registers_again(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path / "run").usual()
        self.depart(cluster)
        cluster.coordinator.submit_job(submission(job(), str(cluster.run_dir)))
        cluster.train()
        assert cluster.coordinator.record(None).state is JobState.PENDING
        cluster.join(agent_member("n1", devices=2))
        commands = cluster.obey() + cluster.obey()

        assert any(isinstance(command, StartStageCommand) for command in commands)

    def test_it_must_be_a_member(self, cluster: Cluster) -> None:
        for agent, registration in (("n7", "x"), ("n1", "of another time")):
            with pytest.raises(UnknownMember):
                cluster.coordinator.depart(AgentId(agent), Registration(registration))
        assert cluster.shards.asked("drain") == []
