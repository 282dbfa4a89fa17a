"""A history in segments: every line is there once, whatever is compressed, and whoever dies on the way."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hetpipe.checker.reading import history_files, read_history
from hetpipe.observe import line_file, segments
from hetpipe.observe.history import History
from hetpipe.observe.segments import compress_before, read_lines


def history(path: Path, *, segment_bytes: int = 400) -> History:
    return History(path, host="n0", pid=1, role="parameter_server", term=1, segment_bytes=segment_bytes)


def clocks(path: Path) -> list[int]:
    return [json.loads(line)["clock"] for line in read_lines(path)]


def published(run_dir: Path) -> list[int]:
    """As the checker reads them, which shares no code with who wrote them."""
    return [event.clock for event in read_history(run_dir).events]  # type: ignore[attr-defined]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history" / "shard-0.jsonl"


class TestRotation:
    def test_old_segments_are_whole_gzips_and_all_is_read_as_one_file(self, path: Path, tmp_path: Path) -> None:
        written = history(path)
        for clock in range(50):
            written.publish(clock=clock)
        written.close()
        compress_before(path, max(segments.segments_of(path)))
        packed = sorted(each for each in path.parent.iterdir() if each.suffix == ".gz")

        assert len(packed) >= 10
        assert all(gzip.decompress(each.read_bytes()).endswith(b"}\n") for each in packed)
        assert not path.exists()
        assert len([each for each in path.parent.iterdir() if each.suffix != ".gz"]) == 1
        assert clocks(path) == published(tmp_path) == list(range(50))
        assert list(history_files(tmp_path)) == ["shard-0"]

    def test_long_histories_take_a_tenth(self, path: Path) -> None:
        written = history(path, segment_bytes=1 << 18)
        for p in range(1, 20_000):
            written.forward(vw=0, incarnation=0, stage=1, p=p, clock=p // 4, local_through=max(0, p - 4))
        written.close()
        compress_before(path, max(segments.segments_of(path)))
        plain = sum(len(line) for line in read_lines(path))

        assert sum(each.stat().st_size for each in path.parent.iterdir()) < plain / 10 + (1 << 18)

    def test_a_later_process_goes_on_in_the_last_segment_and_ends_what_was_left(self, path: Path) -> None:
        first = history(path)
        for clock in range(10):
            first.publish(clock=clock)
        first.close()
        later = history(path)
        later.publish(clock=10)
        later.close()

        assert clocks(path) == list(range(11))

    def test_positions_hold_when_what_lies_before_is_compressed(self, path: Path) -> None:
        written = history(path)
        positions = []
        for clock in range(20):
            positions.append(written.position())
            written.publish(clock=clock)
        written.close()
        compress_before(path, max(segments.segments_of(path)))
        again = history(path)
        found = [[fields["clock"] for _, fields in again.since(position)] for position in positions]
        again.close()

        assert positions == sorted(positions)
        assert found == [list(range(clock, 20)) for clock in range(20)]


class TestDeaths:
    def test_killed_while_it_compresses_it_lacks_nothing(self, path: Path, tmp_path: Path) -> None:
        """Before the rename there is half a file of another name; behind it both are there."""
        written = history(path, segment_bytes=1 << 30)
        for clock in range(5):
            written.publish(clock=clock)
        written.close()
        packed = path.with_name("shard-0.jsonl.gz")
        packed.with_name("shard-0.jsonl.gz.tmp").write_bytes(b"half of")
        assert clocks(path) == published(tmp_path) == list(range(5))
        packed.write_bytes(gzip.compress(path.read_bytes()))
        assert clocks(path) == published(tmp_path) == list(range(5))
        later = history(path)
        later.publish(clock=5)
        later.close()

        assert clocks(path) == published(tmp_path) == list(range(6))

    def test_what_another_process_still_writes_stays_plain(self, path: Path) -> None:
        old = history(path, segment_bytes=1 << 30)
        old.publish(clock=0)
        new = history(path, segment_bytes=10)
        new.publish(clock=1)
        new.close()
        old.publish(clock=2)  # it does not know yet that its life is over
        assert sorted(clocks(path)) == [0, 1, 2]
        old.close()
        compress_before(path, 1)

        assert (path.exists(), sorted(clocks(path))) == (False, [0, 1, 2])

    def test_a_disk_without_room_for_another_file_ends_no_history(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written = history(path)

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(line_file, "open_for_writing", full)
        for clock in range(20):
            written.publish(clock=clock)
        monkeypatch.undo()
        for clock in range(20, 40):
            written.publish(clock=clock)
        written.close()

        assert written.alarm is None
        assert clocks(path) == list(range(40))

    def test_without_locks_nothing_is_compressed(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", refuse)
        written = history(path)
        for clock in range(20):
            written.publish(clock=clock)
        written.close()

        assert path.exists()
        assert clocks(path) == list(range(20))

    def test_a_damaged_segment_is_told_by_its_name(self, path: Path, tmp_path: Path) -> None:
        written = history(path)
        for clock in range(20):
            written.publish(clock=clock)
        written.close()
        compress_before(path, max(segments.segments_of(path)))
        packed = path.with_name("shard-0.0002.jsonl.gz")
        packed.write_bytes(packed.read_bytes()[:-9])
        (damage,) = read_history(tmp_path).damage

        assert (damage.file, damage.torn) == ("history/shard-0.0002.jsonl.gz", False)
