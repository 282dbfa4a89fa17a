"""The way of a whole job back to its newest checkpoint, fact by fact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetpipe.decide.lifecycle.configs import data_of, fresh_progress
from hetpipe.decide.lifecycle.exchange import (
    ClocksReported,
    DrainRequested,
    Evict,
    EvictAcknowledged,
    MemberGone,
    MemberRegistered,
    Prepared,
    Rewind,
    ShardHeartbeat,
    StopRequested,
    TaskFailed,
)
from hetpipe.decide.lifecycle.job_machine import ENDS_AT_CHECKPOINT
from hetpipe.decide.lifecycle.planning import PlannedRun
from hetpipe.decide.planner.partition import plan_job
from hetpipe.values.commands import StartStageCommand
from hetpipe.values.events import Evaluated, JobState, Rewound, StateChanged, StopMode, WorkerLeft
from hetpipe.values.ids import Clock, Incarnation, LayerIndex, Term
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.life_state import LifeState
from hetpipe.values.members import MemberId
from hetpipe.values.run import StageDone, StageEvaluation, StageFailed, StageReady
from tests.server.coordinator.builders import JOB_ID, STAGES, agent_member, clocks, job, model, shard_member
from tests.server.coordinator.machine_driver import AGENTS, SHARDS, Driver

LOST = "parameter server ps1 (pid 201 on shards.host:7001) has lost its state of the job: its disk is gone"


class Rewinding(Driver):
    """A job and what happens to it on its way back."""

    def hear(self, shard: int = 1, *, serves: bool = False) -> None:
        """A heartbeat of a parameter server."""
        self.feed(ShardHeartbeat(MemberId(f"ps{shard}"), serves=serves, reason="" if serves else "its disk is gone"))

    def lose_disk(self, shard: int = 1) -> None:
        self.hear(shard)
        self.hear(shard)

    def end_all(self) -> None:
        for vw, stage in STAGES:
            self.exit(vw, stage, -15)

    def prepare_again(self, clock: int, *, number: int = 1) -> None:
        """The shell has found a checkpoint at `clock`, or none."""
        plan = replace(plan_job(self.job, model(), AGENTS, Term(number + 1), JOB_ID), term=Term(number + 1))
        start = replace(fresh_progress(40), clock=Clock(clock))
        run = PlannedRun(self.job, plan)
        submission = replace(
            self.machine.submission, run_dir=f"/nowhere/run/rewind-{number}", rewinds=number, restore="/checkpoint"
        )
        self.feed(Prepared(run, data_of(self.job, model()), start, submission))

    def rewind(self, clock: int, *, number: int = 1) -> None:
        """All of it, once."""
        self.lose_disk()
        self.end_all()
        self.wait(31.0)
        assert self.rewinds[-1].number == number
        self.prepare_again(clock, number=number)

    def runs_again_without(self, vw: int) -> None:
        """The other virtual worker gets ready; this one stays out."""
        self.prepare_again(4)
        self.feed(EvictAcknowledged(Vw(vw), Incarnation(0)))
        for stage in (0, 1):
            self.exit(vw, stage, -9, ordered=True)
            self.report(1 - vw, stage, ready())

        assert self.machine.state is JobState.RUNNING
        assert self.worker(vw).state is LifeState.OUT

    @property
    def rewinds(self) -> list[Rewind]:
        return self.tasks(Rewind)


@pytest.fixture
def driver() -> Rewinding:
    driver = Rewinding()
    driver.to(JobState.RUNNING)
    return driver


class TestTheWay:
    @pytest.mark.parametrize("state", [JobState.STARTING, JobState.RUNNING])
    def test_all_processes_are_ended_first(self, state: JobState) -> None:
        driver = Rewinding()
        driver.to(state)
        driver.lose_disk()

        assert driver.machine.state is JobState.PLANNING
        assert driver.events(StateChanged)[-1].remark == f"{LOST}: the whole job is rewound to its newest checkpoint"
        assert driver.stop_commands == ["n0", "n1"]
        driver.wait(2.0)
        assert driver.rewinds == []
        driver.end_all()
        driver.wait(0.25)
        [task] = driver.rewinds
        assert (task.number, task.agents, task.shards) == (1, AGENTS, SHARDS)
        assert task.before.plan.term == 1
        assert task.eval_samples == 10
        driver.wait(1.0)
        assert driver.rewinds == [task]

    def test_processes_that_do_not_end_hold_nobody_up(self, driver: Rewinding) -> None:
        driver.lose_disk()
        driver.wait(4.75)
        assert driver.rewinds == []
        driver.wait(0.25)
        assert len(driver.rewinds) == 1

    def test_then_it_begins_anew_in_the_next_term(self, driver: Rewinding) -> None:
        driver.feed(ClocksReported(clocks(7, 8)))
        driver.lose_disk()
        driver.end_all()
        driver.wait(0.25)
        started = len(driver.start_commands)
        driver.prepare_again(4)

        assert driver.states()[-2:] == ["planning", "starting"]
        assert driver.events(Rewound) == [Rewound(Clock(7), Clock(4), "/nowhere/run/rewind-1", LOST)]
        commands = [item.command for item in driver.start_commands[started:]]
        configs = [command.config for command in commands if isinstance(command, StartStageCommand)]
        assert {config.plan.term for config in configs} == {2}
        assert {(config.run_dir, config.restore, config.incarnation) for config in configs} == {
            ("/nowhere/run/rewind-1", "/checkpoint", 0)
        }
        driver.ready()
        assert driver.machine.state is JobState.RUNNING
        driver.all_done()
        driver.wrap_up()
        result = driver.ended().result
        assert result is not None
        assert (result["run_dir"], result["rewinds"]) == ("/nowhere/run", 1)

    def test_evaluations_after_the_checkpoint_come_again_marked_with_the_rewind(self, driver: Rewinding) -> None:
        def evaluate(*clocks_evaluated: int) -> None:
            for clock in clocks_evaluated:
                driver.report(0, 1, StageEvaluation(Clock(clock), clock // 3, 10, {"loss": 30.0 / clock}))

        evaluate(3, 6)
        driver.rewind(4)
        driver.ready()
        evaluate(6, 9)
        driver.all_done()
        driver.wrap_up()

        told = [(event.clock, event.rewinds) for event in driver.events(Evaluated)]
        assert told == [(3, 0), (6, 0), (6, 1), (9, 1)]
        result = driver.ended().result
        assert result is not None
        assert [(one["clock"], one["rewinds"]) for one in result["evaluations"]["listed"]] == [(3, 0), (6, 1), (9, 1)]
        assert (result["evaluations"]["number"], result["eval"]["clock"]) == (3, 9)

    def test_an_evaluation_of_the_checkpoints_clock_comes_once(self, driver: Rewinding) -> None:
        """Who comes in at that clock cannot know that somebody has evaluated it."""
        within = StageEvaluation(Clock(4), 2, 5, {"loss": 2.0}, within_epoch=True, whole=False)
        driver.report(0, 1, within)
        driver.rewind(4)
        driver.ready()
        driver.report(0, 1, within)
        assert [(event.clock, event.whole) for event in driver.events(Evaluated)] == [(4, False)]

    def test_its_old_failures_do_not_count(self, driver: Rewinding) -> None:
        driver.fail(0, 0, "a wave could not be pushed", secondary=True)
        driver.lose_disk()
        driver.fail(1, 0, "the update is not finite")
        driver.end_all()
        driver.wait(0.25)
        driver.prepare_again(4)
        driver.ready()
        driver.wait(20.0)

        assert driver.machine.state is JobState.RUNNING

    def test_a_heartbeat_from_before_the_new_term_proves_nothing(self, driver: Rewinding) -> None:
        driver.rewind(4)
        driver.hear()
        driver.hear(serves=True)
        driver.hear()

        assert driver.machine.state is JobState.STARTING

    def test_parameter_servers_are_told_of_where_they_are_now(self, driver: Rewinding) -> None:
        moved = shard_member(1, term=9, port=8000)
        driver.feed(MemberRegistered(moved))
        driver.lose_disk()
        driver.end_all()
        driver.wait(0.25)

        assert driver.rewinds[0].shards == (SHARDS[0], moved)
        driver.prepare_again(4)
        commands = [item.command for item in driver.start_commands[-4:]]
        configs = [command.config for command in commands if isinstance(command, StartStageCommand)]
        assert {config.shard_addresses for config in configs} == {(SHARDS[0].address, moved.address)}

    def test_stages_say_where_their_agents_are_now(self, driver: Rewinding) -> None:
        driver.feed(MemberGone(MemberId("n1"), "n1 stopped answering"))
        driver.feed(MemberRegistered(replace(agent_member("n1", devices=2, pid=7), host="elsewhere")))
        driver.lose_disk()
        driver.end_all()
        driver.wait(0.25)
        driver.prepare_again(4)

        commands = [item.command for item in driver.start_commands[-4:]]
        configs = [command.config for command in commands if isinstance(command, StartStageCommand)]
        assert [config.host for config in configs] == ["n0.host", "n0.host", "elsewhere", "elsewhere"]


class TestTwice:
    def test_each_has_a_folder_of_its_own(self, driver: Rewinding) -> None:
        driver.rewind(4)
        driver.ready()
        driver.rewind(6, number=2)

        assert [event.folder for event in driver.events(Rewound)] == ["/nowhere/run/rewind-1", "/nowhere/run/rewind-2"]
        assert driver.machine.rewinds == 2

    def test_without_a_newer_checkpoint_it_rests_longer_each_time(self, driver: Rewinding) -> None:
        pauses = []
        for number in (1, 2, 3, 4):
            driver.lose_disk()
            driver.end_all()
            began = driver.now
            while len(driver.rewinds) < number:
                driver.wait(0.25)
            pauses.append(driver.now - began)
            driver.prepare_again(0, number=number)

        assert pauses == [0.25, 1.0, 2.0, 4.0]

    def test_so_often_in_a_row_and_no_more(self) -> None:
        driver = Rewinding(job("survive.restarts=2"))
        driver.to(JobState.RUNNING)
        driver.rewind(4)
        driver.rewind(4, number=2)
        driver.rewind(4, number=3)
        assert driver.machine.state is JobState.STARTING
        driver.rewind(4, number=4)

        ended = driver.ended()
        assert (ended.state, ended.error) == (JobState.FAILED, "StateLost")
        assert ended.sentence == (
            f"{LOST}; the job was rewound to clock 4 3 times in a row without a newer checkpoint, and is abandoned"
        )
        assert len(driver.wrap_up_tasks) == 1

    def test_a_newer_checkpoint_begins_the_count_anew(self) -> None:
        driver = Rewinding(job("survive.restarts=1"))
        driver.to(JobState.RUNNING)
        for number, clock in ((1, 0), (2, 4), (3, 4), (4, 5)):
            driver.rewind(clock, number=number)

        assert driver.machine.state is JobState.STARTING


class TestWhoIsNotThere:
    def test_a_parameter_server_is_waited_for(self, driver: Rewinding) -> None:
        driver.lose_disk()
        driver.feed(MemberGone(MemberId("ps0"), "ps0 stopped answering"))
        driver.end_all()
        driver.wait(10.0)
        assert driver.rewinds == []
        assert driver.sentences()[-1] == (
            "the coordinator waits for the requirements of a rewind to the newest checkpoint: ps0 stopped answering "
            f"(job {JOB_ID})"
        )
        driver.feed(MemberRegistered(shard_member(0)))
        driver.wait(0.25)
        assert len(driver.rewinds) == 1

    def test_but_not_for_ever(self) -> None:
        driver = Rewinding(job("survive.absence=20s"))
        driver.to(JobState.RUNNING)
        driver.lose_disk()
        driver.end_all()
        driver.feed(MemberGone(MemberId("ps1"), "ps1 stopped answering"))
        driver.wait(20.0)
        assert driver.machine.state is JobState.PLANNING
        driver.wait(0.5)

        assert driver.ended().sentence == (
            f"{LOST}; for 20 s the job could not be rewound to a checkpoint: ps1 stopped answering"
        )

    def test_one_that_goes_while_it_is_told_is_told_again(self, driver: Rewinding) -> None:
        driver.lose_disk()
        driver.end_all()
        driver.wait(0.25)
        driver.feed(TaskFailed("prepare", "PeerUnreachable", "parameter server at shards.host:7000 cannot be reached"))
        driver.feed(MemberGone(MemberId("ps0"), "ps0 stopped answering"))
        driver.wait(3.0)
        assert len(driver.rewinds) == 1
        driver.feed(MemberRegistered(shard_member(0)))
        driver.wait(0.25)

        assert [task.number for task in driver.rewinds] == [1, 2]
        driver.prepare_again(4, number=2)
        assert driver.machine.state is JobState.STARTING

    def test_what_cannot_be_mended_ends_the_job(self, driver: Rewinding) -> None:
        driver.lose_disk()
        driver.end_all()
        driver.wait(0.25)
        driver.feed(TaskFailed("prepare", "UserError", "the coordinator cannot write to the run's folder"))

        assert driver.ended().sentence == "the coordinator cannot write to the run's folder"

    def test_virtual_workers_without_their_agent_come_later(self, driver: Rewinding) -> None:
        driver.feed(MemberGone(MemberId("n1"), "n1 stopped answering"))
        driver.lose_disk()
        for stage in (0, 1):
            driver.exit(0, stage, -15)
        driver.wait(0.25)
        driver.prepare_again(4)
        assert driver.worker(1).state is LifeState.ENDING
        assert [task.term for task in driver.tasks(Evict)][-1] == 2
        driver.feed(EvictAcknowledged(Vw(1), Incarnation(0)))
        for stage in (0, 1):
            driver.report(0, stage, ready())
        assert driver.machine.state is JobState.RUNNING

    def test_where_stages_alone_hold_the_weights_agents_are_waited_for(self) -> None:
        driver = Rewinding(job("sync=allreduce", "weights=flush", "parameter_servers.count=1"))
        driver.to(JobState.RUNNING)
        driver.feed(MemberGone(MemberId("n1"), "n1 stopped answering"))
        for stage in (0, 1):
            driver.exit(0, stage, -15)
        driver.wait(10.0)
        assert driver.machine.state is JobState.PLANNING
        assert driver.rewinds == []
        driver.feed(MemberRegistered(agent_member("n1", devices=2)))
        driver.wait(0.25)
        driver.prepare_again(4)
        driver.ready()
        assert driver.states()[-1] == "running"


def ready() -> StageReady:
    return StageReady(pid=1)


class TestWhatPeopleWanted:
    def test_who_was_drained_stays_out(self, driver: Rewinding) -> None:
        driver.feed(DrainRequested(Vw(1), "out"))
        for stage in (0, 1):
            driver.report(1, stage, StageDone(Clock(3), "drain"))
            driver.exit(1, stage, 0)
        assert driver.events(WorkerLeft) == [WorkerLeft(Vw(1), Incarnation(0), returns=False)]
        driver.lose_disk()
        for stage in (0, 1):
            driver.exit(0, stage, -15)
        driver.wait(0.25)
        driver.runs_again_without(1)

    def test_who_was_about_to_leave_stays_out(self, driver: Rewinding) -> None:
        driver.feed(DrainRequested(Vw(1), "out"))
        driver.lose_disk()
        driver.end_all()
        driver.wait(0.25)
        driver.runs_again_without(1)

    @pytest.mark.parametrize("mode", list(StopMode))
    def test_a_stop_on_the_way_ends_the_job(self, driver: Rewinding, mode: StopMode) -> None:
        driver.lose_disk()
        driver.feed(StopRequested(mode))
        assert len(driver.wrap_up_tasks) == 1
        driver.end_all()
        driver.wrap_up()

        assert driver.ended().state is JobState.STOPPED
        assert driver.ended().result is None
        assert driver.rewinds == []

    def test_a_stop_while_it_is_prepared_waits_for_that(self, driver: Rewinding) -> None:
        driver.lose_disk()
        driver.end_all()
        driver.wait(0.25)
        driver.feed(StopRequested(StopMode.NOW))
        assert driver.wrap_up_tasks == []
        driver.prepare_again(4)
        assert len(driver.wrap_up_tasks) == 1
        driver.wrap_up()

        assert driver.ended().state is JobState.STOPPED
        assert driver.events(Rewound) == []

    def test_a_disk_that_is_lost_before_the_last_checkpoint_ends_the_stop_at_the_one_before(
        self, driver: Rewinding
    ) -> None:
        """To go back there would be to train once more what nobody wants trained."""
        driver.feed(StopRequested(StopMode.CHECKPOINT))
        driver.lose_disk()

        ended = driver.ended()
        assert (ended.state, ended.error, ended.result) == (JobState.STOPPED, "", None)
        assert ended.sentence == f"{LOST}; {ENDS_AT_CHECKPOINT}"
        assert driver.stop_commands == ["n0", "n1"]
        assert len(driver.wrap_up_tasks) == 1
        driver.feed(MemberRegistered(agent_member("n1", devices=2)))
        assert driver.stop_commands == ["n0", "n1", "n1"], "an agent that was away when all processes were to end"
        driver.end_all()
        driver.wrap_up()
        assert driver.rewinds == []
        assert driver.machine.is_settled(now=driver.now)

    def test_one_that_is_lost_when_nobody_needs_it_does_not_matter(self, driver: Rewinding) -> None:
        driver.all_done()
        driver.lose_disk()
        driver.wrap_up()

        assert driver.ended().state is JobState.FINISHED


def test_other_parameter_servers_do_not_matter(driver: Rewinding) -> None:
    for _ in range(3):
        driver.feed(ShardHeartbeat(MemberId("ps7"), serves=False))

    assert driver.machine.state is JobState.RUNNING


def test_what_stages_hear_of_a_server_that_has_forgotten_the_job_is_an_echo(driver: Rewinding) -> None:
    for error in ("UnknownJob", "StateLost", "StaleTerm"):
        for vw in (0, 1):
            driver.report(vw, 0, StageFailed(error, "the parameter server does not serve the job"))
    driver.wait(6.0)
    assert driver.states()[-1] == "running"
    driver.lose_disk()

    assert driver.states()[-1] == "planning"


def test_a_plan_that_was_made_meanwhile_stays(driver: Rewinding) -> None:
    lives = driver.machine.lives
    assert lives is not None
    before = lives.assignment.plan.virtual_workers[1]
    first, second = before.stages
    moved = replace(
        before,
        stages=(replace(first, last_layer=LayerIndex(3)), replace(second, first_layer=LayerIndex(3))),
    )
    lives.replan(moved, ())
    driver.lose_disk()
    driver.end_all()
    driver.wait(0.25)

    assert driver.rewinds[0].before.plan.virtual_workers[1] == moved
