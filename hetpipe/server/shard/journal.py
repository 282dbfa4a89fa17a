"""Journal of the clock shard: the accepted events of its decision log, compacted by snapshots of its state.

An event is appended to a write-ahead log (`hetpipe.storage.wal`) before its result is visible to any process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetpipe.decide.sync.decision_log import LogState
from hetpipe.server.shard.decision_events import DecisionEvent, RunKept
from hetpipe.storage.wal import RecoveredLog, SnapshottedLog
from hetpipe.values import wire
from hetpipe.values.ids import Incarnation, StageIndex, VirtualWorkerIndex
from hetpipe.values.run_document import RunDocument

#: Bytes of events that trigger a snapshot where snapshots are cheap (`SnapshottedLog.is_cheap`), at a barrier, where
#: the
#:#: state is smallest, and anywhere: 100,000 events are replayed in three seconds.
_CHEAP_BYTES = 256 << 10
_BARRIER_BYTES = 1 << 20
_WORTH_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Address:
    """The address on which a stage listens."""

    vw: VirtualWorkerIndex
    incarnation: Incarnation
    stage: StageIndex
    link: str
    """For the next stage of its virtual worker; empty: none."""
    replicas: str
    """For the same stage of the other virtual workers; empty: none."""


@dataclass(frozen=True, slots=True)
class ClockState:
    """Serializable state of a clock shard."""

    log: LogState
    addresses: tuple[Address, ...]
    run: RunDocument | None = None
    """The run document; None: that of the shard's configuration."""


@dataclass(frozen=True, slots=True)
class RecoveredDecisions:
    """Recovered state and events."""

    state: ClockState | None
    """Initial state; None: a fresh one."""
    events: tuple[DecisionEvent, ...]
    history: int
    """Position in the history after which lines may be repeated."""


def recovered_decisions(found: RecoveredLog) -> RecoveredDecisions:
    """Decode a recovered journal.

    Raises:
        ProtocolViolation: written by another version.
    """
    events = tuple(_events(found))
    if found.snapshot is None:
        return RecoveredDecisions(None, events, 0)
    header = found.snapshot.header
    return RecoveredDecisions(wire.from_json(ClockState, header.content), events, header.history)


def _events(found: RecoveredLog) -> Iterator[DecisionEvent]:
    for record in found.records:
        event: DecisionEvent = wire.from_json(DecisionEvent, record.header)
        yield event


class Journal:
    """Persistent events of one clock shard. Callers must hold its `condition`."""

    def __init__(self, storage: SnapshottedLog) -> None:
        self._storage = storage
        #: Bytes of the log that do not count towards the next snapshot, because a snapshot of them failed. Bytes of an
        #:#: earlier process do count: otherwise a log would grow without bound if its process is killed repeatedly.
        self._first_bytes = 0

    def append(self, event: DecisionEvent) -> None:
        """Append an event, and wait for the durability of the fsync policy."""
        if isinstance(event, RunKept):  # values of a job file may be infinite
            self._storage.append(wire.to_json(DecisionEvent, event).encode())
        else:
            self._storage.append(wire.to_bytes(DecisionEvent, event))

    def wants_snapshot(self, *, at_barrier: bool) -> bool:
        """Whether a snapshot is due. After a disk failure only a snapshot makes the log complete again."""
        if self._storage.is_busy:
            return False
        grown = self._storage.log.num_bytes - self._first_bytes
        has_gap = self._storage.log.alarm is not None
        if (at_barrier and has_gap) or grown > (_BARRIER_BYTES if at_barrier else _WORTH_BYTES):
            return True
        return grown > _CHEAP_BYTES and self._storage.is_cheap

    def snapshot(self, state: ClockState, *, num_records: int, history: int) -> None:
        """Write a snapshot of `state` in the background; a disk failure is logged, and the events stay."""
        if self._storage.log.alarm is not None and not self._storage.log.reopen():
            return
        since = self._storage.log.rotate()
        self._first_bytes = self._storage.log.num_bytes  # if it fails, the next one is tried after as many again
        number = max(num_records, (self._storage.newest or 0) + 1)

        def work() -> None:
            content = wire.to_json(ClockState, state)
            if self._storage.snapshot(number, content, (), since=since, history=history):
                self._storage.log.clear_alarm()
                self._first_bytes = 0

        self._storage.in_background(work, "snapshot-decisions")

    def wait_idle(self) -> None:
        """Wait until no snapshot is in progress."""
        self._storage.wait_idle()

    def close(self) -> None:
        """Close the log, after any snapshot in progress."""
        self._storage.close()
