"""A snapshot file: one record, written atomically and durably."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hetpipe.checksum import Bytes
from hetpipe.durable import replacing
from hetpipe.errors import StateLost
from hetpipe.failpoints import reach
from hetpipe.storage.wal.record import SYSTEM_DISK, DiskIO, LogRecord, NewLogRecord, read_record, write_record


class _HalfwayDisk(DiskIO):
    """Writes the first half of its input, and reaches a failpoint in between."""

    def __init__(self, disk: DiskIO, points: str) -> None:
        self._disk = disk
        self._points = points
        self._is_first = True

    def write(self, descriptor: int, buffers: Sequence[Bytes]) -> int:
        if not self._is_first:
            return self._disk.write(descriptor, buffers)
        self._is_first = False
        written = self._disk.write(descriptor, buffers[: -(-len(buffers) // 2)])
        if self._points:
            reach(f"{self._points}.half_written")
        return written


def write_snapshot(
    path: Path,
    number: int,
    header: bytes,
    payload: Sequence[Bytes] = (),
    *,
    disk: DiskIO = SYSTEM_DISK,
    points: str = "snapshot",
) -> None:
    """Replace `path` by a snapshot, atomically, and durably regardless of the fsync policy.

    Args:
        path: the file.
        number: of the snapshot, for the reader.
        header: its small part.
        payload: its large part, in pieces.
        disk: performs the writes.
        points: prefix of the names of failpoints to reach; empty: none.

    Raises:
        OSError: it could not be written or synced.
    """
    with replacing(path, points=points) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            if points:
                reach(f"{points}.temp_open")
            write_record(descriptor, NewLogRecord(number, 0, header, payload), disk=_HalfwayDisk(disk, points))
        finally:
            os.close(descriptor)


def read_snapshot(path: Path) -> LogRecord:
    """Read the snapshot in `path` and verify its payload.

    Raises:
        StateLost: the snapshot is missing, unreadable or corrupted.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            record = read_record(descriptor, path, 0)
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StateLost(f"{path} cannot be read: {error.strerror}") from error
    if record is None or record.end != size:
        raise StateLost(f"{path} is not a complete snapshot: it was torn or corrupted ({size} bytes)")
    return record
