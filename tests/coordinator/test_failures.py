"""Something dies: one sentence names it, whoever shouts first."""

from __future__ import annotations

import pytest

from hetpipe.coordinator.exchange import MemberGone, StopAsked, TaskFailed
from hetpipe.spec.events import JobState, StopMode
from hetpipe.spec.members import MemberId
from tests.coordinator.machine_driver import Driver


@pytest.fixture
def driver() -> Driver:
    return Driver().to(JobState.RUNNING)


def gone(member: str, sentence: str = "it stopped answering") -> MemberGone:
    return MemberGone(MemberId(member), sentence)


def test_a_killed_stage_is_named_after_the_echoes(driver: Driver) -> None:
    driver.fail(0, 0, "its neighbour is gone", secondary=True)
    driver.exit(0, 0, 1)
    driver.wait(0.5)
    driver.exit(0, 1, -9)
    driver.wait(0.5)

    ended = driver.ended()
    assert ended.state is JobState.FAILED
    assert ended.error == "JobFailed"
    assert ended.sentence == "stage 1 of virtual worker 0 (pid 1001 on n0.host) was killed by SIGKILL"


def test_everything_is_stopped_and_released(driver: Driver) -> None:
    driver.exit(0, 1, -9)
    driver.wait(1.0)

    assert driver.stop_commands == ["n0", "n1"]
    assert len(driver.wrap_up_tasks) == 1
    assert not driver.machine.may_have_processes(now=driver.now)
    assert not driver.machine.is_settled(now=driver.now)
    for vw, stage in ((0, 0), (1, 0), (1, 1)):
        driver.exit(vw, stage, -15)
    assert driver.machine.is_settled(now=driver.now)
    assert driver.ended().sentence.endswith("SIGKILL")


def test_a_stages_own_words_are_told_with_its_name(driver: Driver) -> None:
    driver.fail(1, 0, "the update of layer 2 from minibatch 17 is not finite")
    driver.exit(1, 0, 1)
    driver.fail(0, 0, "a link was closed", secondary=True)
    driver.wait(1.0)

    ended = driver.ended()
    assert ended.error == "NonFiniteUpdate"
    assert ended.sentence == (
        "stage 0 of virtual worker 1 (pid 1010 on n1.host) failed: "
        "the update of layer 2 from minibatch 17 is not finite"
    )


def test_a_sentence_that_names_the_stage_is_not_given_the_name_again(driver: Driver) -> None:
    driver.fail(1, 0, "stage 0 of virtual worker 1 ran out of memory")
    driver.wait(1.0)

    assert driver.ended().sentence == "stage 0 of virtual worker 1 ran out of memory"


def test_a_stage_that_ends_without_a_word_is_told_with_its_last_output(driver: Driver) -> None:
    driver.exit(1, 1, 3, "MemoryError")
    driver.wait(1.0)

    assert driver.ended().sentence == (
        "stage 1 of virtual worker 1 (pid 1011 on n1.host) ended with exit code 3 before the run did; "
        "its last words: MemoryError"
    )


def test_an_exit_with_0_before_the_end_is_a_failure_too(driver: Driver) -> None:
    driver.exit(1, 1, 0)
    driver.wait(1.0)

    assert "ended with exit code 0 before the run did" in driver.ended().sentence


def test_a_dead_shard_is_named_by_its_lease_although_stages_complain_first(driver: Driver) -> None:
    for vw, stage in ((0, 0), (0, 1), (1, 0), (1, 1)):
        driver.fail(vw, stage, "parameter server at shards.host:7001 cannot be reached", secondary=True)
        driver.exit(vw, stage, 1)
    driver.wait(5.0)
    assert driver.machine.state is JobState.RUNNING
    driver.feed(gone("ps1", "parameter server ps1 stopped answering: no heartbeat for 5.0 s"))
    driver.wait(0.25)

    assert driver.ended().sentence == "parameter server ps1 stopped answering: no heartbeat for 5.0 s"
    assert driver.now <= 15.0


def test_echoes_alone_end_the_job_too(driver: Driver) -> None:
    driver.fail(0, 0, "its neighbour closed the link", secondary=True)
    driver.wait(7.0)

    assert driver.ended().sentence.endswith("failed: its neighbour closed the link")


@pytest.mark.parametrize("member", ["n1", "ps0"])
def test_a_lost_member_ends_the_job(driver: Driver, member: str) -> None:
    driver.feed(gone(member))
    driver.wait(1.0)

    assert driver.ended().sentence == "it stopped answering"


def test_members_of_others_do_not_matter(driver: Driver) -> None:
    driver.feed(gone("n7"))
    driver.feed(gone("ps7"))
    driver.wait(10.0)

    assert driver.machine.state is JobState.RUNNING


def test_the_processes_of_a_lost_agent_count_as_gone(driver: Driver) -> None:
    driver.feed(gone("n1"))
    driver.wait(1.0)
    driver.exit(0, 0, -15)
    driver.exit(0, 1, -15)

    assert driver.machine.is_settled(now=driver.now)


@pytest.mark.parametrize(
    "state", [JobState.INSPECTING, JobState.PLANNING, JobState.STARTING, JobState.RUNNING, JobState.STOPPING]
)
def test_a_lost_member_ends_a_job_in_every_state(state: JobState) -> None:
    driver = Driver().to(JobState.RUNNING if state is JobState.STOPPING else state)
    if state is JobState.STOPPING:
        driver.feed(StopAsked(StopMode.CHECKPOINT))
    driver.feed(gone("n0", "agent n0 stopped answering"))
    driver.wait(1.0)

    assert driver.ended().sentence == "agent n0 stopped answering"


def test_a_barrier_that_the_clock_shard_does_not_take_waits_for_the_cause(driver: Driver) -> None:
    driver.feed(StopAsked(StopMode.CHECKPOINT))
    driver.feed(TaskFailed("barrier", "PeerUnreachable", "parameter server at shards.host:7000 cannot be reached"))
    driver.wait(3.0)
    assert driver.machine.state is JobState.STOPPING
    driver.feed(gone("ps0", "parameter server ps0 stopped answering"))
    driver.wait(0.25)

    assert driver.ended().sentence == "parameter server ps0 stopped answering"


def test_a_failure_after_the_end_changes_nothing(driver: Driver) -> None:
    driver.all_done()
    driver.wrap_up()
    driver.exit(0, 0, -9)
    driver.feed(gone("ps0"))
    driver.wait(3.0)

    assert driver.ended().state is JobState.FINISHED


def test_a_failure_while_the_shards_wrap_up_changes_nothing(driver: Driver) -> None:
    driver.all_done()
    driver.feed(gone("ps0"))
    driver.wait(3.0)
    driver.wrap_up()

    assert driver.ended().state is JobState.FINISHED


def test_stages_that_end_on_a_stop_now_have_not_failed(driver: Driver) -> None:
    driver.feed(StopAsked(StopMode.NOW))
    driver.exit(0, 0, -15)
    driver.fail(0, 1, "its neighbour is gone", secondary=True)
    driver.exit(0, 1, 1)
    driver.exit(1, 0, -9)
    driver.exit(1, 1, -15)
    driver.wrap_up()

    assert driver.ended().state is JobState.STOPPED
