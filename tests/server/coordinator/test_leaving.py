"""A virtual worker is asked to leave or to come back: at the next barrier it goes, and nobody else stops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from hetpipe.decide.lifecycle.exchange import (
    AddRequested,
    Admit,
    AdmitAcknowledged,
    AfterDrain,
    ClocksReported,
    Drain,
    DrainAcknowledged,
    Evict,
    EvictAcknowledged,
    MemberRegistered,
    RequestBarrier,
    Rewind,
    ShardCallFailed,
    StopRequested,
    TaskFailed,
)
from hetpipe.errors import UserError
from hetpipe.job.file import Job
from hetpipe.server.coordinator.worker_requests import check_unscripted
from hetpipe.values.commands import StartStageCommand
from hetpipe.values.events import JobState, StateChanged, StopMode, WorkerLeft, WorkerQuarantined, WorkerRejoined
from hetpipe.values.freezing import FreezeLineup, LineupWorker
from hetpipe.values.ids import Clock, Incarnation
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.life_state import LifeState
from hetpipe.values.run import StageDone, StageFailed
from tests.server.coordinator.builders import STAGES, agent_member, clocks, job, progress
from tests.server.coordinator.leaving import departs, drain, gone, order, pass_barrier, state
from tests.server.coordinator.lives import admit
from tests.server.coordinator.machine_driver import SHARDS, Driver

OUT, AGAIN = WorkerLeft(Vw(1), Incarnation(0), returns=False), WorkerLeft(Vw(1), Incarnation(0), returns=True)


@pytest.fixture
def driver() -> Driver:
    return Driver().to(JobState.RUNNING)


class TestDrain:
    def test_the_clock_shard_is_asked_and_nothing_else_happens(self, driver: Driver) -> None:
        drain(driver)
        driver.feed(DrainAcknowledged(Vw(1), Incarnation(0)))
        for vw in (0, 1):
            for stage in (0, 1):
                driver.report(vw, stage, progress())

        assert driver.tasks(Drain) == [order(1, 0)]
        assert state(driver) is LifeState.LEAVING
        assert driver.worker(1).is_up
        assert (driver.kill_commands, driver.stop_commands, driver.tasks(Evict)) == ([], [], [])

    def test_after_the_barrier_it_is_out(self, driver: Driver) -> None:
        drain(driver)
        pass_barrier(driver)
        driver.wait(30.0)

        assert state(driver) is LifeState.OUT
        assert driver.events(WorkerLeft) == [OUT]
        assert driver.worker(1).status.deaths == 0
        assert [life.shown_state for life in driver.machine.stages] == ["ready", "ready", "left", "left"]
        assert (driver.kill_commands, driver.tasks(Admit), driver.tasks(Evict)) == ([], [], [])
        assert driver.machine.state is JobState.RUNNING

    def test_the_others_come_to_the_end_without_it(self, driver: Driver) -> None:
        drain(driver)
        pass_barrier(driver)
        for stage in (0, 1):
            driver.report(0, stage, StageDone(Clock(6), "end"))
        driver.wrap_up()

        assert driver.ended().state is JobState.FINISHED

    @pytest.mark.parametrize("missing", ["done", "exit"])
    def test_all_its_stages_must_be_done_and_gone(self, driver: Driver, missing: str) -> None:
        drain(driver)
        for stage in (0, 1):
            driver.report(1, stage, progress() if missing == "done" and stage else StageDone(Clock(4), "drain"))
            if not (missing == "exit" and stage):
                driver.exit(1, stage, 0)
        assert driver.events(WorkerLeft) == []
        assert not driver.machine.state.is_terminal

    def test_a_process_that_does_not_end_is_killed(self, driver: Driver) -> None:
        drain(driver)
        pass_barrier(driver, exits=False)
        driver.wait(4.75)
        assert state(driver) is LifeState.LEAVING
        driver.wait(0.25)

        assert state(driver) is LifeState.OUT
        assert driver.kill_commands == [("n1", 1, 0)]

    def test_an_agent_that_goes_with_its_done_stages_loses_nothing(self, driver: Driver) -> None:
        drain(driver, then="again")
        pass_barrier(driver, exits=False)
        driver.feed(gone("n1"))

        assert driver.events(WorkerLeft) == [AGAIN]
        assert driver.lost == []

    def test_it_may_come_back_at_once(self, driver: Driver) -> None:
        drain(driver, then="again")
        pass_barrier(driver)
        driver.begin_life(1, 1)

        assert driver.events(WorkerLeft) == [AGAIN]
        assert driver.tasks(Admit) == [admit(1, 1)]
        assert driver.events(WorkerRejoined) == [WorkerRejoined(Vw(1), Incarnation(1))]

    def test_the_clock_shard_is_asked_until_it_answers(self, driver: Driver) -> None:
        drain(driver)
        for asked in range(1, 7):
            assert driver.tasks(Drain) == [order(1, 0)] * asked
            driver.feed(ShardCallFailed(Vw(1), Incarnation(0), "PeerUnreachable", "it cannot be reached"))
            driver.wait(1.0)
        driver.feed(DrainAcknowledged(Vw(1), Incarnation(0)))
        driver.wait(5.0)

        assert len(driver.tasks(Drain)) == 7
        assert driver.sentences() == [
            "the coordinator waits for the clock shard to have virtual worker 1 drained (it cannot be reached)"
        ]

    def test_what_it_commits_until_then_counts_for_it(self, driver: Driver) -> None:
        drain(driver)
        driver.commit(1)
        driver.exit(1, 0, -9)

        assert driver.worker(1).crashes == 0

    def test_one_that_an_earlier_coordinator_drained_leaves(self, driver: Driver) -> None:
        pass_barrier(driver)

        assert driver.events(WorkerLeft) == [WorkerLeft(Vw(1), Incarnation(0), returns=True)]
        assert driver.tasks(Drain) == []

    def test_the_end_of_the_run_may_come_first(self, driver: Driver) -> None:
        drain(driver)
        for vw in (0, 1):
            for stage in (0, 1):
                driver.report(vw, stage, StageDone(Clock(6), "end+drain"))
        driver.wrap_up()

        assert driver.ended().state is JobState.FINISHED
        assert driver.events(WorkerLeft) == []

    def test_so_may_a_stop(self, driver: Driver) -> None:
        drain(driver, then="again")
        driver.feed(StopRequested(StopMode.CHECKPOINT))
        pass_barrier(driver)
        assert state(driver) is LifeState.OUT
        for stage in (0, 1):
            driver.report(0, stage, StageDone(Clock(6), "stop"))
        driver.wrap_up()

        assert driver.ended().state is JobState.STOPPED
        assert driver.tasks(Admit) == []

    def test_a_stop_with_everybody_gone_says_so(self, driver: Driver) -> None:
        for vw in (0, 1):
            drain(driver, vw, then="again")
            pass_barrier(driver, vw)
        driver.feed(StopRequested(StopMode.CHECKPOINT))
        driver.wait(1.0)

        assert driver.ended().sentence == (
            "no virtual worker is left: all of them were drained; resume from the newest checkpoint"
        )


class TestDeathOnTheWay:
    @pytest.mark.parametrize("then", ["out", "again"])
    def test_it_is_evicted_and_goes_where_it_was_to_go(self, driver: Driver, then: AfterDrain) -> None:
        drain(driver, then=then)
        driver.end_life(1)
        driver.wait(1.0)

        assert len(driver.lost) == 1
        assert driver.tasks(Evict) == [Evict(Vw(1), Incarnation(0), Driver.TERM, SHARDS[0])]
        assert (state(driver) is LifeState.OUT) == (then == "out")
        assert bool(driver.tasks(Admit)) == (then == "again")
        assert driver.events(WorkerQuarantined) == []

    def test_one_that_hangs_is_lost(self) -> None:
        driver = Driver(job("survive.stall=10s")).to(JobState.RUNNING)
        drain(driver)
        for _ in range(11):
            driver.wait(1.0)
            for vw, stage in ((0, 0), (0, 1), (1, 0)):
                driver.report(vw, stage, progress())

        assert [task.vw for task in driver.tasks(Evict)] == [1]

    def test_a_mistake_of_the_user_still_ends_the_job(self, driver: Driver) -> None:
        drain(driver)
        driver.report(1, 0, StageFailed("NonFiniteUpdate", "the loss is not a number"))
        driver.wait(1.0)

        assert driver.ended().error == "NonFiniteUpdate"


class TestInEveryState:
    """What draining and adding do to a virtual worker, wherever it stands."""

    STATES = ("starting", "ready", "leaving", "ending", "awaiting", "admitting", "done", "out")

    def to(self, wanted: str) -> Driver:
        driver = Driver().to(JobState.RUNNING)
        match wanted:
            case "leaving":
                drain(driver, then="again")
            case "ending":
                driver.exit(1, 1, -9)
            case "awaiting":
                driver.feed(gone("n1"))
                driver.feed(EvictAcknowledged(Vw(1), Incarnation(0)))
                driver.wait(1.0)
            case "admitting" | "starting":
                driver.end_life(1)
                driver.wait(0.25)
                if wanted == "starting":
                    driver.feed(AdmitAcknowledged(Vw(1), Incarnation(1), None))
            case "done":
                for stage in (0, 1):
                    driver.report(1, stage, StageDone(Clock(6), "end"))
            case "out":
                drain(driver)
                pass_barrier(driver)
        assert state(driver) == wanted
        driver.said.clear()
        return driver

    @pytest.mark.parametrize(
        ("before", "after", "asked"),
        [
            ("starting", "ending", Evict),
            ("ready", "leaving", Drain),
            ("leaving", "leaving", None),
            ("ending", "ending", None),
            ("awaiting", "out", None),
            ("admitting", "ending", Evict),
            ("done", "done", None),
            ("out", "out", None),
        ],
    )
    def test_drain(self, before: str, after: str, asked: type | None) -> None:
        driver = self.to(before)
        life = driver.worker(1).incarnation
        for _ in range(2):
            drain(driver)

        assert state(driver) == after
        tasks = [item for item in driver.said if isinstance(item, Evict | Drain | Admit)]
        assert tasks == ([] if asked is None else [asked(Vw(1), life, Driver.TERM, SHARDS[0])])
        assert driver.kill_commands == ([("n1", 1, 1)] if before in {"starting", "admitting"} else [])

    @pytest.mark.parametrize("before", STATES)
    def test_it_ends_out_unless_the_run_is_over(self, before: str) -> None:
        driver = self.to(before)
        drain(driver)
        life = driver.worker(1).incarnation
        if before in {"ready", "leaving"}:
            pass_barrier(driver)
        for stage in (0, 1):
            driver.exit(1, stage, -9, life=life, ordered=True)
        driver.feed(EvictAcknowledged(Vw(1), life))
        driver.wait(6.0)

        assert state(driver) == ("done" if before == "done" else "out")
        assert len(driver.events(WorkerLeft)) == (0 if before in {"done", "out"} else 1)
        assert driver.tasks(Admit) == []
        assert [event for event in driver.lost if before != "ending"] == []
        assert driver.machine.state is JobState.RUNNING

    @pytest.mark.parametrize("before", STATES)
    def test_whoever_is_asked_back_before_it_is_gone_comes_back(self, before: str) -> None:
        driver = self.to(before)
        drain(driver)
        driver.feed(AddRequested(Vw(1)))
        life = driver.worker(1).incarnation
        if state(driver) is LifeState.LEAVING:
            pass_barrier(driver)
        for stage in (0, 1):
            driver.exit(1, stage, -9, life=life, ordered=True)
        driver.feed(EvictAcknowledged(Vw(1), life))
        driver.feed(MemberRegistered(agent_member("n1", devices=2, pid=777)))
        driver.wait(1.0)

        assert len(driver.tasks(Admit)) == (0 if before == "done" else 1)

    @pytest.mark.parametrize("before", STATES)
    def test_add(self, before: str) -> None:
        driver = self.to(before)
        driver.feed(AddRequested(Vw(1)))

        assert state(driver) == ("admitting" if before == "out" else before)

    @pytest.mark.parametrize("before", STATES)
    def test_nothing_is_done_after_the_end_of_the_job(self, before: str) -> None:
        driver = self.to(before)
        driver.feed(StopRequested(StopMode.NOW))
        said = len(driver.said)
        drain(driver)
        driver.feed(AddRequested(Vw(1)))
        departs(driver)

        assert len(driver.said) == said


class TestAdd:
    def test_one_that_left_joins_again(self, driver: Driver) -> None:
        drain(driver)
        pass_barrier(driver)
        driver.feed(AddRequested(Vw(1)))
        driver.begin_life(1, 1, restore="/run/checkpoints/clock-00000004")

        started = [item.command for item in driver.start_commands[4:]]
        assert [c.config.restore for c in started if isinstance(c, StartStageCommand)] == [
            "/run/checkpoints/clock-00000004"
        ] * 2
        assert driver.events(WorkerRejoined) == [WorkerRejoined(Vw(1), Incarnation(1))]
        assert driver.worker(1).is_up

    def test_one_that_died_too_often_has_all_its_chances_again(self) -> None:
        driver = Driver(job("survive.restarts=1")).to(JobState.RUNNING)
        driver.end_life(1)
        driver.wait(1.0)
        assert state(driver) is LifeState.OUT
        driver.feed(AddRequested(Vw(1)))

        assert [task.incarnation for task in driver.tasks(Admit)] == [1]
        assert (driver.worker(1).crashes, driver.worker(1).deaths) == (0, 1)

    def test_a_pause_is_cut_short(self, driver: Driver) -> None:
        for life in (0, 1):
            driver.end_life(1, life=life)
            driver.wait(0.25)
            if life == 0:
                driver.feed(AdmitAcknowledged(Vw(1), Incarnation(1), None))
        assert state(driver) is LifeState.AWAITING
        driver.feed(AddRequested(Vw(1)))

        assert state(driver) is LifeState.ADMITTING

    def test_it_waits_for_its_agent(self, driver: Driver) -> None:
        drain(driver)
        pass_barrier(driver)
        driver.feed(gone("n1"))
        driver.feed(AddRequested(Vw(1)))
        assert driver.tasks(Admit) == []
        driver.feed(MemberRegistered(agent_member("n1", devices=2)))

        assert len(driver.tasks(Admit)) == 1

    def test_the_run_may_be_over_meanwhile(self, driver: Driver) -> None:
        drain(driver)
        pass_barrier(driver)
        driver.report(0, 0, StageDone(Clock(6), "end"))
        driver.feed(AddRequested(Vw(1)))

        assert state(driver) is LifeState.OUT
        assert driver.tasks(Admit) == []


def test_where_stages_alone_hold_the_weights_nobody_leaves() -> None:
    driver = Driver(job("sync=allreduce", "weights=flush", "parameter_servers.count=1")).to(JobState.RUNNING)
    said = len(driver.said)
    drain(driver)

    assert len(driver.said) == said
    assert state(driver) is LifeState.READY


class TestPreemptionWhereStagesAloneHoldTheWeights:
    """The job comes to a barrier with a checkpoint, and goes on from that when its agents are there again."""

    @pytest.fixture
    def driver(self) -> Driver:
        settings = ("sync=allreduce", "weights=flush", "parameter_servers.count=1", "survive.absence=10s")
        return Driver(job(*settings)).to(JobState.RUNNING)

    def test_it_takes_a_checkpoint_and_waits_without_a_bound(self, driver: Driver) -> None:
        for agent in ("n1", "n0", "n1"):
            departs(driver, agent)
        assert len(driver.tasks(RequestBarrier)) == 1, "one barrier for all of them"
        driver.all_done("stop")
        assert driver.states()[-1] == "planning"
        assert driver.events(StateChanged)[-1].remark == (
            "agent n1 is shutting down: the whole job continues from the checkpoint it has just taken"
        )
        for vw, stage in STAGES:
            driver.exit(vw, stage, 0)
        driver.wait(60.0)
        assert driver.tasks(Rewind) == [], "they are still registered, and begin nothing any more"
        for agent in ("n0", "n1"):
            driver.feed(gone(agent))
        driver.wait(1000.0)
        assert driver.machine.state is JobState.PLANNING
        assert "the requirements of a rewind to the newest checkpoint: " in driver.sentences()[-1]

        for agent in ("n0", "n1"):
            driver.feed(MemberRegistered(agent_member(agent, devices=2, pid=777)))
        driver.wait(1.0)
        assert len(driver.tasks(Rewind)) == 1

    def test_a_barrier_that_was_not_asked_for_is_asked_for_again(self, driver: Driver) -> None:
        departs(driver)
        driver.feed(TaskFailed("barrier", "PeerUnreachable", "gone"))
        driver.wait(1.5)
        assert len(driver.tasks(RequestBarrier)) == 2
        driver.all_done("stop")
        driver.feed(TaskFailed("barrier", "PeerUnreachable", "gone"))
        driver.wait(5.0)
        assert len(driver.tasks(RequestBarrier)) == 2, "that barrier is behind it"

    def test_a_run_that_is_over_meanwhile_has_ended(self, driver: Driver) -> None:
        departs(driver)
        driver.all_done("end")
        driver.wrap_up()
        assert driver.ended().state is JobState.FINISHED

    def test_a_user_who_stops_it_meanwhile_has_stopped_it(self, driver: Driver) -> None:
        departs(driver)
        driver.feed(StopRequested(StopMode.CHECKPOINT))
        driver.all_done("stop")
        driver.wrap_up()
        assert driver.ended().state is JobState.STOPPED

    def test_before_training_there_is_nothing_to_write_down(self) -> None:
        of = job("sync=allreduce", "weights=flush", "parameter_servers.count=1", "survive.absence=10s")
        driver = Driver(of).to(JobState.STARTING)
        departs(driver)
        assert (driver.tasks(RequestBarrier), driver.states()[-1]) == ([], "planning")
        driver.feed(gone("n1"))
        driver.wait(1000.0)
        assert driver.machine.state is JobState.PLANNING


def scripted(*lines: tuple[int, str, int], settings: Mapping[str, Any] | None = None) -> Driver:
    """A run whose script has lines of (clock, verb, virtual worker)."""
    script = tuple({"at": {"clock": clock}, "do": verb, "vw": vw} for clock, verb, vw in lines)
    values = {**job().model_dump(mode="json"), "elastic": {"script": script}, **(settings or {})}
    return Driver(Job(**values)).to(JobState.RUNNING)


class TestScript:
    """The clock shard drops and adds; the coordinator ends and starts processes."""

    def test_one_that_is_dropped_for_good_stays_out(self) -> None:
        driver = scripted((4, "drop", 1))
        pass_barrier(driver)
        driver.wait(30.0)
        assert state(driver) is LifeState.OUT
        assert driver.tasks(Admit) == []
        assert driver.events(WorkerLeft) == [OUT]

    def test_one_that_is_added_later_is_started_at_once(self) -> None:
        """It waits for its barrier with all its stages."""
        driver = scripted((4, "drop", 1), (9, "add", 1))
        pass_barrier(driver)
        driver.wait(30.0)
        assert state(driver) is LifeState.ADMITTING
        assert driver.tasks(Admit) == [admit(1, 1)]
        assert driver.events(WorkerLeft) == [AGAIN]

    def test_one_that_is_away_where_it_is_dropped_does_not_come_back(self) -> None:
        driver = scripted((4, "drop", 1))
        driver.feed(gone("n1"))
        driver.feed(ClocksReported(clocks(3, 3)))
        assert not driver.worker(1).stays_out
        driver.feed(ClocksReported(clocks(4, 4)))
        assert driver.worker(1).stays_out
        assert not driver.worker(0).stays_out

    def test_one_that_is_added_and_is_not_restarted_any_more_ends_the_run_at_a_barrier(self) -> None:
        """What has been trained is in that barrier's checkpoint."""
        driver = scripted((4, "drop", 1), (9, "add", 1), settings={"survive": {"restarts": 2}})
        pass_barrier(driver)
        for life in (1, 2):
            driver.wait(1.0)
            driver.feed(AdmitAcknowledged(Vw(1), Incarnation(life), None))
            driver.end_life(1, life=life)
        driver.wait(2.0)

        why = "elastic.script[1]: adds virtual worker 1 at clock 9, but it cannot come: virtual worker 1 died 2 times"
        assert driver.states()[-1] == "stopping"
        assert driver.events(StateChanged)[-1].remark.startswith(f"the run ends at the next barrier: {why}")
        assert len(driver.tasks(RequestBarrier)) == 1
        reach_stop(driver)
        ended = driver.ended()
        assert (ended.state, ended.error) == (JobState.FAILED, "ScriptFailed")
        assert ended.sentence.startswith(why)
        assert ended.sentence.endswith("; mend that, or remove the line")

    def test_with_nobody_left_that_trains_before_it_the_run_has_failed(self) -> None:
        """Nobody would ever come to the clock at which it is added."""
        driver = scripted((9, "add", 1), settings={"survive": {"restarts": 1}})
        driver.feed(ClocksReported(clocks(3, 3)))
        driver.end_life(0)
        for _ in range(8):
            assert driver.machine.state is JobState.RUNNING
            driver.wait(0.25)
            driver.feed(ClocksReported(replace(clocks(3, 3), local={})))
        driver.wait(6.0)
        ended = driver.ended()
        assert ended.sentence.startswith(
            "no virtual worker is left that trains at clock 3; stage 1 of virtual worker 0 (pid 1001 on n0.host)"
        )
        assert ended.state is JobState.FAILED

    def test_one_that_waits_for_its_clock_does_not_prolong_the_wait_for_agents_of_those_that_train(self) -> None:
        driver = scripted((9, "add", 1), settings={"survive": {"absence": "10s"}})
        driver.feed(ClocksReported(clocks(3, 3)))
        driver.feed(gone("n0"))
        driver.feed(EvictAcknowledged(Vw(0), Incarnation(0)))
        driver.wait(9.75)
        assert driver.machine.state is JobState.RUNNING
        driver.wait(2.0)
        assert driver.ended().sentence.startswith(
            "no virtual worker is left, and agent n0 did not return within 10 s; agent n0 left the cluster"
        )

    def test_one_whose_agent_is_away_is_awaited_for_a_while(self) -> None:
        driver = scripted((4, "drop", 1), (9, "add", 1), settings={"survive": {"absence": "20s"}})
        lose_agent(driver)
        driver.feed(ClocksReported(clocks(8, 8)))
        driver.wait(25.0)
        assert driver.machine.state is JobState.RUNNING, "nobody waits for it yet"
        driver.feed(ClocksReported(replace(clocks(9, 9), published=Clock(8))))
        driver.wait(19.0)
        assert driver.machine.state is JobState.RUNNING
        driver.wait(2.0)
        assert driver.states()[-1] == "stopping"
        reach_stop(driver)
        assert (
            "elastic.script[1]: adds virtual worker 1 at clock 9, but it cannot come: agent n1 did not return within "
            "20 s of all others' waiting (survive.absence); mend that"
        ) in driver.ended().sentence

    def test_one_whose_agent_returns_is_awaited_no_more(self) -> None:
        driver = scripted((4, "drop", 1), (9, "add", 1), settings={"survive": {"absence": "20s"}})
        lose_agent(driver)
        driver.feed(ClocksReported(replace(clocks(9, 9), published=Clock(8))))
        driver.wait(15.0)
        driver.feed(MemberRegistered(agent_member("n1", devices=2)))
        driver.wait(60.0)
        assert driver.machine.state is JobState.RUNNING
        assert driver.tasks(Admit) == [admit(1, 1)]


def test_a_line_that_a_stage_cannot_do_ends_the_run_at_a_barrier_of_the_others(driver: Driver) -> None:
    driver.report(1, 0, StageFailed("ScriptFailed", "elastic.script[0]: moves layers, but it cannot"))
    driver.wait(2.0)
    assert [task.vw for task in driver.tasks(Evict)] == [1]
    assert driver.machine.state is JobState.STOPPING
    assert len(driver.tasks(RequestBarrier)) == 1
    reach_stop(driver)
    ended = driver.ended()
    assert (ended.state, ended.error) == (JobState.FAILED, "ScriptFailed")
    assert ended.sentence.endswith("elastic.script[0]: moves layers, but it cannot")


def test_a_line_that_the_last_one_cannot_do_ends_the_run(driver: Driver) -> None:
    drain(driver)
    pass_barrier(driver)
    driver.report(0, 0, StageFailed("ScriptFailed", "elastic.script[0]: moves layers, but it cannot"))
    driver.wait(2.0)
    assert driver.tasks(RequestBarrier) == []
    assert "elastic.script[0]: moves layers, but it cannot" in driver.ended().sentence


def lose_agent(driver: Driver) -> None:
    """Virtual worker 1 leaves, and its agent is gone before it can come back."""
    pass_barrier(driver, exits=False)
    driver.feed(gone("n1"))
    driver.feed(EvictAcknowledged(Vw(1), Incarnation(0)))
    driver.wait(2.0)
    assert state(driver) is LifeState.AWAITING


def reach_stop(driver: Driver) -> None:
    """Virtual worker 0 reaches the barrier of the stop, and the processes of all have ended."""
    for stage in (0, 1):
        driver.report(0, stage, StageDone(Clock(9), "stop"))
        driver.exit(0, stage, 0)
        driver.exit(1, stage, -9, ordered=True)
    driver.feed(EvictAcknowledged(Vw(1), Incarnation(0)))
    driver.wait(2.0)
    driver.wrap_up()


class TestLineups:
    """Virtual worker 1 waits until enough layers are frozen, and then replaces virtual worker 0."""

    LINEUPS = tuple(FreezeLineup(2 * vw, (LineupWorker(Vw(vw), (0, 1)),), 4) for vw in (0, 1))

    @pytest.fixture
    def driver(self) -> Driver:
        of = job("freeze.compress=true", "freeze.every=epoch", "freeze.alpha=1/2", "survive.restarts=2")
        return Driver(of, lineups=self.LINEUPS).to(JobState.RUNNING)

    def test_one_that_is_replaced_stays_out(self, driver: Driver) -> None:
        pass_barrier(driver, 0)
        driver.wait(30.0)
        assert state(driver, 0) is LifeState.OUT
        assert driver.tasks(Admit) == []

    def test_one_that_is_away_where_it_is_replaced_does_not_come_back(self, driver: Driver) -> None:
        driver.feed(gone("n0"))
        driver.feed(ClocksReported(clocks(3, 3)))
        assert not driver.worker(0).stays_out
        driver.feed(ClocksReported(replace(clocks(4, 4), lineup=2)))
        assert driver.worker(0).stays_out
        assert not driver.worker(1).stays_out

    def test_one_that_is_yet_to_train_and_is_not_restarted_any_more_ends_the_run_at_a_barrier(
        self, driver: Driver
    ) -> None:
        for life in (0, 1):
            if life:
                driver.wait(1.0)
                driver.feed(AdmitAcknowledged(Vw(1), Incarnation(life), None))
            driver.end_life(1, life=life)
        driver.wait(2.0)
        why = "freeze.compress: virtual worker 1 trains when more layers are frozen, but it cannot come"
        assert driver.states()[-1] == "stopping"
        assert driver.events(StateChanged)[-1].remark.startswith(f"the run ends at the next barrier: {why}")

    def test_an_operator_does_not_decide_who_trains(self, driver: Driver) -> None:
        with pytest.raises(UserError, match=r"frozen layers decide when .* trains \(freeze\.compress\)"):
            check_unscripted(driver.machine, driver.worker(1))
