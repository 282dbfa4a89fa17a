"""A clock shard whose virtual worker leaves: what it says of it, and whom its checkpoint waits for."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from hetpipe.checkpoint.manifest import read_complete
from hetpipe.errors import ClockFreed, ClockNotPublished, StaleIncarnation
from hetpipe.observe.history import MemoryHistory
from hetpipe.observe.timeline import NullTimeline
from hetpipe.pipeline.synchroniser import SyncListener
from hetpipe.server.shard.client import ShardClient
from hetpipe.server.shard.in_process import clock_calls, tensor_calls
from hetpipe.server.shard.job_shard import JobShard
from hetpipe.server.shard.job_storage import JobStorage, StateOptions
from hetpipe.values.ids import Clock, Incarnation, VirtualWorkerIndex, Wave
from hetpipe.values.requests import PullHeader
from hetpipe.weights.flat import BufferPool, FlatBuffer, FlatLayout
from hetpipe.wire.call import Calls, Chunk
from hetpipe.wire.calls import (
    JOIN,
    PUSH,
    REPORT_CHECKPOINT,
    REPORT_INITIALIZED,
    REPORT_STAGED,
    JoinRequest,
    ReportCheckpointRequest,
    ReportInitializedRequest,
    ReportStagedRequest,
)
from tests.checkpoints import stage_part
from tests.polling import wait_until
from tests.server.shard.builders import encode, headers_of, push_header, requester, shard_config, slices_of
from tests.support.fake_clock import FakeClock
from tests.support.method_calls import MethodCalls

SECONDS = 20.0
LEAVER = VirtualWorkerIndex(1)
LIFE = Incarnation(0)


class Server:
    """One shard of a job of two virtual workers, the second of which leaves."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.config = shard_config(slices_of([4]), stages=(1, 1), run_dir=str(run_dir))
        self.start()

    def start(self) -> None:
        self.history = MemoryHistory()
        self.shard = JobShard(self.config, self.history, JobStorage(self.config, StateOptions(), self.history))
        self.shard.start(None)
        self.clock = clock_calls(self.shard)

    def push(self, vw: int, wave: int | None) -> None:
        header = push_header(requester(vw), wave, headers_of(self.config.slices))
        tensor_calls(self.shard).upload(PUSH, header, encode([torch.ones(4)]))

    def leave(self) -> Clock:
        """The run begins, and goes on to the barrier at which the second one leaves; its clock."""
        log = self.shard.clock_shard
        for vw in (0, 1):
            self.clock.invoke(JOIN, JoinRequest(requester(vw)))
        self.push(0, None)
        self.clock.invoke(REPORT_INITIALIZED, ReportInitializedRequest(requester(0)))
        wait_until(lambda: log.passed()[0] is not None, timeout_seconds=SECONDS, what="start")
        log.drain(LEAVER, LIFE)
        barrier = log.snapshot().barrier
        for wave in range(barrier):
            for vw in (0, 1):
                self.push(vw, wave)
                self.clock.invoke(
                    REPORT_STAGED, ReportStagedRequest(requester(vw), Wave(wave), ((2 * wave + vw,),), Clock(0))
                )
        wait_until(lambda: log.progress().clock == barrier, timeout_seconds=SECONDS, what="barrier")
        return Clock(barrier)

    def report(self, clock: Clock, vw: int) -> bool:
        return self.clock.invoke(
            REPORT_CHECKPOINT,
            ReportCheckpointRequest(requester(vw), clock, (stage_part(self.run_dir, clock, vw, 0),)),
        ).complete

    def wait_complete(self, clock: Clock) -> None:
        wait_until(lambda: self.report(clock, 0), timeout_seconds=SECONDS, what="checkpoint")


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


def folder(server: Server, clock: Clock) -> Path:
    return server.run_dir / "checkpoints" / f"clock-{clock:08d}"


def test_a_leaver_is_told_of_and_does_its_part(server: Server) -> None:
    clock = server.leave()
    assert server.history.of("leave") == [{"event": "leave", "vw": 1, "incarnation": 0, "clock": clock}]
    assert [entry["num_stages"] for entry in server.history.of("join")] == [1, 1]
    assert not server.report(clock, 0)
    server.report(clock, 1)
    server.wait_complete(clock)
    assert list(read_complete(folder(server, clock)).num_stages) == [0, 1]
    server.shard.stop()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_leaver_that_dies_is_not_waited_for(server: Server, *, restarts: bool) -> None:
    """Also not by a process that comes after the one that heard of it."""
    clock = server.leave()
    server.shard.clock_shard.evict(LEAVER, LIFE)
    if restarts:
        server.shard.stop()
        server.start()
    server.wait_complete(clock)
    assert list(read_complete(folder(server, clock)).num_stages) == [0]
    with pytest.raises(StaleIncarnation):
        server.report(clock, 1)
    server.shard.stop()


class Refusing(MethodCalls):
    """A shard that has read that a virtual worker left."""

    def pull(self, _: PullHeader) -> Iterator[Chunk]:
        raise StaleIncarnation("no member any more")


class Behind(MethodCalls):
    """A shard that has yet to read what the clock shard told others, and then was away for a minute."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def pull(self, _: PullHeader) -> Iterator[Chunk]:
        if self._clock.monotonic() < 60.0:
            raise ClockNotPublished("the newest is 2")
        raise ClockFreed("it was published, and is gone")


class Heard:
    """A listener."""

    def __init__(self) -> None:
        self.news: queue.SimpleQueue[object] = queue.SimpleQueue()

    def on_fetched(self, clock: Clock, published: FlatBuffer | None) -> None:
        self.news.put((clock, published))

    def on_error(self, error: Exception) -> None:
        self.news.put(error)


def client_of(shard: Calls, heard: Heard, clock: FakeClock) -> ShardClient:
    slices = slices_of([4])
    return ShardClient(
        requester(1),
        slices,
        BufferPool(FlatLayout([(slices[0].parameter.name, (4,), "float32")]), torch.device("cpu")),
        shards=(shard,),
        clock_shard=cast("Calls", None),
        listener=cast("SyncListener", heard),
        clock=clock,
        timeline=NullTimeline(),
    )


def test_a_shard_that_hears_nothing_of_the_clock_shard_is_waited_for() -> None:
    heard, clock = Heard(), FakeClock(auto_advance=True)
    client = client_of(Behind(clock), heard, clock)
    client.fetch(Clock(3), ahead=True)
    assert heard.news.get(timeout=SECONDS) == (3, None)
    client.close()


def test_what_a_leaver_had_only_guessed_that_it_would_need_is_no_loss() -> None:
    """It may ask when its barrier is passed already."""
    heard = Heard()
    client = client_of(Refusing(), heard, FakeClock(auto_advance=True))
    client.fetch(Clock(3), ahead=True)
    assert heard.news.get(timeout=SECONDS) == (3, None)
    client.fetch(Clock(3), ahead=False)
    assert isinstance(heard.news.get(timeout=SECONDS), StaleIncarnation)
    client.close()
