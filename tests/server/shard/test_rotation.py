"""Certificates of a stage and of a shard are replaced again and again while waves are pushed: none is lost."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hetpipe.certs.authority import key_to_pem, new_key, request_for
from hetpipe.errors import ClockNotPublished
from hetpipe.observe.history import MemoryHistory
from hetpipe.server.shard.server import ShardServer
from hetpipe.values.identity import Peer
from hetpipe.values.ids import Clock, ShardIndex, Wave
from hetpipe.values.requests import PullHeader
from hetpipe.wire.calls import (
    JOIN,
    PULL,
    PUSH,
    REPORT_INITIALIZED,
    REPORT_STAGED,
    JoinRequest,
    ReportInitializedRequest,
    ReportStagedRequest,
)
from hetpipe.wire.connection import Connection
from hetpipe.wire.server import Server, ServerConfig
from hetpipe.wire.shard_client import connect_shard
from hetpipe.wire.tls import CHECK_SECONDS, Tls
from tests.certs.cluster import SHARD, cluster, stage_peer, write
from tests.polling import wait_until
from tests.server.shard.builders import decode, encode, headers_of, push_header, requester, shard_config, slices_of
from tests.support.fake_clock import FakeClock

ROTATIONS = 5
THREADS = 4
WAVES = ROTATIONS * THREADS
ELEMENTS = 200
STAGE = stage_peer()


def reissue(folder: Path, peer: Peer) -> None:
    """A new key and a new certificate, as `hetpipe certs issue` and the agent write them."""
    key, root = new_key(), cluster().authority()
    if peer == STAGE:
        certificate = cluster().signer().sign_stage(request_for(STAGE, key), STAGE)
    else:
        certificate = root.issue(peer, key.public_key(), days=1)
    write(folder, root, certificate, key_to_pem(key))


class Rotating:
    """A shard with one job of one stage, that stage's connections, and the certificates of both ends."""

    def __init__(self, folder: Path) -> None:
        self.folders: dict[Peer, Path] = {SHARD: folder / "shard", STAGE: folder / "stage"}
        self.time = FakeClock()
        for peer, own in self.folders.items():
            reissue(own, peer)
        self.tls = {peer: Tls(own, clock=self.time) for peer, own in self.folders.items()}
        self.history = MemoryHistory()
        self.handler = ShardServer(lambda _config: self.history, tls=self.tls[SHARD])
        self.server = Server(ServerConfig(num_threads=12, tls=self.tls[SHARD]))
        self.handler.add_to(self.server)
        self.server.on_stop(self.handler.stop)
        address = self.server.start()
        self.config = shard_config(slices_of([ELEMENTS] * 2), stages=(1,), staleness=WAVES)
        self.headers = headers_of(self.config.slices)
        self.handler.configure(self.config)
        self.shard = connect_shard(address, ShardIndex(0), tls=self.tls[STAGE])
        self.clock = connect_shard(address, ShardIndex(0), tls=self.tls[STAGE])

    @property
    def connection(self) -> Connection:
        """What pushes go over."""
        return self.shard._connection

    def rotate(self) -> None:
        """Replace the certificates of both ends, and let time pass until everybody looks."""
        for peer, own in self.folders.items():
            reissue(own, peer)
        self.time.advance(CHECK_SECONDS)

    def begin(self) -> None:
        self.clock.invoke(JOIN, JoinRequest(requester(), ""))
        self.shard.upload(PUSH, push_header(requester(), None, self.headers), encode([torch.zeros(ELEMENTS)] * 2))
        self.clock.invoke(REPORT_INITIALIZED, ReportInitializedRequest(requester()))
        # The shard reads the log of its own clock shard in another thread, and refuses a member it has not read of.
        wait_until(lambda: self.pulled(0) is not None, timeout_seconds=10.0, what="the first clock")

    def push(self, wave: int, *, hold: threading.Event | None = None) -> bool:
        """The slices of a wave; with `hold`, all but the first chunk wait."""

        def chunks() -> Iterator[bytes]:
            first, *others = encode([torch.full((ELEMENTS,), float(wave + 1))] * 2, chunk_bytes=256)
            yield first
            if hold is not None:
                assert hold.wait(60.0)
            yield from others

        return self.shard.upload(PUSH, push_header(requester(), wave, self.headers), chunks()).duplicate

    def pulled(self, clock: int) -> list[torch.Tensor] | None:
        try:
            return decode(self.shard.download(PULL, PullHeader(requester(), Clock(clock), self.headers)), self.headers)
        except ClockNotPublished:
            return None

    def close(self) -> None:
        self.shard.close()
        self.clock.close()
        self.server.stop(grace_seconds=0.0)


@pytest.fixture
def rotating(tmp_path: Path) -> Iterator[Rotating]:
    rotating = Rotating(tmp_path)
    yield rotating
    rotating.close()


def test_no_push_is_lost(rotating: Rotating) -> None:
    rotating.begin()
    with ThreadPoolExecutor(THREADS) as threads:
        for turn in range(ROTATIONS):
            waves = range(turn * THREADS, (turn + 1) * THREADS)
            going_on = threading.Event()
            # Two pushes are under way when the certificates change, two begin with the new ones.
            pushes: list[Future[bool]] = [threads.submit(rotating.push, wave, hold=going_on) for wave in waves[:2]]
            wait_until(lambda: rotating.connection._current.users == 2, timeout_seconds=10.0, what="two pushes")
            rotating.rotate()
            pushes += [threads.submit(rotating.push, wave) for wave in waves[2:]]
            assert [push.result(60.0) for push in pushes[2:]] == [False, False]
            assert rotating.connection._current.version == turn + 1, "a new connection"
            assert [push.done() for push in pushes[:2]] == [False, False]
            going_on.set()
            assert [push.result(60.0) for push in pushes] == [False] * THREADS, "acknowledged, none a repetition"
            assert not rotating.connection._retired, "an old connection ends with its last call"
            for wave in waves:
                rotating.clock.invoke(REPORT_STAGED, ReportStagedRequest(requester(), Wave(wave), ((wave,),), Clock(0)))

    assert [tls.material.version for tls in rotating.tls.values()] == [ROTATIONS, ROTATIONS]
    wait_until(lambda: rotating.pulled(WAVES) is not None, timeout_seconds=10.0, what="the last clock")
    total = torch.full((ELEMENTS,), float(sum(range(1, WAVES + 1))))
    assert [torch.equal(tensor, total) for tensor in rotating.pulled(WAVES) or ()] == [True, True]
    staged = Counter(event["wave"] for event in rotating.history.of("staged"))
    assert staged == Counter(range(WAVES))
