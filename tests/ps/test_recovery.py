"""Shards that are killed at any moment and started again: nothing acknowledged is lost, nothing counts twice."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hetpipe import durable, failpoints
from hetpipe.errors import Busy, ClockFreed, ClockNotPublished, StaleIncarnation, StateLost, WaveOutOfOrder
from hetpipe.observe.history import MemoryHistory
from hetpipe.ps import kept, snapshots
from hetpipe.ps.clock_shard import ClockShard
from hetpipe.ps.job_state import JobState, StateOptions
from hetpipe.ps.push_log import LoggedPush, PushLimits, push_limits
from hetpipe.ps.shard import Shard, shard_layout
from hetpipe.ps.write_ahead_log import Level
from hetpipe.spec.ids import Clock, Incarnation, ShardIndex, StageIndex, VirtualWorkerIndex, Wave
from hetpipe.spec.requests import PullHeader, Requester
from hetpipe.spec.run import ShardConfig
from hetpipe.sync.records import Record, SegmentRecord
from hetpipe.sync.shard_state import ClosedState
from hetpipe.weights.flat import BufferPool
from tests.pipeline.witness import Witness

from .builders import decode, encode, headers_of, push_header, requester, shard_config, slices_of
from .test_write_ahead_log import FakeDisk

#: Snapshots as soon as anything is behind them.
EAGER = PushLimits(worth_bytes=0, barrier_bytes=0, max_bytes=1 << 30)

#: No snapshots but those at barriers.
LAZY = PushLimits(worth_bytes=1 << 30, barrier_bytes=1 << 30, max_bytes=1 << 40)


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody cuts the power here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Process:
    """One shard's process: made anew, it goes on with what is in its folder."""

    def __init__(self, config: ShardConfig, options: StateOptions, history: MemoryHistory) -> None:
        self.state = JobState(config, options, history)
        self.shard = Shard(config, self.state.history, self.state.pushes)
        self.clock: ClockShard | None = None
        if config.shard == 0:
            self.clock = ClockShard(config, self.state.history, self.state.journal, self.state.old_decisions)
        self.is_behind = self.state.old_pushes is not None
        if self.state.old_pushes is not None:
            self.shard.recall(self.state.old_pushes)


class Cluster:
    """Shards and their decision log in one thread; `crash` drops one and makes it anew from its folder."""

    def __init__(
        self,
        folder: Path,
        *,
        num_shards: int = 2,
        limits: PushLimits = EAGER,
        history: MemoryHistory | None = None,
        **options: object,
    ) -> None:
        self.folder = folder
        self.limits = limits
        self.disks = [FakeDisk() for _ in range(num_shards)]
        sizes = options.pop("sizes", (5, 20))
        self.configs = [
            shard_config(
                slices_of(sizes, shard=index),  # type: ignore[arg-type]
                shard=index,
                num_shards=num_shards,
                run_dir=str(folder),
                **options,  # type: ignore[arg-type]
            )
            for index in range(num_shards)
        ]
        self.headers = headers_of(self.configs[0].slices)
        self.histories = [history or MemoryHistory() for _ in range(num_shards)]
        self.processes = [self.boot(index) for index in range(num_shards)]
        self.records: list[Record] = []
        #: What became of each attempt to choose a clock.
        self.held: list[str] = []
        self.switches: dict[int, int] = {}
        self.next_sample = 0
        self.next_wave = 0
        self.blocks: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}

    def boot(self, index: int) -> Process:
        options = StateOptions(root=self.folder / f"shard-{index}", limits=self.limits, disk=self.disks[index])
        return Process(self.configs[index], options, self.histories[index])

    @property
    def clock(self) -> ClockShard:
        clock = self.processes[0].clock
        assert clock is not None
        return clock

    @property
    def levels(self) -> list[Level]:
        return [process.state.level for process in self.processes]

    def crash(self, index: int) -> None:
        """As by kill -9, but that a snapshot under way comes to its end."""
        self.processes[index].state.wait_idle()
        self.processes[index] = self.boot(index)
        self.settle()

    def strike(self, victim: int | None) -> None:
        """Crash a shard, both (2), or none."""
        for index in range(len(self.processes)):
            if victim in {index, 2}:
                self.crash(index)

    def settle(self) -> None:
        """Every shard carries out what is decided."""
        done = False
        while not done:
            done = True
            for index, process in enumerate(self.processes):
                for record in self.clock.records_from(process.shard.num_records):
                    done = False
                    process.shard.follow(record)
                    if record.index == len(self.records):
                        self.records.append(record)
                if process.is_behind:
                    process.is_behind = False
                    process.shard.caught_up()
                    process.state.caught_up()
                durable = process.state.pushes.durable_records
                self.clock.acknowledge(ShardIndex(index), process.shard.num_records, durable)

    def begin(self, first: list[Tensor] | None = None) -> Cluster:
        for vw, count in self.configs[0].membership.num_stages.items():
            for stage in range(count):
                self.clock.join(requester(vw, stage), f"{vw}:{stage}")
        zeros = [torch.zeros(h.stop, dtype=getattr(torch, h.dtype)) for h in self.headers]
        for index in range(len(self.processes)):
            self.push(requester(), None, first or zeros, index)
        self.clock.initialized(requester())
        self.settle()
        return self

    def resume(self, next_wave: int) -> None:
        """What stages do after an outage: say again whatever was not answered."""
        for vw in range(2):
            self.clock.join(requester(vw), f"{vw}:0")
        self.push(requester(), None, [torch.zeros(h.stop) for h in self.headers], 0)
        self.clock.initialized(requester())
        self.settle()
        self.next_wave = next_wave
        self.next_sample = 2 * next_wave

    def push(self, who: Requester, wave: int | None, tensors: list[Tensor], index: int) -> bool:
        session = self.processes[index].shard.begin_push(push_header(who, wave, self.headers))
        if session is None:
            return True
        for chunk in encode(tensors):
            session.write(chunk)
        session.finish()
        return False

    def report(self, who: Requester, wave: int) -> None:
        if (who.vw, wave) not in self.blocks:
            self.blocks[who.vw, wave] = ((self.next_sample,),)
            self.next_sample += 1
        self.clock.staged(who, Wave(wave), self.blocks[who.vw, wave], segment=self.segment)
        self.settle()

    def hold(self, vw: int, switch: int) -> None:
        """Choose a clock, as often as it can be had, and pull it."""
        try:
            clock, _ = self.clock.hold(requester(vw), switch)
            self.switches[vw] = switch
            weights = [float(self.pull(clock, index, requester(vw))[0][0]) for index in range(len(self.processes))]
            self.held.append(f"{vw} at {switch}: {clock}, {weights}")
        except (ClockNotPublished, ClockFreed, WaveOutOfOrder) as error:
            self.held.append(f"{vw} at {switch}: {type(error).__name__}")

    def hold_again(self) -> None:
        """The same answers as before."""
        for vw, switch in self.switches.items():
            self.hold(vw, switch)

    @property
    def segment(self) -> Clock:
        starts = (record.start for record in reversed(self.records) if isinstance(record, SegmentRecord))
        return next(starts, Clock(0))

    def pull(self, clock: int, index: int, who: Requester | None = None) -> list[Tensor]:
        header = PullHeader(who or requester(), Clock(clock), self.headers)
        with self.processes[index].shard.pull(header) as chunks:
            return decode(list(chunks), self.headers)

    def lines(self, index: int) -> Counter[str]:
        """The history, without pulls."""
        return Counter(json.dumps(entry) for entry in self.histories[index].events if entry["event"] != "pull")


Crashes = dict[int, int]
"""Step → which shard is killed before it; 2: both."""


def train(cluster: Cluster, crashes: Crashes, *, num_waves: int = 8) -> Cluster:
    """Two virtual workers push random waves, and pass a barrier; the second one is a wave behind.

    So the clock that the first one holds is older than the newest one that is published.
    """
    generator = torch.Generator().manual_seed(7)
    steps = iter(range(10_000))

    def tick() -> None:
        cluster.strike(crashes.get(next(steps)))

    def draw() -> list[Tensor]:
        return [torch.randn(h.stop, generator=generator) for h in cluster.headers]

    def compute(vw: int, wave: int) -> None:
        for index, update in enumerate([draw() for _ in cluster.processes]):
            tick()
            cluster.push(requester(vw), wave, update, index)
            tick()
            assert cluster.push(requester(vw), wave, update, index), "a resend changes nothing"
        for _ in range(2):
            tick()
            cluster.report(requester(vw), wave)
            cluster.hold(vw, wave + 2)
        tick()
        cluster.hold_again()

    tick()
    cluster.begin(draw())
    barrier = 0
    for wave in range(num_waves):
        turns = [(0, wave), *([(1, wave - 1)] if wave else [])]
        for vw, each in reversed(turns) if wave == barrier else turns:
            compute(vw, each)
        barrier = barrier or cluster.clock.request_barrier("checkpoint")
    compute(1, num_waves - 1)
    tick()
    return cluster


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return train(Cluster(tmp_path_factory.mktemp("undisturbed"), staleness=2), {})


class TestKilledAtAnyMoment:
    @pytest.mark.matrix
    @given(st.dictionaries(st.integers(0, 113), st.integers(0, 2), max_size=6), st.sampled_from([EAGER, LAZY]))
    @settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_everything_is_as_without(
        self, undisturbed: Cluster, tmp_path_factory: pytest.TempPathFactory, crashes: Crashes, limits: PushLimits
    ) -> None:
        cluster = train(Cluster(tmp_path_factory.mktemp("run"), staleness=2, limits=limits), crashes)

        assert cluster.records == undisturbed.records
        assert cluster.held == undisturbed.held
        assert any(isinstance(record, SegmentRecord) and record.start for record in cluster.records), "a barrier"
        for index in range(2):
            for found, expected in zip(cluster.pull(8, index), undisturbed.pull(8, index), strict=True):
                assert torch.equal(found, expected)
            assert cluster.lines(index) == undisturbed.lines(index)

    @pytest.mark.matrix
    @pytest.mark.parametrize("limits", [EAGER, LAZY])
    def test_again_and_again(self, tmp_path: Path, limits: PushLimits) -> None:
        cluster, expected = (
            train(Cluster(tmp_path / name, staleness=2, limits=limits), crashes)
            for name, crashes in (("killed", dict.fromkeys(range(0, 200, 5), 2)), ("undisturbed", {}))
        )

        assert cluster.records == expected.records
        assert cluster.held == expected.held
        assert all(cluster.lines(index) == expected.lines(index) for index in range(2))
        assert torch.equal(cluster.pull(8, 1)[1], expected.pull(8, 1)[1])

    def test_witness_weights(self, tmp_path: Path) -> None:
        witness = Witness(num_vws=2, num_waves=4, num_slices=2)
        sizes = [witness.slice_elements] * 2
        cluster = Cluster(tmp_path, num_shards=1, sizes=sizes).begin()
        for wave in range(4):
            for vw in range(2):
                update = [witness.update(vw, wave, index) for index in range(2)]
                cluster.push(requester(vw), wave, update, 0)
                cluster.crash(0)
                assert cluster.push(requester(vw), wave, update, 0)
                cluster.report(requester(vw), wave)
                cluster.crash(0)

        assert witness.faults(cluster.pull(4, 0)) == []

    def test_an_evicted_one_stays_evicted_and_what_it_committed_stays(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path, num_shards=1, staleness=2).begin()
        cluster.push(requester(1), 0, ones(2.0), 0)
        cluster.report(requester(1), 0)
        cluster.push(requester(1), 1, ones(100.0), 0)
        cluster.clock.evict(VirtualWorkerIndex(1), Incarnation(0))
        cluster.settle()
        cluster.crash(0)
        with pytest.raises(StaleIncarnation):
            cluster.push(requester(1), 1, ones(100.0), 0)
        cluster.push(requester(0), 0, ones(3.0), 0)
        cluster.report(requester(0), 0)

        assert torch.equal(cluster.pull(1, 0)[0], ones(5.0)[0])
        assert len(cluster.histories[0].of("evict")) == 1

    @pytest.mark.parametrize("limits", [EAGER, LAZY])
    def test_a_new_life_of_a_virtual_worker(self, tmp_path: Path, limits: PushLimits) -> None:
        def live(name: str, victim: int | None) -> Cluster:
            cluster = Cluster(tmp_path / name, staleness=1, limits=limits).begin(ones())
            later = requester(1, incarnation=1)

            def wave(who: Requester, number: int) -> None:
                for index in range(2):
                    cluster.push(who, number, ones(10.0 * who.vw + number), index)
                    cluster.strike(victim)
                cluster.report(who, number)
                cluster.strike(victim)

            wave(requester(0), 0)
            wave(requester(1), 0)
            cluster.push(requester(1), 1, ones(1000.0), 0)
            cluster.clock.evict(VirtualWorkerIndex(1), Incarnation(0))
            cluster.strike(victim)
            cluster.clock.admit(VirtualWorkerIndex(1), Incarnation(1), 1)
            cluster.strike(victim)
            cluster.clock.join(later)
            cluster.settle()
            joined = cluster.clock.snapshot().barrier
            for number in range(1, joined):
                wave(requester(0), number)
            for number in range(joined, joined + 2):
                wave(requester(0), number)
                wave(later, number)
            return cluster

        killed, expected = live("killed", 2), live("undisturbed", None)
        newest = expected.clock.snapshot().published
        assert killed.records == expected.records
        for index in range(2):
            assert torch.equal(killed.pull(newest, index)[1], expected.pull(newest, index)[1])
            assert killed.lines(index) == expected.lines(index)

    def test_a_stage_still_hears_where_its_neighbour_is(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path, num_shards=1, stages=(2, 2))
        for _ in range(3):
            cluster.clock.join(requester(1, 0), "there")
        cluster.crash(0)

        assert cluster.clock.join(requester(1, 1)).link == "there"


class _AtOnce(threading.Thread):
    """Work that is done when it is begun."""

    def start(self) -> None:
        self.run()

    def is_alive(self) -> bool:
        return False

    def join(self, timeout: float | None = None) -> None:
        """It is over."""


class TestKilledWhereItHurts:
    """What is on the disk at every failpoint of pushes and snapshots is enough to go on from."""

    @pytest.mark.matrix
    def test_photographs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(threading, "Thread", _AtOnce)
        cluster = Cluster(tmp_path / "run", num_shards=1)
        taken: list[tuple[str, int, Path, MemoryHistory]] = []

        def photograph(name: str) -> None:
            if name.startswith(("snapshot.", "push.")):
                copy = tmp_path / f"photograph-{len(taken)}"
                shutil.copytree(tmp_path / "run", copy)
                history = MemoryHistory()
                history._events.extend(cluster.histories[0].events)
                taken.append((name, cluster.next_wave, copy, history))

        monkeypatch.setattr(failpoints, "reach", photograph)
        for module in (durable, kept, snapshots):
            monkeypatch.setattr(module, "reach", photograph)
        cluster.begin()
        waves(cluster, 3)
        monkeypatch.undo()

        assert {name for name, *_ in taken} == {
            *(f"snapshot.{place}" for place in ("temp_open", "half_written", "before_fsync", "before_rename")),
            "snapshot.before_directory_fsync",
            "snapshot.old_deleted",
            "push.after_durable",
            "push.after_apply",
        }
        for name, next_wave, copy, history in taken:
            again = Cluster(copy, num_shards=1, history=history)
            again.settle()
            again.resume(next_wave)
            waves(again, 3 - next_wave)
            assert torch.equal(again.pull(3, 0)[0], ones(6.0)[0]), name
            assert again.lines(0) == cluster.lines(0), name


def waves(cluster: Cluster, count: int) -> None:
    """Waves of ones of two virtual workers, and as often as they like."""
    for _ in range(count):
        for vw in range(2):
            cluster.push(requester(vw), cluster.next_wave, ones(), 0)
            cluster.report(requester(vw), cluster.next_wave)
        cluster.next_wave += 1


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
        monkeypatch.setattr(threading, "Thread", _AtOnce)
        config, disk = shard_config(slices_of((4,))), FakeDisk()
        state = JobState(config, StateOptions(root=tmp_path, disk=disk, limits=EAGER), MemoryHistory())
        weights = BufferPool(shard_layout(config), torch.device("cpu")).take()
        levels = []
        disk.room = 0
        for clock in range(6):
            state.pushes.completed(Clock(clock))
            push = LoggedPush(VirtualWorkerIndex(0), Incarnation(0), StageIndex(0), Wave(clock + 2), clock, (0,))
            state.pushes.keep(push, [b"bytes"], crc=0)
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


def ones(scale: float = 1.0) -> list[Tensor]:
    return [torch.full((size,), scale) for size in (5, 20)]
