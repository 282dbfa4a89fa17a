"""What people ask of virtual workers, and what an agent asks that is about to leave: done, done already, or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.decide.elastic.replanning import basis_of
from hetpipe.decide.lifecycle.exchange import ClocksReported
from hetpipe.decide.lifecycle.job_machine import JobMachine
from hetpipe.decide.lifecycle.known_cluster import PlanningInputs, known_links
from hetpipe.errors import Unavailable, UnknownJob, UnknownMember, UserError
from hetpipe.server.coordinator.worker_requests import WorkerRequests
from hetpipe.values.commands import ChildExit, KeyedStageReport, StartStageCommand
from hetpipe.values.events import JobState, StopMode, WorkerLeft, WorkerRejoined, WorkerReplanned
from hetpipe.values.ids import AgentId, Clock, Incarnation, JobId
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.link_measurement import MeasuredLinks
from hetpipe.values.members import Registration
from hetpipe.values.run import StageDone
from hetpipe.values.run_document import RunDescription
from hetpipe.values.sync import PlanMove, PlanVersion
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
    return WorkerRequests(cluster.coordinator).drain(None if job_id is None else JobId(job_id), Vw(vw)).state


def add(cluster: Cluster, vw: int | None = None) -> STATES:
    workers = WorkerRequests(cluster.coordinator).add(None, None if vw is None else Vw(vw))
    return tuple((worker.vw, worker.state) for worker in workers)


def move(cluster: Cluster, vw: int, *layers: int) -> tuple[str, tuple[int, ...]]:
    worker, before = WorkerRequests(cluster.coordinator).move(None, Vw(vw), layers)
    return worker.state, before


def pass_barrier(cluster: Cluster, agent: str = "n1", *, exits: bool = True) -> None:
    """All stages of an agent come to the barrier at which they leave, and end."""
    cluster.executor.run_all()
    keys = cluster.stages(agent, JOB_ID)
    for key in keys:
        cluster.tell(agent, KeyedStageReport(key, StageDone(Clock(4), "drain")))
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


class TestMove:
    def moved(self, cluster: Cluster, *bounds: int) -> None:
        """The clock shard passes the barrier at which virtual worker 1 is cut at `bounds`."""
        plans = {Vw(1): PlanVersion(1, bounds, (0, 2, 4))}
        cluster.shards.last_clocks = replace(clocks(4, 4), plans=plans)
        host = cluster.coordinator.host(JobId(JOB_ID))
        assert host is not None
        cluster.coordinator.feed_job(host, ClocksReported(cluster.shards.last_clocks))

    def test_the_clock_shard_moves_the_layers(self, cluster: Cluster) -> None:
        assert move(cluster, 1, 3, 1) == ("ready", (2, 2))
        assert move(cluster, 1, 3, 1) == ("ready", (2, 2)), "the same request, repeated"
        cluster.executor.run_all()
        assert move(cluster, 1, 3, 1) == ("ready", (2, 2))
        asked = PlanMove(Incarnation(0), (0, 3, 4), "operator", "an operator asked for it", live=True)
        assert cluster.shards.asked("move") == [("shards.host:7000", (JOB_ID, 1, 1, asked))]
        self.moved(cluster, 0, 3, 4)
        (told,) = events(cluster, WorkerReplanned)
        assert (told.vw, told.before, told.after, told.foreseen, told.version) == (1, (2, 2), (3, 1), None, 1)

        assert move(cluster, 1, 3, 1) == ("ready", (3, 1)), "nothing to move"
        cluster.executor.run_all()
        assert len(cluster.shards.asked("move")) == 1
        assert move(cluster, 1, 1, 3) == ("ready", (3, 1))

    def test_without_detection_of_stragglers_too(self, tmp_path: Path) -> None:
        cluster = started(tmp_path, "survive.straggler=0")
        assert move(cluster, 0, 1, 3) == ("ready", (2, 2))
        cluster.executor.run_all()
        assert len(cluster.shards.asked("move")) == 1

    def test_only_one_at_a_time(self, cluster: Cluster) -> None:
        move(cluster, 1, 3, 1)
        for vw, layers in ((0, (3, 1)), (1, (1, 3)), (1, (2, 2))):
            with pytest.raises(UserError, match="move already, or are about to; try again behind the next barrier"):
                move(cluster, vw, *layers)

    @pytest.mark.parametrize(
        ("layers", "wrong"),
        [
            (
                (3, 2),
                "the cut 3,2 has 5 layers for virtual worker 0, but the model has 4; give each of them",
            ),
            ((4,), "the cut 4 has 1 stage for virtual worker 0, which has 2; a move keeps their number"),
            ((1, 1, 2), "the cut 1,1,2 has 3 stages for virtual worker 0, which has 2"),
        ],
    )
    def test_the_cut_must_be_one_of_the_model_into_as_many_stages(
        self, cluster: Cluster, layers: tuple[int, ...], wrong: str
    ) -> None:
        with pytest.raises(UserError, match=wrong):
            move(cluster, 0, *layers)

    def test_never_where_the_model_cannot_be_cut(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        host = cluster.coordinator.host(JobId(JOB_ID))
        assert host is not None
        run = host.machine.run
        assert run is not None
        basis = basis_of(run, host.machine.agents)
        layers = tuple(
            layer.model_copy(update={"no_cut": "a write in place" if at == 2 else ""})
            for at, layer in enumerate(basis.profile.layers)
        )
        profile = basis.profile.model_copy(update={"version": 2, "layers": layers})
        known = PlanningInputs(profile, basis.cluster, known_links([], MeasuredLinks(), now=0.0))
        monkeypatch.setattr(JobMachine, "run", replace(run, described=known))
        with pytest.raises(UserError, match=r"cannot be cut: a write in place; let it end after 2 layers"):
            move(cluster, 0, 3, 1)
        assert move(cluster, 0, 1, 3) == ("ready", (2, 2))

    @pytest.mark.parametrize(
        ("overrides", "wrong"),
        [
            (
                ("sync=allreduce", "weights=flush", "parameter_servers.count=1"),
                "under `allreduce` all virtual workers are cut alike, at the same time; write the moves as",
            ),
            (
                ('elastic.script=[{"at":{"clock":1},"do":"move","vw":0,"stages":[1,3]}]',),
                r"the script of the job \(elastic.script\) decides how virtual worker 1 is cut; change it there",
            ),
        ],
    )
    def test_jobs_that_decide_otherwise(self, tmp_path: Path, overrides: tuple[str, ...], wrong: str) -> None:
        with pytest.raises(UserError, match=wrong):
            move(started(tmp_path, *overrides), 1, 3, 1)

    def test_it_must_compute(self, cluster: Cluster) -> None:
        drain(cluster, 1)
        with pytest.raises(UserError, match="virtual worker 1 is leaving, and layers move between stages that compute"):
            move(cluster, 1, 3, 1)
        with pytest.raises(UserError, match="has no virtual worker 7; name one of these: 0, 1"):
            move(cluster, 7, 3, 1)

    def test_the_run_must_go_on(self, cluster: Cluster) -> None:
        cluster.tell("n0", KeyedStageReport(cluster.stages("n0", JOB_ID)[0], StageDone(Clock(6), "end")))
        with pytest.raises(UserError, match="is over, or about to be; no layers move any more"):
            move(cluster, 1, 3, 1)


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

    def test_a_script_decides_when_one_trains(self, tmp_path: Path) -> None:
        scripted = started(tmp_path, 'elastic.script=[{"at":{"clock":1},"do":"drop","vw":1}]')
        with pytest.raises(UserError, match=r"script of the job .* decides when virtual worker 1 trains; change it"):
            drain(scripted, 1)

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
