"""Pushes and pulls of a stage over shared memory: same results, same errors, and gRPC where it cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from hetpipe.errors import ClockNotPublished, NonFiniteUpdate, PeerUnreachable, ProtocolViolation, StaleIncarnation
from hetpipe.observe.history import MemoryHistory
from hetpipe.server.shard.server import ShardServer
from hetpipe.values.ids import Clock, ShardIndex, Wave
from hetpipe.values.requests import PullHeader
from hetpipe.wire import segment_client
from hetpipe.wire.caller import Caller
from hetpipe.wire.calls import (
    JOIN,
    PULL,
    PUSH,
    REPORT_INITIALIZED,
    REPORT_STAGED,
    SHARE_MEMORY,
    JoinRequest,
    ReportInitializedRequest,
    ReportStagedRequest,
    ShareMemoryRequest,
)
from hetpipe.wire.segment import SegmentRefused
from hetpipe.wire.segment_client import SharedMemoryCalls
from hetpipe.wire.server import Server, ServerConfig
from hetpipe.wire.shard_client import connect_shard
from tests.certs.cluster import SHARD, cluster, stage_peer
from tests.polling import wait_until
from tests.server.shard.builders import decode, encode, headers_of, push_header, requester, shard_config, slices_of
from tests.support.fake_clock import FakeClock

SECONDS = 10.0
#: Several chunks each way, of which the last is not whole.
SIZES = (800_000, 700_000)


class Box:
    """A shard with one job of one stage, and that stage, on one host."""

    def __init__(self, *, tls: bool) -> None:
        shard_tls, stage_tls = (cluster().tls(SHARD), cluster().tls(stage_peer())) if tls else (None, None)
        self.handler = ShardServer(lambda _config: MemoryHistory(), tls=shard_tls)
        self.server = Server(ServerConfig(num_threads=12, tls=shard_tls))
        self.handler.add_to(self.server)
        self.server.on_stop(self.handler.stop)
        address = self.server.start()
        config = shard_config(slices_of(SIZES), stages=(1,), staleness=20)
        self.headers = headers_of(config.slices)
        self.handler.configure(config)
        self.time = FakeClock()
        self.caller: Caller = connect_shard(address, ShardIndex(0), tls=stage_tls)
        self.grpc: Caller = connect_shard(address, ShardIndex(0), tls=stage_tls)
        self.shard = SharedMemoryCalls(self.caller, requester(), clock=self.time)

    @property
    def num_segments(self) -> int:
        return self.handler._segments.num_open

    def begin(self) -> None:
        self.grpc.invoke(JOIN, JoinRequest(requester(), ""))
        self.push(None, 0.0)
        self.grpc.invoke(REPORT_INITIALIZED, ReportInitializedRequest(requester()))
        self.wait_for(0)

    def push(self, wave: int | None, value: float) -> bool:
        tensors = [torch.full((size,), value) for size in SIZES]
        return self.shard.upload(PUSH, push_header(requester(), wave, self.headers), encode(tensors)).duplicate

    def run_wave(self, wave: int) -> None:
        assert not self.push(wave, float(wave + 1))
        self.grpc.invoke(REPORT_STAGED, ReportStagedRequest(requester(), Wave(wave), ((wave,),), Clock(0)))
        self.wait_for(wave + 1)

    def wait_for(self, clock: int) -> None:
        def is_published() -> bool:
            try:
                self.pull(clock)
            except ClockNotPublished:
                return False
            return True

        wait_until(is_published, timeout_seconds=SECONDS, what=f"clock {clock}")

    def pull(self, clock: int, *, over_grpc: bool = False) -> list[torch.Tensor]:
        calls = self.grpc if over_grpc else self.shard
        return decode(calls.download(PULL, PullHeader(requester(), Clock(clock), self.headers)), self.headers)

    def close(self) -> None:
        self.shard.close()
        self.grpc.close()
        wait_until(lambda: self.num_segments == 0, timeout_seconds=SECONDS, what="segment freed")
        self.server.stop(grace_seconds=0.0)


@pytest.fixture(params=[False, True], ids=["plaintext", "TLS"])
def box(request: pytest.FixtureRequest) -> Iterator[Box]:
    with closing(Box(tls=request.param)) as value:
        value.begin()
        yield value


def test_waves_over_memory_are_those_over_grpc(box: Box) -> None:
    for wave in range(3):
        box.run_wave(wave)
    mine, theirs = box.pull(3), box.pull(3, over_grpc=True)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert all(torch.equal(each, torch.full((size,), 6.0)) for each, size in zip(mine, SIZES, strict=True))
    assert box.num_segments == 2, "one for pushes, one for pulls, each for all calls of its kind"
    assert box.shard.refusal == ""


def test_refusals_are_typed_and_cost_no_segment(box: Box) -> None:
    box.run_wave(0)
    with pytest.raises(NonFiniteUpdate, match="wave 1"):
        box.push(1, float("nan"))
    assert box.num_segments == 2
    with pytest.raises(ClockNotPublished):
        box.pull(9)
    assert box.num_segments == 2
    box.run_wave(1)
    assert box.num_segments == 2
    assert box.push(1, 2.0), "a duplicate is answered without its bytes"
    assert box.num_segments == 2
    assert torch.equal(box.pull(2)[0], torch.full((SIZES[0],), 3.0))


def test_a_pull_that_is_not_read_to_its_end(box: Box) -> None:
    box.run_wave(0)
    chunks = box.shard.download(PULL, PullHeader(requester(), Clock(1), box.headers))
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    wait_until(lambda: len(_pulled(box)) == 2, timeout_seconds=SECONDS, what="the next pull")


def _pulled(box: Box) -> list[torch.Tensor]:
    try:
        return box.pull(1)
    except PeerUnreachable:  # the server may not have seen yet that the earlier one ended
        return []


def test_a_segment_that_the_server_forgot_is_replaced(box: Box) -> None:
    box.run_wave(0)
    for _, lane in tuple(box.handler._segments._open.values()):
        lane.close()
    with pytest.raises(PeerUnreachable):
        box.push(1, 2.0)
    assert not box.push(1, 2.0), "as it is repeated"
    wait_until(lambda: box.num_segments >= 1, timeout_seconds=SECONDS, what="a new segment")


def test_segments_that_always_break_are_given_up_for_a_while(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object, **__: object) -> None:
        raise PeerUnreachable("gone")

    with monkeypatch.context() as patched:
        patched.setattr("hetpipe.wire.segment.Lane.send", lost)
        for _ in range(3):
            for lane in box.shard._lanes.values():
                lane.close()
            with pytest.raises(PeerUnreachable, match="gone"):
                box.push(0, 1.0)
        assert not box.push(0, 1.0)
    assert box.shard.refusal == "3 segments broke one after the other"


def test_where_memory_cannot_be_shared_grpc_carries_all_and_it_is_tried_again_later(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def unreachable(offer: object, **_: object) -> None:
        asked.append(offer)
        raise SegmentRefused("its socket cannot be reached from here, as from another host or container")

    for lane in box.shard._lanes.values():
        lane.close()
    with monkeypatch.context() as patched:
        patched.setattr(segment_client, "fetch_segment", unreachable)
        box.run_wave(0)
        box.pull(1)
        assert len(asked) == 1, "it is not asked for each call"
        assert "another host or container" in box.shard.refusal
    box.time.advance(61.0)
    box.run_wave(1)
    assert box.shard.refusal == ""
    assert box.num_segments == 2


def test_a_segment_is_for_members_and_two_kinds_of_calls(box: Box) -> None:
    with pytest.raises(ProtocolViolation, match="memory is shared for Push and Pull, not for 'Join'"):
        box.grpc.invoke(SHARE_MEMORY, ShareMemoryRequest(requester(), "Join"))
    gone = ShareMemoryRequest(requester(incarnation=-1), "Push")
    with pytest.raises((StaleIncarnation, ProtocolViolation)):
        box.handler.calls.invoke(SHARE_MEMORY, gone)
