"""What a shard keeps on its disk: how much, for whom, and what happens when the disk fails or is full."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from hetpipe.errors import Busy, StateLost
from hetpipe.observe.history import MemoryHistory
from hetpipe.ps.job_state import JobState, StateOptions
from hetpipe.ps.push_log import LoggedPush, PushLimits, push_limits
from hetpipe.ps.shard import shard_layout
from hetpipe.ps.write_ahead_log import Level
from hetpipe.spec.ids import Clock, Incarnation, StageIndex, VirtualWorkerIndex, Wave
from hetpipe.sync.shard_state import ClosedState
from hetpipe.weights.flat import BufferPool

from .builders import requester, shard_config, slices_of
from .crashes import EAGER, LAZY, AtOnce, Cluster, ones, train, waves
from .test_write_ahead_log import FakeDisk


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

    def test_a_snapshot_that_is_torn_is_lost_state(self, tmp_path: Path) -> None:
        cluster = train(Cluster(tmp_path, staleness=2), {})
        cluster.processes[1].state.wait_idle()
        (snapshot,) = (tmp_path / "shard-1" / "job@1" / "pushes").glob("snapshot-*")
        snapshot.write_bytes(snapshot.read_bytes()[:-1])
        with pytest.raises(StateLost, match=r"is no whole snapshot.*lacks the records 0 to"):
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
        Cluster(tmp_path, num_shards=1).begin()
        later = Cluster(tmp_path, num_shards=1, term=2)

        assert later.processes[0].state.old_pushes is None
        assert [path.name for path in (tmp_path / "shard-0").iterdir()] == ["job@2"]

    def test_what_was_never_finished_is_no_state(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path, num_shards=1).begin()
        (tmp_path / "shard-0" / "job@1" / "job").unlink()

        assert cluster.boot(0).state.old_pushes is None


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
            patch.setattr("hetpipe.ps.frames.checksums", lambda payload: refuse(payload) if payload else ())
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

        assert cluster.levels == [Level.DURABLE, Level.APPLIED]
        cluster.processes[1].state.wait_idle()
        with pytest.raises(StateLost, match="lacks what was pushed while its disk failed"):
            cluster.boot(1)

    def test_with_room_again_the_next_barriers_make_it_durable(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path, num_shards=1, staleness=0)
        cluster.begin()
        cluster.disks[0].room = 0
        waves(cluster, 2)
        assert cluster.levels == [Level.APPLIED]
        cluster.disks[0].room = None
        for _ in range(2):
            cluster.clock.request_barrier("checkpoint")
            waves(cluster, 4)
        cluster.processes[0].state.wait_idle()
        assert cluster.levels == [Level.DURABLE]
        before = cluster.pull(cluster.next_wave, 0)
        cluster.crash(0)

        assert torch.equal(cluster.pull(cluster.next_wave, 0)[0], before[0])

    def test_it_is_not_durable_before_nothing_that_is_missing_is_needed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(threading, "Thread", AtOnce)
        config, disk = shard_config(slices_of((4,))), FakeDisk()
        state = JobState(config, StateOptions(root=tmp_path, disk=disk, limits=EAGER), MemoryHistory())
        weights = BufferPool(shard_layout(config), torch.device("cpu")).take()
        levels = []
        disk.room = 0
        for clock in range(6):
            state.pushes.completed(Clock(clock))
            push = LoggedPush(VirtualWorkerIndex(0), Incarnation(0), StageIndex(0), Wave(clock + 2), clock, (0,))
            state.pushes.keep(push, [b"bytes"], sums=None)
            disk.room = None
            oldest = closed(clock), weights
            state.pushes.consider_snapshot(Clock(clock), lambda: oldest, lambda _: None, at_barrier=True)  # noqa: B023
            levels.append(state.level)

        assert levels == [Level.APPLIED] * 3 + [Level.DURABLE] * 3, "wave 2 is missing, and part of clock 3"


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
        small = PushLimits(worth_bytes=1 << 30, barrier_bytes=1 << 30, max_bytes=1)
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

    def test_there_is_room_for_all_that_may_be_staged(self) -> None:
        limits = push_limits(1000, num_members=4, staleness=2, floor=0)
        assert limits.max_bytes >= 4 * (2 + 3) * 1000 + limits.worth_bytes
        assert push_limits(1000, num_members=4, staleness=None).max_bytes > limits.max_bytes
