"""A new coordinator leads a job that is under way: what it takes over, and what it finds missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.decide.lifecycle.adoption import ADOPTED
from hetpipe.errors import Unavailable
from hetpipe.values.commands import (
    ChildExit,
    KeyedStageReport,
    StopJobCommand,
    StopVirtualWorkerCommand,
)
from hetpipe.values.events import Evaluated, JobEnded, JobState, NumberedEvent, StateChanged, StopMode, WorkerLost
from hetpipe.values.ids import AgentId, Clock
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.run import StageDone, StageEvaluation
from hetpipe.values.sync import Progress
from tests.server.coordinator.builders import JOB_ID, agent_info, clocks, job, progress, submission
from tests.server.coordinator.fakes import Cluster
from tests.server.coordinator.succession import Succession, key, seen, stages


@pytest.fixture
def succession(tmp_path: Path) -> Succession:
    return Succession(tmp_path)


class TestAsIfNothingHadBeen:
    @pytest.mark.parametrize("wiped", [False, True])
    def test_the_job_runs_and_ends(self, succession: Succession, wiped: bool) -> None:  # noqa: FBT001 - a parameter
        succession.succeed(wiped=wiped)
        succession.cluster.wait(30.0)

        assert succession.state() is JobState.RUNNING
        assert succession.events(WorkerLost) == []
        assert succession.asked("evict") == []
        assert succession.cluster.obey() == []
        succession.cluster.finish(JOB_ID)
        succession.cluster.wait(1.0)
        assert succession.machine.ended.result["samples"] == 80
        kept = succession.cluster.store.job(JOB_ID)
        assert kept is not None
        assert (kept.state, kept.run_dir) == (JobState.FINISHED, str(succession.cluster.run_dir))
        assert kept.submission == replace(submission(job(), kept.run_dir), has_begun=not wiped)
        assert isinstance(succession.cluster.store.events(JOB_ID)[-1].event, JobEnded)

    def test_evaluations_of_before_count_and_are_not_told_twice(self, succession: Succession) -> None:
        def evaluate(clock: int) -> None:
            evaluation = StageEvaluation(Clock(clock), 1, 10, {"loss": 5.0})
            succession.cluster.tell("n0", KeyedStageReport(key(0, 1), evaluation))
            succession.cluster.executor.run_all()

        evaluate(2)
        succession.succeed()
        evaluate(2)
        evaluate(3)

        found = succession.machine.evaluations.summary
        assert (found.number, found.last.clock) == (2, 3)
        assert [event.clock for event in succession.events(Evaluated)] == [2, 3]

    def test_status_knows_processes_and_clocks(self, succession: Succession) -> None:
        succession.succeed(wiped=True)

        assert succession.machine.clocks == clocks(3, 2)
        assert [(life.pid, life.shown_state) for life in succession.machine.stages] == [(77, "ready")] * 4
        assert [worker.state for worker in succession.machine.workers] == ["ready", "ready"]

    def test_progress_counts_what_was_before(self, succession: Succession) -> None:
        succession.succeed()
        for vw, samples in ((0, 1_000), (1, 2_000)):
            report = progress(samples=samples, compute_seconds=40.0, idle_seconds=10.0)
            succession.cluster.tell(f"n{vw}", KeyedStageReport(key(vw, 1), report))
        succession.cluster.wait(1.0)

        assert succession.host.picture is not None
        assert succession.host.picture.samples_per_second == 0.0
        assert succession.host.picture.running_seconds == 51.0

    def test_people_are_told_and_numbers_go_on(self, succession: Succession) -> None:
        before = tuple(succession.host.events)
        succession.succeed()

        assert tuple(succession.host.events)[: len(before)] == before
        told = succession.host.events[len(before)]
        assert told == NumberedEvent(before[-1].sequence + 1, StateChanged(JobState.RUNNING, ADOPTED))

    def test_a_stop_goes_to_the_next_barrier(self, succession: Succession) -> None:
        succession.succeed()
        succession.coordinator.stop_job(JOB_ID, StopMode.CHECKPOINT)
        succession.cluster.executor.run_all()

        assert succession.asked("request_barrier") == [(JOB_ID, 1, "stop")]
        succession.cluster.finish(JOB_ID, "stop")
        assert succession.state() is JobState.STOPPED

    def test_shards_that_serve_it_are_told_nothing(self, succession: Succession) -> None:
        succession.replace(wiped=True)
        succession.come("ps1", "ps0", "n0", "n1")

        for member in ("ps0", "ps1", "n0"):
            assert succession.cluster.beat(member, jobs=(JOB_ID,)).ended_jobs == ()

    def test_a_job_that_waits_gets_what_is_free(self, succession: Succession) -> None:
        succession.replace(wiped=True)
        succession.coordinator.submit_job(submission(job(), "/nowhere/other", request_id="another-request"))
        succession.come("n0", "n1", "ps0", "ps1")
        succession.cluster.executor.run_all()

        assert succession.state() is JobState.RUNNING
        other = succession.coordinator.host(None)
        assert other is not None
        assert other.machine.state is JobState.PENDING

    def test_it_gets_nothing_while_nobody_knows_what_is(self, succession: Succession) -> None:
        """The agents have no processes of the job, and its clock shard is away: it may use any device."""
        succession.replace(wiped=True)
        succession.come("n0", "n1", "ps1", have={"n0": (), "n1": ()})
        other = succession.coordinator.submit_job(
            submission(job("parameter_servers.count=1"), "/nowhere/other", request_id="another-request")
        )
        succession.cluster.wait(40.0)
        host = succession.coordinator.host(other)
        assert host is not None
        assert host.machine.state is JobState.PENDING
        assert str(host.machine.queue_place) == (
            f"1st in the queue, priority 0; waits for the parameter servers to report what job {JOB_ID} uses, which "
            "continues without a coordinator"
        )
        with pytest.raises(Unavailable, match="retry in a few seconds"):
            succession.coordinator.free_devices()

        succession.come("ps0")
        succession.cluster.wait(1.0)
        assert succession.machine.state is JobState.RUNNING
        assert host.machine.state is JobState.PENDING
        assert succession.coordinator.free_devices() == tuple(agent_info(name, devices=0) for name in ("n0", "n1"))


class TestLives:
    def test_one_that_died_in_between_begins_anew(self, succession: Succession) -> None:
        succession.replace()
        succession.come("ps0", "ps1", "n0")
        succession.come("n1", have={"n1": (key(1, 0),)})
        succession.cluster.tell("n1", ChildExit(key(1, 1), 1_011, -9))
        succession.cluster.wait(1.0)

        (lost,) = succession.events(WorkerLost)
        assert lost.sentence.endswith("was killed by SIGKILL")
        assert succession.asked("evict") == [(JOB_ID, 1, 1, 0)]
        succession.cluster.train()
        assert succession.asked("admit") == [(JOB_ID, 1, 1, 1, 2)]
        assert [worker.incarnation for worker in succession.machine.workers] == [0, 1]

    def test_so_does_one_whose_end_an_earlier_coordinator_ordered(self, succession: Succession) -> None:
        succession.succeed()
        for stage in (0, 1):
            succession.cluster.tell("n1", ChildExit(key(1, stage), 1_010 + stage, -9, ordered=True))
        succession.cluster.wait(1.0)

        assert succession.asked("evict") == [(JOB_ID, 1, 1, 0)]
        assert succession.asked("admit") == [(JOB_ID, 1, 1, 1, 2)]

    def test_so_does_one_that_was_killed_by_an_order_of_the_coordinator_before(self, succession: Succession) -> None:
        succession.replace()
        succession.come("ps0", "ps1", "n0")
        succession.come("n1", have={"n1": ()})
        for stage in (0, 1):
            succession.cluster.tell("n1", ChildExit(key(1, stage), 1_010 + stage, -9, ordered=True))
        succession.cluster.train()

        assert succession.asked("evict") == [(JOB_ID, 1, 1, 0)]
        assert succession.machine.workers[1].state == "ready"

    def test_so_does_one_whose_end_nobody_tells(self, succession: Succession) -> None:
        succession.replace()
        succession.come("n1", have={"n1": (key(1, 0),)})
        succession.come("ps0", "ps1", "n0")
        succession.cluster.wait(1.0)
        assert succession.asked("evict") == [(JOB_ID, 1, 1, 0)]
        assert [command.vw for command in succession.commands("n1", StopVirtualWorkerCommand)] == [1]
        succession.cluster.tell("n1", ChildExit(key(1, 0), 1_010, -9, ordered=True))
        (lost,) = succession.events(WorkerLost)
        sentence = "stage 1 of virtual worker 1 (on n1.host) was gone when a new coordinator adopted the job"
        assert lost.sentence == sentence

    def test_an_agent_that_does_not_come_back_has_lost_its_stages(self, succession: Succession) -> None:
        succession.replace()
        succession.come("ps0", "ps1", "n0")
        succession.cluster.wait(6.0)
        assert succession.asked("evict") == []
        succession.cluster.wait(1.0)
        assert succession.asked("evict") == [(JOB_ID, 1, 1, 0)]
        succession.cluster.wait(10.0)
        assert succession.asked("admit") == []
        succession.come("n1", have={"n1": ()})
        succession.cluster.wait(1.0)
        assert succession.asked("admit") == [(JOB_ID, 1, 1, 1, 2)]

    def test_one_that_the_log_has_evicted_begins_anew(self, succession: Succession) -> None:
        succession.describe(seen(0), seen(1, 2, "gone"))
        succession.replace()
        succession.come("ps0", "ps1", "n0", "n1", lives=(0, 2))
        assert [(c.vw, c.incarnation) for c in succession.commands("n1", StopVirtualWorkerCommand)] == [(1, 2)]
        for stage in (0, 1):
            succession.cluster.tell("n1", ChildExit(key(1, stage, 2), 1, -9, ordered=True))
        succession.cluster.train()

        assert succession.asked("evict") == []
        assert succession.asked("admit") == [(JOB_ID, 1, 1, 3, 2)]
        assert succession.machine.workers[1].state == "ready"

    def test_a_newcomer_gets_ready(self, succession: Succession) -> None:
        succession.describe(seen(0), seen(1, 1, "newcomer"))
        succession.replace()
        succession.come("ps0", "ps1", "n0")
        assert succession.machine.workers[1].state == "starting"
        succession.come("n1", lives=(0, 1))

        assert succession.machine.workers[1].state == "ready"

    def test_one_that_nobody_has_started_yet_begins_anew(self, succession: Succession) -> None:
        succession.describe(seen(0), seen(1, 1, "newcomer"))
        succession.replace()
        succession.come("ps0", "ps1", "n0", "n1", have={"n1": ()})
        succession.cluster.wait(1.5)
        succession.cluster.train()

        assert succession.asked("evict") == [(JOB_ID, 1, 1, 1)]
        assert succession.asked("admit") == [(JOB_ID, 1, 1, 2, 2)]

    def test_one_that_was_to_join_and_that_the_log_has_not_heard_of_begins(self, succession: Succession) -> None:
        succession.describe(seen(0))
        succession.replace()
        succession.come("ps0", "ps1", "n0", "n1", have={"n1": ()})
        succession.cluster.train()

        assert succession.asked("admit") == [(JOB_ID, 1, 1, 1, 2)]
        assert succession.machine.workers[1].state == "ready"

    def test_a_newcomer_that_was_asked_to_stay_out_is_sent_away(self, succession: Succession) -> None:
        succession.describe(seen(0), seen(1, 1, "newcomer"), run=replace(succession.run, out=(Vw(1),)))
        succession.replace()
        succession.come("ps0", "ps1", "n0", "n1", lives=(0, 1))
        succession.cluster.train()

        assert succession.asked("evict") == [(JOB_ID, 1, 1, 1)]
        assert succession.machine.workers[1].state == "out"

    def test_a_drain_that_was_not_told_yet_is_told(self, succession: Succession) -> None:
        succession.describe(run=replace(succession.run, out=(Vw(1),)))
        succession.succeed()
        succession.cluster.executor.run_all()

        assert succession.asked("drain") == [(JOB_ID, 1, 1, 0)]

    def test_what_is_left_of_an_older_life_is_ended(self, succession: Succession) -> None:
        succession.describe(seen(0), seen(1, 1))
        succession.replace()
        succession.come("ps0", "ps1", "n0")
        succession.come("n1", have={"n1": (key(1, 0, 0), *stages("n1", 0, 1))})

        assert [(c.vw, c.incarnation) for c in succession.commands("n1", StopVirtualWorkerCommand)] == [(1, 0)]
        succession.cluster.wait(10.0)
        assert succession.asked("evict") == []

    def test_one_that_was_asked_to_stay_out_does(self, succession: Succession) -> None:
        succession.describe(seen(0), seen(1, 0, "gone"), run=replace(succession.run, out=(Vw(1),)))
        succession.succeed()
        succession.cluster.wait(10.0)

        assert succession.asked("admit") == []
        assert succession.machine.workers[1].state == "out"

    def test_one_that_leaves_goes_on_leaving(self, succession: Succession) -> None:
        succession.describe(seen(0), seen(1, leaving=True), run=replace(succession.run, out=(Vw(1),)))
        succession.succeed()
        assert succession.machine.workers[1].state == "leaving"
        for stage in (0, 1):
            succession.cluster.tell("n1", KeyedStageReport(key(1, stage), StageDone(Clock(4), "drain")))
            succession.cluster.tell("n1", ChildExit(key(1, stage), 1, 0))

        assert succession.machine.workers[1].state == "out"
        assert succession.asked("drain") == []


class TestBeforeAndAfterTraining:
    def test_one_that_starts_runs_when_all_are_ready(self, succession: Succession) -> None:
        newcomers = (seen(0, standing="newcomer"), seen(1, standing="newcomer"))
        succession.describe(*newcomers, clocks=replace(clocks(0, 0), published=Clock(-1)))
        succession.replace()
        succession.come("ps0", "ps1", "n0")
        assert succession.state() is JobState.STARTING
        succession.come("n1")
        assert succession.state() is JobState.RUNNING

    def test_one_that_has_not_begun_is_begun_again(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path / "run").usual()
        cluster.coordinator.submit_job(submission(job(), str(cluster.run_dir)))
        cluster.wait(0.5)
        cluster.coordinator = cluster.new_coordinator()
        cluster.usual()
        cluster.train()

        host = cluster.coordinator.host(JOB_ID)
        assert host is not None
        assert host.machine.state is JobState.RUNNING
        assert [event.event.state for event in host.events if isinstance(event.event, StateChanged)] == [
            "inspecting",
            "submitted",
            "pending",
            "inspecting",
            "planning",
            "starting",
            "running",
        ]

    def test_the_queue_outlives_its_coordinator(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path / "run").usual()
        names = [f"request-{number:08d}" for number in range(4)]
        ids = [
            cluster.coordinator.submit_job(submission(job(), str(cluster.run_dir), request_id=name)) for name in names
        ]
        cluster.train()
        cluster.coordinator.stop_job(ids[0], StopMode.NOW)
        cluster.coordinator.stop_job(ids[2], StopMode.NOW)
        cluster.executor.run_all()
        cluster.coordinator = cluster.new_coordinator()
        cluster.coordinator.tick()

        waiting = [host for host in cluster.coordinator.hosts() if host.machine.state is JobState.PENDING]
        places = {host.job_id: host.machine.queue_place.position for host in waiting if host.machine.queue_place}
        assert places == {ids[1]: 1, ids[3]: 2}

    def test_but_not_if_a_shard_serves_it_already(self, succession: Succession) -> None:
        store, coordinator = succession.cluster.store, succession.coordinator
        kept = store.job(JOB_ID)
        assert kept is not None
        store.replace_job(kept.at(JobState.PLANNING, failure=""))
        succession.succeed()

        assert succession.coordinator is not coordinator
        assert succession.state() is JobState.RUNNING
        assert succession.cluster.obey() == []

    def test_one_that_is_on_its_way_back_to_a_checkpoint_goes_that_way_again(self, succession: Succession) -> None:
        cluster, folder = succession.cluster, "/run/checkpoints/clock-00000004"
        cluster.shards.newest_checkpoint = folder
        cluster.shards.progress[folder] = Progress(Clock(4), 1, bytes(5), minibatches=8, samples=32)
        lost = {JOB_ID: "its disk is gone"}
        cluster.shards.serving["shards.host:7001"].clear()
        for _ in range(2):
            cluster.beat("ps1", lost=lost)
        assert succession.state() is JobState.PLANNING
        before = len(succession.asked("configure"))
        succession.die_on_the_way()
        succession.come("n0", "n1", "ps0", "ps1", have={"n0": (), "n1": ()})
        for _ in range(2):
            cluster.beat("ps1", lost=lost)
        cluster.train()
        cluster.wait(1.5)
        cluster.train()

        configs = succession.asked("configure")[before:]
        assert {(config.term, config.progress.clock) for config in configs} == {(2, 4)}
        assert succession.state() is JobState.RUNNING

    def test_one_that_goes_back_waits_for_whom_this_coordinator_has_never_seen(self, succession: Succession) -> None:
        """An agent was gone before this coordinator began, and comes when the job is on its way again."""
        succession.replace()
        succession.come("n1", "ps0", "ps1")
        cluster = succession.cluster
        cluster.shards.serving["shards.host:7001"].clear()
        for _ in range(2):
            cluster.beat("ps1")
        cluster.obey()
        cluster.wait(5.0)
        assert succession.state() is JobState.STARTING
        cluster.train()

        succession.come("n0", have={"n0": ()})
        cluster.train()
        cluster.wait(1.0)
        cluster.train()
        assert succession.state() is JobState.RUNNING
        assert [worker.state for worker in succession.machine.workers] == ["ready", "ready"]
        lost = succession.events(WorkerLost)
        assert [(event.vw, event.sentence) for event in lost] == [(0, "n0 did not register with the new coordinator")]

    def test_it_is_not_begun_again_when_nobody_knows_where_it_was(self, succession: Succession) -> None:
        succession.cluster.beat("ps0", lost={JOB_ID: "its disk is gone"})
        before = len(succession.asked("configure"))
        succession.die_on_the_way()
        succession.cluster.shards.serving.clear()
        succession.cluster.usual()
        succession.cluster.train()
        assert len(succession.asked("configure")) == before
        succession.cluster.wait(5.0)
        succession.cluster.train()

        folders = {config.run_dir for config in succession.asked("configure")[before:]}
        assert folders == {str(succession.cluster.run_dir / "rewind-1")}

    def test_a_run_that_is_over_ends(self, succession: Succession) -> None:
        over = replace(clocks(6, 6), barrier_reason="end")
        succession.describe(clocks=over, is_over=True)
        succession.replace()
        succession.come("n0", "n1", "ps0", "ps1", have={"n0": (), "n1": ()})
        succession.cluster.wait(1.5)

        assert succession.state() is JobState.FINISHED
        assert succession.events(WorkerLost) == []

    def test_a_stopped_one_has_stopped(self, succession: Succession) -> None:
        over = replace(clocks(6, 6), barrier_reason="stop")
        succession.describe(clocks=over, is_over=True, reasons=("stop",))
        succession.replace()
        succession.come("n0", "n1", "ps0", "ps1", have={"n0": (), "n1": ()})
        succession.cluster.wait(1.5)

        assert succession.state() is JobState.STOPPED

    def test_its_end_may_be_told_late(self, succession: Succession) -> None:
        succession.replace()
        succession.come("n0", "n1", have={"n0": (), "n1": ()})
        succession.come("ps0", "ps1")
        for vw in (0, 1):
            for stage in (0, 1):
                succession.cluster.tell(f"n{vw}", KeyedStageReport(key(vw, stage), StageDone(Clock(6), "end")))
                succession.cluster.tell(f"n{vw}", ChildExit(key(vw, stage), 1, 0))

        assert succession.state() is JobState.FINISHED
        assert succession.events(WorkerLost) == []

    def test_its_end_is_kept_before_the_shards_forget_it(self, succession: Succession) -> None:
        cluster = succession.cluster
        for vw in (0, 1):
            reports = [KeyedStageReport(key(vw, stage), StageDone(Clock(6), "end")) for stage in (0, 1)]
            cluster.coordinator.report(AgentId(f"n{vw}"), cluster.registrations[f"n{vw}"], 99, tuple(reports))
        while not succession.asked("release"):
            kept = cluster.store.job(JOB_ID)
            cluster.executor._queue.popleft()()

        assert kept is not None
        assert kept.state is JobState.FINISHED


class TestStops:
    def test_a_wish_that_the_shards_know_is_not_asked_again(self, succession: Succession) -> None:
        succession.describe(reasons=("stop",))
        succession.succeed(wiped=True)
        succession.cluster.wait(1.0)

        assert succession.state() is JobState.STOPPING
        assert succession.asked("request_barrier") == []

    def test_one_that_they_do_not_know_is_kept_in_the_store(self, succession: Succession) -> None:
        succession.cluster.shards.dead.add("shards.host:7000")
        succession.coordinator.stop_job(JOB_ID, StopMode.CHECKPOINT)
        succession.cluster.wait(0.5)
        succession.cluster.shards.dead.clear()
        succession.cluster.shards.calls.clear()
        succession.succeed()

        assert succession.state() is JobState.STOPPING
        assert succession.asked("request_barrier") == [(JOB_ID, 1, "stop")]

    def test_a_stop_at_once_goes_on(self, succession: Succession) -> None:
        succession.coordinator.stop_job(JOB_ID, StopMode.NOW)
        succession.cluster.executor.run_all()
        succession.replace()
        succession.come("n0", "ps0", "ps1")
        assert StopJobCommand(JOB_ID) in succession.commands("n0", StopJobCommand)
        succession.come("n1")
        assert succession.commands("n1", StopJobCommand) == [StopJobCommand(JOB_ID)]
        for agent in ("n0", "n1"):
            succession.cluster.end_stages(agent, JOB_ID, code=-15)

        assert succession.state() is JobState.STOPPED

    def test_a_wish_that_comes_before_anybody_leads_is_kept(self, succession: Succession) -> None:
        succession.replace()
        assert succession.coordinator.stop_job(JOB_ID, StopMode.CHECKPOINT) is JobState.RUNNING
        succession.come("n0", "n1", "ps0", "ps1")

        assert succession.state() is JobState.STOPPING
