"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hetpipe import failpoints
from hetpipe.durable import replacing, write_durably
from hetpipe.errors import InjectedFault

POINTS = ("temp_open", "half_written", "before_fsync", "before_rename", "before_directory_fsync")


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"long before", b"new", b""):
        write_durably(path, data)
        assert path.read_bytes() == data
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_bytes_are_on_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    synced: list[tuple[str, bool]] = []

    def fsync(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_durably(path, b"data")
    assert synced == [("file.tmp", False), (tmp_path.name, True)]


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow longer: what a full disk does, without filling one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durably(path, b"old")
    with files_up_to(1000), pytest.raises(OSError, match="File too large"):
        write_durably(path, bytes(1001))
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_what_cannot_be_forced_to_disk_never_gets_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_durably(path, b"old")

    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        write_durably(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("place", POINTS)
def test_failpoints_are_reached_where_the_table_says(tmp_path: Path, place: str) -> None:
    path = tmp_path / "file"
    write_durably(path, b"old", points="snapshot")
    failpoints.arm({failpoints.VARIABLE: f"snapshot.{place}=error"}, is_allowed=True)
    try:
        with pytest.raises(InjectedFault):
            write_durably(path, b"new", points="snapshot")
        write_durably(path, b"newer")  # others do not reach them
    finally:
        failpoints.disarm()
    assert path.read_bytes() == b"newer"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_only_the_rename_changes_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durably(path, b"old")
    with replacing(path) as temporary:
        temporary.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    with pytest.raises(FileNotFoundError), replacing(path) as temporary:
        assert not temporary.exists()  # nothing was written
    assert path.read_bytes() == b"new"
