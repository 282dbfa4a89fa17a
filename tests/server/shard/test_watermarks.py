"""How far a virtual worker's waves are: staged, committed, durable, in answers to pushes and among the clocks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from hetpipe.checkpoint.keeper import CheckpointKeeper
from hetpipe.checkpoint.store import FolderStore
from hetpipe.decide.sync.segment import first_progress
from hetpipe.observe.history import MemoryHistory
from hetpipe.server.shard.clock_shard import ClockShard
from hetpipe.server.shard.job_storage import StateOptions
from hetpipe.server.shard.server import ShardServer
from hetpipe.values.ids import Clock, ShardIndex, VirtualWorkerIndex, Wave
from hetpipe.values.requests import Watermarks
from hetpipe.wire.calls import (
    JOIN,
    PUSH,
    REPORT_INITIALIZED,
    REPORT_STAGED,
    JoinRequest,
    ReportInitializedRequest,
    ReportStagedRequest,
)
from hetpipe.wire.server import Server, ServerConfig
from hetpipe.wire.shard_client import connect_shard
from tests.checkpoints import stage_part
from tests.polling import wait_until
from tests.server.shard.builders import (
    DATA,
    JOB,
    OneShard,
    encode,
    headers_of,
    push_header,
    requester,
    shard_config,
    slices_of,
)
from tests.storage.wal.disks import LimitedDisk

SLICES = slices_of([4])
HEADERS = headers_of(SLICES)
CONFIG = shard_config(SLICES, stages=(1, 2), staleness=0)
UPDATE = [torch.ones(4)]


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody cuts the power here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


class TestClocks:
    def test_before_the_start_nobody_has_staged_anything(self) -> None:
        told = OneShard(CONFIG).clock.snapshot()
        assert told.staged == told.durable == told.local == {0: 0, 1: 0}

    def test_a_wave_is_staged_once_every_stage_says_so(self) -> None:
        one = OneShard(CONFIG).begin()
        for wave in range(2):
            one.clock.staged(requester(0), Wave(wave), ((wave,),), segment=Clock(0))
        one.clock.staged(requester(1, 1), Wave(0), None, segment=Clock(0))
        told = one.clock.snapshot()
        assert (told.local, told.staged, told.durable) == ({0: 1, 1: 0}, {0: 2, 1: 0}, {0: 2, 1: 0})

    def test_while_a_disk_fails_only_a_checkpoint_is_durable(self) -> None:
        complete = [Clock(0)]
        clock = ClockShard(CONFIG, MemoryHistory(), newest_checkpoint=lambda: complete[0])
        one = OneShard(CONFIG)
        one.clock = clock
        one.begin()
        clock.staged(requester(0), Wave(0), ((0,),), segment=Clock(0))
        clock.acknowledge(ShardIndex(0), clock.num_records, applied=True)
        told = clock.snapshot()
        assert (told.staged, told.durable, told.applied) == ({0: 1, 1: 0}, {0: 0, 1: 0}, (0,))
        assert clock.snapshot() is told, "nothing has changed"
        complete[0] = Clock(7)
        assert clock.snapshot().durable == {0: 1, 1: 0}
        clock.acknowledge(ShardIndex(0), clock.num_records)
        assert (clock.snapshot().durable, clock.snapshot().applied) == ({0: 1, 1: 0}, ())

    def test_the_keeper_knows_the_newest_complete_checkpoint(self, tmp_path: Path) -> None:
        def keeper() -> CheckpointKeeper:
            return CheckpointKeeper(job_id=JOB, store=FolderStore(tmp_path), num_shards=0, keep=2)

        first = keeper()
        first.begin(first_progress(DATA), {VirtualWorkerIndex(0): 1})
        assert first.newest_complete is None
        assert first.report(requester(), Clock(0), [stage_part(tmp_path, 0, 0, 0)])
        assert first.newest_complete == 0
        second = keeper()
        second.begin(first_progress(DATA), {VirtualWorkerIndex(0): 1})
        assert second.newest_complete == 0


class Process:
    """A shard with a disk, behind a real server; `push` says how far virtual worker 0 is there."""

    def __init__(self, root: Path | None, disk: LimitedDisk) -> None:
        state = None if root is None else StateOptions(root=root, disk=disk)
        self.handler = ShardServer(lambda _config: MemoryHistory(), state=state)
        self.handler.recover()
        self.server = Server(ServerConfig(num_threads=4))
        self.handler.add_to(self.server)
        self.shard = connect_shard(self.server.start(), ShardIndex(0))

    def begin(self, run_dir: Path) -> None:
        config = shard_config(SLICES, stages=(1,), staleness=4, run_dir=str(run_dir))
        self.handler.configure(config)
        self.handler.calls.invoke(JOIN, JoinRequest(requester()))
        self.push(None)
        self.handler.calls.invoke(REPORT_INITIALIZED, ReportInitializedRequest(requester()))
        self.wait_published(0)

    def push(self, wave: int | None) -> tuple[bool, Watermarks]:
        reply = self.shard.upload(PUSH, push_header(requester(), wave, HEADERS), encode(UPDATE))
        return reply.duplicate, reply.marks

    def commit(self, wave: int) -> None:
        self.handler.calls.invoke(REPORT_STAGED, ReportStagedRequest(requester(), Wave(wave), ((wave,),), Clock(0)))
        self.wait_published(wave + 1)

    def wait_published(self, clock: int) -> None:
        def reached() -> bool:
            (job,) = self.handler.job_shards()
            return job.shard.facts().published == self.handler.clocks(JOB).published == clock

        wait_until(reached, timeout_seconds=10.0, what=f"clock {clock}")

    def close(self) -> None:
        self.shard.close()
        self.server.stop(grace_seconds=0.0)
        self.handler.stop()


@pytest.fixture
def disk() -> LimitedDisk:
    return LimitedDisk()


@pytest.fixture
def process(tmp_path: Path, disk: LimitedDisk) -> Iterator[Process]:
    with closing(Process(tmp_path / "state", disk)) as value:
        value.begin(tmp_path)
        yield value


def marks(staged: int, committed: int, durable: int) -> Watermarks:
    return Watermarks(Clock(staged), Clock(committed), Clock(durable))


class TestReplies:
    def test_a_push_is_answered_with_what_is_there(self, process: Process) -> None:
        assert process.push(0) == (False, marks(1, 0, 1))
        assert process.push(2) == (False, marks(1, 0, 1)), "wave 1 is missing"
        assert process.push(1) == (False, marks(3, 0, 3))
        process.commit(0)
        assert process.push(0) == (True, marks(3, 1, 3)), "of a resend, too"

    def test_while_the_disk_fails_nothing_is_durable(self, process: Process, disk: LimitedDisk) -> None:
        process.push(0)
        disk.room = 0
        assert process.push(1) == (False, marks(2, 0, 0))
        process.commit(0)
        told = process.handler.clocks(JOB)
        assert (told.local, told.staged, told.durable, told.applied) == ({0: 1}, {0: 1}, {0: 0}, (0,))

    def test_without_a_disk_nothing_ever_is(self, tmp_path: Path, disk: LimitedDisk) -> None:
        with closing(Process(None, disk)) as process:
            process.begin(tmp_path)
            assert process.push(0) == (False, marks(1, 0, 0))
            assert process.handler.clocks(JOB).applied == (0,)
