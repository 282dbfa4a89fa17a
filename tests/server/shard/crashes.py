"""Shards whose process can be dropped at any moment and made anew from its folder."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.clock import Clock as TimeSource
from hetpipe.decide.sync.records import Record, SegmentRecord
from hetpipe.errors import ClockFreed, ClockNotPublished, WaveOutOfOrder
from hetpipe.observe.history import MemoryHistory
from hetpipe.server.shard.clock_shard import ClockShard
from hetpipe.server.shard.job_storage import AckLevel, JobStorage, StateOptions
from hetpipe.server.shard.push_log import PushLimits
from hetpipe.server.shard.shard import Shard
from hetpipe.values.ids import Clock, ShardIndex, Wave
from hetpipe.values.requests import PullHeader, Requester, Watermarks
from hetpipe.values.shard_config import ShardConfig
from tests.server.shard.builders import decode, encode, headers_of, push_header, requester, shard_config, slices_of
from tests.storage.wal.disks import LimitedDisk

#: Snapshots as soon as anything is behind them.
EAGER = PushLimits(worth_bytes=0, cheap_bytes=0, barrier_bytes=0, max_bytes=1 << 30)

#: No snapshots but those at barriers.
LAZY = PushLimits(worth_bytes=1 << 30, cheap_bytes=1 << 30, barrier_bytes=1 << 30, max_bytes=1 << 40)


class Process:
    """One shard's process: made anew, it goes on with what is in its folder."""

    def __init__(self, config: ShardConfig, options: StateOptions, history: MemoryHistory) -> None:
        self.state = JobStorage(config, options, history)
        self.shard = Shard(config, self.state.history, self.state.pushes)
        self.clock: ClockShard | None = None
        if config.shard == 0:
            self.clock = ClockShard(config, self.state.history, self.state.journal, self.state.recovered_decisions)
        self.is_behind = self.state.recovered_pushes is not None
        if self.state.recovered_pushes is not None:
            self.shard.restore(self.state.recovered_pushes)


class Cluster:
    """Shards and their decision log in one thread; `crash` drops one and makes it anew from its folder."""

    def __init__(
        self,
        folder: Path,
        *,
        num_shards: int = 2,
        limits: PushLimits | None = EAGER,
        history: MemoryHistory | None = None,
        clock: TimeSource = SYSTEM_CLOCK,
        **options: object,
    ) -> None:
        self.folder = folder
        self.limits = limits
        self.time = clock
        self.disks = [LimitedDisk() for _ in range(num_shards)]
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
        root = self.folder / f"shard-{index}"
        options = StateOptions(root=root, limits=self.limits, disk=self.disks[index], clock=self.time)
        return Process(self.configs[index], options, self.histories[index])

    @property
    def clock(self) -> ClockShard:
        clock = self.processes[0].clock
        assert clock is not None
        return clock

    @property
    def levels(self) -> list[AckLevel]:
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
        if isinstance(session, Watermarks):
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
            clock, *_ = self.clock.hold(requester(vw), switch)
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
            return decode(chunks, self.headers)

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


class AtOnce(threading.Thread):
    """Work that is done when it is begun."""

    def start(self) -> None:
        self.run()

    def is_alive(self) -> bool:
        return False

    def join(self, timeout: float | None = None) -> None:
        """It is over."""


def waves(cluster: Cluster, count: int) -> None:
    """Waves of ones of two virtual workers, and as often as they like."""
    for _ in range(count):
        for vw in range(2):
            cluster.push(requester(vw), cluster.next_wave, ones(), 0)
            cluster.report(requester(vw), cluster.next_wave)
        cluster.next_wave += 1


def ones(scale: float = 1.0) -> list[Tensor]:
    return [torch.full((size,), scale) for size in (5, 20)]
