"""The jobs that a coordinator leads, with a shell around each state machine: facts in, instructions executed.

`JobHost` is one of them: its machine, its events, its thread for tasks, and its unsaved state.
`JobHosts` holds all of them and turns instructions of a machine into commands, events, and tasks on the job's thread.

One lock guards all state, and `Context.condition` is notified after every change. Nothing slow runs under the lock:
long operations run on the job's own thread, and their results return as facts.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from hetpipe.checkpoint.best import Best, note_best
from hetpipe.clock import Clock
from hetpipe.decide.lifecycle.endings import best_evaluation
from hetpipe.decide.lifecycle.exchange import Announce, ClocksReported, Input, Instruction, SendCommand, Task
from hetpipe.decide.lifecycle.job_machine import JobMachine
from hetpipe.decide.lifecycle.patience import Patience
from hetpipe.decide.lifecycle.registry import Mailboxes
from hetpipe.durable import append
from hetpipe.errors import HetpipeError, ResourceExhausted, UserError, VersionConflict
from hetpipe.loggers.feed import Feed
from hetpipe.loggers.message import Opening, StepRewind, Values, of_evaluation, of_progress
from hetpipe.observe.log import bind_context, get_logger
from hetpipe.server.coordinator.tasks import JobTasks, Tools
from hetpipe.storage.store import ENDED_JOB_SECONDS, MAX_EVENTS, JobRecord, Store
from hetpipe.values.document import dotted
from hetpipe.values.events import (
    Evaluated,
    JobEnded,
    JobEvent,
    JobState,
    LoggerFailed,
    NumberedEvent,
    ProgressTable,
    Rewound,
    StopMode,
)
from hetpipe.values.ids import JobId
from hetpipe.values.rewinds import discard_model_file
from hetpipe.values.storage_url import run_of_checkpoint

_log = get_logger(__name__)

#: Ended jobs that stay in memory; the store has them longer.
MAX_ENDED_JOBS = 20

#: Jobs that have not ended: each has a thread, and a history of events.
MAX_OPEN_JOBS = 100

#: Of them, those that one operator has submitted to this coordinator.
MAX_OPEN_JOBS_OF_OWNER = 80

#: Limit of remembered ended jobs, for members that still have processes of them.
_MAX_ENDED_IDS = 10_000

#: Every evaluation of a run, in its first folder: one JSON object per line, appended. After a rewind it goes on in the
#: same file: what was evaluated after the checkpoint comes again, with another `rewinds`.
EVALUATIONS = "evaluations.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Shared dependencies of a coordinator's components."""

    store: Store
    tools: Tools
    clock: Clock
    patience: Patience
    condition: threading.Condition
    """Guards all state of the coordinator; notified after every change."""


def thread_per_job(job_id: JobId) -> Executor:
    """Default executor of a job: one thread."""
    return ThreadPoolExecutor(
        max_workers=1, thread_name_prefix=f"job-{job_id}", initializer=partial(bind_context, job=job_id)
    )


class JobHost:
    """One job. Guarded by the coordinator's lock, except `save`."""

    def __init__(
        self,
        machine: JobMachine,
        record: JobRecord,
        executor: Executor,
        *,
        events: Sequence[NumberedEvent] = (),
        first: int = 1,
    ) -> None:
        """Host a job.

        Args:
            machine: its state machine; replaced if the job turns out to be running.
            record: the stored record.
            executor: runs its tasks.
            events: stored events of earlier coordinators.
            first: number of the next event, unless `events` go beyond it.
        """
        self.machine = machine
        #: Runs the job's tasks and writes one after the other.
        self.executor = executor
        #: As it is kept, or will be.
        self.record = record
        #: The identity that submitted it, if to this coordinator; empty without TLS.
        self.owner = ""
        #: Events as watchers see them.
        self.events: deque[NumberedEvent] = deque(events, maxlen=MAX_EVENTS)
        self._next_number = max(first, self.events[-1].sequence + 1 if self.events else 1)
        #: Total counts, by kind.
        self.event_counts: Counter[str] = Counter()
        #: The newest progress table and how many there have been.
        self.picture: ProgressTable | None = None
        self.num_pictures = 0
        self._unsaved: deque[NumberedEvent] = deque(maxlen=MAX_EVENTS)
        self._record_unsaved = False
        self._saving = False
        #: The process that logs; None before the first value, and without loggers.
        self._feed: Feed | None = None

    @property
    def job_id(self) -> JobId:
        """The job's id."""
        return self.machine.job_id

    def announce(self, event: JobEvent) -> None:
        """Publish an event to watchers."""
        if isinstance(event, ProgressTable):
            self.picture = event
            self.num_pictures += 1
            return
        numbered = NumberedEvent(self._next_number, event)
        self._next_number += 1
        self.events.append(numbered)
        self.event_counts[event.kind] += 1
        self._unsaved.append(numbered)
        self._note(event)

    def _note(self, event: JobEvent) -> None:
        """Log the event at its severity."""
        values = {field.name: getattr(event, field.name) for field in fields(event) if field.name != "kind"}
        match event.severity:
            case "warning":
                _log.warning(event.kind, job=self.job_id, **values)
            case "info":
                _log.info(event.kind, job=self.job_id, **values)
            case "usual":
                """The events of the job have it."""

    def log(self, message: Values | StepRewind, on_failure: Callable[[JobHost, str, str], None]) -> None:
        """Pass on a message to the loggers of the job, if it has any; the first one starts their process."""
        options = self.machine.job.log.options
        if not options:
            return
        if self._feed is None:
            submission = self.machine.submission
            given = self.machine.job.model_dump(mode="json", exclude_defaults=True)
            opening = Opening(
                run_dir=submission.first_run_dir,
                previous=run_of_checkpoint(submission.restore),
                keys={key: str(value) for key, value in dotted(given).items()},
                options=dict(options),
            )
            self._feed = Feed(opening, partial(on_failure, self))
        self._feed.post(message)

    def close_log(self) -> None:
        """Close the loggers' stream; they finish on their own."""
        if self._feed is not None:
            self._feed.close()

    def note_state(self) -> None:
        """Update the record from the machine's state."""
        state, ended = self.machine.state, self.machine.ended
        if state is not self.record.state:
            self.record = self.record.at(state, failure="" if ended is None else ended.sentence)
            shards = tuple(shard.id for shard in self.machine.shards)
            submission = self.record.submission
            if state is JobState.STARTING and submission is not None:
                submission = replace(submission, has_begun=True)
            self.record = replace(self.record, shards=shards, submission=submission)
            self._record_unsaved = True

    def request_stop(self, mode: StopMode) -> None:
        """Record a user's request to stop, for the next coordinator as well."""
        self.record = replace(self.record, stop=mode)
        self._record_unsaved = True

    def wants_save(self) -> bool:
        """Whether to start a save; the caller then runs `save` and calls `saved`."""
        if self._saving or not (self._unsaved or self._record_unsaved):
            return False
        self._saving = True
        return True

    @property
    def is_saved(self) -> bool:
        """Whether all state is in the store."""
        return not (self._saving or self._unsaved or self._record_unsaved)

    def unsaved(self) -> UnsavedState:
        """The unsaved state."""
        return UnsavedState(self.record, is_record=self._record_unsaved, events=tuple(self._unsaved))

    def saved(self, record: JobRecord | None, num_events: int) -> None:
        """Mark the first `num_events` events as stored, and `record` (the new version) if given."""
        self._saving = False
        for _ in range(num_events):
            self._unsaved.popleft()
        if record is not None:
            self._record_unsaved = (record.state, record.stop) != (self.record.state, self.record.stop)
            self.record = replace(self.record, version=record.version)


@dataclass(frozen=True, slots=True)
class UnsavedState:
    """The unsaved state of a job."""

    record: JobRecord
    is_record: bool
    """Whether that has changed, too."""
    events: tuple[NumberedEvent, ...]


class JobHosts:
    """The jobs of one coordinator, oldest first. Every method is called under the lock."""

    def __init__(
        self,
        context: Context,
        mailboxes: Mailboxes,
        *,
        executor_of: Callable[[JobId], Executor],
        first_number: Callable[[], int],
    ) -> None:
        """Start without jobs.

        Args:
            context: the coordinator's dependencies.
            mailboxes: command queues of the agents.
            executor_of: creates the executor of a job.
            first_number: first number of this coordinator's events; ranges of different leads do not overlap.
        """
        self._context = context
        self._mailboxes = mailboxes
        self.executor_of = executor_of
        self.first_number = first_number
        #: By id, in order of submission.
        self._hosts: dict[JobId, JobHost] = {}
        #: Ended jobs without a host, oldest first; with the end of those that the store does not have.
        self._ended: dict[JobId, str] = {}

    def __contains__(self, job_id: JobId) -> bool:
        """Whether this coordinator leads the job, or led it until its recent end."""
        return job_id in self._hosts

    def __iter__(self) -> Iterator[JobHost]:
        """Iterate over a snapshot."""
        return iter(list(self._hosts.values()))

    def get(self, job_id: JobId) -> JobHost | None:
        """The job with this id, if any."""
        return self._hosts.get(job_id)

    @property
    def newest(self) -> JobHost | None:
        """The most recently submitted job."""
        return next(reversed(self._hosts.values()), None)

    def lead(
        self,
        machine: JobMachine,
        record: JobRecord,
        *,
        events: Sequence[NumberedEvent] = (),
        executor: Executor | None = None,
    ) -> JobHost:
        """Start leading a job.

        Args:
            machine: its state machine.
            record: the stored record.
            events: stored events of earlier coordinators.
            executor: its executor, if it already has one.
        """
        executor = executor or self.executor_of(machine.job_id)
        host = JobHost(machine, record, executor, events=events, first=self.first_number())
        self._hosts[machine.job_id] = host
        return host

    def sort(self) -> None:
        """Restore submission order after adding an older job."""
        self._hosts = dict(sorted(self._hosts.items(), key=lambda item: item[1].record.submitted_wall))

    def remove(self, job_id: JobId) -> None:
        """Stop leading a job."""
        del self._hosts[job_id]

    def check_room(self, job_id: JobId, owner: str = "") -> None:
        """Enforce the limits on jobs, per `owner` and in total.

        Raises:
            ResourceExhausted: a limit is reached.
        """
        under_way = [host for host in self._hosts.values() if host.machine.ended is None]
        num_open, own = len(under_way), sum(host.owner == owner for host in under_way)
        if owner and job_id not in self._hosts and own >= MAX_OPEN_JOBS_OF_OWNER:
            raise ResourceExhausted(f"{own} jobs of {owner} wait or run, which is the limit; stop one or let one end")
        if job_id not in self._hosts and num_open >= MAX_OPEN_JOBS:
            raise ResourceExhausted(f"{num_open} jobs wait or run, which is the limit; stop one or let one end")

    def feed(self, host: JobHost, fact: Input) -> None:
        """Pass a fact to a machine and execute its instructions."""
        try:
            instructions = host.machine.handle(fact, now=self._context.clock.monotonic())
        except Exception:  # noqa: BLE001 - one job's bug must not stop the others
            _log.exception("job_machine_failed", job=host.job_id, fact=type(fact).__name__)
            return
        for instruction in instructions:
            self._carry_out(host, instruction)
        self._keep(host)
        if instructions or isinstance(fact, ClocksReported):
            self._context.condition.notify_all()

    def feed_all(self, fact: Input) -> None:
        """Pass a fact to every job."""
        for host in self:
            self.feed(host, fact)

    def post(self, commands: Sequence[SendCommand]) -> None:
        """Queue commands that belong to no job."""
        for sent in commands:
            self._mailboxes.post(sent.agent, sent.command)
        if commands:
            self._context.condition.notify_all()

    def forget_old(self) -> None:
        """Drop the oldest ended jobs above `MAX_ENDED_JOBS`."""
        now = self._context.clock.monotonic()
        settled = [host for host in self._hosts.values() if host.is_saved and host.machine.is_settled(now=now)]
        for host in settled[:-MAX_ENDED_JOBS]:
            host.executor.shutdown(wait=False)
            self.remove(host.job_id)
            self.note_end(host.job_id)

    def note_end(self, job_id: JobId, sentence: str = "") -> None:
        """Record the end of a job without a host; `sentence` is the reason, if the store has none."""
        self._ended[job_id] = sentence
        while len(self._ended) > _MAX_ENDED_IDS:
            del self._ended[next(iter(self._ended))]

    def has_ended(self, job_id: JobId) -> bool:
        """Whether a job is known to have ended and is no longer led."""
        return job_id in self._ended

    def end_of(self, job_id: JobId) -> str:
        """Reason of a job's end, if the store has none."""
        return self._ended.get(job_id, "")

    def forget_end(self, job_id: JobId) -> None:
        """Forget a job's end, as it was resubmitted."""
        self._ended.pop(job_id, None)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _keep(self, host: JobHost) -> None:
        """Save new state to the store."""
        host.note_state()
        if host.wants_save():
            _submit(host, self._save)

    def _carry_out(self, host: JobHost, instruction: Instruction) -> None:
        match instruction:
            case SendCommand(agent=agent, command=command):
                self._mailboxes.post(agent, command)
            case Announce(event=event):
                host.announce(event)
                self._log_values(host, event)
                if isinstance(event, JobEnded):
                    # First of all, so that no successor takes the job for a running one.
                    self._keep(host)
                    _log.info("job_ended", job=host.job_id, state=event.state, sentence=event.sentence)
            case task:
                _submit(host, partial(self._run_task, task=task))

    def _log_values(self, host: JobHost, event: JobEvent) -> None:
        """Send the values of an event to the loggers of the job."""
        clocks, wall = host.machine.clocks, self._context.clock.wall()
        match event:
            case ProgressTable() if clocks is not None and clocks.minibatches:
                host.log(of_progress(event, clocks.minibatches, wall=wall), self._logger_failed)
            case Evaluated():
                host.log(of_evaluation(event, wall=wall), self._logger_failed)
            case Rewound():
                host.log(StepRewind(), self._logger_failed)
            case JobEnded():
                host.close_log()
            case _:
                """the others are no values"""

    def _logger_failed(self, host: JobHost, logger: str, sentence: str) -> None:
        """Report a logger that failed; in a thread of its own."""
        with self._context.condition:
            if host.machine.ended is None:
                host.announce(LoggerFailed(logger, sentence))
                self._keep(host)
                self._context.condition.notify_all()

    def _run_task(self, host: JobHost, *, task: Task) -> None:
        """Run a task on the job's thread, without the lock."""
        machine = host.machine
        tasks = JobTasks(
            machine.job_id,
            machine.job,
            machine.submission,
            submitted_wall=host.record.submitted_wall,
            store=self._context.store,
            tools=self._context.tools,
            clock=self._context.clock,
        )
        answer = tasks.run(task)
        if answer is not None and machine is host.machine:
            with self._context.condition:
                self.feed(host, answer)

    def _save(self, host: JobHost) -> None:
        """Save on the job's thread, without the lock."""
        with self._context.condition:
            unsaved, submission = host.unsaved(), host.machine.submission
            run_dir, best = Path(submission.first_run_dir), None
            if any(isinstance(numbered.event, Evaluated) for numbered in unsaved.events):
                best = best_evaluation(host.machine.job, host.machine.evaluations.all)
        try:
            kept = save(self._context.store, unsaved)
        except HetpipeError as error:
            _log.warning("job_not_kept_yet", job=host.job_id, reason=str(error))
            with self._context.condition:
                host.saved(None, 0)
            return
        discard_model(self._context.tools, unsaved.record)
        # After the store, whose write may be retried: so each line is written once.
        append_evaluations(run_dir, (numbered.event for numbered in unsaved.events), self._context.clock)
        if best is not None:
            _note_best(Path(submission.run_dir), *best)
        with self._context.condition:
            host.saved(kept, len(unsaved.events))


def _note_best(run_dir: Path, metric: str, evaluated: Evaluated) -> None:
    """Have the checkpoint of the best evaluation kept. Disk failures are only logged."""
    try:
        note_best(run_dir, Best(evaluated.clock, metric, evaluated.values[metric]))
    except OSError as error:
        _log.warning("best_not_noted", run_dir=str(run_dir), reason=str(error))


def save(store: Store, unsaved: UnsavedState) -> JobRecord | None:
    """Write unsaved state, and the record's new version if there is one. Idempotent.

    A store that lost its data gets the job again. A different version there was written by this coordinator, before it
    led the job: other writers are fenced off.

    Raises:
        StoreUnavailable: try again later.
    """
    try:
        return _write(store, unsaved)
    except VersionConflict:
        known = store.job(unsaved.record.job_id)
        record = store.create_job(unsaved.record) if known is None else unsaved.record
        version = record.version if known is None else known.version
        return _write(store, replace(unsaved, record=replace(record, version=version), is_record=True))


def _write(store: Store, unsaved: UnsavedState) -> JobRecord | None:
    record = unsaved.record
    for event in unsaved.events:
        store.append_event(record.job_id, event)
    if not unsaved.is_record:
        return None
    return store.replace_job(record, keep_seconds=ENDED_JOB_SECONDS if record.state.is_terminal else None)


def discard_model(tools: Tools, record: JobRecord) -> None:
    """Delete the inspected model of a job whose end is stored; a no-op for other jobs. Idempotent.

    Only after the end is stored: a new leader that finds the job running restarts its stages from the file. One that
    finds it ended repeats the deletion, in case its predecessor was killed in between.
    """
    if not record.state.is_terminal or record.submission is None:
        return
    folder = record.submission.first_run_dir
    try:
        tools.roots.check_run(folder)
        discard_model_file(Path(folder))
    except (UserError, OSError) as error:
        _log.warning("model_file_not_deleted", job=record.job_id, folder=folder, reason=str(error))


def evaluation_line(evaluated: Evaluated, *, wall: float) -> str:
    """JSON line of an evaluation reported `wall` seconds after the epoch (1970). Non-finite numbers become null.

    >>> from hetpipe.values.ids import Clock
    >>> evaluation_line(Evaluated(Clock(6), 2, 46, {"loss": 0.5}), wall=0.0)
    '{"t":"1970-01-01T00:00:00Z","epoch":2,"clock":6,"minibatches":0,"samples":46,"rewinds":0,"within_epoch":false,"whole":true,"values":{"loss":0.5}}'
    """
    date = datetime.fromtimestamp(wall, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return json.dumps({"t": date, **evaluated.to_object()}, separators=(",", ":"))


def append_evaluations(run_dir: Path, events: Iterable[JobEvent], clock: Clock) -> None:
    """Append one line per evaluation in `events`, with one write.

    Disk failures are only logged: training continues, and the newest evaluation is in the result anyway.
    """
    lines = [evaluation_line(event, wall=clock.wall()) for event in events if isinstance(event, Evaluated)]
    if not lines:
        return
    text = "".join(f"{line}\n" for line in lines).encode()
    try:
        append(run_dir / EVALUATIONS, text)
    except OSError as error:
        _log.warning("evaluation_not_written", path=str(run_dir / EVALUATIONS), reason=str(error))


def _submit(host: JobHost, work: Callable[[JobHost], None]) -> None:
    """Run `work` on the job's thread; a no-op while the coordinator closes."""
    try:
        host.executor.submit(work, host)
    except RuntimeError:
        _log.info("task_not_started", job=host.job_id)
