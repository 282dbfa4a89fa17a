"""A snapshot file: whole or not at all."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hetpipe.errors import StateLost
from hetpipe.storage.wal import SnapshottedLog, StorageOptions, read_snapshot, write_snapshot
from tests.storage.wal.disks import LimitedDisk


class TestSnapshot:
    PAYLOAD = bytes(range(1, 256)) * 10

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "snapshot-1"
        write_snapshot(path, 5, b"header", [self.PAYLOAD[:100], self.PAYLOAD[100:]])
        return path

    def test_there_and_back(self, path: Path) -> None:
        record = read_snapshot(path)
        payload = bytearray(len(self.PAYLOAD))
        record.payload.read_into(memoryview(payload))

        assert (record.lsn, record.header, bytes(payload)) == (5, b"header", self.PAYLOAD)
        assert [p.name for p in path.parent.iterdir()] == [path.name]

    def test_every_length_and_every_zeroed_sector_is_refused(self, path: Path) -> None:
        whole = path.read_bytes()
        damaged = [whole[:length] for length in range(len(whole))]
        damaged += [whole[:s] + bytes(len(whole[s : s + 512])) + whole[s + 512 :] for s in range(0, len(whole), 512)]
        damaged += [whole + b"\0"]
        for bad in damaged:
            path.write_bytes(bad)
            with pytest.raises(StateLost, match="is not a complete snapshot"):
                read_snapshot(path)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(StateLost, match="No such file"):
            read_snapshot(tmp_path / "none")

    @pytest.mark.parametrize("room", [0, 1, 500])
    def test_a_full_disk_leaves_the_previous_one(self, path: Path, room: int) -> None:
        with pytest.raises(OSError, match="No space left"):
            write_snapshot(path, 6, b"header", [self.PAYLOAD], disk=LimitedDisk(room))

        assert read_snapshot(path).lsn == 5
        assert [p.name for p in path.parent.iterdir()] == [path.name]

    def test_a_failed_fsync_leaves_the_previous_one(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hetpipe.durable.os.fsync", LimitedDisk(syncs=False).sync)
        with pytest.raises(OSError, match="Input/output error"):
            write_snapshot(path, 6, b"header", [self.PAYLOAD])

        assert read_snapshot(path).lsn == 5
        assert [p.name for p in path.parent.iterdir()] == [path.name]

    def test_the_file_and_then_its_folder_are_synced(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        synced: list[str] = []
        before = path.read_bytes()

        def sync(descriptor: int) -> None:
            name = Path(f"/proc/self/fd/{descriptor}").readlink().name
            synced.append(f"{name} {path.read_bytes() != before}")

        monkeypatch.setattr("hetpipe.durable.os.fsync", sync)
        write_snapshot(path, 6, b"header", [])

        assert synced == ["snapshot-1.tmp False", f"{path.parent.name} True"]


def test_a_log_is_closed_while_a_snapshot_is_about_to_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread has been named, and not started."""
    log = SnapshottedLog(tmp_path, StorageOptions(identity="job"))
    at_start, goes_on = threading.Event(), threading.Event()
    errors: list[RuntimeError] = []

    class Late(threading.Thread):
        def start(self) -> None:
            if self.name == "snapshot":
                at_start.set()
                assert goes_on.wait(10), "the test lets it go on"
            super().start()

    def close() -> None:
        try:
            log.close()
        except RuntimeError as error:
            errors.append(error)

    monkeypatch.setattr(threading, "Thread", Late)
    written = threading.Event()
    begins = Late(target=lambda: log.in_background(written.set, "snapshot"), name="begins")
    begins.start()
    assert at_start.wait(10)
    closes = Late(target=close, name="closes")
    closes.start()
    closes.join(0.05)  # that it waits cannot be seen otherwise
    goes_on.set()
    begins.join()
    closes.join()
    assert not errors
    assert written.is_set()
