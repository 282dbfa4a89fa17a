"""Virtual workers that die as they start, again and again, or hang: pauses, quarantine, and who is accused."""

from __future__ import annotations

import pytest

from hetpipe.decide.lifecycle.exchange import (
    Admit,
    AdmitAcknowledged,
    Evict,
    EvictAcknowledged,
    MemberGone,
    MemberRegistered,
    Tick,
)
from hetpipe.values.events import (
    JobState,
    WorkerQuarantined,
)
from hetpipe.values.ids import Clock, Incarnation
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.life_state import LifeState
from hetpipe.values.run import StageDone, StageFailed, StageReady, StageWaiting
from tests.server.coordinator.builders import progress
from tests.server.coordinator.lives import admit, evict, gone, keep_reporting, running
from tests.server.coordinator.machine_driver import SHARDS, Driver


@pytest.fixture
def driver() -> Driver:
    return Driver().to(JobState.RUNNING)


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
                driver.feed(AdmitAcknowledged(Vw(1), Incarnation(life + 1), None))
        return pauses

    def test_pauses_grow_and_then_it_stays_out(self, driver: Driver) -> None:
        assert self.crash(driver, 4) == [0.0, 1.0, 2.0, 4.0]
        driver.end_life(1, life=4)
        driver.wait(1.0)

        [event] = driver.events(WorkerQuarantined)
        assert event.vw == 1
        assert event.sentence == (
            "virtual worker 1 died 5 times and is not restarted; the last time, "
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
        assert driver.events(WorkerQuarantined)[0].sentence.startswith(
            "virtual worker 1 died once and is not restarted;"
        )

    def test_want_of_memory_is_tried_twice(self, driver: Driver) -> None:
        for life in (0, 1):
            driver.commit(1)
            driver.report(1, 0, StageFailed("OutOfMemoryError", "no memory"), life=life)
            driver.exit(1, 0, 1, life=life)
            driver.exit(1, 1, -9, life=life, ordered=True)
            driver.feed(EvictAcknowledged(Vw(1), Incarnation(life)))
            if life == 0:
                driver.begin_life(1, 1)

        assert driver.worker(1).state is LifeState.OUT
        assert driver.lost[1].sentence.endswith("failed: no memory")

    def test_a_lost_data_worker_is_no_mistake_of_the_user(self, driver: Driver) -> None:
        driver.report(1, 0, StageFailed("DataWorkerLost", "a data worker was killed by SIGKILL"))
        driver.wait(2.0)

        assert driver.machine.state is JobState.RUNNING
        assert driver.tasks(Evict)[-1] == evict(1, 0)
        assert driver.lost[0].sentence.endswith("a data worker was killed by SIGKILL")

    def test_a_checkpoint_that_is_gone_meanwhile_is_no_mistake_of_the_user(self, driver: Driver) -> None:
        driver.end_life(1)
        driver.feed(AdmitAcknowledged(Vw(1), Incarnation(1), "/run/checkpoints/clock-00000004"))
        driver.report(1, 0, StageFailed("CheckpointError", "it is gone"), life=1)
        driver.wait(2.0)

        assert driver.machine.state is JobState.RUNNING
        assert driver.tasks(Evict)[-1] == evict(1, 1)

    def test_with_nobody_left_the_job_has_failed_of_the_deepest_cause(self) -> None:
        driver = running("survive.restarts=1")
        driver.end_life(1)
        driver.feed(gone("n0"))
        driver.feed(EvictAcknowledged(Vw(0), Incarnation(0)))
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
        driver.feed(AdmitAcknowledged(Vw(1), Incarnation(1), None))
        driver.report(1, 0, StageReady(7), life=1)
        keep_reporting(driver, 121, but=[(1, 0), (1, 1)])

        assert driver.tasks(Evict) == [evict(1, 0), evict(1, 1)]
        driver.exit(1, 0, -9, life=1, ordered=True)
        driver.exit(1, 1, -9, life=1, ordered=True)
        assert (
            driver.lost[1].sentence
            == "stage 1 of virtual worker 1 (on n1.host) is not ready, and has reported nothing for 120 s"
        )


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
        driver.feed(MemberRegistered(SHARDS[0]))
        driver.wait(9.75)
        assert driver.tasks(Evict) == []
        driver.wait(1.0)

        assert driver.tasks(Evict) == [evict(0, 0), evict(1, 0)]

    def test_a_stage_at_its_end_need_not_say_more(self, driver: Driver) -> None:
        for stage in (0, 1):
            driver.report(1, stage, StageDone(Clock(6), "end"))
        keep_reporting(driver, 100, but=[(1, 0), (1, 1)])

        assert driver.tasks(Evict) == []
