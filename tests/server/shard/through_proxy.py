"""Whole runs whose shards are behind gRPC servers, and those behind proxies that do what bad networks do.

Stages and shards are those of `tests.support.in_process`; every push, pull, report and record between them, and
between shards, goes over a socket and through a proxy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self
from unittest.mock import patch

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.observe.history import NullHistory
from hetpipe.server.shard import server as ps_server
from hetpipe.server.shard.failing import FailpointCalls
from hetpipe.server.shard.in_process import clock_calls, tensor_calls
from hetpipe.server.shard.job_shard import JobShard
from hetpipe.server.shard.retries import RetryingCalls, RetryPolicy, RetryState
from hetpipe.server.shard.server import ShardServer
from hetpipe.values.ids import ShardIndex
from hetpipe.values.shard_config import ShardConfig
from hetpipe.wire.server import Server, ServerConfig
from hetpipe.wire.shard_client import connect_shard
from tests.support import in_process
from tests.support.call_faults import Deed, Faults
from tests.support.grpc_proxy import GrpcProxy

#: Longest that a stage tries again.
PATIENCE_SECONDS = 20.0


class Hasty:
    """Real time, but rests are short: who waits for another attempt has nothing to spare for here."""

    def monotonic(self) -> float:
        return SYSTEM_CLOCK.monotonic()

    def wall(self) -> float:
        return SYSTEM_CLOCK.wall()

    def sleep(self, seconds: float) -> None:
        SYSTEM_CLOCK.sleep(seconds / 20.0)


class Network:
    """Servers and proxies of one run; made as its shards are first asked for."""

    def __init__(self, rules: Sequence[Faults], seed: int) -> None:
        self._rules = rules
        self._seed = seed
        self._stack = ExitStack()
        #: What waits for shards, and must not wait any longer when they are gone.
        self._patient: list[RetryingCalls] = []
        #: By shard.
        self.proxies: dict[int, GrpcProxy] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for transport in self._patient:
            transport.close()
        self._stack.close()

    @property
    def deeds(self) -> Counter[Deed]:
        """What all proxies have done."""
        return sum((proxy.deeds for proxy in self.proxies.values()), Counter())

    def shard(self, job_shard: JobShard) -> RetryingCalls:
        """What a stage has of a shard."""
        index = job_shard.config.shard
        shard = RetryingCalls(
            FailpointCalls(connect_shard(self._address(job_shard), index)), _retries(f"shard {index}")
        )
        self._patient.append(shard)
        return shard

    def clock(self, job_shard: JobShard) -> RetryingCalls:
        """What stages and shards have of the clock shard."""
        clock_shard = FailpointCalls(connect_shard(self._address(job_shard), ShardIndex(0)))
        clock = RetryingCalls(clock_shard, _retries("the clock shard"))
        self._patient.append(clock)
        return clock

    def settle(self) -> None:
        """Let everything that is late arrive."""
        for proxy in self.proxies.values():
            proxy.settle()

    def _address(self, job_shard: JobShard) -> str:
        config = job_shard.config
        if config.shard not in self.proxies:
            proxy = GrpcProxy(self._serve(job_shard), self._rules, seed=self._seed + config.shard)
            self.proxies[config.shard] = self._stack.enter_context(proxy)
        return self.proxies[config.shard].address

    def _serve(self, job_shard: JobShard) -> str:
        handler = ShardServer(_no_history)
        # The run starts and stops its shards itself.
        handler._jobs[job_shard.config.job_id] = ps_server._Job(job_shard, SYSTEM_CLOCK)
        server = Server(ServerConfig(num_threads=64))
        handler.add_to(server)
        server.on_stop(handler.stop)
        self._stack.callback(server.stop, grace_seconds=0.0)
        return server.start()


def _no_history(_config: ShardConfig) -> NullHistory:
    return NullHistory()


def _retries(peer: str) -> RetryState:
    waits = RetryPolicy(
        who="a stage", report=lambda _: None, seconds=PATIENCE_SECONDS, clock=Hasty(), chance=lambda: 0.5
    )
    return RetryState(peer, waits)


@contextmanager
def through_proxies(rules: Sequence[Faults], *, seed: int = 0) -> Iterator[Network]:
    """Runs in this process go over a network inside this block."""
    with (
        Network(rules, seed) as network,
        patch.object(in_process, tensor_calls.__name__, network.shard),
        patch.object(in_process, clock_calls.__name__, network.clock),
    ):
        yield network
