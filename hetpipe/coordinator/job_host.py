"""A job inside the coordinator: its machine, its events, its thread for tasks, and what the store has not got yet."""

from __future__ import annotations

from collections import Counter, deque
from concurrent.futures import Executor

from hetpipe.coordinator.job_machine import JobMachine
from hetpipe.coordinator.store import ENDED_JOB_SECONDS, MAX_EVENTS, JobRecord, Store
from hetpipe.spec.events import JobEvent, NumberedEvent, ProgressTable
from hetpipe.spec.ids import JobId


class JobHost:
    """One job. Guarded by the coordinator's lock, but for `save`."""

    def __init__(self, machine: JobMachine, record: JobRecord, executor: Executor) -> None:
        self.machine = machine
        #: Runs the job's tasks and writes one after the other.
        self.executor = executor
        #: As it is kept, or will be.
        self.record = record
        #: Events as watchers see them.
        self.events: deque[NumberedEvent] = deque(maxlen=MAX_EVENTS)
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
        sequence = self.events[-1].sequence + 1 if self.events else 1
        numbered = NumberedEvent(sequence, event)
        self.events.append(numbered)
        self.event_counts[event.kind] += 1
        self._unsaved.append(numbered)

    def note_state(self) -> None:
        """Bring the record up to the machine's state."""
        state, ended = self.machine.state, self.machine.ended
        if state is not self.record.state:
            self.record = self.record.at(state, failure="" if ended is None else ended.sentence)
            self._record_unsaved = True

    def wants_save(self) -> bool:
        """True when a save should be started; the caller then runs `save` and tells `saved`."""
        if self._saving or not (self._unsaved or self._record_unsaved):
            return False
        self._saving = True
        return True

    def unsaved(self) -> tuple[JobRecord | None, tuple[NumberedEvent, ...]]:
        """What the store has not got: the record if it changed, and events."""
        return (self.record if self._record_unsaved else None), tuple(self._unsaved)

    def saved(self, record: JobRecord | None, num_events: int) -> None:
        """The store has got `record` (the new version) and the first `num_events` events."""
        self._saving = False
        for _ in range(num_events):
            self._unsaved.popleft()
        if record is not None:
            self._record_unsaved = self.record.state is not record.state
            self.record = record.at(self.record.state, failure=self.record.failure)


def save(store: Store, record: JobRecord | None, events: tuple[NumberedEvent, ...], job_id: JobId) -> JobRecord | None:
    """Write what is unsaved; the record's new version. Both parts may safely be written again.

    Raises:
        StoreUnavailable: try again later.
    """
    for event in events:
        store.append_event(job_id, event)
    if record is None:
        return None
    return store.replace_job(record, keep_seconds=ENDED_JOB_SECONDS if record.state.is_terminal else None)
