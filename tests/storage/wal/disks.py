"""Disks that get full, fail, or forget in a power cut what was never forced to them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hetpipe.checksum import Bytes
from hetpipe.storage.wal import SYSTEM_DISK, DiskIO


class LimitedDisk(DiskIO):
    """A disk that takes `room` more bytes, and whose fsync can fail or be counted."""

    def __init__(self, room: int | None = None, *, syncs: bool = True) -> None:
        self.room = room
        self.syncs = syncs
        self.num_syncs = 0

    def write(self, descriptor: int, buffers: Sequence[Bytes]) -> int:
        joined = b"".join(bytes(part) for part in buffers)
        taken = joined if self.room is None else joined[: self.room]
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.room is not None:
            self.room -= len(taken)
        return SYSTEM_DISK.write(descriptor, [taken])

    def sync(self, descriptor: int) -> None:
        self.num_syncs += 1
        if not self.syncs:
            raise OSError(errno.EIO, "Input/output error")


class ByteWiseDisk(DiskIO):
    """Writes byte by byte, and calls `step` behind each: what the process had written if it were killed there."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step

    def write(self, descriptor: int, buffers: Sequence[Bytes]) -> int:
        joined = b"".join(bytes(part) for part in buffers)
        for place in range(len(joined)):
            SYSTEM_DISK.write(descriptor, [joined[place : place + 1]])
            self._step()
        return len(joined)


class Volume:
    """What of a folder a power cut must leave: bytes as of the last fsync of their file, names of that of the folder.

    `fsync` stands in for `os.fsync`. It keeps files open, so that the number of an inode is never given anew.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bytes: dict[int, bytes] = {}
        self._names: dict[str, int] = {}
        self._pins: dict[int, int] = {}

    def fsync(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        status = os.fstat(descriptor)
        if not stat.S_ISDIR(status.st_mode):
            self._pin(path)
            self._bytes[status.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()
        elif path == self._folder:
            self._names = self._entries()

    def images(self, target: Path) -> Iterator[Path]:
        """Folders as they may be after a power cut now, one after the other in `target`.

        The disk has nothing but what was forced to it; or all names, as a file system whose metadata runs ahead of the
        bytes leaves them; or all bytes under the names that were forced to it.
        """
        current = self._entries()
        for names, is_all in ((self._names, False), (current, False), (self._names, True)):
            for path in target.iterdir():
                path.unlink()
            for name, inode in names.items():
                content = self._read(inode) if is_all else self._bytes.get(inode, b"")
                (target / name).write_bytes(content)
            yield target

    def close(self) -> None:
        for descriptor in self._pins.values():
            os.close(descriptor)

    def _entries(self) -> dict[str, int]:
        found = {path.name: path.stat().st_ino for path in self._folder.iterdir()}
        for name in found:
            self._pin(self._folder / name)
        return found

    def _pin(self, path: Path) -> None:
        inode = path.stat().st_ino
        if inode not in self._pins:
            self._pins[inode] = os.open(path, os.O_RDONLY)

    def _read(self, inode: int) -> bytes:
        return os.pread(self._pins[inode], 1 << 20, 0)
