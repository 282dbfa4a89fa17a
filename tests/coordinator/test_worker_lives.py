"""A virtual worker dies: it is evicted and killed at once, started anew when that is done, and nobody else stops."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hetpipe.coordinator.exchange import (
    Admit,
    Admitted,
    AskBarrier,
    ClocksTold,
    Evict,
    Evicted,
    MemberGone,
    MemberSeen,
    ShardNotAsked,
    StopAsked,
    Tick,
)
from hetpipe.coordinator.worker_life import LifeState
from hetpipe.spec.commands import StartStageCommand
from hetpipe.spec.events import (
    Evaluated,
    JobState,
    ProgressTable,
    StopMode,
    Waiting,
    WorkerQuarantined,
    WorkerRejoined,
)
from hetpipe.spec.ids import Clock, Incarnation
from hetpipe.spec.ids import VirtualWorkerIndex as Vw
from hetpipe.spec.members import MemberId
from hetpipe.spec.run import StageDone, StageEvaluation, StageFailed, StageReady, StageWaiting
from tests.coordinator.builders import STAGES, agent_member, clocks, job, progress
from tests.coordinator.machine_driver import SHARDS, Driver

UNREACHABLE = ("PeerUnreachable", "the clock shard cannot be reached")


@pytest.fixture
def driver() -> Driver:
    return Driver().to(JobState.RUNNING)


def running(*overrides: str) -> Driver:
    return Driver(job(*overrides)).to(JobState.RUNNING)


def not_asked(vw: int, life: int, error: str = UNREACHABLE[0]) -> ShardNotAsked:
    return ShardNotAsked(Vw(vw), Incarnation(life), error, UNREACHABLE[1])


def gone(agent: str) -> MemberGone:
    return MemberGone(MemberId(agent), f"agent {agent} stopped answering")


def evict(vw: int, life: int) -> Evict:
    return Evict(Vw(vw), Incarnation(life), Driver.TERM, SHARDS[0])


def admit(vw: int, life: int) -> Admit:
    return Admit(Vw(vw), Incarnation(life), 2, Driver.TERM, SHARDS[0])


def started(driver: Driver) -> list[tuple[str, int, int, int, str | None]]:
    """Stages that were told to start after the first lives."""
    found = [(item.agent, item.command) for item in driver.start_commands[len(STAGES) :]]
    return [
        (a, c.config.vw, c.config.stage, c.config.incarnation, c.config.restore)
        for a, c in found
        if isinstance(c, StartStageCommand)
    ]


def keep_reporting(driver: Driver, seconds: float, *, but: Sequence[tuple[int, int]] = ()) -> None:
    """Let time pass while every stage of a first life but those named reports once a second."""
    for _ in range(round(seconds)):
        driver.wait(1.0)
        for vw, stage in STAGES:
            if (vw, stage) not in but:
                driver.report(vw, stage, progress())


class TestDeath:
    def test_it_is_evicted_and_killed_at_once(self, driver: Driver) -> None:
        driver.exit(1, 1, -9)

        assert driver.tasks(Evict) == [evict(1, 0)]
        assert driver.kill_commands == [("n1", 1, 0)]
        assert driver.stop_commands == []

    def test_it_is_told_once_with_its_cause(self, driver: Driver) -> None:
        driver.fail(1, 0, "its neighbour is gone", secondary=True)
        driver.exit(1, 0, 1)
        assert driver.tasks(Evict) == [evict(1, 0)]
        driver.wait(0.5)
        assert driver.lost == []
        driver.exit(1, 1, -9)
        driver.wait(20.0)

        [lost] = driver.lost
        assert (lost.vw, lost.incarnation) == (1, 0)
        assert lost.sentence == "stage 1 of virtual worker 1 (pid 1011 on n1.host) was killed by SIGKILL"
        assert len(driver.tasks(Evict)) == 1

    def test_a_stage_that_the_agent_ended_on_order_is_no_cause(self, driver: Driver) -> None:
        driver.exit(1, 1, 3, "no more memory")
        driver.exit(1, 0, -9, ordered=True)

        assert driver.lost[0].sentence.endswith("its last words: no more memory")

    def test_with_echoes_alone_the_lease_is_waited_for(self, driver: Driver) -> None:
        driver.fail(1, 0, "its neighbour is gone", secondary=True)
        driver.feed(Evicted(Vw(1), Incarnation(0)))
        driver.wait(5.0)
        assert driver.lost == []
        driver.feed(gone("n1"))

        assert [event.sentence for event in driver.lost] == ["agent n1 stopped answering"]

    def test_it_lives_again_with_the_newest_checkpoint(self, driver: Driver) -> None:
        driver.end_life(1)
        driver.wait(0.25)
        assert driver.tasks(Admit) == [admit(1, 1)]
        assert started(driver) == []
        driver.begin_life(1, 1, restore="/run/checkpoints/clock-00000004")

        where = "/run/checkpoints/clock-00000004"
        assert started(driver) == [("n1", 1, 0, 1, where), ("n1", 1, 1, 1, where)]
        assert driver.events(WorkerRejoined) == [WorkerRejoined(Vw(1), Incarnation(1))]
        assert [life.pid for life in driver.machine.stages] == [1000, 1001, 2010, 2011]
        assert driver.worker(1).status.deaths == 1
        assert driver.machine.state is JobState.RUNNING

    @pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
    def test_everything_must_be_over_before_it_starts_anew(self, driver: Driver, order: tuple[int, ...]) -> None:
        driver.exit(1, 1, -9)
        steps = (
            lambda: driver.feed(Evicted(Vw(1), Incarnation(0))),
            lambda: driver.exit(1, 0, -9, ordered=True),
            lambda: driver.wait(1.0),
        )
        for index in order[:-1]:
            steps[index]()
        done = {0, 1} <= set(order[:-1])
        assert bool(driver.tasks(Admit)) == done
        steps[order[-1]]()

        assert driver.tasks(Admit) == [admit(1, 1)]

    def test_a_process_that_does_not_end_is_not_waited_for_for_ever(self, driver: Driver) -> None:
        driver.exit(1, 1, -9)
        driver.feed(Evicted(Vw(1), Incarnation(0)))
        driver.wait(4.75)
        assert driver.tasks(Admit) == []
        driver.wait(0.25)
        assert driver.tasks(Admit) == [admit(1, 1)]
        driver.begin_life(1, 1)
        driver.exit(1, 0, -9, ordered=True)

        assert driver.worker(1).state is LifeState.READY

    def test_what_a_lost_life_still_says_changes_nothing(self, driver: Driver) -> None:
        driver.exit(1, 1, -9)
        driver.report(1, 0, StageFailed("StaleIncarnation", "it is no member any more"))
        driver.report(1, 0, StageFailed("WaveOutOfOrder", "so refused"))
        driver.exit(1, 0, 1)
        driver.wait(30.0)

        assert driver.machine.state is JobState.RUNNING
        assert len(driver.lost) == 1

    def test_one_that_others_have_evicted_is_lost(self, driver: Driver) -> None:
        driver.report(1, 0, StageFailed("StaleIncarnation", "it is no member any more"))

        assert driver.tasks(Evict) == [evict(1, 0)]

    def test_two_die_at_once(self, driver: Driver) -> None:
        driver.end_life(0)
        driver.end_life(1)
        driver.begin_life(1, 1)
        driver.begin_life(0, 1)

        assert driver.tasks(Admit) == [admit(0, 1), admit(1, 1)]
        assert [event.vw for event in driver.events(WorkerRejoined)] == [1, 0]

    def test_the_result_tells_of_it(self, driver: Driver) -> None:
        driver.end_life(1)
        driver.begin_life(1, 1)
        for vw, stage in STAGES:
            driver.report(vw, stage, StageDone(Clock(6), "end"), life=int(vw))
        driver.wrap_up()

        result = driver.ended().result
        assert result is not None
        assert result["deaths"] == {"0": 0, "1": 1}
        assert driver.states()[-1] == "finished"

    def test_distances_are_those_of_the_survivors(self, driver: Driver) -> None:
        driver.feed(ClocksTold(clocks(9, 2)))
        driver.exit(1, 1, -9)
        driver.wait(1.0)

        assert [row.distance for row in driver.events(ProgressTable)[-1].rows] == [0, 0]


class TestTheClockShard:
    @pytest.mark.parametrize("error", ["PeerUnreachable", "UnknownJob", "ZeroDivisionError"])
    def test_it_is_told_until_it_has_heard(self, driver: Driver, error: str) -> None:
        driver.exit(1, 1, -9)
        for asked in range(2, 6):
            driver.feed(not_asked(1, 0, error))
            driver.wait(0.75)
            assert len(driver.tasks(Evict)) == asked - 1
            driver.wait(0.25)
            assert driver.tasks(Evict) == [evict(1, 0)] * asked
        driver.feed(Evicted(Vw(1), Incarnation(0)))
        driver.wait(5.0)
        assert len(driver.tasks(Evict)) == asked
        for asked in range(2, 4):
            driver.feed(not_asked(1, 1, error))
            driver.wait(1.0)
            assert driver.tasks(Admit) == [admit(1, 1)] * asked

    def test_a_wait_for_it_is_told(self, driver: Driver) -> None:
        driver.exit(1, 1, -9)
        driver.feed(not_asked(1, 0))
        driver.wait(5.0)

        assert driver.sentences() == [
            f"the coordinator waits for the clock shard to have virtual worker 1 evicted ({UNREACHABLE[1]})"
        ]

    def test_and_ends_in_the_end(self) -> None:
        driver = running("survive.absence=10s")
        driver.exit(1, 1, -9)
        for _ in range(11):
            assert driver.machine.state is JobState.RUNNING
            driver.feed(not_asked(1, 0))
            driver.wait(1.0)

        assert driver.ended().error == "PeerUnreachable"
        assert driver.ended().sentence == (
            "for 10 s the coordinator could not have virtual worker 1 evicted: the clock shard cannot be reached"
        )

    def test_a_life_that_it_has_seen_already_is_skipped(self, driver: Driver) -> None:
        driver.end_life(1)
        driver.wait(0.25)
        driver.feed(not_asked(1, 1, "StaleIncarnation"))
        driver.wait(1.0)
        assert driver.tasks(Admit) == [admit(1, 1), admit(1, 2)]
        driver.feed(Admitted(Vw(1), Incarnation(1), None))
        assert started(driver) == []
        driver.begin_life(1, 2)

        assert driver.events(WorkerRejoined) == [WorkerRejoined(Vw(1), Incarnation(2))]

    def test_answers_that_come_twice_count_once(self, driver: Driver) -> None:
        driver.end_life(1)
        driver.begin_life(1, 1)
        said = len(driver.said)
        driver.feed(Evicted(Vw(1), Incarnation(0)))
        driver.feed(Admitted(Vw(1), Incarnation(1), None))
        driver.feed(Evicted(Vw(1), Incarnation(1)))

        assert len(driver.said) == said
        assert driver.worker(1).state is LifeState.READY


class TestAgents:
    def test_a_lost_one_loses_its_virtual_workers(self, driver: Driver) -> None:
        driver.feed(gone("n1"))

        assert driver.tasks(Evict) == [evict(1, 0)]
        assert driver.kill_commands == []
        assert [event.sentence for event in driver.lost] == ["agent n1 stopped answering"]

    def test_it_is_waited_for(self, driver: Driver) -> None:
        driver.feed(gone("n1"))
        driver.feed(Evicted(Vw(1), Incarnation(0)))
        keep_reporting(driver, 11)
        assert driver.tasks(Admit) == []
        waits = "the coordinator waits for agent n1 to come back with its devices, to start virtual worker 1 anew"
        assert driver.sentences() == [waits] * 2
        driver.feed(MemberSeen(agent_member("n1", devices=2, pid=777)))

        assert driver.tasks(Admit) == [admit(1, 1)]
        assert driver.kill_commands == [("n1", 1, 0)], "what a process that was only silent still runs"

    def test_one_that_was_replaced_starts_it_soon(self, driver: Driver) -> None:
        driver.feed(gone("n1"))
        driver.feed(MemberSeen(agent_member("n1", devices=2, pid=777)))
        driver.feed(Evicted(Vw(1), Incarnation(0)))
        driver.feed(Admitted(Vw(1), Incarnation(1), None))

        assert [start[:4] for start in started(driver)] == [("n1", 1, 0, 1), ("n1", 1, 1, 1)]

    @pytest.mark.parametrize("back", [agent_member("n1", devices=1), agent_member("n7", devices=2)])
    def test_it_must_have_the_devices_of_the_plan(self, driver: Driver, back: object) -> None:
        driver.feed(gone("n1"))
        driver.feed(Evicted(Vw(1), Incarnation(0)))
        driver.feed(MemberSeen(back))  # type: ignore[arg-type]
        driver.wait(1.0)

        assert driver.tasks(Admit) == []

    def test_without_anybody_left_it_is_not_waited_for_for_ever(self) -> None:
        driver = running("survive.absence=10s")
        for agent in ("n0", "n1"):
            driver.feed(gone(agent))
        for vw in (0, 1):
            driver.feed(Evicted(Vw(vw), Incarnation(0)))
        driver.wait(9.75)
        assert driver.machine.state is JobState.RUNNING
        driver.wait(2.0)

        assert driver.ended().sentence == (
            "no virtual worker is left, and agent n0 did not come back within 10 s; agent n0 stopped answering"
        )

    def test_a_new_life_is_lost_with_its_agent_too(self, driver: Driver) -> None:
        driver.end_life(1)
        driver.feed(Admitted(Vw(1), Incarnation(1), None))
        driver.feed(gone("n1"))

        assert driver.tasks(Evict) == [evict(1, 0), evict(1, 1)]
        assert driver.worker(1).deaths == 2

    def test_one_that_goes_while_the_clock_shard_is_asked(self, driver: Driver) -> None:
        driver.end_life(1)
        driver.feed(gone("n1"))
        driver.feed(Admitted(Vw(1), Incarnation(1), None))

        assert driver.tasks(Evict) == [evict(1, 0), evict(1, 1)]
        assert driver.lost[-1].sentence == "agent n1 is gone"

    def test_nobody_is_started_while_a_parameter_server_is_gone(self, driver: Driver) -> None:
        driver.feed(MemberGone(SHARDS[1].id, "ps1 stopped answering"))
        driver.wait(0.25)
        driver.end_life(1)
        driver.wait(10.0)
        assert driver.tasks(Admit) == []
        driver.feed(MemberSeen(SHARDS[1]))
        driver.wait(0.5)

        assert driver.tasks(Admit) == [admit(1, 1)]


class TestCrashLoop:
    def crash(self, driver: Driver, times: int) -> list[float]:
        """Let virtual worker 1 die again and again as it starts; the pauses."""
        pauses = []
        for life in range(times):
            driver.end_life(1, life=life)
            died = driver.now
            while len(driver.tasks(Admit)) == life and driver.now - died < 40.0:
                driver.report(0, 0, progress())
                driver.report(0, 1, progress())
                driver.wait(0.25)
            pauses.append(driver.now - died)
            if driver.worker(1).state is LifeState.ADMITTING:
                driver.feed(Admitted(Vw(1), Incarnation(life + 1), None))
        return pauses

    def test_pauses_grow_and_then_it_stays_out(self, driver: Driver) -> None:
        assert self.crash(driver, 4) == [0.0, 1.0, 2.0, 4.0]
        driver.end_life(1, life=4)
        driver.wait(1.0)

        [event] = driver.events(WorkerQuarantined)
        assert event.vw == 1
        assert event.sentence == (
            "virtual worker 1 died 5 times and is not started anew; the last time, "
            "stage 1 of virtual worker 1 (pid 1011 on n1.host) was killed by SIGKILL"
        )
        assert driver.machine.state is JobState.RUNNING
        driver.report(0, 0, StageDone(Clock(6), "end"))
        driver.report(0, 1, StageDone(Clock(6), "end"))
        driver.wrap_up()
        assert driver.ended().state is JobState.FINISHED

    def test_pauses_have_a_limit(self) -> None:
        assert self.crash(running("survive.backoff=2s"), 4) == [0.0, 1.0, 2.0, 2.0]

    def test_a_life_that_committed_a_wave_begins_the_count_anew(self, driver: Driver) -> None:
        self.crash(driver, 3)
        for stage in (0, 1):
            driver.report(1, stage, StageReady(7), life=3)
        driver.commit(1)
        driver.end_life(1, life=3)

        assert driver.worker(1).crashes == 0
        assert driver.tasks(Admit)[-1] == admit(1, 4)

    def test_restarts_can_be_forbidden(self) -> None:
        driver = running("survive.restarts=0")
        driver.commit(1)
        driver.end_life(1)

        assert driver.worker(1).state is LifeState.OUT
        assert driver.events(WorkerQuarantined)[0].sentence.startswith("virtual worker 1 died once and is not started")

    def test_want_of_memory_is_tried_twice(self, driver: Driver) -> None:
        for life in (0, 1):
            driver.commit(1)
            driver.report(1, 0, StageFailed("OutOfMemoryError", "no memory"), life=life)
            driver.exit(1, 0, 1, life=life)
            driver.exit(1, 1, -9, life=life, ordered=True)
            driver.feed(Evicted(Vw(1), Incarnation(life)))
            if life == 0:
                driver.begin_life(1, 1)

        assert driver.worker(1).state is LifeState.OUT
        assert driver.lost[1].sentence.endswith("failed: no memory")

    def test_a_checkpoint_that_is_gone_meanwhile_is_no_mistake_of_the_user(self, driver: Driver) -> None:
        driver.end_life(1)
        driver.feed(Admitted(Vw(1), Incarnation(1), "/run/checkpoints/clock-00000004"))
        driver.report(1, 0, StageFailed("CheckpointError", "it is gone"), life=1)
        driver.wait(2.0)

        assert driver.machine.state is JobState.RUNNING
        assert driver.tasks(Evict)[-1] == evict(1, 1)

    def test_with_nobody_left_the_job_has_failed_of_the_deepest_cause(self) -> None:
        driver = running("survive.restarts=1")
        driver.end_life(1)
        driver.feed(gone("n0"))
        driver.feed(Evicted(Vw(0), Incarnation(0)))
        driver.wait(1.5)

        assert driver.ended().sentence == (
            "no virtual worker is left; stage 1 of virtual worker 1 (pid 1011 on n1.host) was killed by SIGKILL"
        )


class TestStarting:
    def test_the_others_begin_without_it(self) -> None:
        driver = Driver().to(JobState.STARTING)
        for stage in (0, 1):
            driver.report(0, stage, StageReady(1))
        assert driver.states()[-1] == "starting"
        driver.exit(1, 0, -9)

        assert driver.states()[-1] == "running"
        assert driver.tasks(Evict) == [evict(1, 0)]

    def test_the_second_lives_begin_when_all_first_ones_were_lost(self) -> None:
        driver = Driver().to(JobState.STARTING)
        for vw in (0, 1):
            driver.end_life(vw)
        assert driver.states()[-1] == "starting"
        driver.begin_life(1, 1)

        assert driver.states()[-1] == "running"

    def test_a_mistake_of_the_user_ends_the_job(self) -> None:
        driver = Driver().to(JobState.STARTING)
        driver.report(1, 0, StageFailed("CallableError", "model:build is not there"))
        driver.wait(1.0)

        assert driver.ended().error == "CallableError"
        assert driver.tasks(Evict) == []

    def test_a_later_life_that_does_not_get_ready_is_lost(self, driver: Driver) -> None:
        driver.end_life(1)
        driver.feed(Admitted(Vw(1), Incarnation(1), None))
        driver.report(1, 0, StageReady(7), life=1)
        keep_reporting(driver, 121, but=[(1, 0), (1, 1)])

        assert driver.tasks(Evict) == [evict(1, 0), evict(1, 1)]
        driver.exit(1, 0, -9, life=1, ordered=True)
        driver.exit(1, 1, -9, life=1, ordered=True)
        assert driver.lost[1].sentence == "stage 1 of virtual worker 1 (on n1.host) did not get ready within 120 s"


class TestStall:
    def test_a_stage_that_says_nothing_is_lost(self) -> None:
        driver = running("survive.stall=10s")
        keep_reporting(driver, 10, but=[(1, 1)])
        assert driver.tasks(Evict) == []
        keep_reporting(driver, 1, but=[(1, 1)])

        assert driver.tasks(Evict) == [evict(1, 0)]
        assert driver.kill_commands == [("n1", 1, 0)]
        keep_reporting(driver, 2, but=[(1, 0), (1, 1)])
        assert driver.lost[0].sentence == (
            "stage 1 of virtual worker 1 (pid 1011 on n1.host) hangs: it has reported nothing for 10 s"
        )

    def test_one_that_waits_says_so(self) -> None:
        driver = running("survive.stall=10s")
        for _ in range(10):
            keep_reporting(driver, 6, but=[(1, 1)])
            driver.report(1, 1, StageWaiting("it waits", 6.0))

        assert driver.tasks(Evict) == []

    def test_a_coordinator_that_was_stopped_itself_accuses_nobody(self, driver: Driver) -> None:
        driver.wait(50.0)
        driver.now += 500.0
        driver.feed(Tick())
        assert driver.tasks(Evict) == []
        driver.wait(10.0)

        assert driver.tasks(Evict) == []

    def test_nobody_hangs_while_a_parameter_server_is_gone(self) -> None:
        driver = running("survive.stall=10s")
        driver.feed(MemberGone(SHARDS[0].id, "ps0 stopped answering"))
        driver.wait(30.0)
        driver.feed(MemberSeen(SHARDS[0]))
        driver.wait(9.75)
        assert driver.tasks(Evict) == []
        driver.wait(1.0)

        assert driver.tasks(Evict) == [evict(0, 0), evict(1, 0)]

    def test_a_stage_at_its_end_need_not_say_more(self, driver: Driver) -> None:
        for stage in (0, 1):
            driver.report(1, stage, StageDone(Clock(6), "end"))
        keep_reporting(driver, 100, but=[(1, 0), (1, 1)])

        assert driver.tasks(Evict) == []


class TestTheEndOfTheRun:
    def test_who_dies_in_the_last_barrier_does_not_hold_it_up(self, driver: Driver) -> None:
        driver.report(0, 0, StageDone(Clock(6), "end"))
        driver.exit(1, 1, -9)
        assert driver.tasks(Evict) == [evict(1, 0)]
        assert driver.wrap_up_tasks == []
        driver.report(0, 1, StageDone(Clock(6), "end"))
        driver.wrap_up()

        assert driver.ended().state is JobState.FINISHED
        assert driver.tasks(Admit) == []

    def test_a_newcomer_that_did_not_get_ready_is_ended(self, driver: Driver) -> None:
        driver.end_life(1)
        driver.feed(Admitted(Vw(1), Incarnation(1), None))
        driver.report(1, 0, StageReady(7), life=1)
        for stage in (0, 1):
            driver.report(0, stage, StageDone(Clock(6), "end"))
        assert driver.wrap_up_tasks == []
        driver.wait(1.25)
        assert driver.kill_commands[-1] == ("n1", 1, 1)
        driver.wrap_up()

        assert driver.ended().state is JobState.FINISHED

    def test_one_that_is_ready_says_itself_that_it_missed_the_end(self, driver: Driver) -> None:
        driver.end_life(1)
        driver.begin_life(1, 1)
        for stage in (0, 1):
            driver.report(0, stage, StageDone(Clock(6), "end"))
        driver.wait(5.0)
        assert driver.wrap_up_tasks == []
        for stage in (0, 1):
            driver.report(1, stage, StageDone(Clock(6), "end"), life=1)

        assert len(driver.wrap_up_tasks) == 1

    @pytest.mark.parametrize("num_answers", [0, 1])
    def test_nobody_is_started_for_it(self, driver: Driver, num_answers: int) -> None:
        driver.end_life(1)
        driver.wait(0.25)
        driver.feed(not_asked(1, 1))
        for stage in (0, 1):
            driver.report(0, stage, StageDone(Clock(6), "end"))
        for _ in range(num_answers):
            driver.feed(Admitted(Vw(1), Incarnation(1), None))
        driver.wait(3.0)

        assert started(driver) == []
        assert len(driver.tasks(Admit)) == 1
        assert len(driver.wrap_up_tasks) == 1

    def test_an_evaluation_has_the_parts_that_came(self, driver: Driver) -> None:
        driver.report(0, 1, StageEvaluation(Clock(6), 1, 6, {"loss": 3.0}))
        assert driver.events(Evaluated) == []
        driver.exit(1, 1, -9)

        assert driver.events(Evaluated) == [Evaluated(Clock(6), 1, 6, {"loss": 0.5})]


class TestStop:
    def test_nobody_is_started_anew_for_the_barrier(self, driver: Driver) -> None:
        driver.end_life(1)
        driver.feed(StopAsked(StopMode.CHECKPOINT))
        driver.feed(Admitted(Vw(1), Incarnation(1), None))
        for stage in (0, 1):
            driver.report(0, stage, StageDone(Clock(6), "stop"))
        driver.wrap_up()

        assert started(driver) == []
        assert driver.ended().state is JobState.STOPPED

    def test_a_death_on_the_way_to_it_is_survived(self, driver: Driver) -> None:
        driver.feed(StopAsked(StopMode.CHECKPOINT))
        driver.end_life(1)
        driver.wait(1.0)
        assert driver.machine.state is JobState.STOPPING
        for stage in (0, 1):
            driver.report(0, stage, StageDone(Clock(6), "stop"))
        driver.wrap_up()

        assert driver.ended().state is JobState.STOPPED
        assert len(driver.tasks(AskBarrier)) == 1

    def test_with_nobody_left_there_is_no_barrier(self, driver: Driver) -> None:
        driver.end_life(1)
        driver.feed(StopAsked(StopMode.CHECKPOINT))
        driver.end_life(0)
        driver.wait(1.0)

        assert driver.ended().state is JobState.FAILED
        assert driver.ended().sentence.startswith("no virtual worker is left; stage 1 of virtual worker")

    def test_at_once_it_ends_whatever_was_going_on(self, driver: Driver) -> None:
        driver.exit(1, 1, -9)
        driver.feed(StopAsked(StopMode.NOW))
        driver.feed(Evicted(Vw(1), Incarnation(0)))
        driver.exit(1, 0, -9, ordered=True)
        for stage in (0, 1):
            driver.exit(0, stage, -15)
        driver.wrap_up()

        assert driver.ended().state is JobState.STOPPED
        assert driver.tasks(Admit) == []


def test_a_wait_is_not_told_while_there_is_none(driver: Driver) -> None:
    driver.end_life(1)
    driver.begin_life(1, 1)
    keep_reporting(driver, 20, but=[(1, 0), (1, 1)])

    assert driver.events(Waiting) == []
