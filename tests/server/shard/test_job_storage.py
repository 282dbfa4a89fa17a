"""What a shard keeps on its disk: how much, for whom, and what happens when the disk fails or is full."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from hetpipe.decide.sync.shard_state import ClosedState
from hetpipe.errors import Busy, StateLost
from hetpipe.observe.history import MemoryHistory
from hetpipe.server.shard import journal
from hetpipe.server.shard.job_storage import AckLevel, JobStorage, StateOptions
from hetpipe.server.shard.push_log import LoggedPush, PushLimits, push_limits
from hetpipe.server.shard.shard import shard_layout
from hetpipe.storage.wal import write_snapshot
from hetpipe.values.ids import Clock, Incarnation, StageIndex, VirtualWorkerIndex, Wave
from hetpipe.weights.flat import BufferPool
from tests.server.shard.builders import requester, shard_config, slices_of
from tests.server.shard.crashes import EAGER, LAZY, AtOnce, Cluster, ones, train, waves
from tests.storage.wal.disks import LimitedDisk
from tests.support.fake_clock import FakeClock


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody cuts the power here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


class TestWhatIsKept:
    def test_a_log_stays_short(self, tmp_path: Path) -> None:
        cluster = train(Cluster(tmp_path, staleness=2), {}, num_waves=30)
        for process in cluster.processes:
            process.state.wait_idle()
        pushes = tmp_path / "shard-1" / "job@1" / "pushes"

        assert len(list(pushes.glob("snapshot-*"))) == 1
        assert len(list(pushes.glob("*.log"))) <= 4

    def test_events_that_earlier_processes_left_are_a_reason_for_a_snapshot(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Killed again and again before it has many of its own, the log would grow for ever."""
        monkeypatch.setattr(journal, "_WORTH_BYTES", 3_000)
        cluster = Cluster(tmp_path, num_shards=1).begin()
        sizes = []
        for _ in range(12):
            waves(cluster, 1)
            cluster.crash(0)
            cluster.processes[0].state.wait_idle()
            sizes.append(sum(path.stat().st_size for path in (tmp_path / "shard-0/job@1/decisions").glob("*.log")))

        assert max(sizes) < 2 * 3_000

    def test_a_snapshot_that_is_torn_is_lost_state(self, tmp_path: Path) -> None:
        cluster = train(Cluster(tmp_path, staleness=2), {})
        cluster.processes[1].state.wait_idle()
        (snapshot,) = (tmp_path / "shard-1" / "job@1" / "pushes").glob("snapshot-*")
        snapshot.write_bytes(snapshot.read_bytes()[:-1])
        with pytest.raises(StateLost, match=r"is not a complete snapshot.*lacks the records 0 to"):
            cluster.boot(1)

    def test_a_torn_snapshot_is_passed_over_while_the_log_is_whole(self, tmp_path: Path) -> None:
        cluster = train(Cluster(tmp_path, staleness=2, limits=LAZY), {})
        pushes = tmp_path / "shard-1" / "job@1" / "pushes"
        (pushes / "snapshot-0000000000000005").write_bytes(b"torn")
        (pushes / "snapshot-0000000000000006.tmp").write_bytes(b"never finished")
        before = cluster.pull(8, 1)
        cluster.crash(1)

        assert torch.equal(cluster.pull(8, 1)[0], before[0])

    def test_state_of_another_partition_is_refused(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path, num_shards=1).begin()
        cluster.configs[0] = Cluster(tmp_path / "other", num_shards=1, sizes=(5, 21)).configs[0]
        with pytest.raises(StateLost, match="of another model or partition"):
            cluster.boot(0)

    def test_a_later_term_begins_anew_and_deletes_the_old_one(self, tmp_path: Path) -> None:
        Cluster(tmp_path, num_shards=1).begin().processes[0].state.wait_idle()
        later = Cluster(tmp_path, num_shards=1, term=2)

        assert later.processes[0].state.recovered_pushes is None
        assert [path.name for path in (tmp_path / "shard-0").iterdir()] == ["job@2"]

    def test_what_was_never_finished_is_no_state(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path, num_shards=1).begin()
        (tmp_path / "shard-0" / "job@1" / "job").unlink()

        assert cluster.boot(0).state.recovered_pushes is None


#: A shard of 70 KB.
_SMALL = 17_500


class TestHowMuchIsKept:
    """The figures of `docs/files.md`, "How much a shard keeps"."""

    @pytest.mark.parametrize("staleness", [0, 1])
    def test_a_small_shard_keeps_a_small_log_and_is_back_after_few_records(
        self, tmp_path: Path, staleness: int
    ) -> None:
        options: dict[str, Any] = {"staleness": staleness, "limits": None, "sizes": (_SMALL,), "clock": FakeClock()}
        cluster = Cluster(tmp_path, num_shards=1, **options).begin()
        most = [0, 0]
        for _ in range(300):
            _wave(cluster)
            folder = tmp_path / "shard-0" / "job@1"
            for index, logs in enumerate((folder / "pushes", folder / "decisions")):
                most[index] = max(most[index], sum(path.stat().st_size for path in logs.glob("*.log")))
        cluster.crash(0)
        old = cluster.processes[0].state.recovered_pushes

        assert most[0] < 1_000_000
        assert most[1] < 600_000
        assert old is not None
        assert len(old.pushes) < 20

    def test_a_large_shard_is_snapshotted_as_seldom_as_ever(self) -> None:
        limits = push_limits(100_000_000, num_members=2, staleness=0)

        assert limits.worth_bytes == limits.cheap_bytes == 3 * 100_000_000 + (64 << 20)
        assert limits.barrier_bytes == 100_000_000 + (16 << 20)

    def test_on_a_slow_disk_the_log_grows_instead_of_the_share_of_time_that_snapshots_take(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each takes two seconds and a wave one, so there is no more than one snapshot of a log in six waves."""
        monkeypatch.setattr(threading, "Thread", AtOnce)
        time, taken = FakeClock(), Counter[str]()

        def slow_write(path: Path, *arguments: Any, **options: Any) -> None:
            taken[path.parent.name] += 1
            time.advance(2.0)
            write_snapshot(path, *arguments, **options)

        monkeypatch.setattr("hetpipe.storage.wal.snapshotted_log.write_snapshot", slow_write)
        cluster = Cluster(tmp_path, num_shards=1, limits=None, sizes=(_SMALL,), clock=time).begin()
        for _ in range(200):
            _wave(cluster)
            time.advance(1.0)

        assert 3 <= max(taken.values()) <= 200 / 6 + 1

    def test_whatever_a_snapshot_costs_the_log_has_an_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The disk never seems quick enough; then the limits hold that were there before."""
        monkeypatch.setattr("hetpipe.storage.wal.SnapshottedLog.is_cheap", False)
        monkeypatch.setattr(threading, "Thread", AtOnce)
        limits = PushLimits(worth_bytes=10 * 4 * _SMALL, cheap_bytes=0, barrier_bytes=0, max_bytes=1 << 30)
        cluster = Cluster(tmp_path, num_shards=1, limits=limits, sizes=(_SMALL,)).begin()
        sizes = []
        for _ in range(40):
            _wave(cluster)
            sizes.append(cluster.processes[0].state.pushes.num_bytes)

        assert 10 * 4 * _SMALL < max(sizes) < 25 * 4 * _SMALL


def _wave(cluster: Cluster) -> None:
    """One of both virtual workers; snapshots that it leads to are taken at its end."""
    for vw in range(2):
        cluster.push(requester(vw), cluster.next_wave, [torch.ones(_SMALL)], 0)
        cluster.report(requester(vw), cluster.next_wave)
    cluster.next_wave += 1
    cluster.processes[0].state.wait_idle()


class TestSums:
    def test_a_push_is_summed_once_and_read_back_with_the_sums_of_the_wire(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Several chunks, and slices that do not fill their slots."""
        cluster = Cluster(tmp_path, num_shards=1, limits=LAZY, sizes=(5, 300_001)).begin()

        def refuse(_: object) -> NoReturn:
            raise AssertionError("its sums are known from the wire")

        update = [torch.arange(size, dtype=torch.float32) for size in (5, 300_001)]
        with monkeypatch.context() as patch:
            patch.setattr("hetpipe.storage.wal.record.checksums", lambda payload: refuse(payload) if payload else ())
            cluster.push(requester(), 0, update, 0)
        cluster.crash(0)
        cluster.push(requester(1), 0, update, 0)
        for vw in range(2):
            cluster.report(requester(vw), 0)

        assert all(torch.equal(found, 2 * part) for found, part in zip(cluster.pull(1, 0), update, strict=True))


class TestFailingDisk:
    def test_the_run_goes_on_says_so_and_would_not_be_resumed_from_what_is_there(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path, num_shards=2, staleness=2)
        cluster.disks[1].room = 1000
        train(cluster, {})

        assert cluster.levels == [AckLevel.DURABLE, AckLevel.APPLIED]
        cluster.processes[1].state.wait_idle()
        with pytest.raises(StateLost, match="lacks waves pushed while its disk failed"):
            cluster.boot(1)

    def test_with_room_again_the_next_barriers_make_it_durable(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path, num_shards=1, staleness=0)
        cluster.begin()
        cluster.disks[0].room = 0
        waves(cluster, 2)
        assert cluster.levels == [AckLevel.APPLIED]
        cluster.disks[0].room = None
        for _ in range(2):
            cluster.clock.request_barrier("checkpoint")
            waves(cluster, 4)
        cluster.processes[0].state.wait_idle()
        assert cluster.levels == [AckLevel.DURABLE]
        before = cluster.pull(cluster.next_wave, 0)
        cluster.crash(0)

        assert torch.equal(cluster.pull(cluster.next_wave, 0)[0], before[0])

    def test_it_is_not_durable_before_nothing_that_is_missing_is_needed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(threading, "Thread", AtOnce)
        config, disk = shard_config(slices_of((4,))), LimitedDisk()
        state = JobStorage(config, StateOptions(root=tmp_path, disk=disk, limits=EAGER), MemoryHistory())
        weights = BufferPool(shard_layout(config), torch.device("cpu")).take()
        levels = []
        disk.room = 0
        for clock in range(6):
            state.pushes.note_complete(Clock(clock))
            push = LoggedPush(VirtualWorkerIndex(0), Incarnation(0), StageIndex(0), Wave(clock + 2), clock, (0,))
            state.pushes.append(push, [b"bytes"], sums=None)
            disk.room = None
            oldest = closed(clock), weights
            state.pushes.consider_snapshot(Clock(clock), lambda: oldest, lambda _: None, at_barrier=True)  # noqa: B023
            levels.append(state.level)

        assert levels == [AckLevel.APPLIED] * 3 + [AckLevel.DURABLE] * 3, "wave 2 is missing, and part of clock 3"

    def test_a_job_that_could_not_be_written_down_is_not_promised_to_be_found_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The disk had room for the beginnings of the logs, but not for this."""
        config, options = shard_config(slices_of((4,))), StateOptions(root=tmp_path)

        def full(*_: object, **__: object) -> NoReturn:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("hetpipe.server.shard.job_storage.write_snapshot", full)
            state = JobStorage(config, options, MemoryHistory())
            state.try_again()
        levels = [state.level]
        state.try_again()
        levels.append(state.level)
        state.close()

        assert levels == [AckLevel.APPLIED, AckLevel.DURABLE]
        assert JobStorage(config, options, MemoryHistory()).recovered_pushes is not None

    def test_a_disk_that_fails_again_before_it_is_durable_is_not_taken_for_whole(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With `fsync`: what was written in between could not be forced to disk, and has a gap behind it."""
        monkeypatch.setattr(threading, "Thread", AtOnce)
        config, disk = shard_config(slices_of((4,))), LimitedDisk()
        options = StateOptions(root=tmp_path, disk=disk, limits=EAGER, fsync=True)
        state = JobStorage(config, options, MemoryHistory())
        weights = BufferPool(shard_layout(config), torch.device("cpu")).take()

        def step(clock: int, *, syncs: bool) -> AckLevel:
            state.pushes.note_complete(Clock(clock))
            disk.syncs = syncs
            push = LoggedPush(VirtualWorkerIndex(0), Incarnation(0), StageIndex(0), Wave(clock), clock, (0,))
            state.pushes.append(push, [b"bytes"], sums=None)
            disk.syncs = True
            oldest = closed(clock), weights
            state.pushes.consider_snapshot(Clock(clock), lambda: oldest, lambda _: None, at_barrier=True)
            return state.level

        levels = [step(clock, syncs=clock not in {0, 1}) for clock in range(4)]
        assert levels == [AckLevel.APPLIED, AckLevel.APPLIED, AckLevel.DURABLE, AckLevel.DURABLE]
        state.close()

        assert JobStorage(config, options, MemoryHistory()).recovered_pushes is not None

    def test_a_disk_that_lets_nothing_go_does_not_keep_the_next_term_from_beginning(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As a file system that is read-only after an error; what cannot be written is no promise then."""
        Cluster(tmp_path, num_shards=1).begin()

        def fail(path: Path, **_: object) -> NoReturn:
            raise OSError(errno.EROFS, "Read-only file system", str(path))

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", fail)
            later = Cluster(tmp_path, num_shards=1, term=2)

        assert later.processes[0].state.recovered_pushes is None

    def test_while_it_fails_nothing_is_remembered_for_ever(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path, num_shards=1)
        cluster.disks[0].room = 1000
        cluster.begin()
        waves(cluster, 20)
        pushes = cluster.processes[0].state.pushes

        assert cluster.levels == [AckLevel.APPLIED]
        assert (len(pushes._waves), len(pushes._completed_at)) <= (2, 2)


def closed(clock: int) -> ClosedState:
    return ClosedState(
        built=Clock(clock),
        followed=clock,
        workers={},
        lives={},
        order=(),
        num_members=1,
        barrier=Clock(100),
        published=Clock(clock),
        committed=(),
    )


class TestBusy:
    def test_a_full_log_takes_what_the_next_clock_needs_and_nothing_else(self, tmp_path: Path) -> None:
        small = PushLimits(worth_bytes=1 << 30, cheap_bytes=1 << 30, barrier_bytes=1 << 30, max_bytes=1)
        cluster = Cluster(tmp_path, num_shards=1, staleness=1, limits=small).begin()
        cluster.push(requester(0), 0, ones(), 0)
        cluster.report(requester(0), 0)
        with pytest.raises(Busy, match="its limit is 1"):
            cluster.push(requester(0), 1, ones(), 0)
        cluster.push(requester(1), 0, ones(), 0)
        cluster.report(requester(1), 0)

        assert not cluster.push(requester(0), 1, ones(), 0)

    def test_until_it_has_caught_up_a_shard_asks_for_patience(self, tmp_path: Path) -> None:
        cluster = train(Cluster(tmp_path, staleness=2), {})
        cluster.processes[1].state.wait_idle()
        cluster.processes[1] = cluster.boot(1)
        with pytest.raises(Busy, match="shard 1 of job job was restarted"):
            cluster.pull(8, 1)
        with pytest.raises(Busy):
            cluster.push(requester(), 6, ones(), 1)
        cluster.settle()

        cluster.pull(8, 1)

    def test_the_room_follows_the_virtual_workers(self, tmp_path: Path) -> None:
        """Also after a restart: who was added later may be as far ahead as the others."""
        cluster = Cluster(tmp_path, num_shards=1, staleness=2, limits=None).begin()
        newcomer = requester(2)
        rooms = [cluster.processes[0].state.pushes.max_bytes]
        cluster.clock.admit(newcomer.vw, newcomer.incarnation, 1)
        cluster.clock.join(newcomer)
        waves(cluster, 5)
        rooms.append(cluster.processes[0].state.pushes.max_bytes)
        cluster.crash(0)
        rooms.append(cluster.processes[0].state.pushes.max_bytes)
        num_bytes = cluster.processes[0].shard.layout.num_bytes
        limits = [push_limits(num_bytes, num_members=count, staleness=2) for count in (2, 3, 3)]

        assert rooms == [each.max_bytes for each in limits]

    def test_there_is_room_for_all_that_may_be_staged(self) -> None:
        limits = push_limits(1000, num_members=4, staleness=2, floor=0)
        assert limits.max_bytes >= 4 * (2 + 3) * 1000 + limits.worth_bytes
        assert push_limits(1000, num_members=4, staleness=None).max_bytes > limits.max_bytes
