"""Atomic, durable files: complete or absent, even after a power failure.

Data is written to a temporary file in the same folder, synced, and renamed; the rename is synced as well. A file whose
data could not be synced is never renamed, since the system's later reports about it cannot be trusted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetpipe.failpoints import reach

#: Ending of the name of an unfinished file, which a killed process leaves behind.
TEMPORARY = ".tmp"


@contextmanager
def replacing(path: Path, *, points: str = "") -> Iterator[Path]:
    """Yield a temporary path; on exit from the `with` block that file is synced and renamed to `path`.

    On any error, an existing file at `path` is unchanged, and the temporary file is removed.

    Args:
        path: the final file; its folder must exist.
        points: prefix of the names of failpoints to reach, for example `snapshot`; empty for none.

    Raises:
        OSError: the disk is full or broken, or the folder is gone.
    """
    temporary = path.with_name(f"{path.name}{TEMPORARY}")
    try:
        yield temporary
        _reach(points, "before_fsync")
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        _reach(points, "before_rename")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _reach(points, "before_directory_fsync")
    sync_dir(path.parent)


def write_durably(path: Path, data: bytes, *, points: str = "") -> None:
    """Replace the content of `path` by `data`. Arguments and errors as in `replacing`."""
    with replacing(path, points=points) as temporary, temporary.open("wb") as file:
        _reach(points, "temp_open")
        file.write(data[: len(data) // 2])
        file.flush()
        _reach(points, "half_written")
        file.write(data[len(data) // 2 :])


def append(path: Path, data: bytes) -> None:
    """Append with one write, so that readers find all of it or nothing; not forced to disk.

    Raises:
        OSError: the file cannot be opened or written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def make_dir(folder: Path) -> None:
    """Create a folder and its missing parents durably.

    Raises:
        OSError: the disk is full or broken, or a file has that name.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_dir(path.parent)


def sync_dir(folder: Path) -> None:
    """Make renames within `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reach(points: str, place: str) -> None:
    if points:
        reach(f"{points}.{place}")
