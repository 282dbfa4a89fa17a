"""A virtual worker dies: it is evicted and killed at once, started anew when that is done, and nobody else stops."""

from __future__ import annotations

import pytest

from hetpipe.decide.lifecycle.exchange import (
    Admit,
    AdmitAcknowledged,
    ClocksReported,
    Evict,
    EvictAcknowledged,
    MemberGone,
    MemberRegistered,
)
from hetpipe.values.events import (
    JobState,
    ProgressTable,
    WorkerRejoined,
)
from hetpipe.values.ids import Clock, Incarnation
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.life_state import LifeState
from hetpipe.values.run import StageDone, StageFailed
from tests.server.coordinator.builders import STAGES, agent_member, clocks
from tests.server.coordinator.lives import UNREACHABLE, admit, evict, gone, keep_reporting, not_asked, running, started
from tests.server.coordinator.machine_driver import SHARDS, Driver


@pytest.fixture
def driver() -> Driver:
    return Driver().to(JobState.RUNNING)


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

        assert driver.lost[0].sentence.endswith("its last output: no more memory")

    def test_with_echoes_alone_the_lease_is_waited_for(self, driver: Driver) -> None:
        driver.fail(1, 0, "its neighbour is gone", secondary=True)
        driver.feed(EvictAcknowledged(Vw(1), Incarnation(0)))
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
            lambda: driver.feed(EvictAcknowledged(Vw(1), Incarnation(0))),
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
        driver.feed(EvictAcknowledged(Vw(1), Incarnation(0)))
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
        driver.feed(ClocksReported(clocks(9, 2)))
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
        driver.feed(EvictAcknowledged(Vw(1), Incarnation(0)))
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
        driver.feed(AdmitAcknowledged(Vw(1), Incarnation(1), None))
        assert started(driver) == []
        driver.begin_life(1, 2)

        assert driver.events(WorkerRejoined) == [WorkerRejoined(Vw(1), Incarnation(2))]

    def test_answers_that_come_twice_count_once(self, driver: Driver) -> None:
        driver.end_life(1)
        driver.begin_life(1, 1)
        said = len(driver.said)
        driver.feed(EvictAcknowledged(Vw(1), Incarnation(0)))
        driver.feed(AdmitAcknowledged(Vw(1), Incarnation(1), None))
        driver.feed(EvictAcknowledged(Vw(1), Incarnation(1)))

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
        driver.feed(EvictAcknowledged(Vw(1), Incarnation(0)))
        keep_reporting(driver, 11)
        assert driver.tasks(Admit) == []
        waits = "the coordinator waits for agent n1 to return with its devices, to restart virtual worker 1"
        assert driver.sentences() == [waits] * 2
        driver.feed(MemberRegistered(agent_member("n1", devices=2, pid=777)))

        assert driver.tasks(Admit) == [admit(1, 1)]
        assert driver.kill_commands == [("n1", 1, 0)], "what a process that was only silent still runs"

    def test_one_that_was_replaced_starts_it_soon(self, driver: Driver) -> None:
        driver.feed(gone("n1"))
        driver.feed(MemberRegistered(agent_member("n1", devices=2, pid=777)))
        driver.feed(EvictAcknowledged(Vw(1), Incarnation(0)))
        driver.feed(AdmitAcknowledged(Vw(1), Incarnation(1), None))

        assert [start[:4] for start in started(driver)] == [("n1", 1, 0, 1), ("n1", 1, 1, 1)]

    @pytest.mark.parametrize("back", [agent_member("n1", devices=1), agent_member("n7", devices=2)])
    def test_it_must_have_the_devices_of_the_plan(self, driver: Driver, back: object) -> None:
        driver.feed(gone("n1"))
        driver.feed(EvictAcknowledged(Vw(1), Incarnation(0)))
        driver.feed(MemberRegistered(back))  # type: ignore[arg-type]
        driver.wait(1.0)

        assert driver.tasks(Admit) == []

    def test_without_anybody_left_it_is_not_waited_for_for_ever(self) -> None:
        driver = running("survive.absence=10s")
        for agent in ("n0", "n1"):
            driver.feed(gone(agent))
        for vw in (0, 1):
            driver.feed(EvictAcknowledged(Vw(vw), Incarnation(0)))
        driver.wait(9.75)
        assert driver.machine.state is JobState.RUNNING
        driver.wait(2.0)

        assert driver.ended().sentence == (
            "no virtual worker is left, and agent n0 did not return within 10 s; agent n0 stopped answering"
        )

    def test_a_new_life_is_lost_with_its_agent_too(self, driver: Driver) -> None:
        driver.end_life(1)
        driver.feed(AdmitAcknowledged(Vw(1), Incarnation(1), None))
        driver.feed(gone("n1"))

        assert driver.tasks(Evict) == [evict(1, 0), evict(1, 1)]
        assert driver.worker(1).deaths == 2

    def test_one_that_goes_while_the_clock_shard_is_asked(self, driver: Driver) -> None:
        driver.end_life(1)
        driver.feed(gone("n1"))
        driver.feed(AdmitAcknowledged(Vw(1), Incarnation(1), None))

        assert driver.tasks(Evict) == [evict(1, 0), evict(1, 1)]
        assert driver.lost[-1].sentence == "agent n1 is gone"

    def test_nobody_is_started_while_a_parameter_server_is_gone(self, driver: Driver) -> None:
        driver.feed(MemberGone(SHARDS[1].id, "ps1 stopped answering"))
        driver.wait(0.25)
        driver.end_life(1)
        driver.wait(10.0)
        assert driver.tasks(Admit) == []
        driver.feed(MemberRegistered(SHARDS[1]))
        driver.wait(0.5)

        assert driver.tasks(Admit) == [admit(1, 1)]
