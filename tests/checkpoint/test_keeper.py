"""Who reports what, who dies meanwhile, and which checkpoints are there in the end."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from hetpipe import failpoints
from hetpipe.checkpoint.keeper import CheckpointKeeper
from hetpipe.checkpoint.manifest import MANIFEST, checkpoint_dir, newest_checkpoint, newest_complete, read_complete
from hetpipe.checkpoint.store import FolderStore
from hetpipe.decide.sync.records import EvictRecord, PublishRecord, SegmentMember, SegmentRecord
from hetpipe.errors import CheckpointError, CheckpointNotWritten, PeerUnreachable, ProtocolViolation
from hetpipe.values.ids import Clock, Incarnation, ShardIndex, VirtualWorkerIndex
from hetpipe.values.requests import CheckpointFile
from tests.checkpoints import JOB, progress_at, shard_part, stage_part
from tests.server.shard.builders import requester
from tests.support.fake_clock import FakeClock

#: Stages of the virtual workers, unless a test says otherwise; there are two shards.
STAGES = {0: 2, 1: 1, 3: 1}


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody cuts the power here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Parts:
    """A keeper, and everybody who reports to it."""

    def __init__(self, run_dir: Path, keep: int = 2) -> None:
        self.run_dir = run_dir
        self.keep = keep
        self.restart()

    def restart(self) -> None:
        self.time = FakeClock()
        self.keeper = CheckpointKeeper(
            job_id=JOB,
            store=FolderStore(self.run_dir),
            num_shards=2,
            keep=self.keep,
            last_checkpoint_seconds=20.0,
            time=self.time,
        )

    def begin(self, clock: int, *, reasons: tuple[str, ...] = ("checkpoint",), left: tuple[int, ...] = ()) -> None:
        everybody = [
            SegmentMember(VirtualWorkerIndex(vw), Incarnation(0), count, joined=vw == 3) for vw, count in STAGES.items()
        ]
        members, leavers = (tuple(m for m in everybody if (m.vw in left) == is_left) for is_left in (False, True))
        self.keeper.follow(SegmentRecord(9, Clock(clock), reasons, 0, members, leavers), progress_at(clock))

    def shard(self, clock: int, shard: int) -> bool:
        part = shard_part(self.run_dir, clock, shard)
        return self.keeper.report_shard(ShardIndex(shard), Clock(clock), [part])

    def stage(self, clock: int, vw: int, stage: int = 0) -> bool:
        part = stage_part(self.run_dir, clock, vw, stage)
        return self.keeper.report(requester(vw, stage), Clock(clock), [part])

    def evict(self, vw: int) -> None:
        self.keeper.follow(EvictRecord(10, VirtualWorkerIndex(vw), Incarnation(0), Clock(0)), progress_at(0))

    def all(self, clock: int) -> None:
        """One whole checkpoint."""
        self.begin(clock)
        answers = [self.shard(clock, 0), self.shard(clock, 1)]
        answers += [self.stage(clock, vw, stage) for vw, count in STAGES.items() for stage in range(count)]
        assert answers == [False] * 5 + [True]

    @property
    def folders(self) -> list[int]:
        return sorted(int(path.name[-8:]) for path in (self.run_dir / "checkpoints").glob("clock-*"))


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path)


def test_the_last_part_makes_it_complete_whoever_brings_it(parts: Parts) -> None:
    parts.begin(4)
    for _ in range(2):  # a repetition changes nothing
        assert not any([parts.stage(4, 0, 1), parts.shard(4, 1), parts.stage(4, 3), parts.stage(4, 1)])
        parts.begin(4)
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        newest_checkpoint(parts.run_dir)
    assert not parts.stage(4, 0, 0)
    assert parts.shard(4, 0)
    assert parts.stage(4, 0, 0), "asked again: it is complete"

    manifest = read_complete(checkpoint_dir(parts.run_dir, Clock(4)))
    assert (manifest.num_stages, manifest.num_shards, manifest.progress) == (STAGES, 2, progress_at(4))
    assert [file.name for file in manifest.files[:3]] == [
        "shard-0.safetensors",
        "shard-1.safetensors",
        "vw-0-stage-0.safetensors",
    ]


def test_who_leaves_has_a_part_in_it(parts: Parts) -> None:
    """So its next life begins with the state that its optimizer left with."""
    parts.begin(4, reasons=("drain",), left=(1,))
    assert not any([parts.shard(4, 0), parts.shard(4, 1), parts.stage(4, 0), parts.stage(4, 0, 1), parts.stage(4, 3)])
    assert parts.stage(4, 1)
    assert read_complete(checkpoint_dir(parts.run_dir, Clock(4))).num_stages == STAGES


def test_nobody_waits_for_who_was_to_leave_and_died(parts: Parts) -> None:
    """No record says so: it counts no more."""
    parts.begin(4, reasons=("drain",), left=(1,))
    assert not any([parts.shard(4, 0), parts.shard(4, 1), parts.stage(4, 0), parts.stage(4, 0, 1), parts.stage(4, 3)])
    parts.keeper.evict(VirtualWorkerIndex(1))
    assert list(read_complete(checkpoint_dir(parts.run_dir, Clock(4))).num_stages) == [0, 3]


@pytest.mark.parametrize("reasons", [("evict",), ("join",), ()])
def test_other_barriers_ask_for_none(parts: Parts, reasons: tuple[str, ...]) -> None:
    parts.begin(4, reasons=reasons)
    parts.keeper.follow(PublishRecord(3, Clock(4), ()), progress_at(4))
    parts.keeper.follow(None, progress_at(4))
    with pytest.raises(ProtocolViolation, match="at clock 4, but no barrier requires one there"):
        parts.shard(4, 0)


def test_an_older_barrier_that_is_read_again_begins_none(parts: Parts) -> None:
    member = SegmentMember(VirtualWorkerIndex(0), Incarnation(0), 1, joined=False)
    parts.keeper.follow(SegmentRecord(2, Clock(2), ("checkpoint",), 0, (member,)), progress_at(4))
    with pytest.raises(ProtocolViolation, match="at clock 2, but no barrier"):
        parts.stage(2, 0)


@pytest.mark.parametrize(
    "name", ["vw-1-stage-0.safetensors", "shard-0.safetensors", "../vw-0-stage-0.safetensors", "manifest.json"]
)
def test_a_file_that_is_not_the_reporters(parts: Parts, name: str) -> None:
    parts.begin(4)
    with pytest.raises(ProtocolViolation, match=r"not the ones it must write|checkpoint file named"):
        parts.keeper.report(requester(0, 0), Clock(4), [CheckpointFile(name, "0" * 64, 1)])
    with pytest.raises(ProtocolViolation, match="not the ones it must write"):
        parts.keeper.report(requester(0, 0), Clock(4), [])
    with pytest.raises(ProtocolViolation, match="there is no shard 2; the job has 2"):
        parts.keeper.report_shard(ShardIndex(2), Clock(4), [])


# -- deaths ------------------------------------------------------------------------------------------------------------


def test_nobody_waits_for_one_that_is_evicted(parts: Parts) -> None:
    parts.begin(4)
    for shard in (0, 1):
        parts.shard(4, shard)
    assert not any([parts.stage(4, 0, 0), parts.stage(4, 1), parts.stage(4, 3)])
    parts.evict(0)  # one of its stages had written, the other had not

    manifest = read_complete(newest_checkpoint(parts.run_dir))
    assert manifest.num_stages == {1: 1, 3: 1}
    assert "vw-0-stage-0.safetensors" not in [file.name for file in manifest.files]


def test_what_an_evicted_one_has_written_whole_counts(parts: Parts) -> None:
    parts.begin(4)
    parts.stage(4, 3)
    parts.evict(3)
    parts.evict(7)  # whom no set knows
    for shard in (0, 1):
        parts.shard(4, shard)
    for vw, stage in ((0, 0), (0, 1), (1, 0)):
        parts.stage(4, vw, stage)
    assert read_complete(newest_checkpoint(parts.run_dir)).num_stages == STAGES


def test_without_any_copy_of_the_buffers_it_is_given_up(parts: Parts) -> None:
    parts.all(2)
    parts.begin(4)
    parts.stage(4, 3)
    parts.evict(0)
    parts.evict(1)
    with pytest.raises(CheckpointNotWritten, match=r"at clock 4 was abandoned: virtual workers \[0, 1\], the only"):
        parts.shard(4, 0)
    assert newest_complete(parts.run_dir) == checkpoint_dir(parts.run_dir, Clock(2))


# -- what cannot be written --------------------------------------------------------------------------------------------


def test_who_cannot_write_says_so_and_the_one_before_stays(parts: Parts) -> None:
    parts.all(2)
    parts.begin(4)
    parts.shard(4, 1)
    with pytest.raises(CheckpointNotWritten, match="shard 0 could not write its part: no space"):
        parts.keeper.report_shard(ShardIndex(0), Clock(4), [], failure="no space")
    with pytest.raises(CheckpointNotWritten, match="shard 0 could not write"):
        parts.stage(4, 0, 0)
    assert parts.folders == [2, 4]

    parts.all(6)
    assert parts.folders == [2, 6], "what was given up is deleted when the next one begins"


def test_a_stage_that_cannot_write(parts: Parts) -> None:
    parts.begin(4)
    with pytest.raises(CheckpointNotWritten, match=r"stage 1 of virtual worker 0 .* could not write its part: full"):
        parts.keeper.report(requester(0, 1), Clock(4), [], failure="full")


def test_a_manifest_that_cannot_be_forced_to_disk(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    parts.all(2)
    parts.begin(4)
    for shard in (0, 1):
        parts.shard(4, shard)
    for vw, stage in ((0, 0), (0, 1), (1, 0)):
        parts.stage(4, vw, stage)
    last = stage_part(parts.run_dir, 4, 3, 0)

    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(CheckpointNotWritten, match=r"its manifest could not be written: .*Input/output error"):
        parts.keeper.report(requester(3, 0), Clock(4), [last])
    monkeypatch.undo()
    assert newest_complete(parts.run_dir) == checkpoint_dir(parts.run_dir, Clock(2))
    parts.all(6)
    assert parts.folders == [2, 6]


def test_one_that_takes_too_long_is_given_up(parts: Parts) -> None:
    parts.begin(2)
    parts.stage(2, 0, 0)
    parts.all(4)
    assert parts.folders == [2, 4], "the older one may still become complete"
    parts.begin(6)
    parts.begin(8)
    with pytest.raises(CheckpointNotWritten, match=r"two barriers later shard-0\.safetensors is still missing"):
        parts.shard(2, 0)


def test_an_older_one_may_become_complete_after_a_newer_one(parts: Parts) -> None:
    parts.begin(2)
    for vw, count in STAGES.items():
        for stage in range(count):
            parts.stage(2, vw, stage)
    parts.shard(2, 1)
    parts.all(4)
    assert parts.shard(2, 0)
    assert parts.folders == [2, 4]
    assert newest_checkpoint(parts.run_dir).name == "clock-00000004"


# -- keeping -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    parts = Parts(tmp_path, keep)
    for clock in (2, 4, 6, 8):
        parts.all(clock)
        assert newest_complete(tmp_path) == checkpoint_dir(tmp_path, Clock(clock))
    assert parts.folders == [2, 4, 6, 8][-keep:]


def test_the_newest_is_there_until_the_next_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is deleted before the manifest that replaces it has its name, on disk."""
    parts = Parts(tmp_path, keep=1)
    parts.all(2)
    seen: list[tuple[str, list[str]]] = []

    def watched(descriptor: int) -> None:
        synced = Path(f"/proc/self/fd/{descriptor}").readlink().name
        seen.append((synced, sorted(path.parent.name[-1] for path in tmp_path.glob(f"checkpoints/*/{MANIFEST}"))))

    monkeypatch.setattr(os, "fsync", watched)
    parts.all(4)
    assert seen[-4:] == [
        (f"{MANIFEST}.tmp", ["2"]),
        ("clock-00000004", ["2", "4"]),
        ("checkpoints", ["2", "4"]),
        (tmp_path.name, ["2", "4"]),
    ]
    assert parts.folders == [4]


# -- a restart of the clock shard --------------------------------------------------------------------------------------


def test_after_a_restart_what_lies_on_disk_counts(parts: Parts) -> None:
    """Those whose reports were heard do not repeat them."""
    parts.begin(4)
    parts.shard(4, 0)
    parts.stage(4, 0, 0)
    parts.stage(4, 1)
    parts.restart()
    parts.begin(4)
    parts.keeper.adopt()
    assert not any([parts.shard(4, 1), parts.stage(4, 0, 1)])
    assert parts.stage(4, 3)
    assert read_complete(newest_checkpoint(parts.run_dir)).num_stages == STAGES


def test_adopting_the_last_part_completes_it(parts: Parts) -> None:
    parts.all(4)
    folder = newest_checkpoint(parts.run_dir)
    (folder / MANIFEST).unlink()
    parts.restart()
    parts.begin(4)
    parts.keeper.adopt()
    assert newest_checkpoint(parts.run_dir) == folder


def test_what_is_torn_or_of_another_clock_is_not_adopted(parts: Parts) -> None:
    parts.begin(4)
    for shard in (0, 1):
        parts.shard(4, shard)
    for vw, stage in ((0, 0), (0, 1), (1, 0), (3, 0)):
        stage_part(parts.run_dir, 4, vw, stage)
    folder = checkpoint_dir(parts.run_dir, Clock(4))
    (folder / "shard-0.safetensors").write_bytes(b"torn")
    shard_part(parts.run_dir, 3, 1)
    checkpoint_dir(parts.run_dir, Clock(3)).joinpath("shard-1.safetensors").replace(folder / "shard-1.safetensors")
    parts.restart()
    parts.begin(4)
    parts.keeper.adopt()
    assert not parts.shard(4, 0)
    assert parts.shard(4, 1)


def test_the_manifest_that_ends_a_run_is_written_as_soon_as_there_is_room(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    for clock, has_room in ((4, True), (6, False)):
        parts.begin(clock, reasons=("end",))
        for vw, count in STAGES.items():
            for stage in range(count):
                parts.stage(clock, vw, stage)
        parts.shard(clock, 0)
        report = partial(parts.keeper.report_shard, ShardIndex(1), Clock(clock), [shard_part(parts.run_dir, clock, 1)])
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            assert not report()
            parts.time.advance(19.0)
            assert not report()
            if not has_room:
                parts.time.advance(1.0)
                with pytest.raises(CheckpointNotWritten, match=r"its manifest could not be written: .*No space left"):
                    report()
        if has_room:
            assert report()


def test_after_a_restart_a_complete_one_is_complete(parts: Parts) -> None:
    parts.all(4)
    parts.restart()
    parts.begin(4)
    parts.keeper.adopt()
    assert parts.stage(4, 0, 0)


@pytest.mark.parametrize("action", ["error", "drop"])
@pytest.mark.parametrize(
    "place", ["temp_open", "half_written", "before_fsync", "before_rename", "before_directory_fsync"]
)
def test_failpoints_in_the_manifest_cost_that_checkpoint(parts: Parts, place: str, action: str) -> None:
    parts.all(2)
    parts.begin(4)
    for vw, count in STAGES.items():
        for stage in range(count):
            parts.stage(4, vw, stage)
    parts.shard(4, 0)
    last = shard_part(parts.run_dir, 4, 1)
    failpoints.arm({failpoints.VARIABLE: f"snapshot.{place}={action}"}, is_allowed=True)
    try:
        with pytest.raises(CheckpointNotWritten, match=r"its manifest could not be written: failpoint"):
            parts.keeper.report_shard(ShardIndex(1), Clock(4), [last])
    finally:
        failpoints.disarm()
    assert newest_complete(parts.run_dir) == checkpoint_dir(parts.run_dir, Clock(2))
    parts.all(6)
    assert parts.folders == [2, 6]


def test_failpoints_around_it_change_nothing(parts: Parts) -> None:
    traps = "snapshot.manifest_on_some_shards=drop,snapshot.old_deleted=error"
    parts.begin(4)
    part = shard_part(parts.run_dir, 4, 0)
    failpoints.arm({failpoints.VARIABLE: traps}, is_allowed=True)
    try:
        with pytest.raises(PeerUnreachable):
            parts.keeper.report_shard(ShardIndex(0), Clock(4), [part])
        assert not parts.keeper.report_shard(ShardIndex(0), Clock(4), [part])
        for vw, count in STAGES.items():
            for stage in range(count):
                parts.stage(4, vw, stage)
        last = shard_part(parts.run_dir, 4, 1)
        assert parts.keeper.report_shard(ShardIndex(1), Clock(4), [last])
    finally:
        failpoints.disarm()
    assert newest_complete(parts.run_dir) == checkpoint_dir(parts.run_dir, Clock(4))


def test_what_one_begins_from_that_is_away_stays_until_it_is_back(parts: Parts) -> None:
    parts.all(1)
    parts.all(2)
    for clock in range(3, 8):
        parts.begin(clock)
        parts.evict(1)
        assert [parts.stage(clock, 0), parts.stage(clock, 0, 1), parts.stage(clock, 3)] == [False] * 3
        assert [parts.shard(clock, 0), parts.shard(clock, 1)] == [False, True]
    assert parts.folders == [2, 6, 7]
    parts.restart()
    parts.all(8)

    assert parts.folders == [7, 8]


def test_of_a_damaged_checkpoint_nobody_begins(parts: Parts) -> None:
    parts.all(1)
    (parts.run_dir / "checkpoints" / "clock-00000001" / MANIFEST).write_text("{")
    for clock in (2, 3, 4):
        parts.all(clock)

    assert parts.folders == [3, 4]
