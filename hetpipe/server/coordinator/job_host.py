"""A job inside the coordinator: its machine, its events, its thread for tasks, and what the store has not got yet."""

from __future__ import annotations

import json
import os
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path

from hetpipe.clock import Clock
from hetpipe.decide.lifecycle.job_machine import JobMachine
from hetpipe.errors import VersionConflict
from hetpipe.observe.log import get_logger
from hetpipe.storage.store import ENDED_JOB_SECONDS, MAX_EVENTS, JobRecord, Store
from hetpipe.values.events import (
    Evaluated,
    JobEvent,
    JobState,
    NumberedEvent,
    ProgressTable,
    StopMode,
    severity_of,
)
from hetpipe.values.ids import JobId

_log = get_logger(__name__)


#: Every evaluation of a run, in its first folder: one JSON object per line, appended. After a rewind it goes on in the
#: same file: what was evaluated after the checkpoint comes again, with another `rewinds`.
EVALUATIONS = "evaluations.jsonl"


class JobHost:
    """One job. Guarded by the coordinator's lock, but for `save`."""

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
            machine: what decides; another one takes its place when the job turns out to be under way.
            record: as it is kept.
            executor: see there.
            events: those that are kept, told by earlier coordinators.
            first: number of the next event, unless those go beyond it.
        """
        self.machine = machine
        #: Runs the job's tasks and writes one after the other.
        self.executor = executor
        #: As it is kept, or will be.
        self.record = record
        #: Whose certificate handed it in, if that was with this coordinator; empty without TLS.
        self.owner = ""
        #: Events as watchers see them.
        self.events: deque[NumberedEvent] = deque(events, maxlen=MAX_EVENTS)
        self._next_number = max(first, self.events[-1].sequence + 1 if self.events else 1)
        #: All that there have been, by kind.
        self.event_counts: Counter[str] = Counter()
        #: The newest progress table and how many there have been.
        self.picture: ProgressTable | None = None
        self.num_pictures = 0
        self._unsaved: deque[NumberedEvent] = deque(maxlen=MAX_EVENTS)
        self._record_unsaved = False
        self._saving = False

    @property
    def job_id(self) -> JobId:
        """The job's id."""
        return self.machine.job_id

    def announce(self, event: JobEvent) -> None:
        """Let watchers see an event."""
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
        """Write down what became of virtual workers and of the run's safety, for whoever was not there to see it."""
        told = {field.name: getattr(event, field.name) for field in fields(event) if field.name != "kind"}
        match severity_of(event):
            case "warning":
                _log.warning(event.kind, job=self.job_id, **told)
            case "info":
                _log.info(event.kind, job=self.job_id, **told)
            case "usual":
                """The events of the job have it."""

    def note_state(self) -> None:
        """Bring the record up to the machine's state."""
        state, ended = self.machine.state, self.machine.ended
        if state is not self.record.state:
            self.record = self.record.at(state, failure="" if ended is None else ended.sentence)
            shards = tuple(shard.id for shard in self.machine.shards)
            submission = self.record.submission
            if state is JobState.STARTING and submission is not None:
                submission = replace(submission, has_begun=True)
            self.record = replace(self.record, shards=shards, submission=submission)
            self._record_unsaved = True

    def want_stop(self, mode: StopMode) -> None:
        """A user wants the job to stop; the next coordinator shall know."""
        self.record = replace(self.record, stop=mode)
        self._record_unsaved = True

    def wants_save(self) -> bool:
        """True when a save should be started; the caller then runs `save` and tells `saved`."""
        if self._saving or not (self._unsaved or self._record_unsaved):
            return False
        self._saving = True
        return True

    @property
    def is_saved(self) -> bool:
        """Whether the store has got everything."""
        return not (self._saving or self._unsaved or self._record_unsaved)

    def unsaved(self) -> Unsaved:
        """What the store has not got."""
        return Unsaved(self.record, is_record=self._record_unsaved, events=tuple(self._unsaved))

    def saved(self, record: JobRecord | None, num_events: int) -> None:
        """The store has got the first `num_events` events, and `record` (the new version) if there is one."""
        self._saving = False
        for _ in range(num_events):
            self._unsaved.popleft()
        if record is not None:
            self._record_unsaved = (record.state, record.stop) != (self.record.state, self.record.stop)
            self.record = replace(self.record, version=record.version)


@dataclass(frozen=True, slots=True)
class Unsaved:
    """What a store has not got of a job."""

    record: JobRecord
    is_record: bool
    """Whether that has changed, too."""
    events: tuple[NumberedEvent, ...]


def save(store: Store, unsaved: Unsaved) -> JobRecord | None:
    """Write what is unsaved; the record's new version, if it has one. All parts may safely be written again.

    A store that has lost its memory learns of the job again. One that has another version has it of this coordinator,
    before it led the job: whoever else writes is refused by its fence.

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


def _write(store: Store, unsaved: Unsaved) -> JobRecord | None:
    record = unsaved.record
    for event in unsaved.events:
        store.append_event(record.job_id, event)
    if not unsaved.is_record:
        return None
    return store.replace_job(record, keep_seconds=ENDED_JOB_SECONDS if record.state.is_terminal else None)


def evaluation_line(evaluated: Evaluated, *, wall: float) -> str:
    """The line of an evaluation that was heard of `wall` seconds after 1970. Numbers that are not finite become null.

    >>> from hetpipe.values.ids import Clock
    >>> evaluation_line(Evaluated(Clock(6), 2, 46, {"loss": 0.5}), wall=0.0)
    '{"t":"1970-01-01T00:00:00Z","epoch":2,"clock":6,"minibatches":0,"samples":46,"rewinds":0,"within_epoch":false,"whole":true,"values":{"loss":0.5}}'
    """
    date = datetime.fromtimestamp(wall, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return json.dumps({"t": date, **evaluated.to_object()}, separators=(",", ":"))


def append_evaluations(run_dir: Path, events: Iterable[JobEvent], clock: Clock) -> None:
    """Append a line for every evaluation among `events`, with one write.

    A disk that does not take it is told in the log: the run goes on, and its newest evaluation is in its result anyway.
    """
    lines = [evaluation_line(event, wall=clock.wall()) for event in events if isinstance(event, Evaluated)]
    if not lines:
        return
    text = "".join(f"{line}\n" for line in lines).encode()
    try:
        descriptor = os.open(run_dir / EVALUATIONS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, text)
        finally:
            os.close(descriptor)
    except OSError as error:
        _log.warning("evaluation_not_written", path=str(run_dir / EVALUATIONS), reason=str(error))
