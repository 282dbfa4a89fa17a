"""The write-ahead log: what comes back is what was appended, or a typed error."""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.checksum import Bytes, checksums
from hetpipe.errors import DurabilityLost, StateLost, Unavailable
from hetpipe.storage.wal import (
    SYSTEM_DISK,
    DiskIO,
    LogContents,
    WalOptions,
    WriteAheadLog,
    read_log,
    read_snapshot,
)
from hetpipe.storage.wal.segments import segment_path
from tests.storage.wal.disks import LimitedDisk

WHOSE = b"job 7"
ROOMY = WalOptions(max_bytes=1 << 30)


def new_log(folder: Path, disk: DiskIO = SYSTEM_DISK, options: WalOptions = ROOMY, following: int = 0) -> WriteAheadLog:
    return WriteAheadLog(folder, identity=WHOSE, options=options, next_lsn=following, disk=disk)


def contents(found: LogContents) -> list[tuple[bytes, bytes]]:
    """Header and payload of every record."""
    result = []
    for record in found.records:
        payload = bytearray(record.payload.num_bytes)
        record.payload.read_into(memoryview(payload))
        result.append((record.header, bytes(payload)))
    return result


def read(folder: Path, since: int = 0) -> LogContents:
    return read_log(folder, identity=WHOSE, since=since)


class TestLog:
    @given(st.lists(st.tuples(st.binary(max_size=40), st.lists(st.binary(max_size=60), max_size=3)), max_size=8))
    @settings(max_examples=40)
    def test_what_was_appended_comes_back(
        self, tmp_path_factory: pytest.TempPathFactory, records: list[tuple[bytes, list[bytes]]]
    ) -> None:
        folder = tmp_path_factory.mktemp("log")
        log = new_log(folder, options=WalOptions(max_bytes=1 << 30, segment_bytes=100))
        for header, payload in records:
            log.append(header, payload, sums=checksums(payload))
        found = read(folder)

        assert contents(found) == [(header, b"".join(payload)) for header, payload in records]
        assert not found.torn
        assert log.alarm is None
        assert log.num_bytes == sum(path.stat().st_size for path in folder.iterdir())

    def test_a_restarted_process_goes_on_in_a_file_of_its_own(self, tmp_path: Path) -> None:
        for number in range(3):
            following = read(tmp_path).next_lsn if number else 0
            new_log(tmp_path, following=following).append(b"%d" % number)

        assert [record.header for record in read(tmp_path).records] == [b"0", b"1", b"2"]

    def test_a_payload_of_several_blocks_with_the_sums_of_somebody_else(self, tmp_path: Path) -> None:
        payload = bytes(range(256)) * 8_200
        new_log(tmp_path).append(b"", [payload[:7], payload[7:]], sums=checksums([payload]))

        assert contents(read(tmp_path)) == [(b"", payload)]

    def test_a_log_of_the_version_before_is_refused_by_name(self, tmp_path: Path) -> None:
        head = struct.pack("<4sIQQQI", b"hpF2", len(WHOSE), 0, 0, 0, 0)
        old = head + zlib.crc32(WHOSE, zlib.crc32(head)).to_bytes(4, "little") + WHOSE
        segment_path(tmp_path, 0).write_bytes(old)
        with pytest.raises(StateLost, match="written by another version of hetpipe"):
            read(tmp_path)
        (tmp_path / "snapshot").write_bytes(old)
        with pytest.raises(StateLost, match="written by another version of hetpipe"):
            read_snapshot(tmp_path / "snapshot")

    def test_a_payload_in_very_many_pieces(self, tmp_path: Path) -> None:
        new_log(tmp_path).append(b"", [b"%04d" % number for number in range(3_000)])

        assert contents(read(tmp_path))[0][1] == b"".join(b"%04d" % number for number in range(3_000))

    def test_what_lies_behind_a_snapshot_is_deleted(self, tmp_path: Path) -> None:
        log = new_log(tmp_path)
        log.append(b"a")
        log.append(b"b")
        since = log.rotate()
        log.append(b"c")
        before = log.num_bytes
        log.truncate_before(since)

        assert [record.header for record in read(tmp_path, since).records] == [b"c"]
        assert log.num_bytes < before
        assert len(list(tmp_path.iterdir())) == 1
        with pytest.raises(StateLost, match="lacks the records 0 to"):
            read(tmp_path, 0)

    def test_truncation_keeps_segments_that_hold_a_later_record(self, tmp_path: Path) -> None:
        log = new_log(tmp_path)
        log.append(b"a")
        second = log.rotate()
        log.append(b"b")
        log.rotate()
        log.truncate_before(second)

        assert [record.header for record in read(tmp_path, second).records] == [b"b"]

    def test_what_the_disk_did_not_delete_is_deleted_the_next_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = new_log(tmp_path)
        first, second = log.rotate(), log.rotate()

        def fail(path: Path, **_: object) -> None:
            raise OSError(errno.EIO, "Input/output error", str(path))

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", fail)
            with pytest.raises(OSError, match="Input/output error"):
                log.truncate_before(first)
        log.truncate_before(second)

        assert [path.name for path in tmp_path.iterdir()] == [segment_path(tmp_path, second).name]
        assert log.num_bytes == segment_path(tmp_path, second).stat().st_size

    def test_a_missing_file_is_lost_state(self, tmp_path: Path) -> None:
        log = new_log(tmp_path)
        log.append(b"a")
        log.rotate()
        log.append(b"b")
        since = log.rotate()
        files = sorted(tmp_path.iterdir())
        files[1].unlink()
        with pytest.raises(StateLost, match="lacks the records 2 to 3"):
            read(tmp_path)
        files[2].unlink()
        with pytest.raises(StateLost, match=f"lacks record {since}"):
            read(tmp_path, since)

    def test_a_folder_without_any_segment_is_lost_state(self, tmp_path: Path) -> None:
        with pytest.raises(StateLost, match="lacks record 0, at which its log must begin"):
            read(tmp_path)

    def test_the_log_of_another_job_is_refused(self, tmp_path: Path) -> None:
        new_log(tmp_path)
        with pytest.raises(StateLost, match="belongs to the log of b'job 7', not of b'job 8'"):
            read_log(tmp_path, identity=b"job 8", since=0)

    def test_a_record_that_changed_since_it_was_found(self, tmp_path: Path) -> None:
        new_log(tmp_path).append(b"a", [b"payload"])
        (record,) = read(tmp_path).records
        path = record.payload.path
        path.write_bytes(path.read_bytes().replace(b"payload", b"paylord"))
        with pytest.raises(StateLost, match="does not match"):
            record.payload.read_into(memoryview(bytearray(7)))
        path.unlink()
        with pytest.raises(StateLost, match="No such file"):
            record.payload.read_into(memoryview(bytearray(7)))


class TestDamage:
    """Every truncation and every zeroed sector: a whole prefix, or a typed error; never anything else."""

    RECORDS = tuple((b"header %d" % number, bytes(range(1, 201)) * 2) for number in range(4))

    @pytest.fixture
    def log_file(self, tmp_path: Path) -> Path:
        log = new_log(tmp_path)
        for header, payload in self.RECORDS:
            log.append(header, [payload])
        (path,) = tmp_path.iterdir()
        return path

    def outcome(self, folder: Path) -> int | None:
        """How many records came back; None: the log was refused."""
        try:
            found = read(folder)
        except StateLost:
            return None
        records = contents(found)
        assert tuple(records) == self.RECORDS[: len(records)]
        assert bool(found.torn) or len(records) == len(self.RECORDS) or self.ends_with_a_record(found)
        return len(records)

    @staticmethod
    def ends_with_a_record(found: LogContents) -> bool:
        return not found.records or found.records[-1].end == found.records[-1].payload.path.stat().st_size

    def test_cut_at_every_length(self, log_file: Path) -> None:
        whole = log_file.read_bytes()
        found = []
        for length in range(len(whole)):
            log_file.write_bytes(whole[:length])
            found.append(self.outcome(log_file.parent))

        known = [count for count in found if count is not None]
        assert known == sorted(known), "a longer file never holds fewer"
        assert found[0] is None, "an empty file is no log"
        assert set(known) == set(range(len(self.RECORDS)))

    @pytest.mark.parametrize("step", [0, 100])
    def test_every_zeroed_sector(self, log_file: Path, step: int) -> None:
        whole = log_file.read_bytes()
        ends = [record.end for record in read(log_file.parent).records]
        for first in range(step, len(whole), 512):
            log_file.write_bytes(whole[:first] + bytes(len(whole[first : first + 512])) + whole[first + 512 :])
            found = self.outcome(log_file.parent)
            if first + 512 <= ends[-2]:
                assert found is None, "a record that has a later one is missed"
            else:
                assert found in {None, sum(end <= first for end in ends)}

    def test_every_flipped_byte(self, log_file: Path) -> None:
        whole = log_file.read_bytes()
        for place in range(0, len(whole), 7):
            log_file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x20]) + whole[place + 1 :])
            assert self.outcome(log_file.parent) in {None, len(self.RECORDS) - 1}

    def test_what_was_cut_off_is_told_and_the_log_goes_on(self, log_file: Path) -> None:
        log_file.write_bytes(log_file.read_bytes()[:-1])
        found = read(log_file.parent)
        assert len(found.records) == len(self.RECORDS) - 1
        assert "are not a complete record and are ignored" in str(found.torn[0])
        new_log(log_file.parent, following=found.next_lsn).append(b"next")

        assert read(log_file.parent).records[-1].header == b"next"

    def test_a_record_cut_out_of_the_middle(self, log_file: Path) -> None:
        whole = log_file.read_bytes()
        records = read(log_file.parent).records
        log_file.write_bytes(whole[: records[1].end] + whole[records[2].end :])
        with pytest.raises(StateLost, match="is corrupted at byte"):
            read(log_file.parent)


class TestFailingDisk:
    def test_a_full_disk_is_an_alarm_and_nothing_is_taken_for_kept(self, tmp_path: Path) -> None:
        disk = LimitedDisk(room=300)
        log = new_log(tmp_path, disk)
        kept = [number for number in range(20) if log.append(b"%d" % number, [b"x" * 30]) is not None]

        assert 0 < len(kept) < 20
        assert kept == list(range(len(kept)))
        assert log.alarm is not None
        assert isinstance(log.alarm, DurabilityLost)
        assert "No space left on device" in str(log.alarm)
        assert len(read(tmp_path).records) == len(kept)

    def test_with_room_again_the_gap_shows_until_it_lies_behind_a_snapshot(self, tmp_path: Path) -> None:
        disk = LimitedDisk(room=100)
        log = new_log(tmp_path, disk)
        log.append(b"a")
        assert log.append(b"b" * 200) is None
        assert not log.reopen()
        disk.room = None
        assert log.append(b"c") is None, "only `reopen` tries again"
        assert log.reopen()
        assert log.alarm is not None
        since = log.rotate()
        assert log.append(b"d") is not None
        with pytest.raises(StateLost, match="lacks the records"):
            read(tmp_path)
        log.clear_alarm()

        assert log.alarm is None
        assert [record.header for record in read(tmp_path, since).records] == [b"d"]

    def test_a_failed_fsync_is_an_alarm_and_is_not_tried_again(self, tmp_path: Path) -> None:
        disk = LimitedDisk(syncs=False)
        log = new_log(tmp_path, disk, WalOptions(max_bytes=1 << 30, fsync=True))
        number = log.append(b"a")
        log.sync(number)
        disk.syncs = True
        log.sync(number)

        assert log.alarm is not None
        assert log.append(b"b") is None

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        log = new_log(tmp_path / "file" / "log")

        assert log.alarm is not None
        assert not log.reopen()

    def test_dev_full(self, tmp_path: Path) -> None:
        class Full(DiskIO):
            def write(self, descriptor: int, buffers: Sequence[Bytes]) -> int:
                with open("/dev/full", "wb", buffering=0) as full:  # noqa: PTH123 - a device, no path of ours
                    return SYSTEM_DISK.write(full.fileno(), buffers)

        log = new_log(tmp_path, Full())
        assert log.append(b"a") is None
        assert log.alarm is not None


class TestLimits:
    def test_a_log_is_full_until_something_is_deleted(self, tmp_path: Path) -> None:
        log = new_log(tmp_path, options=WalOptions(max_bytes=1_000))
        assert not log.is_full
        log.append(b"", [b"x" * 1_000])
        assert log.is_full
        assert log.append(b"needed all the same") is not None
        log.truncate_before(log.rotate())

        assert not log.is_full

    def test_waiting_threads_share_a_wait(self, tmp_path: Path) -> None:
        disk = LimitedDisk()
        log = new_log(tmp_path, disk, WalOptions(max_bytes=1 << 30, fsync=True))
        numbers = [log.append(b"%d" % number) for number in range(5)]
        log.sync(numbers[2])
        once = disk.num_syncs
        for number in numbers:
            log.sync(number)

        assert disk.num_syncs == once
        log.sync(log.append(b"later"))
        assert disk.num_syncs == once + 1

    def test_without_fsync_the_disk_is_not_waited_for(self, tmp_path: Path) -> None:
        disk = LimitedDisk(syncs=False)
        log = new_log(tmp_path, disk)
        log.sync(log.append(b"a"))

        assert log.alarm is None

    def test_what_nobody_was_told_of_may_be_cut_off_though_later_records_reached_the_disk(self, tmp_path: Path) -> None:
        log = new_log(tmp_path, LimitedDisk(), WalOptions(max_bytes=1 << 30, fsync=True))
        log.sync(log.append(b"told"))
        for header in (b"lost one", b"kept one"):
            log.append(header)  # the machine dies before anybody waits for them
        (path,) = tmp_path.iterdir()
        path.write_bytes(path.read_bytes().replace(b"lost one", bytes(8)))

        assert [record.header for record in read(tmp_path).records] == [b"told"]
        path.write_bytes(path.read_bytes().replace(b"told", bytes(4)))
        with pytest.raises(StateLost, match="is corrupted"):
            read(tmp_path)

    def test_nothing_is_believed_to_be_kept_by_a_log_that_is_closed(self, tmp_path: Path) -> None:
        log = new_log(tmp_path)
        log.close()
        with pytest.raises(Unavailable, match="is closed: this process is shutting down"):
            log.append(b"too late")
        assert contents(read(tmp_path)) == []

    def test_every_folder_that_was_made_is_synced(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Or a power cut could take the whole folder."""
        synced: list[Path] = []
        monkeypatch.setattr(
            os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        )
        log = new_log(tmp_path / "job" / "pushes", options=WalOptions(fsync=True))
        log.sync(log.append(b"a"))

        assert {tmp_path, tmp_path / "job", tmp_path / "job" / "pushes"} < set(synced)
