"""The coordinator as a whole, without a network: a running job loses a virtual worker, or a shard what it kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from hetpipe.checkpoint.best import Best, read_best
from hetpipe.errors import StaleIncarnation
from hetpipe.server.coordinator.job_hosts import EVALUATIONS
from hetpipe.server.coordinator.servicer import CoordinatorServicer
from hetpipe.values.commands import ChildExit, KeyedStageReport, StageKey, StartStageCommand
from hetpipe.values.events import JobState, Rewound, StopMode, WorkerLost, WorkerRejoined
from hetpipe.values.ids import Clock, Incarnation, StageIndex, Term
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.run import StageEvaluation, StageFailed
from hetpipe.values.sync import Progress
from tests.server.coordinator.builders import JOB_ID, agent_member
from tests.server.coordinator.fakes import Cluster, events, state, submit


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    cluster = Cluster(tmp_path / "run").usual()
    submit(cluster)
    cluster.train()
    return cluster


class TestLives:
    """One stage of virtual worker 1, on agent n1, is killed."""

    def kill(self, cluster: Cluster) -> None:
        cluster.tell("n1", ChildExit(cluster.stages("n1", JOB_ID)[0], 1, -9))

    def test_it_is_evicted_and_admitted_again_with_the_newest_checkpoint(self, cluster: Cluster) -> None:
        cluster.shards.newest_checkpoint = "/run/checkpoints/clock-00000004"
        self.kill(cluster)
        cluster.obey()
        commands = cluster.obey()

        assert cluster.shards.asked("evict") == [("shards.host:7000", (JOB_ID, 1, 1, 0))]
        assert cluster.shards.asked("admit") == [("shards.host:7000", (JOB_ID, 1, 1, 1, 2))]
        configs = [command.config for command in commands if isinstance(command, StartStageCommand)]
        assert [(c.vw, c.stage, c.incarnation, c.host) for c in configs] == [
            (1, 0, 1, "n1.host"),
            (1, 1, 1, "n1.host"),
        ]
        assert {c.restore for c in configs} == {"/run/checkpoints/clock-00000004"}
        assert [event.incarnation for event in events(cluster, WorkerRejoined)] == [1]
        assert state(cluster) is JobState.RUNNING

    def test_the_log_says_what_became_of_it_and_why(self, cluster: Cluster) -> None:
        with capture_logs() as logs:
            self.kill(cluster)
            cluster.train()

        told = {line["event"]: line for line in logs if line["event"].startswith("worker_")}
        assert list(told) == ["worker_lost", "worker_rejoined"]
        (event,) = events(cluster, WorkerLost)
        lost = told["worker_lost"]
        assert (lost["log_level"], lost["job"], lost["vw"], lost["incarnation"]) == ("warning", JOB_ID, 1, 0)
        assert lost["sentence"] == event.sentence

    def test_a_clock_shard_that_is_away_is_asked_until_it_answers(self, cluster: Cluster) -> None:
        cluster.shards.dead.add("shards.host:7000")
        self.kill(cluster)
        cluster.obey()
        cluster.wait(3.0)
        assert len(cluster.shards.asked("evict")) == 4
        cluster.shards.dead.clear()
        cluster.wait(1.5)
        cluster.train()

        assert len(cluster.shards.asked("evict")) == 5
        assert len(cluster.shards.asked("admit")) == 1
        assert len(events(cluster, WorkerRejoined)) == 1

    def test_a_life_that_the_clock_shard_never_heard_of_is_evicted(self, cluster: Cluster) -> None:
        cluster.shards.refusals["evict"] = StaleIncarnation("virtual worker 1 had no incarnation 0")
        self.kill(cluster)
        cluster.train()

        assert len(events(cluster, WorkerRejoined)) == 1

    def test_a_mistake_of_our_own_does_not_lose_it(self, cluster: Cluster) -> None:
        cluster.shards.refusals["admit"] = ZeroDivisionError()  # type: ignore[assignment]
        self.kill(cluster)
        cluster.train()
        assert events(cluster, WorkerRejoined) == []
        del cluster.shards.refusals["admit"]
        cluster.wait(1.5)
        cluster.train()

        assert len(events(cluster, WorkerRejoined)) == 1

    def test_a_killed_agent_that_is_started_again_starts_it_again(self, cluster: Cluster) -> None:
        cluster.wait(6.0, silent=("n1",))
        assert [event.sentence for event in events(cluster, WorkerLost)] == [
            "agent n1 (pid 100 on n1.host) stopped answering: no heartbeat for 5.0 s"
        ]
        cluster.join(agent_member("n1", devices=2, pid=777))
        cluster.executor.run_all()
        cluster.train()

        assert len(events(cluster, WorkerRejoined)) == 1

    def test_one_that_takes_the_name_of_another_starts_it_again_at_once(self, cluster: Cluster) -> None:
        cluster.join(agent_member("n1", devices=2, pid=777))
        cluster.executor.run_all()
        cluster.train()

        assert [event.sentence for event in events(cluster, WorkerLost)] == [
            "agent n1 (pid 100 on n1.host) was replaced by pid 777 on n1.host"
        ]
        assert len(events(cluster, WorkerRejoined)) == 1


class TestRewinds:
    """Parameter server 1 is told to have lost its disk."""

    def evaluate(self, cluster: Cluster, clock: int, *, term: int) -> None:
        """A virtual worker tells of an evaluation of all samples."""
        last_stage = StageKey(JOB_ID, Vw(0), StageIndex(1), Incarnation(0), Term(term))
        evaluation = StageEvaluation(Clock(clock), 1, 10, {"loss": 5.0}, minibatches=4 * clock)
        cluster.tell("n0", KeyedStageReport(last_stage, evaluation))
        cluster.executor.run_all()

    def test_the_best_evaluation_of_each_folder_is_noted(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path / "run").usual()
        submit(cluster, "checkpoint.best=loss", "data.eval=model:train")
        cluster.train()
        for clock in (3, 6):
            self.evaluate(cluster, clock, term=1)
        assert read_best(cluster.run_dir) == Best(Clock(3), "loss", 0.5)

    def test_its_evaluations_go_on_in_one_file(self, cluster: Cluster) -> None:
        cluster.shards.newest_checkpoint = "/run/checkpoints/clock-00000004"
        cluster.shards.progress[cluster.shards.newest_checkpoint] = Progress(Clock(4), 1, bytes(5), 8, 32)
        for clock in (3, 6):
            self.evaluate(cluster, clock, term=1)
        self.lose(cluster)
        self.evaluate(cluster, 6, term=2)

        assert state(cluster) is JobState.RUNNING
        lines = [json.loads(line) for line in (cluster.run_dir / EVALUATIONS).read_text().splitlines()]
        assert [(line["clock"], line["minibatches"], line["rewinds"]) for line in lines] == [
            (3, 12, 0),
            (6, 24, 0),
            (6, 24, 1),
        ]
        assert not (cluster.run_dir / "rewind-1" / EVALUATIONS).exists()
        status = CoordinatorServicer(cluster.coordinator, host="here").status(JOB_ID)
        assert status.evaluations is not None
        assert (status.evaluations.number, status.evaluations.last.rewinds) == (2, 1)

    def lose(self, cluster: Cluster) -> None:
        cluster.shards.serving["shards.host:7001"].clear()
        for _ in range(2):
            cluster.beat("ps1", lost={JOB_ID: "its disk is gone"})
        cluster.train()
        cluster.wait(0.5)
        cluster.train()

    def test_everybody_begins_anew_from_the_newest_checkpoint(self, cluster: Cluster) -> None:
        start = Progress(Clock(4), 1, bytes([0b101, 0, 0, 0, 0]), minibatches=8, samples=32)
        cluster.shards.newest_checkpoint = "/run/checkpoints/clock-00000004"
        cluster.shards.progress["/run/checkpoints/clock-00000004"] = start
        self.lose(cluster)

        folder = cluster.run_dir / "rewind-1"
        configs = [(address, config) for address, config in cluster.shards.asked("configure")][2:]
        assert [address for address, _ in configs] == ["shards.host:7000", "shards.host:7001"]
        assert {(config.term, config.run_dir, config.progress.clock) for _, config in configs} == {(2, str(folder), 4)}
        kept = configs[0][1].run
        assert (kept.submission.rewinds, kept.submission.first_run_dir) == (1, str(cluster.run_dir))
        assert kept.eval_samples == 10
        (event,) = events(cluster, Rewound)
        assert (event.to_clock, event.folder) == (4, str(folder))
        assert event.sentence.endswith("has lost its state of the job: its disk is gone")
        assert state(cluster) is JobState.RUNNING
        assert cluster.coordinator.record(JOB_ID).run_dir == str(cluster.run_dir)
        assert sorted(path.name for path in folder.iterdir()) == ["facts.json", "job.json", "plan.json"]
        facts = json.loads((folder / "facts.json").read_text())
        assert facts["start"] == {
            "clock": 4,
            "epoch": 1,
            "used": [0, 2],
            "minibatches": 8,
            "samples": 32,
            "frozen": 0,
            "waves": {},
            "lineup": 0,
            "inactive": [],
            "fresh": [],
        }
        assert json.loads((folder / "plan.json").read_text())["term"] == 2

    def test_a_late_word_of_an_earlier_term_is_of_nobody(self, cluster: Cluster) -> None:
        (old, _) = cluster.stages("n1", JOB_ID)
        self.lose(cluster)
        (new, _) = cluster.stages("n1", JOB_ID)
        cluster.tell("n1", KeyedStageReport(old, StageFailed("UserError", "no such column")), ChildExit(old, 1, 1))

        assert (old.term, old.incarnation, new.term, new.incarnation) == (1, 0, 2, 0)
        assert state(cluster) is JobState.RUNNING
        assert events(cluster, WorkerLost) == []

    def test_without_one_from_where_it_began(self, cluster: Cluster) -> None:
        self.lose(cluster)

        assert cluster.shards.asked("configure")[-1][1].progress.clock == 0
        assert state(cluster) is JobState.RUNNING

    def test_a_lost_job_that_has_ended_is_told_to_be_over(self, cluster: Cluster) -> None:
        cluster.coordinator.stop_job(JOB_ID, StopMode.NOW)
        cluster.train()
        cluster.wait(6.0)

        assert cluster.beat("ps1", lost={JOB_ID: "its disk is gone"}).ended_jobs == (JOB_ID,)
