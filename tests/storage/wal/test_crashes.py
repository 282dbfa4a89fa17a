"""Whenever the process is killed, the power is cut or the disk is full: recovery finds what was acknowledged.

The state machine here is the simplest: its state is the list of what was appended, and a snapshot holds all of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from hetpipe import durable
from hetpipe.errors import InjectedFault, StateLost
from hetpipe.failpoints import POINTS
from hetpipe.storage.wal import (
    SYSTEM_DISK,
    DiskIO,
    RecoveredLog,
    SnapshottedLog,
    StorageOptions,
    WalOptions,
    WriteAheadLog,
    read_log,
    recover,
    snapshot,
    snapshotted_log,
)
from tests.storage.wal.disks import ByteWiseDisk, LimitedDisk, Volume

WHOSE = "a machine"

#: Places of this engine at which a process can be told to die.
FAILPOINTS = {name for name in POINTS if name.startswith("snapshot.")} - {"snapshot.manifest_on_some_shards"}

#: What a machine does: a number is appended, `!` takes a snapshot, `^` is a restart.
PROGRAM = "12!34!^5!6"


class Machine:
    """Appends, takes snapshots, restarts; tells what it acknowledged."""

    def __init__(self, folder: Path, *, fsync: bool = False, disk: DiskIO = SYSTEM_DISK) -> None:
        self.folder = folder
        self._options = StorageOptions(identity=WHOSE, fsync=fsync, disk=disk)
        self.appended: list[str] = []
        #: So many of them, from the first on, were acknowledged as durable.
        self.num_acknowledged = 0
        self.num_snapshots = 0
        self.storage = SnapshottedLog(folder, self._options)

    def run(self, program: str, step: Callable[[], None] = lambda: None) -> None:
        """What `PROGRAM` describes, with a look by `step` behind each letter."""
        for letter in program:
            if letter == "!":
                self.snapshot()
            elif letter == "^":
                self.restart()
            else:
                self.append(letter)
            step()

    def append(self, item: str) -> None:
        self.appended.append(item)
        self.storage.append(item.encode())
        if self.storage.log.alarm is None:
            self.num_acknowledged = len(self.appended)

    def snapshot(self) -> bool:
        log = self.storage.log
        if log.alarm is not None and not log.reopen():
            return False
        since = log.rotate()
        self.num_snapshots += 1
        content = json.dumps(self.appended)
        if self.storage.snapshot(self.num_snapshots, content, [b"payload"], since=since, history=0):
            if log.is_complete_from(since):
                log.clear_alarm()
            return log.alarm is None
        return False

    def restart(self) -> None:
        self.storage.close()
        recovered = recover(self.folder, identity=WHOSE)
        self.appended = contents(recovered)
        self.storage = SnapshottedLog(self.folder, self._options, recovered=recovered)

    def check(self, folder: Path | None = None) -> None:
        """A process that begins now would find all that was acknowledged, and nothing that was not appended."""
        try:
            found = contents(recover(folder or self.folder, identity=WHOSE))
        except StateLost:
            assert self.num_acknowledged == 0 or self.storage.log.alarm is not None, "what was acknowledged is lost"
        else:
            assert found == self.appended[: len(found)]
            assert len(found) >= self.num_acknowledged


def contents(found: RecoveredLog) -> list[str]:
    before: list[str] = [] if found.snapshot is None else json.loads(found.snapshot.header.content)
    if found.snapshot is not None:
        payload = bytearray(found.snapshot.payload.num_bytes)
        found.snapshot.payload.read_into(memoryview(payload))
        assert payload == b"payload"
    return before + [record.header.decode() for record in found.records]


def patch_after(patch: pytest.MonkeyPatch, owner: object, name: str, step: Callable[[], None]) -> None:
    """Have `step` looked at before and after each call."""
    real = getattr(owner, name)

    def watched(*arguments: object, **options: object) -> object:
        step()
        result = real(*arguments, **options)
        step()
        return result

    patch.setattr(owner, name, watched)


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    """What recovery says of thousands of torn tails."""
    with capture_logs():
        yield


@pytest.fixture
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody cuts the power here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.usefixtures("_quick_disk")
class TestKilled:
    def test_at_every_byte_that_is_written_and_every_file_that_comes_and_goes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps = 0
        machine: Machine | None = None

        def step() -> None:
            nonlocal steps
            steps += 1
            if machine is not None:
                machine.check()

        machine = Machine(tmp_path, disk=ByteWiseDisk(step))
        with monkeypatch.context() as patch:
            patch_after(patch, Path, "unlink", step)
            patch_after(patch, Path, "replace", step)
            machine.run(PROGRAM, step)

        assert steps > 800
        assert contents(recover(tmp_path, identity=WHOSE)) == list("123456")

    def test_at_every_failpoint(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        machine = Machine(tmp_path)
        reached: set[str] = set()

        def reach(name: str) -> None:
            reached.add(name)
            machine.check()

        for module in (durable, snapshot, snapshotted_log):
            monkeypatch.setattr(module, "reach", reach)
        machine.run(PROGRAM)

        assert reached == FAILPOINTS

    @pytest.mark.parametrize("point", sorted(FAILPOINTS))
    def test_a_fault_at_a_failpoint_costs_the_snapshot_at_most(
        self, point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        machine = Machine(tmp_path)
        machine.run("12!34")

        def reach(name: str) -> None:
            if name == point:
                raise InjectedFault(name)

        with monkeypatch.context() as patch:
            for module in (durable, snapshot, snapshotted_log):
                patch.setattr(module, "reach", reach)
            assert not machine.snapshot()
        machine.check()
        machine.run("5^6!7")

        assert contents(recover(tmp_path, identity=WHOSE)) == list("1234567")
        assert not list(tmp_path.glob("*.tmp"))

    def test_at_every_byte_of_a_log_of_many_segments(self, tmp_path: Path) -> None:
        appended: list[bytes] = []
        num_acknowledged = 0

        def step() -> None:
            try:
                found = [record.header for record in read_log(tmp_path, identity=b"x", since=0).records]
            except StateLost:
                found = []
            assert found == appended[: len(found)]
            assert len(found) >= num_acknowledged

        log = WriteAheadLog(tmp_path, identity=b"x", options=WalOptions(segment_bytes=150), disk=ByteWiseDisk(step))
        for number in range(12):
            appended.append(b"%d" % number)
            assert log.append(appended[-1]) is not None
            num_acknowledged += 1
        step()

        assert len(list(tmp_path.iterdir())) > 3


@pytest.mark.usefixtures("_quick_disk")
class TestFullDisk:
    @pytest.mark.parametrize("returns", [False, True])
    def test_at_every_byte_nothing_is_acknowledged_that_is_lost(
        self, *, returns: bool, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """And with room again, a snapshot makes the log complete."""
        whole = LimitedDisk(1 << 20)
        Machine(tmp_path_factory.mktemp("whole"), disk=whole).run("12!34!56")
        needed = (1 << 20) - (whole.room or 0)
        for room in range(0, needed, 7):
            disk = LimitedDisk(room)
            machine = Machine(tmp_path_factory.mktemp("full"), disk=disk)
            machine.run("12!34!56", machine.check)
            assert machine.storage.log.alarm is not None
            if returns:
                disk.room = None
                machine.append("7")
                assert machine.snapshot()
                machine.run("8")
                assert contents(recover(machine.folder, identity=WHOSE)) == list("12345678")
            machine.storage.close()


class TestPowerCut:
    """A disk that has only what was forced to it: with `fsync` nothing that was acknowledged is lost."""

    @pytest.fixture
    def volume(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Volume]:
        (tmp_path / "log").mkdir()
        volume = Volume(tmp_path / "log")
        monkeypatch.setattr(os, "fsync", volume.fsync)
        yield volume
        volume.close()

    def check(self, machine: Machine, volume: Volume, target: Path) -> None:
        target.mkdir(exist_ok=True)
        for image in volume.images(target):
            machine.check(image)

    @pytest.mark.parametrize("program", [PROGRAM, "1!^2!^!3", "!!^1", "^1^2^!3"])
    def test_between_any_two_system_calls(
        self, program: str, tmp_path: Path, volume: Volume, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        machine = Machine(tmp_path / "log", fsync=True)

        def step() -> None:
            with monkeypatch.context() as unwatched:
                unwatched.setattr(Path, "unlink", unlink)
                self.check(machine, volume, tmp_path / "image")

        unlink = Path.unlink
        for owner, name in ((Path, "unlink"), (Path, "replace"), (os, "fsync"), (os, "writev")):
            patch_after(monkeypatch, owner, name, step)
        machine.run(program, step)

    def test_a_log_that_was_begun_is_there(self, tmp_path: Path, volume: Volume) -> None:
        """Before anything was appended: or the job of a parameter server would be lost by a power cut at its start."""
        Machine(tmp_path / "log", fsync=True)
        (tmp_path / "image").mkdir()
        for image in volume.images(tmp_path / "image"):
            assert recover(image, identity=WHOSE).records == ()

    @given(st.text("1!^", max_size=12))
    @settings(max_examples=25)
    def test_of_any_program(self, tmp_path_factory: pytest.TempPathFactory, program: str) -> None:
        folder = tmp_path_factory.mktemp("cut")
        (folder / "log").mkdir()
        volume = Volume(folder / "log")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", volume.fsync)
            machine = Machine(folder / "log", fsync=True)
            machine.run(program, lambda: self.check(machine, volume, folder / "image"))
        volume.close()

    def test_without_fsync_a_hole_is_never_taken_for_a_log(self, tmp_path: Path) -> None:
        """Any subset of the pages may have reached the disk: what comes back is a prefix, or an error."""
        machine = Machine(tmp_path)
        machine.run("123456")
        (path,) = tmp_path.iterdir()
        whole = path.read_bytes()
        outcomes = set()
        for first in range(0, len(whole), 40):
            for end in (first + 40, len(whole)):
                path.write_bytes(whole[:first] + bytes(min(end, len(whole)) - first) + whole[end:])
                try:
                    found = contents(recover(tmp_path, identity=WHOSE))
                except StateLost:
                    outcomes.add("refused")
                else:
                    assert found == machine.appended[: len(found)]
                    outcomes.add("a prefix")

        assert outcomes == {"refused", "a prefix"}


class TestOrder:
    """What is forced to the disk before what: the guarantees above rest on it."""

    @pytest.fixture
    def calls(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        calls: list[str] = []
        unlink, replace = Path.unlink, Path.replace

        def fsync(descriptor: int) -> None:
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            calls.append(f"fsync {'folder' if path == tmp_path else path.name.lstrip('0')}")

        def watched_unlink(path: Path, *, missing_ok: bool = False) -> None:
            calls.append(f"unlink {_short(path)}")
            unlink(path, missing_ok=missing_ok)

        def watched_replace(path: Path, target: Path) -> Path:
            calls.append(f"rename to {_short(target)}")
            return replace(path, target)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(Path, "unlink", watched_unlink)
        monkeypatch.setattr(Path, "replace", watched_replace)
        return calls

    def test_a_snapshot_is_durable_before_anything_it_replaces_goes(self, tmp_path: Path, calls: list[str]) -> None:
        machine = Machine(tmp_path)
        machine.run("1!2")
        calls.clear()
        machine.run("!")

        assert calls == [
            "fsync snapshot-0000000000000002.tmp",
            "rename to snapshot-2",
            "fsync folder",
            "unlink snapshot-1",
            "unlink 2.log",
        ]

    def test_with_fsync_a_segment_is_durable_before_the_next_one_is_begun(
        self, tmp_path: Path, calls: list[str]
    ) -> None:
        machine = Machine(tmp_path, fsync=True)
        begun = list(calls)
        calls.clear()
        machine.storage.log.append(b"not waited for")
        machine.storage.log.rotate()

        assert begun == ["fsync folder", "fsync .log"]
        assert calls == ["fsync .log", "fsync folder", "fsync 2.log"]

    def test_without_fsync_the_log_waits_for_no_disk(self, tmp_path: Path, calls: list[str]) -> None:
        Machine(tmp_path).run("12345")

        assert calls == []


def _short(path: Path) -> str:
    prefix = "snapshot-" if path.name.startswith("snapshot-") else ""
    return prefix + path.name.removeprefix(prefix).lstrip("0")


def test_a_snapshot_needs_no_history(tmp_path: Path) -> None:
    """The position in the owner's history is given back as it was."""
    storage = SnapshottedLog(tmp_path, StorageOptions(identity=WHOSE))
    payload: Sequence[bytes] = [b"ab", b"c"]
    assert storage.snapshot(7, "content", payload, since=storage.log.rotate(), history=4711)
    found = recover(tmp_path, identity=WHOSE).snapshot

    assert found is not None
    assert (found.number, found.header.content, found.header.history) == (7, "content", 4711)
    with pytest.raises(StateLost, match=f"is a snapshot of {WHOSE}, not of another"):
        recover(tmp_path, identity="another")
