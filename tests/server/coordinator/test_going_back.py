"""A job whose coordinator and clock shard are lost together: it goes back to its newest checkpoint by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.decide.lifecycle.job_machine import ENDS_AT_CHECKPOINT
from hetpipe.errors import PeerUnreachable, ProtocolViolation, UnknownJob
from hetpipe.storage.store import JobRecord
from hetpipe.values.commands import (
    ChildExit,
    StopVirtualWorkerCommand,
)
from hetpipe.values.events import JobEnded, JobState, NumberedEvent, Rewound, StateChanged, StopMode, Waiting
from hetpipe.values.ids import Clock, Term
from hetpipe.values.run_document import RunDocument
from hetpipe.values.sync import Progress
from tests.server.coordinator.builders import JOB_ID, agent_member, job, shard_member, submission
from tests.server.coordinator.fakes import FlakyStore
from tests.server.coordinator.succession import Succession, stages

LOST = (
    f"job {JOB_ID} was running when its coordinator ended, and parameter server ps0 (pid 200 on shards.host:7000) has "
    "lost its state of the job: its state folder does not contain it"
)
CLOCK_SHARD, OTHER_SHARD = "shards.host:7000", "shards.host:7001"


class Loss(Succession):
    """The coordinator and the disk of the clock shard are gone at once."""

    def lose(self, *, wiped: bool = False) -> None:
        self.cluster.shards.serving[CLOCK_SHARD].clear()
        self.cluster.shards.descriptions.clear()
        self.replace(wiped=wiped)

    def come_back(self) -> None:
        """All of them, the clock shard with an empty disk; it says twice that it has nothing of the job."""
        self.come_alive("n0", "n1", "ps1", "ps0")
        self.cluster.wait(0.5)

    def come_alive(self, *names: str) -> None:
        for name in names:
            if name.startswith("n"):
                self.cluster.join(replace(agent_member(name, devices=2), stages=stages(name, 0, 0)))
            else:
                self.cluster.join(shard_member(int(name[2:])))

    def end_old_stages(self) -> None:
        for agent in ("n0", "n1"):
            for stage in stages(agent, 0, 0):
                self.cluster.tell(agent, ChildExit(stage, 1, -9, ordered=True))

    def tell_clocks_of_nothing(self) -> None:
        self.cluster.beat("ps0")

    def submit_again(self) -> None:
        """Whoever follows it hands it in once more."""
        handed_in = submission(job(), str(self.cluster.run_dir))
        self.coordinator.submit_job(replace(handed_in, has_begun=True))

    def train_again(self) -> None:
        self.end_old_stages()
        self.cluster.wait(1.0)
        self.cluster.train()

    def checkpoint(self, clock: int) -> None:
        folder = f"/run/checkpoints/clock-{clock:08d}"
        self.cluster.shards.newest_checkpoint = folder
        start = Progress(Clock(clock), 1, bytes([0b101, 0, 0, 0, 0]), minibatches=8, samples=32)
        self.cluster.shards.progress[folder] = start

    @property
    def record(self) -> JobRecord:
        return self.coordinator.record(JOB_ID)

    def killed(self, agent: str) -> list[tuple[int, Term]]:
        return [(command.vw, command.term) for command in self.commands(agent, StopVirtualWorkerCommand)]


@pytest.fixture
def loss(tmp_path: Path) -> Loss:
    return Loss(tmp_path)


class TestTheWayBack:
    def test_it_goes_on_from_its_newest_checkpoint_in_the_next_term(self, loss: Loss) -> None:
        loss.checkpoint(4)
        before = len(loss.asked("configure"))
        loss.lose()
        loss.come_back()
        loss.train_again()

        folder = str(loss.cluster.run_dir / "rewind-1")
        configs = loss.asked("configure")[before:]
        assert {(config.term, config.run_dir, config.progress.clock) for config in configs} == {(2, folder, 4)}
        kept: RunDocument = configs[0].run
        assert (kept.submission.rewinds, kept.submission.first_run_dir) == (1, str(loss.cluster.run_dir))
        assert loss.state() is JobState.RUNNING
        assert loss.events(Rewound) == [Rewound(Clock(4), Clock(4), folder, LOST)]
        assert loss.events(StateChanged)[-5].remark == f"{LOST}: the whole job is rewound to its newest checkpoint"
        assert (loss.record.run_dir, loss.record.shards) == (str(loss.cluster.run_dir), ("ps0", "ps1"))
        loss.cluster.finish(JOB_ID)
        loss.cluster.wait(1.0)
        assert loss.machine.ended.result["rewinds"] == 1

    def test_without_a_checkpoint_it_begins_anew(self, loss: Loss) -> None:
        loss.lose()
        loss.come_back()
        loss.train_again()

        assert {(config.term, config.progress.clock) for config in loss.asked("configure")[-2:]} == {(2, 0)}
        assert loss.state() is JobState.RUNNING

    def test_one_heartbeat_of_its_clock_shard_proves_nothing(self, loss: Loss) -> None:
        loss.lose()
        loss.come_alive("n0", "n1", "ps1", "ps0")
        assert loss.coordinator.is_orphan(JOB_ID)
        loss.tell_clocks_of_nothing()
        loss.cluster.executor.run_all()

        assert loss.state() is JobState.SUBMITTED

    def test_processes_of_the_old_term_are_ended_first(self, loss: Loss) -> None:
        loss.lose()
        loss.come_back()
        told = {agent: loss.cluster.take(agent) for agent in ("n0", "n1")}
        assert [type(command) for commands in told.values() for command in commands] == [StopVirtualWorkerCommand] * 2
        loss.cluster.wait(2.0)
        assert loss.state() is JobState.SUBMITTED
        loss.end_old_stages()
        loss.cluster.wait(1.0)

        assert loss.state() is JobState.INSPECTING

    def test_those_that_do_not_end_hold_nobody_up(self, loss: Loss) -> None:
        loss.lose()
        loss.come_back()
        loss.cluster.wait(5.5)

        assert loss.state() is JobState.INSPECTING

    def test_an_agent_that_comes_late_hears_that_its_processes_are_over(self, loss: Loss) -> None:
        loss.lose()
        loss.come_alive("n0", "ps1", "ps0")
        loss.cluster.wait(0.5)
        for stage in stages("n0", 0, 0):
            loss.cluster.tell("n0", ChildExit(stage, 1, -9, ordered=True))
        loss.cluster.wait(3.0)
        assert loss.state() is JobState.PENDING
        assert "more than the 1 registered agent has (2)" in str(loss.host.machine.queue_place)
        loss.come_alive("n1")
        assert loss.killed("n1") == [(1, 1)]
        loss.cluster.wait(1.0)
        assert loss.state() is JobState.PENDING
        for stage in stages("n1", 0, 0):
            loss.cluster.tell("n1", ChildExit(stage, 1, -9, ordered=True))
        loss.cluster.wait(1.0)
        loss.cluster.train()

        assert loss.state() is JobState.RUNNING

    def test_one_that_comes_when_it_trains_again_does_too(self, loss: Loss) -> None:
        loss.lose()
        loss.come_back()
        loss.train_again()
        loss.come_alive("n1")

        assert (1, 1) in loss.killed("n1")

    def test_a_store_that_knows_no_term_takes_one_above_what_is_written(self, loss: Loss) -> None:
        loss.lose(wiped=True)
        loss.submit_again()
        loss.come_back()
        loss.train_again()

        assert {config.term for config in loss.asked("configure")[-2:]} == {2}

    def test_who_dies_while_it_is_inspected_is_waited_for(self, loss: Loss) -> None:
        loss.lose()
        loss.come_back()
        loss.end_old_stages()
        loss.cluster.wait(1.0)
        assert loss.state() is JobState.INSPECTING
        loss.cluster.wait(6.0, silent=("n0",))
        assert loss.state() is JobState.PENDING
        loss.cluster.join(agent_member("n0", devices=2, pid=777))
        loss.cluster.wait(0.5)
        loss.cluster.train()

        assert loss.state() is JobState.RUNNING

    def test_a_parameter_server_that_dies_while_it_is_prepared_is_waited_for(self, loss: Loss) -> None:
        loss.lose()
        loss.come_back()
        loss.end_old_stages()
        loss.cluster.shards.dead.add(OTHER_SHARD)
        loss.cluster.wait(1.0)
        loss.cluster.obey()
        loss.cluster.wait(3.0)
        assert loss.state() is JobState.PLANNING
        loss.cluster.shards.dead.clear()
        loss.cluster.wait(1.5)
        loss.cluster.train()

        assert loss.state() is JobState.RUNNING
        assert [event.to_clock for event in loss.events(Rewound)] == [0]

    def test_the_next_coordinator_takes_the_way_up_again(self, loss: Loss) -> None:
        loss.checkpoint(4)
        loss.lose()
        loss.come_back()
        loss.cluster.wait(0.5)
        assert loss.record.state is JobState.SUBMITTED
        loss.replace()
        loss.come_back()
        loss.train_again()

        assert loss.state() is JobState.RUNNING
        assert loss.asked("configure")[-1].progress.clock == 4

    def test_it_is_lost_again_and_has_a_folder_of_its_own(self, loss: Loss) -> None:
        for number in (1, 2):
            loss.checkpoint(4)
            loss.lose()
            loss.come_back()
            loss.train_again()
            loss.cluster.wait(5.5)
            loss.cluster.train()

            assert loss.events(Rewound)[-1].folder == str(loss.cluster.run_dir / f"rewind-{number}")
        assert loss.machine.rewinds == 2

    @pytest.mark.parametrize("mode", list(StopMode))
    def test_a_stop_on_the_way_ends_it(self, loss: Loss, mode: StopMode) -> None:
        loss.lose()
        loss.come_back()
        loss.coordinator.stop_job(JOB_ID, mode)
        loss.cluster.wait(6.0)

        assert loss.record.state is JobState.STOPPED


class TestNobodyTells:
    def test_after_a_while_it_goes_back_without_the_parameter_server_that_is_away(self, loss: Loss) -> None:
        loss.replace()
        loss.come_alive("n0", "n1", "ps1")
        loss.cluster.wait(59.5)
        assert loss.coordinator.is_orphan(JOB_ID)
        assert loss.coordinator.awaited(JOB_ID).startswith(
            "its coordinator ended, and the new one waits for a parameter server to report it, "
        )
        loss.cluster.join(shard_member(2))
        loss.cluster.wait(1.0)
        loss.train_again()

        assert loss.state() is JobState.RUNNING
        assert loss.record.shards == ("ps1", "ps2")

    def test_whose_clock_shard_comes_with_all_it_had_goes_on_from_there(self, loss: Loss) -> None:
        loss.replace()
        loss.come_alive("n0", "n1", "ps1")
        loss.cluster.wait(61.0)
        assert loss.state() is JobState.SUBMITTED
        loss.come("ps0")

        assert loss.state() is JobState.RUNNING
        assert loss.events(Rewound) == []

    def test_one_that_cannot_be_led_by_what_it_has_is_prepared_anew(self, loss: Loss) -> None:
        loss.replace()
        loss.come_alive("n0", "n1", "ps1")
        loss.cluster.wait(61.0)
        loss.cluster.shards.refusals["describe"] = ProtocolViolation("it has no document")
        loss.end_old_stages()
        loss.come("ps0")
        for _ in range(65):
            loss.tell_clocks()
            loss.cluster.wait(1.0)
        loss.cluster.train()

        assert [event.to_clock for event in loss.events(Rewound)] == [0]

    def test_it_is_pending_until_there_are_devices_again(self, loss: Loss) -> None:
        loss.lose()
        loss.come_alive("ps0", "ps1")
        loss.cluster.wait(300.0)
        assert loss.state() is JobState.PENDING
        assert any("needs 4 devices" in event.sentence for event in loss.events(Waiting))
        loss.come_alive("n0", "n1")
        loss.train_again()

        assert loss.state() is JobState.RUNNING


class TestWhatTheStoreKnows:
    """What was handed in is what a job goes back by."""

    def test_a_record_that_no_index_names_is_found_by_its_id(self, loss: Loss) -> None:
        flaky = FlakyStore(loss.cluster.store)
        flaky.jobs = lambda: ()  # type: ignore[attr-defined]
        loss.cluster.store = flaky
        loss.lose()
        loss.come_back()
        loss.cluster.wait(61.0)
        loss.train_again()

        assert loss.state() is JobState.RUNNING
        assert [event.to_clock for event in loss.events(Rewound)] == [0]

    def test_one_that_cannot_go_back_ends_where_everybody_hears_it(self, loss: Loss) -> None:
        loss.forget_submission()
        flaky = FlakyStore(loss.cluster.store)
        flaky.jobs = lambda: ()  # type: ignore[attr-defined]
        loss.cluster.store = flaky
        loss.lose()
        loss.come_back()
        loss.cluster.wait(61.0)

        assert loss.record.state is JobState.FAILED
        assert "no parameter server reports it" in loss.record.failure
        assert isinstance(loss.coordinator.kept_events(JOB_ID, after=0)[-1].event, JobEnded)
        assert loss.coordinator.stop_job(JOB_ID, StopMode.CHECKPOINT) is JobState.FAILED

    def test_one_that_was_overlooked_is_looked_after_when_somebody_asks(self, loss: Loss) -> None:
        flaky = FlakyStore(loss.cluster.store)
        flaky.jobs = lambda: ()  # type: ignore[attr-defined]
        loss.cluster.store = flaky
        loss.lose()
        assert not loss.coordinator.is_orphan(JOB_ID)
        assert loss.record.state is JobState.RUNNING

        assert loss.coordinator.is_orphan(JOB_ID)

    def test_a_job_of_which_nobody_knows_anything_says_so(self, loss: Loss) -> None:
        loss.lose(wiped=True)
        loss.come_back()
        with pytest.raises(UnknownJob, match="its coordinator ended"):
            loss.coordinator.record(JOB_ID)
        loss.cluster.wait(61.0)

        assert loss.record.state is JobState.FAILED
        assert loss.record.failure.endswith(
            "the store has nothing of it, either, so its submission is lost: resume from its newest "
            "checkpoint with `hetpipe submit --resume RUN_DIR --coordinator HOST:PORT`"
        )
        (told,) = loss.coordinator.kept_events(JOB_ID, after=7)
        assert told.sequence == 8
        assert told.event == JobEnded(JobState.FAILED, loss.record.failure, "JobFailed")
        assert loss.cluster.beat("n0", jobs=(JOB_ID,)).ended_jobs == (JOB_ID,)

    def test_handed_in_again_it_goes_back_however_far_it_had_come(self, loss: Loss) -> None:
        loss.checkpoint(4)
        loss.lose(wiped=True)
        loss.submit_again()
        loss.come_back()
        loss.train_again()

        assert loss.state() is JobState.RUNNING
        assert loss.asked("configure")[-1].progress.clock == 4

    def test_handed_in_again_its_clock_shard_is_heard_first(self, loss: Loss) -> None:
        loss.replace(wiped=True)
        loss.submit_again()
        loss.come("n0", "n1", "ps1", "ps0")

        assert loss.state() is JobState.RUNNING
        assert loss.events(Rewound) == []

    def test_one_that_has_ended_is_not_begun_again_because_it_is_handed_in_again(self, loss: Loss) -> None:
        loss.cluster.finish(JOB_ID)
        loss.cluster.wait(1.0)
        loss.replace()
        loss.submit_again()
        loss.cluster.usual()
        loss.cluster.wait(70.0)

        assert loss.record.state is JobState.FINISHED

    def test_an_end_that_was_not_told_is_told_from_the_record(self, loss: Loss) -> None:
        kept = loss.cluster.store.job(JOB_ID)
        assert kept is not None
        loss.cluster.store.replace_job(kept.at(JobState.FAILED, failure="its disk is gone"))
        loss.replace()

        assert loss.coordinator.kept_events(JOB_ID, after=100) == (
            NumberedEvent(101, JobEnded(JobState.FAILED, "its disk is gone", "JobFailed")),
        )

    def test_a_store_that_is_away_is_waited_for(self, loss: Loss) -> None:
        flaky = FlakyStore(loss.cluster.store)
        loss.cluster.store = flaky
        loss.lose()
        loss.come_alive("n0", "n1", "ps1", "ps0")
        flaky.away = True
        loss.cluster.wait(4.0)
        assert loss.coordinator.host(JOB_ID) is None
        flaky.away = False
        loss.cluster.wait(2.0)
        loss.train_again()

        assert loss.state() is JobState.RUNNING


class TestStops:
    def test_one_at_once_waits_for_nobody(self, loss: Loss) -> None:
        loss.replace()
        loss.come_alive("n0", "n1")
        assert loss.coordinator.stop_job(JOB_ID, StopMode.NOW) is JobState.RUNNING
        loss.cluster.wait(1.0)

        assert loss.record.state is JobState.STOPPED
        assert loss.cluster.beat("n0", jobs=(JOB_ID,)).ended_jobs == (JOB_ID,)

    def test_one_with_a_checkpoint_ends_what_nobody_can_lead(self, loss: Loss) -> None:
        loss.lose()
        loss.coordinator.stop_job(JOB_ID, StopMode.CHECKPOINT)
        loss.come_back()
        loss.cluster.wait(1.0)

        assert loss.record.state is JobState.STOPPED
        assert loss.record.failure == f"{LOST}; {ENDS_AT_CHECKPOINT}"

    def test_the_wish_outlives_the_next_coordinator_too(self, loss: Loss) -> None:
        loss.replace()
        loss.coordinator.stop_job(JOB_ID, StopMode.CHECKPOINT)
        loss.replace()
        loss.come("n0", "n1", "ps0", "ps1")

        assert loss.state() is JobState.STOPPING

    def test_and_does_not_keep_the_adopted_job_from_being_kept(self, loss: Loss) -> None:
        loss.replace()
        loss.come_alive("n0", "n1", "ps1")
        loss.cluster.join(shard_member(0))
        loss.cluster.shards.refusals["describe"] = PeerUnreachable("not now")
        loss.tell_clocks()
        loss.coordinator.stop_job(JOB_ID, StopMode.CHECKPOINT)
        del loss.cluster.shards.refusals["describe"]
        for _ in range(3):
            loss.tell_clocks()
            loss.cluster.wait(1.0)

        kept = loss.cluster.store.job(JOB_ID)
        assert kept is not None
        assert (kept.state, kept.stop) == (JobState.STOPPING, StopMode.CHECKPOINT)
