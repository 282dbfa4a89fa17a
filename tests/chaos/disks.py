"""Small disks of their own, which really get full: tmpfs in a mount namespace of this process.

The namespace is made by starting this process anew below `unshare`, so that nothing stays mounted however it ends, and
so that no root is needed where the system lets users make namespaces.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

#: Set in the environment of who has been started in a namespace of its own, to how that was possible.
NAMESPACE_VARIABLE = "HETPIPE_CHAOS_MOUNTS"

#: Whoever fills a disk takes what others free meanwhile.
_TOP_UP_SECONDS = 0.02

_BLOCK_BYTES = 1 << 16

_PROBE_SECONDS = 20.0


class MountMeans(StrEnum):
    """How this process may mount disks of its own."""

    ROOT = "root"
    """In a mount namespace of its own, as root."""
    USER_NAMESPACE = "user namespace"
    """The same, as a user who is root in a namespace of users."""
    NONE = "none"
    """Not at all: disks cannot be filled."""


_UNSHARE = {
    MountMeans.ROOT: ("unshare", "--mount", "--propagation", "private"),
    MountMeans.USER_NAMESPACE: ("unshare", "--user", "--map-root-user", "--mount", "--propagation", "private"),
}


def probe() -> MountMeans:
    """The first way that works here, found by trying."""
    trial = (
        "folder=$(mktemp -d) && mount -t tmpfs -o size=1m tmpfs $folder && umount $folder; s=$?; rmdir $folder; exit $s"
    )
    for means, prefix in _UNSHARE.items():
        if means is MountMeans.ROOT and os.geteuid() != 0:
            continue
        with suppress(OSError, subprocess.SubprocessError):
            command = [*prefix, "sh", "-c", trial]
            if subprocess.run(command, capture_output=True, check=False, timeout=_PROBE_SECONDS).returncode == 0:
                return means
    return MountMeans.NONE


def in_namespace(command: Sequence[str]) -> MountMeans:
    """Go on as `command` in a mount namespace of its own; returns there, or where none can be had."""
    if known := os.environ.get(NAMESPACE_VARIABLE):
        return MountMeans(known)
    means = probe()
    if means is not MountMeans.NONE:
        sys.stdout.flush()
        sys.stderr.flush()
        prefix = _UNSHARE[means]
        os.execvpe(prefix[0], [*prefix, *command], {**os.environ, NAMESPACE_VARIABLE: means})
    return means


class Disk:
    """A file system of its own. Use it in a `with` block; afterwards its files lie in the folder, on the disk below."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        """Prepare.

        Args:
            folder: where it is mounted; made where it is missing.
            size_bytes: how much it holds.
        """
        self._folder = folder
        self._size_bytes = size_bytes

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={self._size_bytes}", "tmpfs", str(self._folder))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        saved = self._folder.with_name(f"{self._folder.name}.saved")
        shutil.copytree(self._folder, saved, symlinks=True)
        # Lazily: whoever is about to die may have a file open there.
        _run("umount", "--lazy", str(self._folder))
        self._folder.rmdir()
        saved.rename(self._folder)

    @property
    def used_bytes(self) -> int:
        """What is on it."""
        found = os.statvfs(self._folder)
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    @contextmanager
    def full(self) -> Iterator[None]:
        """No room is left in the block, whatever others free meanwhile."""
        filler = self._folder / "filler"
        ended = threading.Event()
        with filler.open("wb", buffering=0) as file:

            def top_up() -> None:
                while not ended.wait(_TOP_UP_SECONDS):
                    _fill(file.fileno())

            _fill(file.fileno())
            thread = threading.Thread(target=top_up, name="filler", daemon=True)
            thread.start()
            try:
                yield
            finally:
                ended.set()
                thread.join()
                filler.unlink()


def _fill(descriptor: int) -> None:
    """Write until nothing more fits."""
    block = b"\0" * _BLOCK_BYTES
    while True:
        try:
            os.write(descriptor, block)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_PROBE_SECONDS)
