"""What a parameter server says of its safety: checkpoints given up, a log that cannot be written, disks nearly full."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest

from hetpipe.checkpoint.keeper import CheckpointKeeper
from hetpipe.checkpoint.store import FolderStore
from hetpipe.conditions import Conditions
from hetpipe.errors import CheckpointNotWritten
from hetpipe.observe.history import History
from hetpipe.server.shard.disk_watch import Disk, DiskWatch, disk_of
from hetpipe.server.shard.job_shard import JobShard
from hetpipe.server.shard.job_storage import JobStorage, StateOptions
from hetpipe.values.conditions import Condition, ConditionKind
from hetpipe.values.ids import Clock, ShardIndex
from tests.checkpoints import JOB, progress_at, shard_part, stage_part
from tests.server.shard.builders import requester, shard_config, slices_of
from tests.storage.wal.disks import LimitedDisk
from tests.support.fake_clock import FakeClock

WHO = "parameter server 0"
KIND = ConditionKind.DURABILITY_LOST


def only(conditions: Conditions, kind: ConditionKind) -> Condition:
    (found,) = (one for one in conditions.active() if one.kind is kind)
    return found


class TestConditions:
    def test_the_first_cause_stays_while_it_holds(self) -> None:
        clock = FakeClock(wall=100.0)
        conditions = Conditions(clock)
        conditions.raise_(KIND, WHO, "the first cause")
        clock.advance(5.0)
        conditions.raise_(KIND, WHO, "an echo")
        (told,) = conditions.active()
        assert (told.sentence, told.since, told.times, told.holds) == ("the first cause", 100.0, 2, True)

    def test_raised_again_after_it_was_over_it_has_a_cause_of_its_own(self) -> None:
        conditions = Conditions(FakeClock())
        conditions.raise_(KIND, WHO, "the first cause")
        conditions.clear(KIND, WHO, "it is well")
        conditions.raise_(KIND, WHO, "another one")
        (told,) = conditions.active()
        assert (told.sentence, told.times, told.clearance) == ("another one", 2, "")

    def test_only_changes_are_told_at_once(self) -> None:
        heard: list[int] = []
        conditions = Conditions(FakeClock())
        conditions.on_change(lambda: heard.append(1))
        conditions.raise_(KIND, WHO, "a cause")
        conditions.raise_(KIND, WHO, "an echo")
        conditions.clear(KIND, WHO, "it is well")
        conditions.clear(KIND, WHO, "it is still well")
        assert len(heard) == 2


class TestCheckpoints:
    def test_one_that_is_given_up_is_raised_and_cleared_by_the_next_that_is_complete(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "fsync", lambda _: None)
        conditions = Conditions(FakeClock())
        keeper = CheckpointKeeper(job_id=JOB, store=FolderStore(tmp_path), num_shards=1, keep=2, conditions=conditions)

        def checkpoint(clock: int, *, failure: str = "") -> None:
            keeper.begin(progress_at(clock), {requester(0).vw: 1})
            keeper.report_shard(ShardIndex(0), Clock(clock), [shard_part(tmp_path, clock, 0)])
            parts = [] if failure else [stage_part(tmp_path, clock, 0, 0)]
            with pytest.raises(CheckpointNotWritten) if failure else nullcontext():
                keeper.report(requester(0), Clock(clock), parts, failure=failure)

        checkpoint(40)
        checkpoint(42, failure="[Errno 28] No space left on device")
        checkpoint(44, failure="[Errno 28] No space left on device")
        raised = only(conditions, ConditionKind.CHECKPOINT_GIVEN_UP)
        assert raised.holds
        assert raised.times == 2
        assert raised.sentence.startswith(
            "the checkpoint at clock 42 was abandoned, the newest complete one is at clock 40"
        )
        assert "No space left on device" in raised.sentence

        checkpoint(57)
        assert (
            only(conditions, ConditionKind.CHECKPOINT_GIVEN_UP).clearance == "checkpoints are written again at clock 57"
        )
        assert keeper.newest_bytes > 0


class TestState:
    def test_a_log_that_cannot_be_written_is_raised_with_the_path_and_the_fix(self, tmp_path: Path) -> None:
        conditions, disk = Conditions(FakeClock()), LimitedDisk()
        config = shard_config(slices_of((4,)), run_dir=str(tmp_path))
        history = History(tmp_path / "h.jsonl", host="n0", pid=1, role="parameter_server", term=1)
        state = JobStorage(config, StateOptions(root=tmp_path / "state", disk=disk), history, conditions)
        assert not only(conditions, KIND).holds
        assert only(conditions, KIND).times == 0

        disk.room = 0
        assert state.journal is not None
        state.journal._storage.append(b"{}")
        raised = only(conditions, KIND)
        assert raised.holds
        assert raised.sentence.startswith("parameter server 0 cannot persist staged waves (level applied): ")
        for part in (str(tmp_path / "state"), "No space left on device", "free disk space, or replace the disk"):
            assert part in raised.sentence

        disk.room = None
        assert state.journal._storage.log.reopen()
        state.journal._storage.log.clear_alarm()
        assert only(conditions, KIND).clearance == "parameter server 0 persists staged waves again"
        state.close()
        history.close()

    def test_a_history_that_is_cut_is_raised(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        history = History(tmp_path / "h.jsonl", host="n0", pid=1, role="parameter_server", term=1)
        shard = JobShard(shard_config(slices_of((4,)), run_dir=str(tmp_path)), history)

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as broken:
            broken.setattr(os, "write", full)
            history.publish(clock=1)
        raised = only(shard.conditions, ConditionKind.HISTORY_INCOMPLETE)
        assert raised.who == WHO
        assert f"{tmp_path / 'h.jsonl'} cannot be written (No space left on device)" in raised.sentence
        history.close()


class Job:
    """What a watch looks after."""

    def __init__(self, needs: Mapping[Path, int]) -> None:
        self.conditions = Conditions(FakeClock())
        self.needs = needs

    def disk_needs(self) -> Mapping[Path, int]:
        return self.needs

    def job_shards(self) -> list[Job]:
        return [self]


MIB = 1 << 20
RUN, STATE = Path("/runs/a"), Path("/state")


class TestDisks:
    """A disk of 1000 MiB for the runs, and another one for state."""

    def watch(self, job: Job, free: dict[Path, int]) -> DiskWatch:
        def look(folder: Path) -> Disk:
            mount = Path("/") / folder.parts[1]
            return Disk(mount, free[mount] * MIB, 1000 * MIB)

        return DiskWatch(job, look=look)

    def test_it_is_told_before_it_is_full_and_is_over_with_some_room_to_spare(self) -> None:
        job, free = Job({RUN: 100 * MIB}), {Path("/runs"): 160}
        watch = self.watch(job, free)

        def holds() -> bool:
            watch.check()
            return only(job.conditions, ConditionKind.DISK_NEARLY_FULL).holds

        assert not holds()
        free[Path("/runs")] = 149
        assert holds(), "two checkpoints of 50 MiB, and 5 % of the disk"
        assert "the disk at /runs on " in only(job.conditions, ConditionKind.DISK_NEARLY_FULL).sentence
        assert "149 MiB of 1000 MiB are free" in only(job.conditions, ConditionKind.DISK_NEARLY_FULL).sentence
        free[Path("/runs")] = 160
        assert holds(), "one more checkpoint would have it full again"
        free[Path("/runs")] = 190
        assert not holds()

    def test_each_disk_has_its_own(self) -> None:
        job, free = Job({RUN: 100 * MIB, STATE: 10 * MIB}), {Path("/runs"): 500, Path("/state"): 20}
        self.watch(job, free).check()
        states = {one.who.split(" on ")[0]: one.holds for one in job.conditions.active()}
        assert states == {"the disk at /runs": False, "the disk at /state": True}

    def test_what_is_on_one_disk_adds_up(self) -> None:
        job, free = Job({RUN: 100 * MIB, RUN / "state": 80 * MIB}), {Path("/runs"): 200}
        self.watch(job, free).check()
        (told,) = job.conditions.active()
        assert told.holds
        assert f"snapshots in {RUN} and {RUN / 'state'}" in told.sentence

    def test_of_a_large_disk_a_gibibyte_is_enough(self) -> None:
        huge = Disk(Path("/"), 0, 10_000_000 * MIB)
        assert huge.wanted_bytes(5 * MIB) == (1024 + 5) * MIB

    def test_one_that_does_not_answer_is_looked_at_again(self) -> None:
        job, fails = Job({RUN: 1}), [True]

        def look(_: Path) -> Disk:
            if fails.pop():
                raise OSError(errno.EIO, "Input/output error")
            return Disk(Path("/runs"), 0, 100)

        watch = DiskWatch(job, look=look)
        watch.check()
        assert job.conditions.active() == ()
        fails.append(False)
        watch.check()
        assert only(job.conditions, ConditionKind.DISK_NEARLY_FULL).holds

    def test_a_folder_that_is_not_there_yet_is_on_the_disk_above(self, tmp_path: Path) -> None:
        assert disk_of(tmp_path / "not" / "there").mount == disk_of(tmp_path).mount
