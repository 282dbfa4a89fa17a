"""What each message means for a run that is followed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetpipe.errors import DeadlineExceeded, NobodyLeads, PeerUnreachable, PermissionDenied, UnknownJob
from hetpipe.runs.follow import (
    CoordinatorLost,
    Detached,
    Ending,
    Follower,
    Inbox,
    Interrupted,
    ReceivedEvent,
    Remark,
    RunningJob,
    StopRefused,
)
from hetpipe.runs.reconnection import RECONNECT_SECONDS, UNKNOWN_SECONDS
from hetpipe.runs.service import ServiceDeath
from hetpipe.runs.supervisor import ServiceRestart
from hetpipe.values.events import JobEnded, JobState, StateChanged, StopMode, Submission
from hetpipe.wire.calls import SubmitJobRequest, SubmittedJob
from tests.cli.fakes import FINISHES, JOB_ID, RESULT, FakeCoordinator, RecordingView, small_job, table
from tests.support.fake_clock import FakeClock

DEATH = ServiceDeath("parameter server 1", 123, -9, "")


class Wishes:
    """A `JobPort` that keeps what it is asked."""

    def __init__(self) -> None:
        self.modes: list[StopMode] = []

    def request_stop(self, mode: StopMode) -> None:
        self.modes.append(mode)


class Case:
    """A follower and everything around it."""

    def __init__(self, *, stop_now_seconds: float = 0.0) -> None:
        self.job = Wishes()
        self.view = RecordingView()
        self.inbox: Inbox = Inbox()
        self.clock = FakeClock()
        self.follower = Follower(
            self.job, self.view, inbox=self.inbox, clock=self.clock, stop_now_seconds=stop_now_seconds
        )


def test_a_run_that_finishes() -> None:
    case = Case()
    for event in FINISHES:
        case.inbox.put(ReceivedEvent(event))
    assert case.follower.run() == Ending(state=JobState.FINISHED, result=RESULT)
    assert case.view.events == list(FINISHES)


def test_a_run_that_fails_tells_every_problem() -> None:
    case = Case()
    case.follower.handle(ReceivedEvent(JobEnded(JobState.FAILED, "a; b", "JobError", ("a", "b"))))
    assert case.follower.ending == Ending(state=JobState.FAILED, error="JobError", sentences=("a", "b"))


@pytest.mark.parametrize(("sentence", "told"), [("it broke", "it broke"), ("", "the run failed without a reason")])
def test_a_run_that_fails_tells_its_sentence(sentence: str, told: str) -> None:
    case = Case()
    case.follower.handle(ReceivedEvent(JobEnded(JobState.FAILED, sentence, "JobFailed")))
    assert case.follower.ending is not None
    assert case.follower.ending.sentences[0].startswith(told)


def test_a_death_is_the_cause_of_all_that_follows() -> None:
    case = Case()
    case.inbox.put(ReceivedEvent(table(1)))
    case.inbox.put(DEATH)
    case.inbox.put(ReceivedEvent(JobEnded(JobState.FAILED, "an echo", "LinkClosed")))
    ending = case.follower.run()
    assert ending.sentences == ("parameter server 1 (pid 123) was killed by SIGKILL",)
    assert ending.error == "JobFailed"


def test_a_service_that_was_started_again_is_told() -> None:
    case = Case()
    case.follower.handle(ServiceRestart("parameter-server-1", DEATH, 124))
    assert case.view.remarks == [
        "parameter server 1 (pid 123) was killed by SIGKILL; it was restarted (pid 124)",
    ]
    assert case.follower.ending is None


def test_who_detaches_asks_for_nothing() -> None:
    case = Case()
    case.follower.handle(ReceivedEvent(StateChanged(JobState.RUNNING)))
    case.follower.handle(Detached())
    assert case.follower.ending == Ending(state=JobState.RUNNING, detached=True)
    assert case.job.modes == []


def test_the_first_interrupt_asks_for_a_checkpoint() -> None:
    case = Case()
    case.follower.handle(ReceivedEvent(StateChanged(JobState.RUNNING)))
    case.follower.handle(Interrupted())
    assert case.job.modes == [StopMode.CHECKPOINT]
    assert case.view.remarks == ["stopping at the next barrier, with a checkpoint; press Ctrl-C again to stop now"]
    assert case.follower.ending is None
    case.follower.handle(ReceivedEvent(JobEnded(JobState.STOPPED, result=RESULT)))
    assert case.follower.ending is not None
    assert case.follower.ending.state is JobState.STOPPED
    assert case.follower.ending.result == RESULT
    assert case.follower.ending.sentences == ("the run was stopped before its end",)


def test_a_stop_that_could_not_reach_its_barrier_says_why() -> None:
    case = Case()
    case.follower.handle(ReceivedEvent(StateChanged(JobState.RUNNING)))
    case.follower.handle(Interrupted())
    case.follower.handle(ReceivedEvent(JobEnded(JobState.STOPPED, "a disk is gone; it ends at its newest checkpoint")))
    assert case.follower.ending is not None
    assert case.follower.ending.sentences == (
        "the run was stopped before its end: a disk is gone; it ends at its newest checkpoint",
    )


def test_before_training_there_is_no_barrier_to_stop_at() -> None:
    case = Case()
    case.follower.handle(Interrupted())
    assert case.job.modes == [StopMode.CHECKPOINT]
    assert case.view.remarks == ["stopping before training begins; press Ctrl-C again to stop now"]


def test_a_run_that_somebody_else_stops() -> None:
    case = Case()
    case.follower.handle(ReceivedEvent(JobEnded(JobState.STOPPED, result=RESULT)))
    assert case.follower.ending is not None
    assert case.follower.ending.sentences == ("the run was stopped by another user before its end",)


def test_the_second_interrupt_ends_a_local_run_at_once() -> None:
    case = Case()
    case.inbox.put(Interrupted())
    case.inbox.put(Interrupted())
    ending = case.follower.run()
    assert ending.state is JobState.STOPPED
    assert ending.result is None
    assert case.job.modes == [StopMode.CHECKPOINT, StopMode.NOW]


def test_elsewhere_the_end_of_the_job_is_waited_for_but_not_for_long() -> None:
    case = Case(stop_now_seconds=5.0)
    case.follower.handle(Interrupted())
    case.follower.handle(Interrupted())
    assert case.follower.ending is None
    case.follower.handle(ReceivedEvent(JobEnded(JobState.STOPPED, result=RESULT)))
    assert case.follower.ending is not None
    assert case.follower.ending.result == RESULT

    case = Case(stop_now_seconds=5.0)
    case.follower.handle(Interrupted())
    case.follower.handle(Interrupted())
    case.clock.advance(5.0)
    assert case.follower.run().result is None


def test_a_third_interrupt_waits_for_nothing() -> None:
    case = Case(stop_now_seconds=5.0)
    for _ in range(3):
        case.follower.handle(Interrupted())
    assert case.follower.ending is not None


def test_a_wish_to_stop_that_was_not_taken_is_told() -> None:
    case = Case()
    case.follower.handle(StopRefused(PeerUnreachable("coordinator at x cannot be reached")))
    assert case.view.remarks == [
        (
            "the coordinator did not accept the request to stop (coordinator at x cannot be reached), which is "
            "retried; Ctrl-C again stops now"
        )
    ]


def test_a_lost_coordinator_ends_the_run() -> None:
    case = Case()
    case.follower.handle(CoordinatorLost("PeerUnreachable", "it is gone; look with: hetpipe status"))
    assert case.follower.ending == Ending(
        state=JobState.FAILED,
        error="PeerUnreachable",
        sentences=("it is gone; look with: hetpipe status",),
        lost_contact=True,
    )


class ComingUp:
    """The services of a run that are slow."""

    awaited = "parameter server 0 (importing torch, 12 s)"
    verdict = ""

    def given_up(self, *, is_queued: bool) -> str:
        assert is_queued
        return self.verdict


def test_services_of_the_run_are_waited_for_and_said_to_be_coming_up() -> None:
    view, clock, services = RecordingView(), FakeClock(), ComingUp()
    follower = Follower(Wishes(), view, inbox=Inbox(), clock=clock, stop_now_seconds=0.0, services=services)
    for _ in range(40):
        clock.advance(100.0)
        follower._check_services()
    assert view.remarks == ["waiting for parameter server 0 (importing torch, 12 s)"] * 40
    assert follower.ending is None

    services.verdict = "parameter server 0 (pid 7) is not ready, and has reported nothing for 60 s"
    follower._check_services()
    assert follower.ending == Ending(state=JobState.FAILED, error="DeadlineExceeded", sentences=(services.verdict,))


def test_once_the_job_has_what_it_needs_nobody_looks_after_them() -> None:
    services = ComingUp()
    services.verdict = "they are silent"
    follower = Follower(
        Wishes(), RecordingView(), inbox=Inbox(), clock=FakeClock(), stop_now_seconds=0.0, services=services
    )
    follower.handle(ReceivedEvent(StateChanged(JobState.INSPECTING)))
    follower._check_services()
    assert follower.ending is None


def watched(coordinator: FakeCoordinator, *, when_lost: str = "") -> Inbox:
    inbox: Inbox = Inbox()
    followed(coordinator, inbox, when_lost=when_lost).watch()
    return inbox


def followed(coordinator: FakeCoordinator, inbox: Inbox, *, when_lost: str = "") -> RunningJob:
    handed_in = Submission("request-1", small_job().model_dump_json(), "/runs/small", "/code")
    job = RunningJob(coordinator, handed_in, inbox, clock=FakeClock(auto_advance=True), when_lost=when_lost)
    assert job.hand_in() == JOB_ID
    return job


class Late(FakeCoordinator):
    """A coordinator whose first answers come too late."""

    def __init__(self, late: int) -> None:
        super().__init__()
        self._late = late

    def submit_job(self, request: SubmitJobRequest) -> SubmittedJob:
        found = super().submit_job(request)
        if len(self.submissions) <= self._late:
            raise DeadlineExceeded("it did not answer in time")
        return found


def test_a_coordinator_that_answers_late_is_asked_again_for_the_same_job() -> None:
    late = Late(2)
    followed(late, Inbox())
    assert [submission.request_id for submission in late.submissions] == ["request-1"] * 3
    silent = Late(1_000)
    with pytest.raises(DeadlineExceeded):
        followed(silent, Inbox())
    assert len(silent.submissions) == 12


def test_a_broken_stream_is_mended() -> None:
    gone = PeerUnreachable("gone")
    inbox = watched(FakeCoordinator([StateChanged(JobState.RUNNING), gone, gone, JobEnded(JobState.FINISHED)]))
    heard = [inbox.get(timeout=10.0) for _ in range(4)]
    assert heard == [
        ReceivedEvent(StateChanged(JobState.RUNNING)),
        Remark("the coordinator does not answer; retrying"),
        Remark("the coordinator is reachable again after 1 s"),
        ReceivedEvent(JobEnded(JobState.FINISHED)),
    ]


def test_remarks_are_shown() -> None:
    case = Case()
    case.follower.handle(Remark("the coordinator is reachable again after 1 s"))
    assert case.view.remarks == ["the coordinator is reachable again after 1 s"]


def test_a_stream_that_stays_broken_is_given_up() -> None:
    attempts = int(RECONNECT_SECONDS / 0.5) + 1
    inbox = watched(FakeCoordinator([PeerUnreachable("gone")] * attempts), when_lost="look elsewhere")
    assert isinstance(inbox.get(timeout=10.0), Remark)
    sentence = "gone; it has not answered for 600 s; look elsewhere"
    assert inbox.get(timeout=10.0) == CoordinatorLost("PeerUnreachable", sentence)


FORGOTTEN = UnknownJob("job small-1 is not known here")


def test_a_new_coordinator_that_knows_nothing_is_given_the_same_job_again() -> None:
    coordinator = FakeCoordinator([StateChanged(JobState.STARTING), FORGOTTEN, FORGOTTEN, JobEnded(JobState.FINISHED)])
    inbox = watched(coordinator)
    heard = [inbox.get(timeout=10.0) for _ in range(4)]
    assert heard == [
        ReceivedEvent(StateChanged(JobState.STARTING)),
        Remark("the coordinator does not know the job yet; retrying"),
        Remark("the coordinator is reachable again after 1 s"),
        ReceivedEvent(JobEnded(JobState.FINISHED)),
    ]
    assert [handed_in.request_id for handed_in in coordinator.submissions] == ["request-1"] * 3


@pytest.mark.parametrize("state", [JobState.STARTING, JobState.RUNNING])
def test_one_that_has_begun_to_train_is_handed_in_as_such(state: JobState) -> None:
    coordinator = FakeCoordinator([StateChanged(state), FORGOTTEN, JobEnded(JobState.FINISHED)])
    inbox = watched(coordinator)
    assert [inbox.get(timeout=10.0) for _ in range(2)][1] == ReceivedEvent(JobEnded(JobState.FINISHED))
    assert [handed_in.has_begun for handed_in in coordinator.submissions] == [False, True]


def test_one_that_is_to_stop_is_only_waited_for() -> None:
    coordinator = FakeCoordinator(
        [StateChanged(JobState.RUNNING), StateChanged(JobState.STOPPING), FORGOTTEN, JobEnded(JobState.STOPPED)]
    )
    inbox = watched(coordinator)
    assert [inbox.get(timeout=10.0) for _ in range(3)][2] == ReceivedEvent(JobEnded(JobState.STOPPED))
    assert len(coordinator.submissions) == 1
    coordinator = FakeCoordinator([StateChanged(JobState.RUNNING), FORGOTTEN, JobEnded(JobState.STOPPED)])
    followed_job = followed(coordinator, Inbox())
    followed_job.request_stop(StopMode.CHECKPOINT)
    followed_job._watch()
    assert len(coordinator.submissions) == 1


def test_a_coordinator_that_answers_and_tells_nothing_of_the_job_is_not_followed_for_ever() -> None:
    silent = NobodyLeads("the coordinator at h:1 is reachable but has reported nothing about job small-1 for 180 s")
    inbox = watched(FakeCoordinator([StateChanged(JobState.RUNNING), silent]), when_lost="look elsewhere")
    assert [inbox.get(timeout=10.0) for _ in range(2)][1] == CoordinatorLost("NobodyLeads", f"{silent}; look elsewhere")


def test_one_that_was_handed_in_before_is_never_begun_a_second_time() -> None:
    coordinator, inbox = FakeCoordinator([FORGOTTEN, JobEnded(JobState.FINISHED)]), Inbox()
    handed_in = Submission("request-1", small_job().model_dump_json(), "/runs/small", "/code")
    job = RunningJob(coordinator, handed_in, inbox, clock=FakeClock(auto_advance=True))
    job.adopt(JOB_ID)
    job.watch()
    assert inbox.get(timeout=10.0) == ReceivedEvent(JobEnded(JobState.FINISHED))
    assert coordinator.submissions == [replace(handed_in, has_begun=True)]


def test_and_not_for_ever() -> None:
    attempts = int(UNKNOWN_SECONDS / 0.5) + 1
    inbox = watched(FakeCoordinator([StateChanged(JobState.RUNNING), *[FORGOTTEN] * attempts]))
    heard = [inbox.get(timeout=10.0) for _ in range(3)]
    sentence = "job small-1 is not known here; the coordinator answers, but the job has been unknown to it for 90 s"
    assert heard[-1] == CoordinatorLost("UnknownJob", sentence)


def test_wishes_to_stop_reach_the_coordinator_from_a_thread() -> None:
    coordinator, inbox = FakeCoordinator(), Inbox()
    told: Inbox = Inbox()
    coordinator.on_stop = lambda _: told.put(Interrupted())
    followed(coordinator, inbox).request_stop(StopMode.CHECKPOINT)
    told.get(timeout=10.0)
    assert coordinator.stops == [StopMode.CHECKPOINT]


def test_a_wish_to_stop_that_fails_becomes_a_message_and_is_told_again() -> None:
    coordinator, inbox = FakeCoordinator(), Inbox()

    def refuse(_: StopMode) -> None:
        if len(coordinator.stops) < 4:
            raise PeerUnreachable("gone")
        inbox.put(Interrupted())

    coordinator.on_stop = refuse
    followed(coordinator, inbox).request_stop(StopMode.NOW)
    message = inbox.get(timeout=10.0)
    assert isinstance(message, StopRefused)
    assert str(message.error) == "gone"
    assert inbox.get(timeout=10.0) == Interrupted()
    assert len(coordinator.stops) == 4


def test_one_that_is_refused_is_not() -> None:
    coordinator, inbox = FakeCoordinator(), Inbox()

    def refuse(_: StopMode) -> None:
        raise PermissionDenied("you may not")

    coordinator.on_stop = refuse
    followed(coordinator, inbox)._stop(StopMode.NOW)
    assert isinstance(inbox.get(timeout=10.0), StopRefused)
    assert len(coordinator.stops) == 1


@pytest.mark.parametrize(
    ("death", "sentence"),
    [
        (DEATH, "parameter server 1 (pid 123) was killed by SIGKILL"),
        (ServiceDeath("the agent", 7, 1, "no room"), "the agent (pid 7) ended with exit code 1: no room"),
    ],
)
def test_a_death_as_a_sentence(death: ServiceDeath, sentence: str) -> None:
    assert str(death) == sentence
