"""An agent is about to go, with its virtual workers; and who is out is kept where restarts find it."""

from __future__ import annotations

import pytest

from hetpipe.decide.lifecycle.exchange import (
    AddRequested,
    Admit,
    AdmitAcknowledged,
    ClocksReported,
    Drain,
    DrainedPersisted,
    Evict,
    EvictAcknowledged,
    MemberRegistered,
    PersistDrained,
)
from hetpipe.values.events import JobState, QueuePlace, Waiting, WorkerLeft, WorkerRejoined
from hetpipe.values.ids import Incarnation
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.life_state import LifeState
from hetpipe.values.run import StageFailed, StageReady
from tests.server.coordinator.builders import agent_member, clocks, job
from tests.server.coordinator.leaving import departs, drain, gone, order, pass_barrier, state
from tests.server.coordinator.machine_driver import Driver

OUT, AGAIN = WorkerLeft(Vw(1), Incarnation(0), returns=False), WorkerLeft(Vw(1), Incarnation(0), returns=True)


@pytest.fixture
def driver() -> Driver:
    return Driver().to(JobState.RUNNING)


class TestDepartingAgents:
    def test_its_virtual_workers_leave_and_wait_for_it(self, driver: Driver) -> None:
        departs(driver)
        departs(driver)
        assert driver.tasks(Drain) == [order(1, 0)]
        pass_barrier(driver)
        assert driver.events(WorkerLeft) == [AGAIN]
        driver.feed(gone("n1"))
        driver.wait(5.0)
        assert (driver.lost, driver.tasks(Admit)) == ([], [])
        driver.feed(MemberRegistered(agent_member("n1", devices=2, pid=777)))
        driver.begin_life(1, 1)

        assert driver.events(WorkerRejoined) == [WorkerRejoined(Vw(1), Incarnation(1))]

    def test_it_gets_no_stages_before_it_registers_again(self, driver: Driver) -> None:
        departs(driver)
        pass_barrier(driver)
        driver.wait(1.0)
        assert driver.tasks(Admit) == []
        driver.feed(MemberRegistered(agent_member("n1", devices=2)))

        assert len(driver.tasks(Admit)) == 1

    def test_what_it_cannot_end_in_time_is_lost_as_ever(self, driver: Driver) -> None:
        departs(driver)
        driver.exit(1, 0, -9)
        driver.exit(1, 1, -9)

        assert len(driver.tasks(Evict)) == 1
        assert len(driver.lost) == 1

    def test_who_is_being_started_there_is_sent_away(self, driver: Driver) -> None:
        driver.end_life(1)
        driver.feed(AdmitAcknowledged(Vw(1), Incarnation(1), None))
        departs(driver)
        for stage in (0, 1):
            driver.report(1, stage, StageFailed("LinkClosed", "its neighbour is gone", secondary=True), life=1)
            driver.exit(1, stage, -9, life=1, ordered=True)
        driver.feed(EvictAcknowledged(Vw(1), Incarnation(1)))
        driver.wait(2.0)

        assert driver.events(WorkerLeft) == [WorkerLeft(Vw(1), Incarnation(1), returns=True)]
        assert len(driver.lost) == 1, "the life before"
        assert state(driver) is LifeState.AWAITING
        assert driver.worker(1).deaths == 1

    def test_one_that_was_to_stay_out_stays_out(self, driver: Driver) -> None:
        drain(driver)
        departs(driver)
        pass_barrier(driver)

        assert driver.events(WorkerLeft) == [OUT]

    def test_with_nobody_left_the_job_waits_for_them_for_as_long_as_it_takes(self) -> None:
        """They have said that they go: a cluster that is preempted as a whole loses nothing but time."""
        driver = Driver(job("survive.absence=10s")).to(JobState.RUNNING)
        for agent in ("n0", "n1"):
            departs(driver, agent)
        for vw, agent in enumerate(("n0", "n1")):
            pass_barrier(driver, vw)
            driver.feed(gone(agent))
        driver.wait(1000.0)
        assert driver.machine.state is JobState.RUNNING
        assert driver.events(Waiting)[0].sentence.startswith("the coordinator waits for agent n0 to return")
        driver.feed(MemberRegistered(agent_member("n1", devices=2, pid=777)))
        driver.begin_life(1, 1)
        assert driver.events(WorkerRejoined) == [WorkerRejoined(Vw(1), Incarnation(1))]

    def test_who_has_come_back_and_then_goes_without_a_word_is_not_waited_for_for_ever(self) -> None:
        driver = Driver(job("survive.absence=10s")).to(JobState.RUNNING)
        for vw, agent in enumerate(("n0", "n1")):
            departs(driver, agent)
            pass_barrier(driver, vw)
            driver.feed(gone(agent))
        for vw, agent in enumerate(("n0", "n1")):
            driver.feed(MemberRegistered(agent_member(agent, devices=2, pid=777)))
            driver.begin_life(vw, 1)
        for vw, agent in enumerate(("n0", "n1")):
            driver.feed(gone(agent))
            driver.feed(EvictAcknowledged(Vw(vw), Incarnation(1)))
        driver.wait(30.0)

        assert driver.ended().sentence.startswith("no virtual worker is left, and agent n0 did not return within 1")

    def test_a_job_that_is_inspected_there_goes_back_to_the_queue(self) -> None:
        driver = Driver().to(JobState.INSPECTING)
        departs(driver, "n0")
        driver.feed(gone("n0"))
        driver.wait(1000.0)
        place = QueuePlace(1, "agent n0 is shutting down, and the job has not begun")
        assert (driver.machine.state, driver.machine.queue_place) == (JobState.PENDING, place)
        assert driver.machine.agents == ()
        driver.see_cluster()
        assert driver.states() == ["inspecting", "pending", "inspecting"]

    def test_strangers_may_depart(self, driver: Driver) -> None:
        departs(driver, "n7")

        assert driver.tasks(Drain) == []


class TestStarting:
    def test_the_others_begin_without_one_that_was_sent_away(self) -> None:
        driver = Driver().to(JobState.STARTING)
        for stage in (0, 1):
            driver.report(0, stage, StageReady(1))
        drain(driver)

        assert driver.states()[-1] == "running"
        assert driver.kill_commands == [("n1", 1, 0)]
        driver.feed(ClocksReported(clocks(1, 0)))
        for stage in (0, 1):
            driver.exit(1, stage, -9, ordered=True)
        driver.feed(EvictAcknowledged(Vw(1), Incarnation(0)))
        assert driver.events(WorkerLeft) == [OUT]


class TestKeepingWhoIsOut:
    """The clock shard knows it, so that a later coordinator starts nobody whom this one was asked to send away."""

    def asked(self, driver: Driver) -> list[tuple[int, ...]]:
        return [tuple(task.out) for task in driver.tasks(PersistDrained)]

    def test_it_is_told_of_every_change(self, driver: Driver) -> None:
        drain(driver)
        drain(driver)
        assert self.asked(driver) == [(1,)]
        driver.feed(DrainedPersisted((Vw(1),), is_kept=True))
        driver.wait(5.0)
        assert self.asked(driver) == [(1,)]
        driver.feed(AddRequested(Vw(1)))

        assert self.asked(driver) == [(1,), ()]

    def test_one_order_after_the_other(self, driver: Driver) -> None:
        drain(driver)
        driver.feed(AddRequested(Vw(1)))
        drain(driver, 0)
        assert self.asked(driver) == [(1,)]
        driver.feed(DrainedPersisted((Vw(1),), is_kept=True))

        assert self.asked(driver) == [(1,), (0,)]

    def test_it_is_told_again_after_a_failure(self, driver: Driver) -> None:
        drain(driver)
        driver.feed(DrainedPersisted((Vw(1),), is_kept=False))
        driver.wait(0.75)
        assert len(self.asked(driver)) == 1
        driver.wait(0.25)
        assert len(self.asked(driver)) == 2

    def test_who_comes_back_by_itself_is_not_kept(self, driver: Driver) -> None:
        departs(driver)
        assert self.asked(driver) == []
