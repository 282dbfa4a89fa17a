"""One peer opens a thousand calls and sends nothing, or next to nothing: the others are served as ever."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.observe.history import MemoryHistory
from hetpipe.server.shard.server import ShardServer
from hetpipe.values.identity import Role, server_name
from hetpipe.wire import calls
from hetpipe.wire.calls import GET_PROGRESS, GET_SHARD_CLOCKS, GetShardClocksRequest
from hetpipe.wire.codec import to_bytes
from hetpipe.wire.limits import Limits
from hetpipe.wire.server import MAX_STREAMS_PER_CONNECTION, Server, ServerConfig
from hetpipe.wire.shard_client import connect_shard
from tests.certs.cluster import COORDINATOR, SHARD, cluster, stage_peer
from tests.fuzz.memory import bytes_in_use
from tests.polling import wait_until
from tests.server.shard.builders import JOB, chunk_of, headers_of, push_header, requester, shard_config, slices_of
from tests.support.fake_clock import FakeClock

NUM_CALLS = 1_000
NUM_CONNECTIONS = 10
SECONDS = 10.0
LIMITS = Limits(calls_per_peer=12, streams_per_peer=8, idle_seconds=30.0)
ASK = GET_PROGRESS.path
PUSH = calls.PUSH.path
# What grpc.aio itself calls a call that the server ended while the client wrote: the server's status is lost then.
LOST_BY_THE_CLIENT = "Internal error from Core"


class Shard:
    """A shard with TLS and few threads, and one job."""

    def __init__(self, run_dir: Path) -> None:
        self.clock = FakeClock()
        handler = ShardServer(lambda _config: MemoryHistory())
        config = ServerConfig(num_threads=16, tls=cluster().tls(SHARD), limits=LIMITS)
        self.server = Server(config, clock=self.clock)
        handler.add_to(self.server)
        self.server.on_stop(handler.stop)
        self.address = self.server.start()
        config_of_job = shard_config(slices_of([64]), stages=(1, 1), run_dir=str(run_dir))
        handler.configure(config_of_job)
        self.header = push_header(requester(), None, headers_of(config_of_job.slices))
        self.coordinator = connect_shard(self.address, tls=cluster().tls(COORDINATOR))

    def answers_promptly(self) -> None:
        """What the coordinator asks is answered while the streams are open."""
        for _ in range(5):
            began = SYSTEM_CLOCK.monotonic()
            assert self.coordinator.invoke(GET_SHARD_CLOCKS, GetShardClocksRequest(JOB)).published == 0
            assert SYSTEM_CLOCK.monotonic() - began < 2.0

    @property
    def admission(self) -> Any:
        return self.server._guard._admission

    def close(self) -> None:
        self.coordinator.close()
        self.server.stop(grace_seconds=0.0)


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with closing(Shard(tmp_path)) as shard:
        yield shard


def stage_channel(address: str) -> grpc.aio.Channel:
    """A connection of its own, with the certificate of the stage."""
    tls = cluster().tls(stage_peer(JOB))
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.ssl_target_name_override", server_name(Role.PARAMETER_SERVER)),
    ]
    return grpc.aio.secure_channel(address, tls.channel_credentials(tls.material), options)


async def attack(
    shard: Shard, call: str, messages: tuple[bytes, ...], num_calls: int = NUM_CALLS
) -> list[grpc.StatusCode]:
    """Open the calls, send the first messages, and nothing more until the coordinator has had its answers."""
    channels = [stage_channel(shard.address) for _ in range(NUM_CONNECTIONS)]
    open_call: list[Any] = [channel.stream_unary(call, None, None) for channel in channels]
    calls = [open_call[index % NUM_CONNECTIONS]() for index in range(num_calls)]
    await asyncio.gather(*(send(call, messages) for call in calls))
    most = num_calls - (LIMITS.calls_per_peer or 0) - shard.server._threads.max_reading
    all_but_a_few = partial(wait_until, lambda: sum(call.done() for call in calls) >= most, what="most to be refused")
    await asyncio.to_thread(all_but_a_few, timeout_seconds=SECONDS)
    await asyncio.to_thread(shard.answers_promptly)
    refused = [await call.code() for call in calls if call.done() and await call.details() != LOST_BY_THE_CLIENT]
    for each in calls:
        each.cancel()
    await asyncio.gather(*(channel.close(None) for channel in channels))
    return refused


async def send(call: Any, messages: tuple[bytes, ...]) -> None:
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it was refused already
        for message in messages:
            await call.write(message)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["silent upload", "slow upload", "silent request"])
def test_a_thousand_calls_of_one_peer(shard: Shard, kind: str) -> None:
    header = to_bytes(shard.header)
    messages = (header, chunk_of(0, bytes(64))) if kind == "slow upload" else ()
    call = ASK if kind == "silent request" else PUSH
    asyncio.run(attack(shard, call, messages, num_calls=100))  # what is kept for ever is made now
    wait_until(lambda: shard.admission.num_peers == 0, timeout_seconds=SECONDS, what="the calls to be gone")
    before = bytes_in_use()
    refused = asyncio.run(attack(shard, call, messages))
    given_up = {grpc.StatusCode.INVALID_ARGUMENT} if messages else set()  # of two that push the same, the later counts
    assert {grpc.StatusCode.RESOURCE_EXHAUSTED} <= set(refused) <= {grpc.StatusCode.RESOURCE_EXHAUSTED} | given_up
    wait_until(lambda: shard.admission.num_peers == 0, timeout_seconds=SECONDS, what="the calls to be gone")
    wait_until(lambda: bytes_in_use() - before < 1 << 20, timeout_seconds=SECONDS, what="memory to be what it was")
    shard.answers_promptly()


def test_one_connection_has_so_many_streams() -> None:
    """Otherwise one connection could fill the server's queue by itself."""
    assert ServerConfig().max_concurrent_calls > MAX_STREAMS_PER_CONNECTION
    assert (Limits().calls_per_peer or 0) < MAX_STREAMS_PER_CONNECTION
