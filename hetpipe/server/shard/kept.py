"""A write-ahead log and the snapshots that shorten it, in one folder.

A snapshot says from which record on the log goes on from it. It is durable before anything it replaces is deleted; one
that is torn or damaged is passed over for the one before, if that is still there.

How often one is taken is decided by two figures of whoever owns the state. Above the larger one the log is shortened
whatever that costs; above the smaller one, which grows with the state, as soon as snapshots are cheap
(`Kept.is_cheap`): they take at most a quarter of the time. So a small state has a small log, and a slow disk a longer
one instead of a slower run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import DurabilityLost, InjectedFault, ProtocolViolation, StateLost
from hetpipe.failpoints import reach
from hetpipe.server.shard.checksum import Bytes
from hetpipe.server.shard.frames import DISK, Disk, Extent, Frame
from hetpipe.server.shard.old_log import read_log
from hetpipe.server.shard.snapshots import read_snapshot, write_snapshot
from hetpipe.server.shard.write_ahead_log import LogLimits, WriteAheadLog
from hetpipe.values import wire

log = structlog.get_logger(__name__)

_PREFIX = "snapshot-"

#: After a snapshot that took t seconds the next one is cheap again when this many times t have passed.
_PAUSES = 3


@dataclass(frozen=True, slots=True)
class SnapshotLabel:
    """What a snapshot is of."""

    identity: str
    """Whose it is."""
    since: int
    """The log goes on from it with this record."""
    history: int
    """Position in the history from which on lines may be repeated by what the log holds."""
    content: str
    """The small part of the state, as JSON."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A whole snapshot."""

    number: int
    label: SnapshotLabel
    payload: Extent


@dataclass(frozen=True, slots=True)
class Found:
    """What an earlier process left."""

    snapshot: Snapshot | None
    records: tuple[Frame, ...]
    """Those that the snapshot lacks; without one, all."""
    next_sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """How state is kept."""

    identity: str
    """Whose it is: job, term, shard, and what the shard holds."""
    fsync: bool = False
    """Whether what was acknowledged outlives the machine, too."""
    disk: Disk = DISK
    on_alarm: Callable[[Path, DurabilityLost | None], None] = lambda _folder, _alarm: None
    """Hears of a folder whose log lacks records, and why; None when that is over."""
    clock: Clock = SYSTEM_CLOCK
    """Measures how long snapshots take."""


class Kept:
    """Where one part of a process's state is kept. Thread-safe; `snapshot` is for one thread at a time."""

    def __init__(self, folder: Path, keeping: Keeping, *, found: Found | None = None) -> None:
        """Go on behind what was found, or begin; then the folder holds nothing yet. The log is never full."""
        self._folder = folder
        self._keeping = keeping
        self.log = WriteAheadLog(
            folder,
            identity=keeping.identity.encode(),
            limits=LogLimits(fsync=keeping.fsync),
            next_sequence=0 if found is None else found.next_sequence,
            disk=keeping.disk,
            on_alarm=lambda alarm: keeping.on_alarm(folder, alarm),
        )
        self._thread: threading.Thread | None = None
        #: Until then another snapshot would take more than its share of the time.
        self._cheap_at = keeping.clock.monotonic()
        #: Number of the newest snapshot; None before the first.
        self.newest = None if found is None or found.snapshot is None else found.snapshot.number

    def append(self, header: bytes) -> int | None:
        """Keep a record: it is there after a restart when this returns. Its number, or None (`WriteAheadLog.alarm`)."""
        number = self.log.append(header)
        self.log.sync(number)
        return number

    @property
    def is_busy(self) -> bool:
        """Whether a snapshot is under way in the background."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_cheap(self) -> bool:
        """Whether a snapshot now would leave the time that snapshots take below a quarter, going by the last one."""
        return self._keeping.clock.monotonic() >= self._cheap_at

    def in_background(self, work: Callable[[], None], name: str) -> None:
        """Take a snapshot, which is `work`, in a thread of its own."""
        clock = self._keeping.clock

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
        """Return when no snapshot is under way."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Close the log, once no snapshot is under way."""
        self.wait_idle()
        self.log.close()

    def snapshot(self, number: int, content: str, payload: Sequence[Bytes], *, since: int, history: int) -> bool:
        """Keep a whole state, and delete what lies behind it; whether that went well.

        Args:
            number: of the snapshot; larger than that of the newest.
            content: the small part of the state.
            payload: the large part.
            since: the first record that it lacks.
            history: see `SnapshotLabel`.
        """
        label = SnapshotLabel(self._keeping.identity, since, history, content)
        path = self._folder / f"{_PREFIX}{number:016d}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_snapshot(path, number, wire.to_json(SnapshotLabel, label).encode(), payload, disk=self._keeping.disk)
            self.newest = number
            for other in self._folder.glob(f"{_PREFIX}*"):
                if other != path:
                    other.unlink(missing_ok=True)
            self.log.forget(since)
            reach("snapshot.old_deleted")
        except (OSError, InjectedFault) as error:
            log.warning("snapshot_failed", path=str(path), reason=str(error))
            return False
        return True


def read_kept(folder: Path, *, identity: str) -> Found:
    """What is kept in a folder.

    Raises:
        StateLost: it is damaged, incomplete, or of another.
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
    frame = read_snapshot(path)
    try:
        label: SnapshotLabel = wire.from_json(SnapshotLabel, frame.header)
    except ProtocolViolation as error:
        raise StateLost(f"{path} cannot be read: {error}") from None
    if label.identity != identity:
        raise StateLost(f"{path} is a snapshot of {label.identity:.200}, not of {identity:.200}")
    return Snapshot(frame.sequence, label, frame.payload)


def _with_log(folder: Path, identity: str, snapshot: Snapshot | None) -> Found:
    since = 0 if snapshot is None else snapshot.label.since
    old = read_log(folder, identity=identity.encode(), since=since)
    for tail in old.torn:
        log.warning("torn_tail", sentence=str(tail))
    return Found(snapshot, old.records, old.next_sequence)
