"""An append-only log in a folder: what was appended is there again after the process was killed.

A record is handed to the kernel whole before `append` returns, so it outlives the process; with `fsync` and after
`sync` it outlives the machine. The log is cut into segments. Whoever writes a snapshot `rotate`s before, and calls
`truncate_before` when the snapshot is durable.

A log whose disk fails is never taken for complete: `alarm` is set and nothing is appended until `reopen`, which skips
an LSN, so that recovery sees the gap.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import structlog

from hetpipe.checksum import Bytes
from hetpipe.durable import make_dir, sync_dir
from hetpipe.errors import DurabilityLost, Unavailable
from hetpipe.storage.wal.record import SYSTEM_DISK, DiskIO, NewLogRecord, write_record
from hetpipe.storage.wal.segments import first_lsn, segment_path, segment_paths

log = structlog.get_logger(__name__)

#: A segment is closed when it is larger, so that it can be deleted once all of its records lie behind a snapshot.
_SEGMENT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WalOptions:
    """Size and fsync policy of a log."""

    max_bytes: int = 1 << 62
    """Of all segments; beyond it `is_full` is true, and records are appended all the same."""
    segment_bytes: int = _SEGMENT_BYTES
    """A segment that is larger is followed by another one."""
    fsync: bool = False
    """Whether `sync` waits for the disk."""


def _ignore_alarm(_: DurabilityLost | None) -> None:
    """No listener."""


@dataclass(slots=True)
class _Segment:
    """The segment that is being written."""

    first: int
    descriptor: int
    num_bytes: int = 0
    #: Its name is not yet durable.
    is_new: bool = True

    def close(self) -> None:
        os.close(self.descriptor)


class WriteAheadLog:
    """The end of a log, to which records are appended. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        *,
        identity: bytes,
        options: WalOptions,
        next_lsn: int = 0,
        disk: DiskIO = SYSTEM_DISK,
        on_alarm: Callable[[DurabilityLost | None], None] = _ignore_alarm,
    ) -> None:
        """Begin a new segment; those that are there stay.

        Args:
            folder: the log's, made if missing.
            identity: whose log it is: no other may read it.
            options: its size and fsync policy.
            next_lsn: of `read_log`.
            disk: what writes.
            on_alarm: called with the reason when records begin to be missing, and with None when all are there again.
        """
        self._folder = folder
        self._on_alarm = on_alarm
        self._identity = identity
        self._options = options
        #: See `WalOptions`; may be changed.
        self.max_bytes = options.max_bytes
        self._disk = disk
        #: Guards what follows; held while a record is written.
        self._lock = threading.Lock()
        self._next = next_lsn
        self._is_closed = False
        self._segment: _Segment | None = None
        #: Records with lower LSNs may be missing: a disk failed since.
        self._complete_from = 0
        self._sizes = {first_lsn(path): path.stat().st_size for path in segment_paths(folder)}
        self._num_bytes = sum(self._sizes.values())
        self._alarm: DurabilityLost | None = None
        #: Held while the disk is waited for: callers that come meanwhile share the next wait (group commit). Taken
        #: before `_lock`, and with it where a segment is followed by another one.
        self._sync_lock = threading.Lock()
        self._synced = next_lsn
        with self._sync_lock, self._lock:
            self._try(self._open)

    # -- appending ---------------------------------------------------------------------------------------------------

    def append(
        self, header: bytes, payload: Sequence[Bytes] = (), *, sums: Sequence[bytes] | None = None
    ) -> int | None:
        """Hand a record to the kernel; returns its LSN, or None if the disk did not take it (`alarm`).

        Args:
            header: its small part.
            payload: its large part, in pieces.
            sums: checksums of the payload where they are known; None: to be computed.

        Raises:
            Unavailable: the log is closed; nothing was appended.
        """
        with self._lock:
            if self._is_closed:
                raise Unavailable(f"the write-ahead log in {self._folder} is closed: this process is shutting down")
            if self._segment is None:
                return None
            segment = self._segment
            lsn = self._next
            record = NewLogRecord(lsn, self._durable_below, header, payload, sums)
            try:
                num_bytes = write_record(segment.descriptor, record, disk=self._disk)
            except OSError as error:
                self._fail(error)
                return None
            self._count(segment, num_bytes)
            self._next += 1
            is_long = segment.num_bytes > self._options.segment_bytes
        if is_long:
            self._rotate_after(segment)
        return lsn

    def sync(self, lsn: int | None) -> None:
        """With `fsync`: return when that record is on the disk. Waiting threads share one wait; None is no record."""
        if lsn is None or not self._options.fsync:
            return
        with self._sync_lock:
            if self._synced > lsn:
                return
            with self._lock:
                target, current = self._next, self._segment
            if current is None:
                return
            try:
                self._sync_segment(current)
                self._synced = target
            except OSError as error:
                with self._lock:
                    self._fail(error)

    # -- compaction --------------------------------------------------------------------------------------------------

    @property
    def next_lsn(self) -> int:
        """The LSN of the next record, or of one that is being written."""
        return self._next

    def rotate(self) -> int:
        """Begin another segment; returns its first LSN, from which on a snapshot taken now needs the log."""
        with self._sync_lock, self._lock:
            if self._segment is not None:
                self._try(self._open)
            return self._next - 1

    def truncate_before(self, lsn: int) -> None:
        """Delete the segments all of whose records are below `lsn`; one that the disk does not let go comes next time.

        Raises:
            OSError: the disk does not.
        """
        with self._lock:
            firsts = sorted(self._sizes)
        for first, following in pairwise(firsts):
            if following > lsn:
                break
            segment_path(self._folder, first).unlink(missing_ok=True)
            with self._lock:
                self._num_bytes -= self._sizes.pop(first)

    # -- when the disk fails -----------------------------------------------------------------------------------------

    @property
    def alarm(self) -> DurabilityLost | None:
        """Why records are missing; None while all are there."""
        return self._alarm

    def reopen(self) -> bool:
        """Try the disk again after an alarm, which stays until `clear_alarm`; whether records are appended again."""
        with self._sync_lock, self._lock:
            if self._segment is None:
                self._next += 1
                self._complete_from = self._next
                self._try(self._open)
            return self._segment is not None

    def is_complete_from(self, lsn: int) -> bool:
        """Whether recovery would find every record from this one on."""
        with self._lock:
            return self._segment is not None and lsn >= self._complete_from

    def clear_alarm(self) -> None:
        """What is missing lies behind a snapshot: the log is complete again, unless the disk failed once more."""
        with self._lock:
            if self._segment is not None and self._alarm is not None:
                self._alarm = None
                log.warning("durable_again", folder=str(self._folder))
                self._on_alarm(None)

    # -- size and end ------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Of all segments."""
        return self._num_bytes

    @property
    def is_full(self) -> bool:
        """Whether it has `max_bytes` or more. A log whose disk fails does not grow, and is not full."""
        return self._num_bytes >= self.max_bytes and self._alarm is None

    def close(self) -> None:
        """Close the segment; nothing more is appended."""
        with self._sync_lock, self._lock:
            self._is_closed = True
            if self._segment is not None:
                self._segment.close()
                self._segment = None

    # -- inside, with the lock held ----------------------------------------------------------------------------------

    @property
    def _durable_below(self) -> int:
        """Records with lower LSNs are as durable as was promised."""
        return self._synced if self._options.fsync else self._next

    def _rotate_after(self, long: _Segment) -> None:
        """Begin another segment after one that is too long, unless another thread has."""
        with self._sync_lock, self._lock:
            if self._segment is long:
                self._try(self._open)

    def _open(self) -> None:
        """Begin a segment in place of the present one. With both locks held.

        With `fsync` what is in that one is on the disk first: or a power cut could leave the new one, and of the old
        one not all. Then the new one is, too, before a snapshot relies on it or anything is appended.
        """
        if self._segment is not None and self._options.fsync:
            self._sync_segment(self._segment)
            self._synced = self._next
        make_dir(self._folder)
        path = segment_path(self._folder, self._next)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        segment = _Segment(self._next, descriptor)
        try:
            opening = NewLogRecord(self._next, self._durable_below, self._identity)
            num_bytes = write_record(descriptor, opening, disk=self._disk)
            if self._options.fsync:
                self._sync_segment(segment)
        except OSError:
            segment.close()
            path.unlink(missing_ok=True)
            raise
        if self._segment is not None:
            self._segment.close()
        self._segment = segment
        self._num_bytes -= self._sizes.pop(segment.first, 0)
        self._count(segment, num_bytes)
        self._next += 1
        if self._options.fsync:
            self._synced = self._next

    def _sync_segment(self, segment: _Segment) -> None:
        if segment.is_new:
            sync_dir(self._folder)
            segment.is_new = False
        self._disk.sync(segment.descriptor)

    def _count(self, segment: _Segment, num_bytes: int) -> None:
        segment.num_bytes += num_bytes
        self._num_bytes += num_bytes
        self._sizes[segment.first] = segment.num_bytes

    def _try(self, work: Callable[[], None]) -> bool:
        try:
            work()
        except OSError as error:
            self._fail(error)
            return False
        return True

    def _fail(self, error: OSError) -> None:
        first = self._alarm is None
        self._alarm = DurabilityLost(
            f"the write-ahead log in {self._folder} cannot be written ({error.strerror or error}); what comes now "
            "would be lost with this process: make room, or replace the disk"
        )
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        if first:
            log.error("durability_lost", sentence=str(self._alarm))
            self._on_alarm(self._alarm)
