"""An append-only log in a folder: what was appended is there again when the process was killed.

A record is handed to the kernel whole before `append` returns, so it outlives the process; with `fsync` and after
`sync` it outlives the machine. The log is cut into files, each named by the number of its first record and beginning
with one that says whose log it is. Whoever keeps a snapshot `rotate`s, and later `forget`s what lies behind it.

A log that its disk failed is never taken for whole: `alarm` is set and nothing is appended until `resume`, which leaves
out a number, so that the gap shows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

import structlog

from hetpipe.durable import make_dir, sync_dir
from hetpipe.errors import Busy, DurabilityLost, PeerUnreachable
from hetpipe.server.shard.checksum import Bytes
from hetpipe.server.shard.frames import DISK, Disk, NewFrame, write_frame
from hetpipe.server.shard.old_log import first_of, log_files, log_path

log = structlog.get_logger(__name__)

#: A file is closed when it is larger, so that it can be deleted once all of its records lie behind a snapshot.
_FILE_BYTES = 64 << 20


class Level(StrEnum):
    """What a process's answer "it is staged" means (`reliability.md` P2)."""

    DURABLE = "durable"
    """It outlives the process; with `fsync` the machine."""
    APPLIED = "applied"
    """It is in memory only, because the disk failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLimits:
    """How a log is kept."""

    max_bytes: int = 1 << 62
    """Of all its files; the log says when it is full, and takes more all the same."""
    file_bytes: int = _FILE_BYTES
    """A file that is larger is followed by another one."""
    fsync: bool = False
    """Whether `sync` waits for the disk."""


def _ignore_alarm(_: DurabilityLost | None) -> None:
    """Nobody wants to know."""


@dataclass(slots=True)
class _File:
    """The file that is being written."""

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
        limits: LogLimits,
        next_sequence: int = 0,
        disk: Disk = DISK,
        on_alarm: Callable[[DurabilityLost | None], None] = _ignore_alarm,
    ) -> None:
        """Begin a file of its own; those that are there stay.

        Args:
            folder: the log's, made if missing.
            identity: whose log it is: no other may read it.
            limits: how it is kept.
            next_sequence: of `old_log.read_log`.
            disk: what writes.
            on_alarm: hears why records are missing when that begins, and None when all are there again.
        """
        self._folder = folder
        self._on_alarm = on_alarm
        self._identity = identity
        self._limits = limits
        #: See `LogLimits`; may be changed.
        self.max_bytes = limits.max_bytes
        self._disk = disk
        #: Guards what follows; held while a record is written.
        self._lock = threading.Lock()
        self._next = next_sequence
        self._is_closed = False
        self._file: _File | None = None
        #: Records with lower numbers may be missing: a disk failed since.
        self._whole_from = 0
        self._sizes = {first_of(path): path.stat().st_size for path in log_files(folder)}
        self._num_bytes = sum(self._sizes.values())
        self._alarm: DurabilityLost | None = None
        self._is_told_full = False
        #: Held while the disk is waited for: who comes meanwhile is served by the next wait. Taken before `_lock`, and
        #: with it where a file is followed by another one.
        self._sync_lock = threading.Lock()
        self._synced = next_sequence
        with self._sync_lock, self._lock:
            self._try(self._open)

    # -- appending ---------------------------------------------------------------------------------------------------

    def append(
        self, header: bytes, payload: Sequence[Bytes] = (), *, sums: Sequence[bytes] | None = None
    ) -> int | None:
        """Hand a record to the kernel; returns its number, or None if it is not kept (`alarm`).

        Args:
            header: its small part.
            payload: its large part, in pieces.
            sums: checksums of the payload where they are known; None: to be computed.

        Raises:
            PeerUnreachable: the log is closed. Whoever asks for the record must not believe that it is kept.
        """
        with self._lock:
            if self._is_closed:
                raise PeerUnreachable(f"this parameter server ends: its write-ahead log in {self._folder} is closed")
            if self._file is None:
                return None
            file = self._file
            number = self._next
            new = NewFrame(number, self._settled, header, payload, sums)
            try:
                num_bytes = write_frame(file.descriptor, new, disk=self._disk)
            except OSError as error:
                self._fail(error)
                return None
            self._count(file, num_bytes)
            self._next += 1
            is_long = file.num_bytes > self._limits.file_bytes
        if is_long:
            self._begin_after(file)
        return number

    def sync(self, sequence: int | None) -> None:
        """With `fsync`: return when the record of that number is on the disk. Waiting threads share one wait."""
        if sequence is None or not self._limits.fsync:
            return
        with self._sync_lock:
            if self._synced > sequence:
                return
            with self._lock:
                target, current = self._next, self._file
            if current is None:
                return
            try:
                self._sync_file(current)
                self._synced = target
            except OSError as error:
                with self._lock:
                    self._fail(error)

    # -- behind a snapshot -------------------------------------------------------------------------------------------

    @property
    def next_sequence(self) -> int:
        """The number of the next record, or of one that is being written."""
        return self._next

    def rotate(self) -> int:
        """Begin another file; returns the number of its first record, which is what a snapshot needs from here on."""
        with self._sync_lock, self._lock:
            if self._file is not None:
                self._try(self._open)
            return self._next - 1

    def forget(self, sequence: int) -> None:
        """Delete the files all of whose records are below `sequence`; those that the disk does not let go come next.

        Raises:
            OSError: it does not.
        """
        with self._lock:
            firsts = sorted(self._sizes)
        for first, following in pairwise(firsts):
            if following > sequence:
                break
            log_path(self._folder, first).unlink(missing_ok=True)
            with self._lock:
                self._num_bytes -= self._sizes.pop(first)
        with self._lock:
            if self._num_bytes < self.max_bytes:
                self._is_told_full = False

    # -- when the disk fails -----------------------------------------------------------------------------------------

    @property
    def alarm(self) -> DurabilityLost | None:
        """Why records are missing; None while all are there."""
        return self._alarm

    @property
    def level(self) -> Level:
        """What is promised now."""
        return Level.DURABLE if self._alarm is None else Level.APPLIED

    def resume(self) -> bool:
        """Try the disk again after an alarm, which stays until `settle`; whether records are appended again."""
        with self._sync_lock, self._lock:
            if self._file is None:
                self._next += 1
                self._whole_from = self._next
                self._try(self._open)
            return self._file is not None

    def is_whole(self, sequence: int) -> bool:
        """Whether a restart would find every record from this one on."""
        with self._lock:
            return self._file is not None and sequence >= self._whole_from

    def settle(self) -> None:
        """What is missing lies behind a snapshot: the log is whole again, unless the disk failed once more."""
        with self._lock:
            if self._file is not None and self._alarm is not None:
                self._alarm = None
                log.warning("durable_again", folder=str(self._folder))
                self._on_alarm(None)

    # -- answers -----------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Of all its files."""
        return self._num_bytes

    def check_room(self) -> None:
        """Refuse more while the log is full.

        Raises:
            Busy: it is; the first time it is also logged.
        """
        if self.num_bytes < self.max_bytes or self._alarm is not None:
            return
        sentence = (
            f"the write-ahead log in {self._folder} has {self.num_bytes} bytes, its limit is {self.max_bytes}; "
            "it shrinks when slower virtual workers have committed their waves"
        )
        with self._lock:
            told, self._is_told_full = self._is_told_full, True
        if not told:
            log.warning("write_ahead_log_full", sentence=sentence)
        raise Busy(sentence)

    def close(self) -> None:
        """Close the files; nothing more is appended."""
        with self._sync_lock, self._lock:
            self._is_closed = True
            if self._file is not None:
                self._file.close()
                self._file = None

    # -- inside, with the lock held ----------------------------------------------------------------------------------

    @property
    def _settled(self) -> int:
        """Records with lower numbers are as durable as was promised."""
        return self._synced if self._limits.fsync else self._next

    def _begin_after(self, long: _File) -> None:
        """Begin another file after one that is too long, unless somebody else has."""
        with self._sync_lock, self._lock:
            if self._file is long:
                self._try(self._open)

    def _open(self) -> None:
        """Begin a file in place of the present one. With both locks held.

        What is in that one is on the disk first: or a power cut could leave the new file, and of the old one not all.
        """
        if self._file is not None and self._limits.fsync:
            self._sync_file(self._file)
            self._synced = self._next
        make_dir(self._folder)
        path = log_path(self._folder, self._next)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        file = _File(self._next, descriptor)
        try:
            opening = NewFrame(self._next, self._settled, self._identity)
            num_bytes = write_frame(descriptor, opening, disk=self._disk)
        except OSError:
            file.close()
            path.unlink(missing_ok=True)
            raise
        if self._file is not None:
            self._file.close()
        self._file = file
        self._num_bytes -= self._sizes.pop(file.first, 0)
        self._count(file, num_bytes)
        self._next += 1

    def _sync_file(self, file: _File) -> None:
        if file.is_new:
            sync_dir(self._folder)
            file.is_new = False
        self._disk.sync(file.descriptor)

    def _count(self, file: _File, num_bytes: int) -> None:
        file.num_bytes += num_bytes
        self._num_bytes += num_bytes
        self._sizes[file.first] = file.num_bytes

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
            f"the write-ahead log in {self._folder} cannot be written ({error.strerror or error}); the run goes on, "
            "but what is pushed now would be lost with this process: make room, or replace the disk"
        )
        if self._file is not None:
            self._file.close()
            self._file = None
        if first:
            log.error("durability_lost", sentence=str(self._alarm))
            self._on_alarm(self._alarm)
