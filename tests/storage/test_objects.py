"""The contract of object stores: local files, a store in memory, and a local server that speaks S3."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetpipe.storage.objects import ObjectStore, StorageError
from tests.storage.faulty_objects import FaultyFiles
from tests.storage.s3_server import BUCKET, S3Server, s3_server
from tests.support.fake_clock import FakeClock


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    """A local server that speaks S3."""
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(params=["file", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    if request.param == "file":
        return ObjectStore(f"file://{tmp_path}/store")
    if request.param == "memory":
        return ObjectStore("faulty://bucket/store", filesystem=FaultyFiles())
    request.getfixturevalue("s3")
    return ObjectStore(f"s3://{BUCKET}/{tmp_path.name}")


def test_objects_are_written_replaced_read_listed_and_deleted(store: ObjectStore, tmp_path: Path) -> None:
    assert store.sizes() == {}
    assert not store.exists("a/one")
    store.put("a/one", b"1")
    store.put("a/one", b"one")
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)) * 5_000)
    store.put_file("a/b/two", source)
    assert store.get("a/one", max_bytes=3) == b"one"
    assert store.exists("a/b/two")
    assert store.sizes() == {"a/one": 3, "a/b/two": 1_280_000}
    assert store.sizes("a/b/") == {"a/b/two": 1_280_000}
    assert store.below("a").sizes() == {"one": 3, "b/two": 1_280_000}
    store.get_file("a/b/two", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    store.delete("a/one")
    store.delete("a/one")
    assert store.sizes() == {"a/b/two": 1_280_000}


def test_an_object_that_is_not_there_is_missed_and_leaves_no_file(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        store.get("none", max_bytes=1)
    with pytest.raises(FileNotFoundError):
        store.get_file("none", tmp_path / "copy")
    assert not list(tmp_path.glob("copy*"))
    assert store.sizes("none/") == {}


def test_a_larger_object_than_expected_is_not_read_as_one(store: ObjectStore) -> None:
    store.put("large", bytes(100))
    with pytest.raises(StorageError, match=r"large has more than 99 bytes, so it is not what belongs there"):
        store.get("large", max_bytes=99)


@pytest.mark.skipif("not __import__('os').geteuid()", reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_refuses_with_the_fix(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match=r"cannot be written: .*Permission denied.*; give the processes"):
        ObjectStore(f"file://{tmp_path}/store").put("one", b"1")


@pytest.mark.usefixtures("s3")
def test_a_bucket_that_does_not_exist_refuses_with_the_fix() -> None:
    with pytest.raises(StorageError, match=r"s3://nobody/one cannot be written: .*; give the processes"):
        ObjectStore("s3://nobody").put("one", b"1")


def test_a_bucket_without_permission_refuses_with_the_fix(s3: S3Server) -> None:
    s3.make_bucket("readable", "s3:PutObject")
    refused = r"cannot be written: .*(Access ?Denied|Forbidden).*; give the processes of the nodes credentials"
    store = ObjectStore("s3://readable")
    with pytest.raises(StorageError, match=rf"s3://readable/one {refused}"):
        store.put("one", b"1")
    assert not store.exists("one")


# -- a store with faults -----------------------------------------------------------------------------------------------


class Faulty:
    def __init__(self) -> None:
        self.files = FaultyFiles()
        self.clock = FakeClock(auto_advance=True)
        self.store = ObjectStore("faulty://bucket", filesystem=self.files, clock=self.clock)


@pytest.fixture
def faulty() -> Faulty:
    return Faulty()


def test_a_failure_is_retried_with_growing_pauses(faulty: Faulty) -> None:
    faulty.files.fault = lambda _, number: 1 if number < 4 else None
    faulty.store.put("one", b"whole", seconds=60.0)
    assert faulty.store.get("one", max_bytes=9) == b"whole"
    assert faulty.clock.monotonic() == pytest.approx(0.5 + 1 + 2 + 4)


def test_a_store_that_keeps_failing_ends_with_a_sentence(faulty: Faulty) -> None:
    faulty.files.fault = lambda *_: 2
    with pytest.raises(StorageError) as caught:
        faulty.store.put("one", b"whole", seconds=20.0)
    assert str(caught.value) == (
        "faulty://bucket/one cannot be written, tried for 15.5 s: the connection was reset in the middle of it; see "
        "that the store can be reached from here, and has room"
    )
    assert faulty.clock.monotonic() < 20.0


def test_a_large_object_may_take_long_but_is_not_retried_for_long(faulty: Faulty, tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(bytes(10))
    faulty.files.fault = lambda *_: 2
    with pytest.raises(StorageError, match=r"tried for 5\d"):
        faulty.store.put_file("part", tmp_path / "part")


def test_a_refusal_is_not_retried(faulty: Faulty) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("Access Denied")

    faulty.files.fault = refuse
    for work in (lambda: faulty.store.put("one", b"1"), faulty.store.sizes, lambda: faulty.store.delete("one")):
        with pytest.raises(StorageError, match="Access Denied; give the processes of the nodes credentials"):
            work()
    assert faulty.files.calls == ["put", "list", "delete"]


def test_credentials_that_are_missing_are_not_waited_for(faulty: Faulty) -> None:
    class NoCredentialsError(Exception):
        pass

    def refuse(*_: object) -> None:
        raise NoCredentialsError("Unable to locate credentials")

    faulty.files.fault = refuse
    with pytest.raises(StorageError, match="Unable to locate credentials; give the processes"):
        faulty.store.get("one", max_bytes=1)
    assert len(faulty.files.calls) == 1


def test_a_store_that_never_answers_is_left_at_the_deadline() -> None:
    files, release = FaultyFiles(), threading.Event()

    def hang(*_: object) -> None:
        release.wait(60.0)

    files.fault = hang
    store = ObjectStore("faulty://bucket", filesystem=files)
    try:
        with pytest.raises(StorageError, match=r"tried for 0.\d s: no answer within 0 s"):
            store.put("one", b"1", seconds=0.05)
    finally:
        release.set()


def test_a_store_that_keeps_less_than_it_was_given_is_found_out(faulty: Faulty, monkeypatch: Any) -> None:
    monkeypatch.setattr(FaultyFiles, "pipe_file", lambda self, path, value: self.store.update({}) or None)
    with pytest.raises(StorageError):
        faulty.store.put("one", b"1", seconds=1.0)


def test_a_scheme_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> None:
        raise ImportError("no module")

    monkeypatch.setattr("fsspec.filesystem", absent)
    with pytest.raises(StorageError, match=r"needs the package s3fs, .* pip install 'hetpipe\[s3\]'"):
        ObjectStore("s3://bucket").put("one", b"1")
    with pytest.raises(StorageError, match=r"needs the package gcsfs, .* pip install 'gcsfs'"):
        ObjectStore("gs://bucket").sizes()
