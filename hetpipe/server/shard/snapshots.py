"""A state at one moment as a file: one frame, there whole or not at all, also across a power cut."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hetpipe.durable import replacing
from hetpipe.errors import StateLost
from hetpipe.failpoints import reach
from hetpipe.server.shard.checksum import Bytes
from hetpipe.server.shard.frames import DISK, Disk, Frame, NewFrame, read_frame, write_frame


class _Halfway(Disk):
    """Takes the first half of what it is given, and says so at a failpoint."""

    def __init__(self, disk: Disk, points: str) -> None:
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
    disk: Disk = DISK,
    points: str = "snapshot",
) -> None:
    """Replace `path` by a snapshot. What stood there before stands until this one is durable.

    Args:
        path: the file.
        number: of the snapshot, for the reader.
        header: what it is of.
        payload: its bytes, in pieces.
        disk: what writes.
        points: first part of the names of failpoints to reach; empty: none.

    Raises:
        OSError: it could not be written, or not be made durable.
    """
    with replacing(path, points=points) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            if points:
                reach(f"{points}.temp_open")
            write_frame(descriptor, NewFrame(number, 0, header, payload), disk=_Halfway(disk, points))
        finally:
            os.close(descriptor)


def read_snapshot(path: Path) -> Frame:
    """The snapshot in `path`; its payload has been checked, too.

    Raises:
        StateLost: there is none, it cannot be read, or it is not as it was written.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            frame = read_frame(descriptor, path, 0)
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StateLost(f"{path} cannot be read: {error.strerror}") from error
    if frame is None or frame.end != size:
        raise StateLost(f"{path} is no whole snapshot: it was torn or damaged ({size} bytes)")
    return frame
