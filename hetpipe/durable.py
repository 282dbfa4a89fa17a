"""Atomic, durable files: complete or absent, also after a power cut.

Bytes go to another name beside the wanted one, are forced to disk, and get their name by a rename that is forced to
disk, too. A file whose bytes could not be forced to disk never gets the name: what the system says of it afterwards
cannot be trusted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetpipe.failpoints import reach


@contextmanager
def replacing(path: Path, *, points: str = "") -> Iterator[Path]:
    """A temporary path to write to, inside a `with`; at its end that file is forced to disk and renamed to `path`.

    Whatever goes wrong, an older file at `path` stays as it was, and nothing is left under the other name.

    Args:
        path: the final file; its folder exists.
        points: first part of the names of failpoints to reach, for example `snapshot`; empty: none.

    Raises:
        OSError: the disk is full or broken, or the folder is gone.
    """
    temporary = path.with_name(f"{path.name}.tmp")
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
    """Replace `path` by `data`. Arguments and errors as of `replacing`."""
    with replacing(path, points=points) as temporary, temporary.open("wb") as file:
        _reach(points, "temp_open")
        file.write(data[: len(data) // 2])
        file.flush()
        _reach(points, "half_written")
        file.write(data[len(data) // 2 :])


def make_dir(folder: Path) -> None:
    """Create a folder and its parents, if missing, so that they survive a power cut.

    Raises:
        OSError: the disk is full or broken, or there is a file of that name.
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
