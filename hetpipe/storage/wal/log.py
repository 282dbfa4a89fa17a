"""An append-only log in a folder, which survives the death of the process.

`append` passes a record to the kernel as a whole before it returns, so it outlives the process; with `fsync` and after
`sync` it outlives the machine. The log is divided into segments. To take a snapshot, call `rotate` first, and
`truncate_before` once the snapshot is durable.

After a disk error the log is never considered complete: `alarm` is set and nothing is appended until `reopen`, which
skips an LSN, so that recovery detects the gap.
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

#: A segment is closed above this size, so that it can be deleted once a snapshot covers all of its records.
_SEGMENT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WalOptions:
    """Size and fsync policy of a log."""

    max_bytes: int = 1 << 62
    """Limit for all segments together; above it `is_full` is true, but records are still appended."""
    segment_bytes: int = _SEGMENT_BYTES
    """A segment above this size is closed, and another one is started."""
    fsync: bool = False
    """`sync` waits for the disk."""


def _ignore_alarm(_: DurabilityLost | None) -> None:
    """Default listener, which does nothing."""


@dataclass(slots=True)
class _Segment:
    """The segment being written."""

    first: int
    descriptor: int
    num_bytes: int = 0
    #: Its directory entry is not yet durable.
    is_new: bool = True

    def close(self) -> None:
        os.close(self.descriptor)


class WriteAheadLog:
    """The tail of a log, to which records are appended. Thread-safe."""

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
        """Start a new segment; existing ones are kept.

        Args:
            folder: of the log, created if missing.
            identity: the owner of the log, verified on reading.
            options: its size and fsync policy.
            next_lsn: of `read_log`.
            disk: performs the writes.
            on_alarm: called with the reason when records are lost, and with None when the log is complete again.
        """
        self._folder = folder
        self._on_alarm = on_alarm
        self._identity = identity
        self._options = options
        #: See `WalOptions`; mutable.
        self.max_bytes = options.max_bytes
        self._disk = disk
        #: Guards the following attributes; held while a record is written.
        self._lock = threading.Lock()
        self._next = next_lsn
        self._is_closed = False
        self._segment: _Segment | None = None
        #: Records with lower LSNs may be missing after a disk error.
        self._complete_from = 0
        self._sizes = {first_lsn(path): path.stat().st_size for path in segment_paths(folder)}
        self._num_bytes = sum(self._sizes.values())
        self._alarm: DurabilityLost | None = None
        #: Held while waiting for the disk: callers that arrive meanwhile share the next wait (group commit). Acquired
        #: before `_lock`, and with it at a segment change.
        self._sync_lock = threading.Lock()
        self._synced = next_lsn
        with self._sync_lock, self._lock:
            self._try(self._open)

    # -- appending ---------------------------------------------------------------------------------------------------

    def append(
        self, header: bytes, payload: Sequence[Bytes] = (), *, sums: Sequence[bytes] | None = None
    ) -> int | None:
        """Pass a record to the kernel; returns its LSN, or None after a disk error (`alarm`).

        Args:
            header: its small part.
            payload: its large part, in pieces.
            sums: checksums of the payload, if known; None: to be computed.

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
        """With `fsync`: return once the record `lsn` is on disk; None is no record. Waiting threads share one wait."""
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
        """The LSN of the next record, or of the one being written."""
        return self._next

    def rotate(self) -> int:
        """Start another segment; returns its first LSN, at which replay after a snapshot taken now begins."""
        with self._sync_lock, self._lock:
            if self._segment is not None:
                self._try(self._open)
            return self._next - 1

    def truncate_before(self, lsn: int) -> None:
        """Delete segments that contain only records below `lsn`; one that cannot be deleted is retried next time.

        Raises:
            OSError: a segment could not be deleted.
        """
        with self._lock:
            firsts = sorted(self._sizes)
        for first, following in pairwise(firsts):
            if following > lsn:
                break
            segment_path(self._folder, first).unlink(missing_ok=True)
            with self._lock:
                self._num_bytes -= self._sizes.pop(first)

    # -- disk errors --------------------------------------------------------------------------------------------------

    @property
    def alarm(self) -> DurabilityLost | None:
        """The reason why records are missing; None while the log is complete."""
        return self._alarm

    def reopen(self) -> bool:
        """Try the disk again after an alarm, which stays until `clear_alarm`; returns whether appending works again."""
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
        """Clear the alarm once a snapshot covers the missing records, unless the disk has failed once more."""
        with self._lock:
            if self._segment is not None and self._alarm is not None:
                self._alarm = None
                log.warning("durable_again", folder=str(self._folder))
                self._on_alarm(None)

    # -- size and end ------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Size of all segments."""
        return self._num_bytes

    @property
    def is_full(self) -> bool:
        """Whether the log has `max_bytes` or more. A log with a disk error does not grow, and is never full."""
        return self._num_bytes >= self.max_bytes and self._alarm is None

    def close(self) -> None:
        """Close the segment; nothing can be appended afterwards."""
        with self._sync_lock, self._lock:
            self._is_closed = True
            if self._segment is not None:
                self._segment.close()
                self._segment = None

    # -- internals, with the lock held --------------------------------------------------------------------------------

    @property
    def _durable_below(self) -> int:
        """Records with lower LSNs are as durable as the fsync policy promises."""
        return self._synced if self._options.fsync else self._next

    def _rotate_after(self, long: _Segment) -> None:
        """Replace an oversized segment, unless another thread has done so."""
        with self._sync_lock, self._lock:
            if self._segment is long:
                self._try(self._open)

    def _open(self) -> None:
        """Replace the current segment by a new one. Both locks must be held.

        With `fsync` the old segment is synced first: otherwise a power failure could leave the new segment but only
        part of the old one. The new one is then synced, too, before a snapshot relies on it or anything is appended.
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
            f"the write-ahead log in {self._folder} cannot be written ({error.strerror or error}); updates from "
            "now on are lost if this process dies: free disk space, or replace the disk"
        )
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        if first:
            log.error("durability_lost", sentence=str(self._alarm))
            self._on_alarm(self._alarm)
