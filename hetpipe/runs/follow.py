"""Following a run: one inbox for all its events, one place that interprets them.

Events come from the coordinator's stream, deaths from the supervisor, interrupts from signal handlers; each is a
message in one queue, and `Follower.handle` processes them one by one. The first interrupt requests a barrier with a
checkpoint, the second one ends everything. The death of a service that is not restarted is the root cause of all later
failures, so it is reported first.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hetpipe.clock import Clock
from hetpipe.errors import DeadlineExceeded, HetpipeError, JobFailed, Unavailable, UnknownJob
from hetpipe.report.conditions import EventConditions
from hetpipe.report.view import View
from hetpipe.runs.reconnection import Reconnection
from hetpipe.runs.service import ServiceDeath
from hetpipe.runs.shell import CoordinatorPort
from hetpipe.runs.supervisor import ServiceRestart
from hetpipe.values.conditions import Condition, consequence
from hetpipe.values.events import JobEnded, JobEvent, JobState, StateChanged, StopMode, Submission
from hetpipe.values.ids import JobId
from hetpipe.wire.calls import STOP_JOB, SUBMIT_JOB, StopJobRequest, SubmitJobRequest

#: Polling interval for messages, the delay of detecting a deadline.
_POLL_SECONDS = 0.25

#: Submissions to a coordinator that is connected and does not answer in time: a minute in all.
_MOST_LATE = 12

#: Interval of notices of starting services.
_NOTICE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ReceivedEvent:
    """An event of the job."""

    event: JobEvent


@dataclass(frozen=True, slots=True)
class Remark:
    """A remark about the connection to the coordinator."""

    sentence: str


@dataclass(frozen=True, slots=True)
class CoordinatorLost:
    """The stream of events broke and could not be reopened."""

    error: str
    """Class name in `hetpipe.errors`."""
    sentence: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A request to stop the run: Ctrl-C, or SIGTERM where the run ends with this process."""


@dataclass(frozen=True, slots=True)
class Detached:
    """A request to end this process, but not the run: SIGTERM while following a job on a cluster."""


@dataclass(frozen=True, slots=True)
class StopRefused:
    """The coordinator did not accept the request to stop."""

    error: HetpipeError


Message = (
    ReceivedEvent | Remark | CoordinatorLost | ServiceRestart | ServiceDeath | Interrupted | Detached | StopRefused
)
Inbox = queue.SimpleQueue[Message]


class JobPort(Protocol):
    """The followed job."""

    def request_stop(self, mode: StopMode) -> None:
        """Request a stop, without waiting for it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The ending of a followed run."""

    state: JobState
    error: str = ""
    """Class name in `hetpipe.errors`, or of the Python exception; empty unless it failed."""
    sentences: tuple[str, ...] = ()
    """The reasons, unless it finished."""
    result: dict[str, Any] | None = None
    detached: bool = False
    """It has not ended: following ended in this state."""
    lost_contact: bool = False
    """Its state is unknown; on a cluster the run may continue."""
    conditions: tuple[Condition, ...] = ()
    """The conditions of the run, by start time."""


class RunningJob:
    """A job on a coordinator: its events go to the inbox from a thread. Thread-safe."""

    def __init__(
        self, client: CoordinatorPort, submission: Submission, inbox: Inbox, *, clock: Clock, when_lost: str = ""
    ) -> None:
        """Prepare, without any call.

        Args:
            client: of the coordinator.
            submission: the job.
            inbox: receives the events.
            clock: for the timeout of reconnecting.
            when_lost: the fix for the user when the coordinator is lost; the end of a sentence.
        """
        self._client = client
        self._submission = submission
        self._job_id: JobId | None = None
        self._inbox = inbox
        self._when_lost = when_lost
        #: Number of the last event received.
        self._last = 0
        #: Training has begun: a resubmission resumes from its newest checkpoint.
        self._has_begun = False
        #: A stop was requested, so it is not resubmitted once it has begun.
        self._is_to_stop = False
        self._clock = clock
        self._reconnection = Reconnection(clock, say=lambda sentence: inbox.put(Remark(sentence)))

    def hand_in(self) -> JobId:
        """Submit the job to the coordinator. Once, before everything else.

        A coordinator that is connected but slow, as on a machine with too little time, is asked again: the same request
        is the same job.

        Raises:
            HetpipeError: the coordinator did not accept it.
        """
        request = SubmitJobRequest(self._submission)
        num_late = 0
        while self._job_id is None:
            try:
                self._job_id = self._client.invoke(SUBMIT_JOB, request).job_id
            except DeadlineExceeded:
                num_late += 1
                if num_late == _MOST_LATE:
                    raise
        return self._job_id

    def adopt(self, job_id: JobId) -> None:
        """Adopt a job that was submitted before, and may have begun. Instead of `hand_in`."""
        self._job_id = job_id
        self._has_begun = True

    def watch(self) -> None:
        """Start passing events to the inbox. Once."""
        threading.Thread(target=self._watch, name="job-events", daemon=True).start()

    def request_stop(self, mode: StopMode) -> None:
        """Implement `JobPort.request_stop`."""
        self._is_to_stop = True
        threading.Thread(target=self._stop, args=(mode,), name="job-stop", daemon=True).start()

    def _watch(self) -> None:
        self._reconnection.succeeded()  # it has just accepted the job
        try:
            while not self._received_all():
                """Handle an attempt to reopen the broken stream."""
        except HetpipeError as error:
            hint = f"; {self._when_lost}" if self._when_lost else ""
            self._inbox.put(CoordinatorLost(type(error).__name__, f"{error}{hint}"))

    def _received_all(self) -> bool:
        """Receive events until the job has ended or the stream breaks; False if it broke and may be reopened.

        Raises:
            HetpipeError: it broke permanently.
        """
        try:
            for numbered in self._client.watch_job(self._job_id, after=self._last):
                self._last = max(self._last, numbered.sequence)
                self._reconnection.succeeded()
                self._has_begun = self._has_begun or _has_begun(numbered.event)
                self._is_to_stop = self._is_to_stop or _is_to_stop(numbered.event)
                self._inbox.put(ReceivedEvent(numbered.event))
        except Unavailable as error:
            self._reconnection.failed(error)
            return False
        except UnknownJob as error:
            self._reconnection.failed(error)
            self._hand_in_again()
            return False
        return True

    def _hand_in_again(self) -> None:
        """Resubmit to a new coordinator with an empty store. The same request is the same job."""
        if self._has_begun and self._is_to_stop:
            return
        try:
            submission = replace(self._submission, has_begun=self._has_begun)
            self._client.invoke(SUBMIT_JOB, SubmitJobRequest(submission))
        except Unavailable as error:
            self._reconnection.failed(error)

    def _stop(self, mode: StopMode) -> None:
        """Retry until the coordinator has accepted it, or is lost."""
        reconnection = Reconnection(self._clock, say=lambda _: None)
        reconnection.succeeded()
        has_reported = False
        while True:
            try:
                self._client.invoke(STOP_JOB, StopJobRequest(mode, self._job_id))
            except HetpipeError as error:
                if not has_reported:
                    self._inbox.put(StopRefused(error))
                    has_reported = True
                if not isinstance(error, Unavailable | UnknownJob) or not _reconnects(reconnection, error):
                    return
            else:
                return


def _has_begun(event: JobEvent) -> bool:
    return isinstance(event, StateChanged) and event.state in {JobState.STARTING, JobState.RUNNING}


def _is_to_stop(event: JobEvent) -> bool:
    return isinstance(event, StateChanged) and event.state is JobState.STOPPING


def _reconnects(reconnection: Reconnection, error: Unavailable | UnknownJob) -> bool:
    """Back off; returns whether to make another attempt."""
    try:
        reconnection.failed(error)
    except HetpipeError:
        return False
    return True


class OwnServices(Protocol):
    """The services of a run on this machine."""

    @property
    def awaited(self) -> str:
        """The services that are not ready yet, with their phases; empty when all are."""
        ...

    def given_up(self, *, is_queued: bool) -> str:
        """The reason to stop waiting, as a sentence; empty without one."""
        ...


class Follower:
    """The state machine of following one run. Not thread-safe."""

    def __init__(
        self,
        job: JobPort,
        view: View,
        *,
        inbox: Inbox,
        clock: Clock,
        stop_now_seconds: float,
        services: OwnServices | None = None,
        on_training: Callable[[], None] = lambda: None,
    ) -> None:
        """Follow `job`.

        Args:
            job: the followed job.
            view: displays events.
            inbox: source of the messages.
            clock: for the timeout after a second interrupt.
            stop_now_seconds: timeout for the end of the job after a second interrupt; 0 if this process ends its
            processes.
            services: those started for the run; None: those of a cluster.
            on_training: called whenever the job is reported to be training.
        """
        self._job = job
        self._view = view
        self._inbox = inbox
        self._clock = clock
        self._stop_now_seconds = stop_now_seconds
        self._services = services
        self._on_training = on_training
        #: Time of the last notice of starting services.
        self._noticed = clock.monotonic()
        #: Deadline after the second interrupt, in monotonic seconds.
        self._give_up_at: float | None = None
        self._num_interrupts = 0
        #: It is training, so that a stop takes effect at a barrier.
        self._is_training = False
        #: Its last reported state.
        self._state = JobState.SUBMITTED
        self._conditions = EventConditions()
        #: Its ending; None before.
        self.ending: Ending | None = None

    def run(self) -> Ending:
        """Follow the job to its end."""
        while self.ending is None:
            try:
                message = self._inbox.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                self._pass_time()
                self._check_services()
            else:
                self.handle(message)
        return self.ending

    def handle(self, message: Message) -> None:  # noqa: C901 - one case per kind of message
        """Process one message."""
        match message:
            case ReceivedEvent(event=JobEnded() as ended):
                self._view.show(ended)
                self.ending = _ending_of(ended, by_whom="" if self._num_interrupts else " by another user")
            case ReceivedEvent(event=event):
                self._conditions.on_event(event)
                if isinstance(event, StateChanged):
                    self._state = event.state
                    self._is_training = event.state is JobState.RUNNING
                    if self._is_training:
                        self._on_training()
                self._view.show(event)
            case Remark(sentence=sentence):
                self._view.say(sentence)
            case ServiceRestart():
                self._view.say(str(message))
            case ServiceDeath():
                self.ending = self._failed(JobFailed.__name__, str(message))
            case CoordinatorLost(error=error, sentence=sentence):
                self.ending = replace(self._failed(error, sentence), lost_contact=True)
            case StopRefused(error=error):
                failure = f"the coordinator did not accept the request to stop ({error})"
                again = ", which is retried" if isinstance(error, Unavailable | UnknownJob) else ""
                self._view.say(f"{failure}{again}; Ctrl-C again stops now")
            case Detached():
                self.ending = Ending(state=self._state, detached=True)
            case Interrupted():
                self._interrupted()

    def _failed(self, error: str, sentence: str) -> Ending:
        """End with a failure that its coordinator has not reported."""
        conditions = self._conditions.all
        sentences = (consequence(sentence, error, conditions),)
        return Ending(state=JobState.FAILED, error=error, sentences=sentences, conditions=conditions)

    def _interrupted(self) -> None:
        self._num_interrupts += 1
        if self._num_interrupts == 1:
            how = "at the next barrier, with a checkpoint" if self._is_training else "before training begins"
            self._view.say(f"stopping {how}; press Ctrl-C again to stop now")
            self._job.request_stop(StopMode.CHECKPOINT)
        elif self._give_up_at is None:
            self._view.say("stopping now")
            self._job.request_stop(StopMode.NOW)
            self._give_up_at = self._clock.monotonic() + self._stop_now_seconds
            self._pass_time()
        else:
            self.ending = _STOPPED_NOW

    def _check_services(self) -> None:
        """Report the starting services of this run; fail if one is silent for too long."""
        if self._services is None or not self._state.is_queued or self.ending is not None:
            return
        sentence = self._services.given_up(is_queued=True)
        if sentence:
            self.ending = Ending(state=JobState.FAILED, error=DeadlineExceeded.__name__, sentences=(sentence,))
            return
        now, awaited = self._clock.monotonic(), self._services.awaited
        if awaited and now - self._noticed >= _NOTICE_SECONDS:
            self._noticed = now
            self._view.say(f"waiting for {awaited}")

    def _pass_time(self) -> None:
        if self._give_up_at is not None and self._clock.monotonic() >= self._give_up_at:
            self.ending = _STOPPED_NOW


_STOPPED_NOW = Ending(state=JobState.STOPPED, sentences=("the run was stopped at once, before a barrier",))


def _ending_of(ended: JobEnded, *, by_whom: str) -> Ending:
    if ended.state is JobState.FAILED:
        sentences = ended.problems or (ended.sentence or "the run failed without a reason; see its logs",)
        return Ending(state=ended.state, error=ended.error, sentences=sentences, conditions=ended.conditions)
    why = f": {ended.sentence}" if ended.sentence else ""
    sentences = () if ended.state is JobState.FINISHED else (f"the run was stopped{by_whom} before its end{why}",)
    return Ending(state=ended.state, sentences=sentences, result=ended.result, conditions=ended.conditions)
