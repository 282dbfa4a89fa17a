"""What ends a job: one sentence names it, whoever shouts first. What a job survives is in `test_virtual_workers`."""

from __future__ import annotations

import pytest

from hetpipe.decide.lifecycle.exchange import MemberGone, MemberRegistered, RequestBarrier, StopRequested, TaskFailed
from hetpipe.decide.lifecycle.job_machine import ENDS_AT_CHECKPOINT
from hetpipe.values.events import JobState, StateChanged, StopMode, Waiting
from hetpipe.values.members import MemberId
from tests.server.coordinator.builders import job, shard_member
from tests.server.coordinator.machine_driver import Driver

WHY = "; under `allreduce` only the stages hold the weights, which are lost with one of them"


def alone(state: JobState = JobState.RUNNING) -> Driver:
    """A job whose weights are on no parameter server."""
    return Driver(job("sync=allreduce", "weights=flush", "parameter_servers.count=1")).to(state)


@pytest.fixture
def driver() -> Driver:
    return alone()


def gone(member: str, sentence: str = "it stopped answering") -> MemberGone:
    return MemberGone(MemberId(member), sentence)


def cause(driver: Driver) -> str:
    """Why the job goes back to a checkpoint."""
    remark, _, rest = driver.events(StateChanged)[-1].remark.partition(": the whole job is rewound")
    assert rest == " to its newest checkpoint"
    assert driver.machine.state is JobState.PLANNING
    return remark


class TestWithoutWeightsOnParameterServers:
    def test_a_killed_stage_is_named_after_the_echoes(self, driver: Driver) -> None:
        driver.fail(0, 0, "its neighbour is gone", secondary=True)
        driver.exit(0, 0, 1)
        driver.wait(0.5)
        driver.exit(0, 1, -9)
        driver.wait(0.5)

        assert cause(driver) == f"stage 1 of virtual worker 0 (pid 1001 on n0.host) was killed by SIGKILL{WHY}"

    def test_while_it_is_to_stop_the_job_ends(self, driver: Driver) -> None:
        driver.feed(StopRequested(StopMode.CHECKPOINT))
        driver.exit(0, 1, -9)
        driver.wait(1.0)

        assert driver.stop_commands == ["n0", "n1"]
        assert len(driver.wrap_up_tasks) == 1
        assert driver.machine.may_have_processes(now=driver.now)
        assert not driver.machine.is_settled(now=driver.now)
        for vw, stage in ((0, 0), (1, 0), (1, 1)):
            driver.exit(vw, stage, -15)
        assert driver.machine.is_settled(now=driver.now)
        ended = driver.ended()
        assert (ended.state, ended.error) == (JobState.STOPPED, "")
        assert ended.sentence.endswith(f"SIGKILL{WHY}; {ENDS_AT_CHECKPOINT}")

    def test_a_stage_that_ends_without_a_word_is_told_with_its_last_output(self, driver: Driver) -> None:
        driver.exit(1, 1, 3, "MemoryError")
        driver.wait(1.0)

        assert cause(driver) == (
            "stage 1 of virtual worker 1 (pid 1011 on n1.host) ended with exit code 3 before the run did; "
            f"its last output: MemoryError{WHY}"
        )

    def test_an_exit_with_0_before_the_end_is_a_death_too(self, driver: Driver) -> None:
        driver.exit(1, 1, 0)
        driver.wait(1.0)

        assert "ended with exit code 0 before the run did" in cause(driver)

    def test_echoes_alone_are_enough(self, driver: Driver) -> None:
        driver.fail(0, 0, "its neighbour closed the link", secondary=True)
        driver.wait(7.0)

        assert cause(driver).endswith(f"failed: its neighbour closed the link{WHY}")

    def test_so_is_a_stage_that_hangs(self, driver: Driver) -> None:
        driver.wait(61.5)

        assert f"virtual worker 0 (pid 1000 on n0.host) hangs: it has reported nothing for 60 s{WHY}" in cause(driver)

    def test_so_is_a_lost_agent(self, driver: Driver) -> None:
        driver.feed(gone("n1"))
        driver.wait(1.0)

        assert cause(driver) == f"it stopped answering{WHY}"

    def test_what_is_wrong_with_the_job_ends_it(self, driver: Driver) -> None:
        driver.fail(0, 1, "the update of layer 2 from minibatch 17 is not finite")
        driver.wait(1.0)

        assert driver.ended().error == "NonFiniteUpdate"


class TestWhatIsWrongWithTheJob:
    @pytest.fixture
    def driver(self) -> Driver:
        return Driver().to(JobState.RUNNING)

    def test_a_stages_own_words_are_told_with_its_name(self, driver: Driver) -> None:
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

    def test_it_ends_the_job_also_when_its_echo_was_faster(self, driver: Driver) -> None:
        driver.fail(1, 1, "its neighbour is gone", secondary=True)
        driver.fail(1, 0, "the update of layer 2 from minibatch 17 is not finite")
        driver.wait(1.0)

        assert driver.ended().error == "NonFiniteUpdate"

    def test_but_not_when_the_stage_was_confused_by_a_death(self, driver: Driver) -> None:
        driver.fail(1, 0, "the update of layer 2 from minibatch 17 is not finite")
        driver.wait(0.25)
        driver.exit(1, 1, -9)
        driver.wait(3.0)

        assert driver.machine.state is JobState.RUNNING
        assert [event.sentence[-20:] for event in driver.lost] == ["was killed by SIGKILL"[-20:]]

    def test_a_sentence_that_names_the_stage_is_not_given_the_name_again(self, driver: Driver) -> None:
        driver.fail(1, 0, "stage 0 of virtual worker 1 has no such layer")
        driver.wait(1.0)

        assert driver.ended().sentence == "stage 0 of virtual worker 1 has no such layer"


class TestMembers:
    @pytest.mark.parametrize("member", ["n0", "ps0"])
    @pytest.mark.parametrize("state", [JobState.INSPECTING, JobState.PLANNING])
    def test_one_that_is_lost_early_ends_the_job(self, state: JobState, member: str) -> None:
        driver = Driver().to(state)
        driver.feed(gone(member, "it stopped answering"))
        driver.wait(1.0)

        assert driver.ended().sentence == "it stopped answering"

    @pytest.mark.parametrize("state", [JobState.STARTING, JobState.RUNNING, JobState.STOPPING])
    def test_later_a_shard_is_waited_for(self, state: JobState) -> None:
        driver = Driver(job("survive.absence=20s")).to(JobState.RUNNING if state is JobState.STOPPING else state)
        if state is JobState.STOPPING:
            driver.feed(StopRequested(StopMode.CHECKPOINT))
        driver.feed(gone("ps1", "ps1 stopped answering"))
        driver.wait(19.75)
        assert driver.machine.state is state
        awaited = "the coordinator waits for the parameter server to return at shards.host:7001"
        told = [event for event in driver.events(Waiting) if "ps1" in event.sentence]
        assert [(event.sentence, event.seconds) for event in told] == [
            (f"{awaited}: ps1 stopped answering", seconds) for seconds in (5.0, 10.0, 15.0)
        ]
        driver.wait(0.25)

        assert driver.ended().sentence == ("ps1 stopped answering; it did not return at shards.host:7001 within 20 s")

    def test_one_that_comes_back_is_forgotten(self) -> None:
        driver = Driver(job("survive.absence=20s")).to(JobState.RUNNING)
        driver.feed(gone("ps1"))
        driver.wait(6.0)
        driver.feed(MemberRegistered(shard_member(0)))
        driver.feed(MemberRegistered(shard_member(1)))
        driver.wait(40.0)

        assert driver.machine.state is JobState.RUNNING
        assert len(driver.events(Waiting)) == 1

    def test_one_that_comes_back_elsewhere_is_no_help(self) -> None:
        driver = Driver(job("survive.absence=0s")).to(JobState.RUNNING)
        driver.feed(gone("ps1"))
        driver.feed(MemberRegistered(shard_member(1, port=98)))
        driver.wait(1.0)

        assert driver.ended().sentence == (
            "it stopped answering; it did not return at shards.host:7001 within 0 s, and not at shards.host:99, "
            "where it is now"
        )

    def test_members_of_others_do_not_matter(self) -> None:
        driver = Driver().to(JobState.RUNNING)
        driver.feed(gone("n7"))
        driver.feed(gone("ps7"))
        driver.wait(10.0)

        assert driver.machine.state is JobState.RUNNING
        assert driver.lost == []


def test_a_barrier_that_the_clock_shard_does_not_take_is_asked_for_again() -> None:
    driver = Driver().to(JobState.RUNNING)
    driver.feed(StopRequested(StopMode.CHECKPOINT))
    for asked in (2, 3):
        driver.feed(TaskFailed("barrier", "PeerUnreachable", "parameter server at shards.host:7000 cannot be reached"))
        driver.wait(0.75)
        assert len(driver.tasks(RequestBarrier)) == asked - 1
        driver.wait(0.25)
        assert len(driver.tasks(RequestBarrier)) == asked
    driver.wait(10.0)
    assert len(driver.tasks(RequestBarrier)) == asked
    assert driver.machine.state is JobState.STOPPING


class TestTooLate:
    @pytest.fixture
    def driver(self) -> Driver:
        return Driver().to(JobState.RUNNING)

    def test_a_failure_after_the_end_changes_nothing(self, driver: Driver) -> None:
        driver.all_done()
        driver.wrap_up()
        driver.exit(0, 0, -9)
        driver.feed(gone("ps0"))
        driver.wait(3.0)

        assert driver.ended().state is JobState.FINISHED

    def test_a_failure_while_the_shards_wrap_up_changes_nothing(self, driver: Driver) -> None:
        driver.all_done()
        driver.feed(gone("ps0"))
        driver.wait(200.0)
        driver.wrap_up()

        assert driver.ended().state is JobState.FINISHED

    def test_stages_that_end_on_a_stop_now_have_not_failed(self, driver: Driver) -> None:
        driver.feed(StopRequested(StopMode.NOW))
        driver.exit(0, 0, -15)
        driver.fail(0, 1, "its neighbour is gone", secondary=True)
        driver.exit(0, 1, 1)
        driver.exit(1, 0, -9)
        driver.exit(1, 1, -15)
        driver.wrap_up()

        assert driver.ended().state is JobState.STOPPED
        assert driver.lost == []
