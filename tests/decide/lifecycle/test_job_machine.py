"""A job's life: the usual way, stops, and waits that are too long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetpipe.decide.lifecycle.exchange import (
    ClocksReported,
    Evict,
    FinalClocks,
    RequestBarrier,
    ResourcesOffered,
    StopRequested,
    TaskFailed,
)
from hetpipe.decide.lifecycle.inspections import Inspected
from hetpipe.decide.lifecycle.job_machine import JobMachine
from hetpipe.decide.lifecycle.job_queue import ClusterView, Turn
from hetpipe.decide.lifecycle.patience import Patience
from hetpipe.decide.lifecycle.planning import PlannedRun
from hetpipe.decide.planner.partition import plan_job
from hetpipe.job.file import Job
from hetpipe.values.commands import (
    InspectCommand,
    InspectionPhase,
    InspectionResult,
    InspectionStep,
    KeyedStageReport,
    LinkAwaited,
    LinkResult,
    MeasureLinkCommand,
    StageKey,
)
from hetpipe.values.events import (
    Evaluated,
    JobState,
    Measuring,
    ProgressTable,
    QueuePlace,
    StateChanged,
    StopMode,
    Waiting,
)
from hetpipe.values.ids import AgentId, Clock, Incarnation, JobId, StageIndex, Term
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.measurement import ProfileStep
from hetpipe.values.run import StageDone, StageEvaluation, StagePhase, StageReady, StageWaiting
from tests.decide.lifecycle.test_agents_cluster import agent, t4
from tests.server.coordinator.builders import (
    BASE,
    JOB_ID,
    STAGES,
    agent_info,
    clocks,
    job,
    measured,
    model,
    progress,
    shard_member,
    submission,
)
from tests.server.coordinator.machine_driver import AGENTS, SHARDS, Driver

UNDER_WAY = [
    JobState.SUBMITTED,
    JobState.INSPECTING,
    JobState.PLANNING,
    JobState.STARTING,
    JobState.RUNNING,
]


class TestTheUsualWay:
    def test_from_submission_to_the_end(self) -> None:
        driver = Driver().to(JobState.RUNNING)
        driver.now = 10.0
        driver.all_done()
        assert driver.machine.state is JobState.RUNNING
        driver.wrap_up()

        assert driver.states() == ["inspecting", "planning", "starting", "running", "finished"]
        ended = driver.ended()
        assert ended.state is JobState.FINISHED
        assert ended.result is not None
        assert ended.result["samples"] == 80
        assert ended.result["wall_seconds"] == 10.0
        assert driver.stop_commands == []
        assert [task.shards for task in driver.wrap_up_tasks] == [SHARDS]

    def test_a_job_that_comes_with_a_report_of_its_model_is_planned_at_once(self) -> None:
        driver = Driver()
        handed_in = replace(submission(driver.job), model=model())
        driver.machine = JobMachine(JOB_ID, driver.job, handed_in, patience=Patience(), now=driver.now)
        driver.see_cluster()

        assert driver.commands(InspectCommand) == []
        assert driver.states() == ["inspecting", "planning"]
        (task,) = driver.prepare_tasks
        assert task.inspected == Inspected(model())
        plan = plan_job(driver.job, model(), AGENTS, Term(1), JOB_ID)
        assignment = PlannedRun(driver.job, plan).assignment(handed_in, AGENTS, SHARDS)
        assert assignment.submission == replace(handed_in, model=None), "what outlives the plan does not keep it"

    def test_the_first_agent_inspects(self) -> None:
        driver = Driver().to(JobState.INSPECTING)

        [command] = driver.commands(InspectCommand)
        assert command.agent == "n0"

    def test_claimed_are_the_first_free_devices(self) -> None:
        driver = Driver().to(JobState.PLANNING)

        [task] = driver.prepare_tasks
        assert task.agents == AGENTS
        assert task.shards == SHARDS
        assert driver.machine.agents == AGENTS

    def test_every_stage_is_started_on_its_agent(self) -> None:
        driver = Driver().to(JobState.STARTING)

        assert [item.agent for item in driver.start_commands] == ["n0", "n0", "n1", "n1"]

    def test_all_stages_must_be_ready(self) -> None:
        driver = Driver().to(JobState.STARTING)
        for vw, stage in ((0, 0), (0, 1), (1, 0)):
            driver.report(vw, stage, StageReady(1))
        assert driver.states()[-1] == "starting"
        driver.report(1, 1, StageReady(1))
        assert driver.states()[-1] == "running"

    def test_it_is_told_which_links_the_stages_have(self) -> None:
        driver = Driver().to(JobState.STARTING)
        for vw, stage, link in ((0, 0, "gloo: fast"), (0, 1, ""), (1, 0, "grpc: safe"), (1, 1, "")):
            driver.report(vw, stage, StageReady(1, link))

        remark = "links between stages: gloo: fast (1 of 2); grpc: safe (1 of 2)"
        assert driver.events(StateChanged)[-1] == StateChanged(JobState.RUNNING, remark)

    def test_one_kind_of_links_needs_no_count(self) -> None:
        driver = Driver().to(JobState.STARTING)
        for vw, stage, link in ((0, 0, "gloo: fast"), (0, 1, ""), (1, 0, "gloo: fast"), (1, 1, "")):
            driver.report(vw, stage, StageReady(1, link))

        assert driver.events(StateChanged)[-1].remark == "links between stages: gloo: fast"

    def test_progress_is_pictured_every_second(self) -> None:
        driver = Driver().to(JobState.RUNNING)
        driver.report(0, 0, progress(clock=2, samples=8))
        driver.feed(ClocksReported(clocks(2, 1, samples=16)))
        driver.wait(3.0)

        tables = driver.events(ProgressTable)
        assert len(tables) == 3
        assert [row.distance for row in tables[-1].rows] == [1, 0]

    def test_evaluations_are_told_when_they_are_whole(self) -> None:
        driver = Driver().to(JobState.RUNNING)
        driver.report(0, 1, StageEvaluation(Clock(3), 0, 1, {"loss": 1.0}))
        assert driver.events(Evaluated) == []
        driver.report(1, 1, StageEvaluation(Clock(3), 0, 9, {"loss": 1.0}))
        driver.all_done()
        driver.wrap_up()

        assert [event.values for event in driver.events(Evaluated)] == [{"loss": 0.2}]
        result = driver.ended().result
        assert result is not None
        assert result["eval"]["loss"] == 0.2

    def test_long_waits_of_stages_are_passed_on(self) -> None:
        driver = Driver().to(JobState.RUNNING)
        driver.report(0, 0, StageWaiting("virtual worker 0 waits for virtual worker 1 to commit wave 3", 5.2))

        assert driver.events(Waiting) == [Waiting("virtual worker 0 waits for virtual worker 1 to commit wave 3", 5.2)]

    def test_news_of_another_life_change_nothing(self) -> None:
        driver = Driver().to(JobState.STARTING)
        key = StageKey(JOB_ID, Vw(0), StageIndex(0), Incarnation(7), Term(1))

        assert driver.feed(KeyedStageReport(key, StageReady(1))) == []

    def test_without_last_clocks_those_told_before_count(self) -> None:
        driver = Driver().to(JobState.RUNNING)
        driver.feed(ClocksReported(clocks(4, 4, samples=64)))
        driver.all_done()
        driver.feed(FinalClocks(None))

        result = driver.ended().result
        assert result is not None
        assert result["samples"] == 64


class TestMeasuring:
    """A job that says nothing of its stages, on a node with CPUs and one with a GPU."""

    AGENTS = (agent_info("n0", devices=2), agent("n1", t4("n1/0")))

    def driver(self) -> Driver:
        driver = Driver(Job(**{**BASE, "workers": {}}))
        driver.feed(ResourcesOffered(ClusterView(self.AGENTS, 0, SHARDS)))
        return driver

    def inspections(self, driver: Driver) -> list[tuple[str, bool, tuple[str, ...]]]:
        commands = [(item.agent, item.command) for item in driver.commands(InspectCommand)]
        return [(a, c.with_model, c.measure) for a, c in commands if isinstance(c, InspectCommand)]

    def test_every_type_is_measured_before_anything_is_planned(self) -> None:
        driver = self.driver()
        assert self.inspections(driver) == [("n0", True, ("cpu",))]
        driver.feed(InspectionResult(JOB_ID, model(), measurements=(measured("cpu"),)))
        assert self.inspections(driver)[1:] == [("n1", False, ("T4",))]
        assert driver.states() == ["inspecting"]
        driver.feed(InspectionResult(JOB_ID, None, measurements=(measured("T4"),)))
        assert driver.states() == ["inspecting"], "the link between the nodes is not known"
        driver.feed(LinkAwaited(JOB_ID, 0, "n0.host:7000"))
        commands = [item.command for item in driver.commands(MeasureLinkCommand)]
        tasks = [command.task for command in commands if isinstance(command, MeasureLinkCommand)]
        assert [(task.other, task.with_copies) for task in tasks] == [("n1", False), ("n0", True)], "one has a GPU"
        driver.feed(LinkResult(JOB_ID, 0, problem="nobody came"))

        [task] = driver.prepare_tasks
        assert task.inspected == Inspected(model(), (measured("cpu"), measured("T4")))
        assert driver.states() == ["inspecting", "planning"]

    def test_an_agent_that_fails_fails_the_job(self) -> None:
        driver = self.driver()
        driver.feed(InspectionResult(JOB_ID, model(), measurements=(measured("cpu"),)))
        driver.feed(InspectionResult(JOB_ID, None, "CallableError", ("model: layer 2 (2) failed on n1",)))

        assert driver.machine.ended is not None
        assert driver.machine.ended.error == "CallableError"
        assert driver.machine.ended.sentence == "model: layer 2 (2) failed on n1"
        assert driver.stop_commands == ["n0", "n1"]

    def test_an_answer_without_what_was_asked_for_fails_the_job(self) -> None:
        driver = self.driver()
        driver.feed(InspectionResult(JOB_ID, model()))

        assert driver.ended().error == "PlanError"
        assert "agent n0 on n0.host registered devices of type cpu but found none" in driver.ended().sentence

    def test_progress_is_told_and_keeps_the_patience_up(self) -> None:
        driver = self.driver()
        for done in range(4):
            driver.wait(100.0)
            driver.feed(InspectionStep(JOB_ID, ProfileStep("cpu", "head", done, 4)))
        driver.wait(119.0)
        assert driver.machine.state is JobState.INSPECTING
        assert driver.events(Measuring)[-1] == Measuring(ProfileStep("cpu", "head", 3, 4), AgentId("n0"))
        driver.wait(1.0)

        assert driver.ended().error == "DeadlineExceeded"
        assert "after 120 s of waiting for agent n0 on n0.host, which is measuring" in driver.ended().sentence

    def test_an_inspection_that_says_what_it_does_is_never_given_up(self) -> None:
        driver = Driver().to(JobState.INSPECTING)
        for minutes in range(60):
            driver.wait(60.0)
            driver.feed(InspectionPhase(JOB_ID, "importing torch", 60.0 * (minutes + 1)))
        driver.wait(5.0)
        assert driver.sentences()[-1].startswith(
            "the coordinator waits for agent n0 on n0.host to import and inspect the model, which is importing torch "
            "(3600 s)"
        )
        driver.wait(115.0)
        assert driver.ended().error == "DeadlineExceeded", "bad input it is not"

    def test_how_long_silence_may_last_is_of_the_job(self) -> None:
        driver = Driver(job("patience.inspection=10min")).to(JobState.INSPECTING)
        driver.wait(599.0)
        assert driver.machine.state is JobState.INSPECTING
        driver.wait(1.0)
        assert "after 600 s of waiting for agent n0" in driver.ended().sentence

    def test_each_agent_has_its_own_time(self) -> None:
        driver = self.driver()
        driver.wait(100.0)
        driver.feed(InspectionResult(JOB_ID, model(), measurements=(measured("cpu"),)))
        driver.wait(100.0)

        assert driver.machine.state is JobState.INSPECTING
        assert driver.sentences()[-1].startswith("the coordinator waits for agent n1 on n1.host to import and inspect")

    def test_a_step_that_comes_too_late_changes_nothing(self) -> None:
        driver = Driver().to(JobState.PLANNING)

        assert driver.feed(InspectionStep(JOB_ID, ProfileStep("cpu", "head", 0, 4))) == []


class TestStops:
    def test_with_a_checkpoint(self) -> None:
        driver = Driver().to(JobState.RUNNING)
        driver.feed(StopRequested(StopMode.CHECKPOINT))
        assert driver.machine.state is JobState.STOPPING
        assert driver.tasks(RequestBarrier) == [RequestBarrier(1, SHARDS[0])]  # type: ignore[arg-type]
        assert driver.stop_commands == []
        driver.all_done("checkpoint+stop")
        driver.wrap_up()

        ended = driver.ended()
        assert ended.state is JobState.STOPPED
        assert ended.result is not None

    def test_a_run_that_came_to_its_end_first_is_finished(self) -> None:
        driver = Driver().to(JobState.RUNNING)
        driver.feed(StopRequested(StopMode.CHECKPOINT))
        driver.all_done("epoch+end")
        driver.wrap_up()

        assert driver.ended().state is JobState.FINISHED

    @pytest.mark.parametrize("state", UNDER_WAY)
    def test_at_once_from_anywhere(self, state: JobState) -> None:
        driver = Driver().to(state)
        driver.feed(StopRequested(StopMode.NOW))
        if state is JobState.PLANNING:
            driver.prepare()
        for life in list(driver.machine.stages):
            driver.exit(life.key.vw, life.key.stage, -15)
        assert driver.machine.state is JobState.STOPPING
        assert len(driver.wrap_up_tasks) == 1
        driver.wrap_up()

        assert driver.ended().state is JobState.STOPPED
        assert driver.ended().sentence == ""
        assert driver.stop_commands == ([] if state is JobState.SUBMITTED else ["n0", "n1"])

    @pytest.mark.parametrize("state", UNDER_WAY[:-1])
    def test_before_training_there_is_nothing_to_write_down(self, state: JobState) -> None:
        driver = Driver().to(state)
        driver.feed(StopRequested(StopMode.CHECKPOINT))

        assert driver.tasks(RequestBarrier) == []
        assert driver.machine.state is JobState.STOPPING

    def test_a_second_stop_now_does_not_wait_for_the_barrier(self) -> None:
        driver = Driver().to(JobState.RUNNING)
        driver.feed(StopRequested(StopMode.CHECKPOINT))
        driver.feed(StopRequested(StopMode.CHECKPOINT))
        assert driver.stop_commands == []
        driver.feed(StopRequested(StopMode.NOW))
        assert driver.stop_commands == ["n0", "n1"]

    def test_processes_that_do_not_end_hold_nobody_up(self) -> None:
        driver = Driver().to(JobState.RUNNING)
        driver.feed(StopRequested(StopMode.NOW))
        driver.wait(4.75)
        assert driver.wrap_up_tasks == []
        driver.wait(0.5)
        driver.wrap_up()

        assert driver.ended().state is JobState.STOPPED

    def test_a_stop_after_the_end_changes_nothing(self) -> None:
        driver = Driver().to(JobState.RUNNING)
        driver.all_done()
        driver.wrap_up()

        assert driver.feed(StopRequested(StopMode.NOW)) == []
        assert driver.machine.state is JobState.FINISHED

    def test_an_inspection_that_comes_too_late_changes_nothing(self) -> None:
        driver = Driver().to(JobState.INSPECTING)
        driver.feed(StopRequested(StopMode.NOW))

        assert driver.inspect() == []

    def test_a_barrier_that_is_not_reached_fails_the_job(self) -> None:
        driver = Driver().to(JobState.RUNNING)
        driver.feed(StopRequested(StopMode.CHECKPOINT))
        driver.wait(600.0)

        ended = driver.ended()
        assert ended.state is JobState.FAILED
        assert "after 600 s of waiting for all stages to reach the barrier of the stop" in ended.sentence


class TestWaits:
    def test_a_job_waits_for_members_and_says_so(self) -> None:
        driver = Driver()
        driver.feed(ResourcesOffered(ClusterView(AGENTS[:1], 0, SHARDS[:1])))
        driver.wait(6.0)

        place = (
            "1st in the queue, priority 0; needs 4 devices, one per stage, more than the 1 registered agent has (2): "
            "start more agents, or stop this job, and needs 2 parameter servers, 1 registered: start 1 more"
        )
        assert [(event.state, event.remark) for event in driver.events(StateChanged)] == [(JobState.PENDING, place)]
        assert driver.sentences() == [], "it has just said so"
        driver.wait(60.0)
        assert driver.sentences() == [f"pending: {place}"]

    def test_a_place_in_the_queue_is_told_when_it_changes(self) -> None:
        driver = Driver()
        lacks = ClusterView(AGENTS, 0, (shard_member(0),))
        driver.feed(ResourcesOffered(lacks, Turn(2, JobId("first-1"))))
        driver.wait(6.0)
        driver.feed(ResourcesOffered(lacks, Turn(1)))
        driver.wait(1.0)

        needs = "needs 2 parameter servers, 1 registered: start 1 more"
        assert driver.events(StateChanged)[0].remark == f"2nd in the queue, priority 0; {needs}; job first-1 goes first"
        assert driver.sentences() == [f"pending: 1st in the queue, priority 0; {needs}"]
        assert driver.machine.queue_place == QueuePlace(1, needs)
        driver.wait(10_000.0)
        assert driver.machine.state is JobState.PENDING, "no time is too long"
        driver.see_cluster()
        assert driver.machine.queue_place is None
        assert driver.states() == ["pending", "inspecting"]

    def test_a_wait_is_told_every_five_seconds(self) -> None:
        driver = Driver().to(JobState.INSPECTING)
        driver.wait(16.0)

        assert [round(event.seconds) for event in driver.events(Waiting)] == [5, 10, 15]
        assert driver.sentences()[0].startswith("the coordinator waits for agent n0 on n0.host to import and inspect")

    def test_a_stage_that_says_what_it_does_is_waited_for_and_one_that_is_silent_is_not(self) -> None:
        driver = Driver().to(JobState.STARTING)
        for _ in range(10):
            driver.wait(60.0)
            for vw, stage in STAGES:
                driver.report(vw, stage, StagePhase("importing torch", 60.0))
        assert driver.machine.state is JobState.STARTING
        assert "stage 0 of virtual worker 0 (on n0.host), which is importing torch (60 s); " in driver.sentences()[-1]
        for vw, stage in STAGES[1:]:
            driver.report(vw, stage, StageReady(1))
        driver.wait(120.0)
        assert driver.ended().error == "DeadlineExceeded"
        assert (
            "after 120 s of waiting for these to become ready: stage 0 of virtual worker 0" in driver.ended().sentence
        )

    def test_stages_that_do_not_get_ready_are_named(self) -> None:
        driver = Driver().to(JobState.STARTING)
        for vw, stage in ((0, 0), (0, 1), (1, 0)):
            driver.report(vw, stage, StageReady(1))
        driver.wait(120.0)

        ended = driver.ended()
        assert ended.error == "DeadlineExceeded"
        assert "these to become ready: stage 1 of virtual worker 1 (on n1.host)" in ended.sentence
        assert driver.stop_commands == ["n0", "n1"]
        assert len(driver.wrap_up_tasks) == 1

    def test_running_has_no_limit(self) -> None:
        driver = Driver().to(JobState.RUNNING)
        for _ in range(40):
            driver.wait(50.0)
            for vw, stage in STAGES:
                driver.report(vw, stage, progress())

        assert driver.machine.state is JobState.RUNNING
        assert driver.tasks(Evict) == []


class TestSettling:
    def test_devices_are_held_until_the_processes_are_gone(self) -> None:
        driver = Driver().to(JobState.RUNNING)
        driver.all_done()
        driver.wrap_up()
        assert not driver.machine.is_settled(now=driver.now)
        for vw, stage in ((0, 0), (0, 1), (1, 0), (1, 1)):
            driver.exit(vw, stage, 0)
        assert driver.machine.is_settled(now=driver.now)
        assert driver.ended().state is JobState.FINISHED

    def test_or_until_they_had_the_time(self) -> None:
        driver = Driver().to(JobState.RUNNING)
        driver.all_done()
        driver.wrap_up()

        assert driver.machine.may_have_processes(now=driver.now + 4.9)
        assert not driver.machine.may_have_processes(now=driver.now + 5.0)
        assert driver.machine.is_settled(now=driver.now + 5.0)

    def test_shards_configured_after_all_are_released(self) -> None:
        driver = Driver().to(JobState.PLANNING)
        driver.wait(60.0)
        assert driver.machine.state is JobState.FAILED
        assert driver.wrap_up_tasks == []
        assert not driver.machine.is_settled(now=driver.now + 100.0)
        driver.prepare()

        assert len(driver.wrap_up_tasks) == 1
        assert driver.start_commands == []
        assert driver.machine.is_settled(now=driver.now)

    def test_shards_configured_in_part_are_released(self) -> None:
        driver = Driver().to(JobState.PLANNING)
        driver.feed(TaskFailed("prepare", "PeerUnreachable", "parameter server at h:1 cannot be reached"))

        assert driver.ended().error == "PeerUnreachable"
        assert driver.ended().sentence == "parameter server at h:1 cannot be reached"
        assert len(driver.wrap_up_tasks) == 1

    def test_mistakes_found_by_the_inspection_are_all_told(self) -> None:
        driver = Driver().to(JobState.INSPECTING)
        driver.feed(InspectionResult(JOB_ID, None, "JobError", ("model: no such module", "loss: no such module")))

        ended = driver.ended()
        assert (ended.error, ended.problems) == ("JobError", ("model: no such module", "loss: no such module"))
        assert ended.sentence == "model: no such module; loss: no such module"

    def test_done_once_is_done(self) -> None:
        driver = Driver().to(JobState.RUNNING)
        driver.all_done()
        driver.report(0, 0, StageDone(Clock(6), "end"))

        assert len(driver.wrap_up_tasks) == 1
