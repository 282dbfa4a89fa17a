"""A virtual worker dies while the run ends or is being stopped."""

from __future__ import annotations

import pytest

from hetpipe.decide.lifecycle.exchange import (
    Admit,
    AdmitAcknowledged,
    Evict,
    EvictAcknowledged,
    RequestBarrier,
    StopRequested,
)
from hetpipe.values.events import (
    Evaluated,
    JobState,
    StopMode,
    Waiting,
)
from hetpipe.values.ids import Clock, Incarnation
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.run import StageDone, StageEvaluation, StageReady
from tests.server.coordinator.lives import evict, keep_reporting, not_asked, started
from tests.server.coordinator.machine_driver import Driver


@pytest.fixture
def driver() -> Driver:
    return Driver().to(JobState.RUNNING)


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
        driver.feed(AdmitAcknowledged(Vw(1), Incarnation(1), None))
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
            driver.feed(AdmitAcknowledged(Vw(1), Incarnation(1), None))
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
        driver.feed(StopRequested(StopMode.CHECKPOINT))
        driver.feed(AdmitAcknowledged(Vw(1), Incarnation(1), None))
        for stage in (0, 1):
            driver.report(0, stage, StageDone(Clock(6), "stop"))
        driver.wrap_up()

        assert started(driver) == []
        assert driver.ended().state is JobState.STOPPED

    def test_a_death_on_the_way_to_it_is_survived(self, driver: Driver) -> None:
        driver.feed(StopRequested(StopMode.CHECKPOINT))
        driver.end_life(1)
        driver.wait(1.0)
        assert driver.machine.state is JobState.STOPPING
        for stage in (0, 1):
            driver.report(0, stage, StageDone(Clock(6), "stop"))
        driver.wrap_up()

        assert driver.ended().state is JobState.STOPPED
        assert len(driver.tasks(RequestBarrier)) == 1

    def test_with_nobody_left_there_is_no_barrier(self, driver: Driver) -> None:
        driver.end_life(1)
        driver.feed(StopRequested(StopMode.CHECKPOINT))
        driver.end_life(0)
        driver.wait(1.0)

        assert driver.ended().state is JobState.FAILED
        assert driver.ended().sentence.startswith("no virtual worker is left; stage 1 of virtual worker")

    def test_at_once_it_ends_whatever_was_going_on(self, driver: Driver) -> None:
        driver.exit(1, 1, -9)
        driver.feed(StopRequested(StopMode.NOW))
        driver.feed(EvictAcknowledged(Vw(1), Incarnation(0)))
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
