"""A write-ahead log with the snapshots that compact it, in one folder.

A snapshot records the LSN at which replay continues. It is durable before anything it replaces is deleted; a torn or
corrupted snapshot is skipped in favour of the previous one, if that still exists.

The owner of the state decides when to take one, by two thresholds on the bytes since the last snapshot. Above the
larger one the log is compacted at any cost; above the smaller one, which grows with the state, as soon as snapshots are
cheap (`SnapshottedLog.is_cheap`), that is, take at most a quarter of the time. A small state thus has a small log, and
a slow disk leads to a longer log rather than a slower process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from hetpipe.checksum import Bytes
from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import DurabilityLost, InjectedFault, ProtocolViolation, StateLost
from hetpipe.failpoints import reach
from hetpipe.storage.wal.log import WalOptions, WriteAheadLog
from hetpipe.storage.wal.record import SYSTEM_DISK, DiskIO, Extent, LogRecord
from hetpipe.storage.wal.segments import read_log
from hetpipe.storage.wal.snapshot import read_snapshot, write_snapshot
from hetpipe.values import wire

log = structlog.get_logger(__name__)

_PREFIX = "snapshot-"

#: After a snapshot that took t seconds, the next one is cheap again after this many times t.
_PAUSES = 3


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """Header of a snapshot, as JSON on disk."""

    identity: str
    """Owner of the state."""
    since: int
    """The LSN at which the log continues the snapshot."""
    history: int
    """A position in a file of the owner, returned unchanged: replay may repeat the lines from there on."""
    content: str
    """The small part of the owner's state."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A complete snapshot."""

    number: int
    header: SnapshotHeader
    payload: Extent


@dataclass(frozen=True, slots=True)
class RecoveredLog:
    """Result of recovery."""

    snapshot: Snapshot | None
    records: tuple[LogRecord, ...]
    """Records after the snapshot; without one, all."""
    next_lsn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """Storage configuration."""

    identity: str
    """Owner of the state; state of another owner is rejected."""
    fsync: bool = False
    """Acknowledged records also survive a power failure."""
    disk: DiskIO = SYSTEM_DISK
    on_alarm: Callable[[Path, DurabilityLost | None], None] = lambda _folder, _alarm: None
    """Called with a folder whose log lacks records, and the reason; with None when the log is complete again."""
    clock: Clock = SYSTEM_CLOCK
    """Measures the duration of snapshots."""


class SnapshottedLog:
    """The log and the snapshots of one state machine. Thread-safe; only one thread at a time may call `snapshot`."""

    def __init__(self, folder: Path, options: StorageOptions, *, recovered: RecoveredLog | None = None) -> None:
        """Continue from the result of `recover`, or start in an empty folder. The log is never full."""
        self._folder = folder
        self._options = options
        self.log = WriteAheadLog(
            folder,
            identity=options.identity.encode(),
            options=WalOptions(fsync=options.fsync),
            next_lsn=0 if recovered is None else recovered.next_lsn,
            disk=options.disk,
            on_alarm=lambda alarm: options.on_alarm(folder, alarm),
        )
        self._thread: threading.Thread | None = None
        #: Held from naming the thread to its start: before that it cannot be joined.
        self._starting = threading.Lock()
        #: Until then another snapshot would exceed its share of the time.
        self._cheap_at = options.clock.monotonic()
        #: Number of the newest snapshot; None before the first.
        self.newest = None if recovered is None or recovered.snapshot is None else recovered.snapshot.number

    def append(self, header: bytes) -> int | None:
        """Append a record and wait until it is durable; returns its LSN, or None (`WriteAheadLog.alarm`).

        Raises:
            Unavailable: the log is closed.
        """
        lsn = self.log.append(header)
        self.log.sync(lsn)
        return lsn

    @property
    def is_busy(self) -> bool:
        """Whether a snapshot is being written in the background."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_cheap(self) -> bool:
        """Whether a snapshot taken now would take at most its share of the time, judging by the last one."""
        return self._options.clock.monotonic() >= self._cheap_at

    def in_background(self, work: Callable[[], None], name: str) -> None:
        """Take a snapshot by running `work` in a thread of its own."""
        clock = self._options.clock

        def measured() -> None:
            started = clock.monotonic()
            try:
                work()
            finally:
                ended = clock.monotonic()
                self._cheap_at = ended + _PAUSES * (ended - started)

        with self._starting:
            self._thread = threading.Thread(target=measured, name=name, daemon=True)
            self._thread.start()

    def wait_idle(self) -> None:
        """Return when no snapshot is being written."""
        with self._starting:
            thread = self._thread
        if thread is not None:
            thread.join()

    def close(self) -> None:
        """Close the log after the snapshot being written, if any."""
        self.wait_idle()
        self.log.close()

    def snapshot(self, number: int, content: str, payload: Sequence[Bytes], *, since: int, history: int) -> bool:
        """Write a snapshot, then delete what it replaces; returns whether it succeeded.

        Args:
            number: of the snapshot; larger than that of the newest.
            content: the small part of the state.
            payload: the large part.
            since: the first LSN it does not cover.
            history: see `SnapshotHeader`.
        """
        header = SnapshotHeader(self._options.identity, since, history, content)
        path = self._folder / f"{_PREFIX}{number:016d}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            encoded = wire.to_json(SnapshotHeader, header).encode()
            write_snapshot(path, number, encoded, payload, disk=self._options.disk)
            self.newest = number
            for other in self._folder.glob(f"{_PREFIX}*"):
                if other != path:
                    other.unlink(missing_ok=True)
            self.log.truncate_before(since)
            reach("snapshot.old_deleted")
        except (OSError, InjectedFault) as error:
            log.warning("snapshot_failed", path=str(path), reason=str(error))
            return False
        return True


def recover(folder: Path, *, identity: str) -> RecoveredLog:
    """Read the newest complete snapshot in a folder and the records after it, without modifying anything.

    Raises:
        StateLost: the state is corrupted or incomplete, or has another owner.
    """
    refused: list[str] = []
    for path in sorted(folder.glob(f"{_PREFIX}*"), reverse=True):
        if path.suffix:
            continue  # one that was never completed
        try:
            snapshot = _read_snapshot(path, identity)
            return _with_log(folder, identity, snapshot)
        except StateLost as error:
            refused.append(str(error))
            log.warning("snapshot_refused", sentence=str(error))
    try:
        return _with_log(folder, identity, None)
    except StateLost as error:
        raise StateLost("; ".join([*refused, str(error)])) from None


def _read_snapshot(path: Path, identity: str) -> Snapshot:
    record = read_snapshot(path)
    try:
        header: SnapshotHeader = wire.from_json(SnapshotHeader, record.header)
    except ProtocolViolation as error:
        raise StateLost(f"{path} cannot be read: {error}") from None
    if header.identity != identity:
        raise StateLost(f"{path} is a snapshot of {header.identity:.200}, not of {identity:.200}")
    return Snapshot(record.lsn, header, record.payload)


def _with_log(folder: Path, identity: str, snapshot: Snapshot | None) -> RecoveredLog:
    since = 0 if snapshot is None else snapshot.header.since
    found = read_log(folder, identity=identity.encode(), since=since)
    for tail in found.torn:
        log.warning("torn_tail", sentence=str(tail))
    return RecoveredLog(snapshot, found.records, found.next_lsn)
