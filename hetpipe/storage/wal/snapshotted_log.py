"""A write-ahead log and the snapshots that compact it, in one folder.

A snapshot says from which LSN on the log continues it. It is durable before anything it replaces is deleted; one that
is torn or damaged is passed over for the one before, if that is still there.

When to take one is up to the owner of the state, by two thresholds on the bytes behind the last snapshot. Above the
larger one the log is compacted whatever that costs; above the smaller one, which grows with the state, as soon as
snapshots are cheap (`SnapshottedLog.is_cheap`): they take at most a quarter of the time. So a small state has a small
log, and a slow disk a longer one instead of a slower process.
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

#: After a snapshot that took t seconds the next one is cheap again when this many times t have passed.
_PAUSES = 3


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """The small part of a snapshot, as JSON on disk."""

    identity: str
    """Whose it is."""
    since: int
    """The LSN with which the log continues it."""
    history: int
    """A position in a file of the owner's, given back as it was: from there on replay may repeat its lines."""
    content: str
    """The small part of the owner's state."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A whole snapshot."""

    number: int
    header: SnapshotHeader
    payload: Extent


@dataclass(frozen=True, slots=True)
class RecoveredLog:
    """What recovery found."""

    snapshot: Snapshot | None
    records: tuple[LogRecord, ...]
    """Those behind the snapshot; without one, all."""
    next_lsn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """How state is stored."""

    identity: str
    """Whose it is; state of another identity is refused."""
    fsync: bool = False
    """Whether what was acknowledged survives a power cut, too."""
    disk: DiskIO = SYSTEM_DISK
    on_alarm: Callable[[Path, DurabilityLost | None], None] = lambda _folder, _alarm: None
    """Called with a folder whose log lacks records, and why; with None when that is over."""
    clock: Clock = SYSTEM_CLOCK
    """Measures how long snapshots take."""


class SnapshottedLog:
    """The log and the snapshots of one state machine. Thread-safe; `snapshot` is for one thread at a time."""

    def __init__(self, folder: Path, options: StorageOptions, *, recovered: RecoveredLog | None = None) -> None:
        """Continue what `recover` found, or begin; then the folder holds nothing yet. The log is never full."""
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
        #: Until then another snapshot would take more than its share of the time.
        self._cheap_at = options.clock.monotonic()
        #: Number of the newest snapshot; None before the first.
        self.newest = None if recovered is None or recovered.snapshot is None else recovered.snapshot.number

    def append(self, header: bytes) -> int | None:
        """Append a record and wait until it is durable; its LSN, or None (`WriteAheadLog.alarm`).

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
        """Whether a snapshot now would leave the time that snapshots take below a quarter, going by the last one."""
        return self._options.clock.monotonic() >= self._cheap_at

    def in_background(self, work: Callable[[], None], name: str) -> None:
        """Take a snapshot, which is `work`, in a thread of its own."""
        clock = self._options.clock

        def measured() -> None:
            started = clock.monotonic()
            try:
                work()
            finally:
                ended = clock.monotonic()
                self._cheap_at = ended + _PAUSES * (ended - started)

        self._thread = threading.Thread(target=measured, name=name, daemon=True)
        self._thread.start()

    def wait_idle(self) -> None:
        """Return when no snapshot is being written."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Close the log, once no snapshot is being written."""
        self.wait_idle()
        self.log.close()

    def snapshot(self, number: int, content: str, payload: Sequence[Bytes], *, since: int, history: int) -> bool:
        """Write a snapshot, then delete what it replaces; whether that went well.

        Args:
            number: of the snapshot; larger than that of the newest.
            content: the small part of the state.
            payload: the large part.
            since: the first LSN that it lacks.
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
    """The newest whole snapshot in a folder and the records behind it; nothing is changed.

    Raises:
        StateLost: it is damaged, incomplete, or of another identity.
    """
    refused: list[str] = []
    for path in sorted(folder.glob(f"{_PREFIX}*"), reverse=True):
        if path.suffix:
            continue  # one that was never finished
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
