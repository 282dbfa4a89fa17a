"""How many stages can one clock shard serve, and how many members one coordinator?

Real: the clock shard, a process with all that `hetpipe serve parameter-server` does but for its registration, and the
relay of the decision log in a process of 16 stages, from the agent's stream to the pipe of each stage. Light: the other
shards, which follow the decision log and acknowledge it, and the stages, which report a wave some time after the clock
before it has arrived: at once (*saturated*: a wave takes as long as its calls and records do), or as devices would, at
a pace of so many seconds per wave. The slowest virtual workers take as long, the fastest half of it, each with its own
speed; a few per cent are chance, from a seed.

The *limit* of a size is a program of nothing but `grpc.aio` and pipes: as many stages call at the same pace; after the
last call of a wave a message goes to as many shards, their acknowledgements come back, and the publication goes to as
many processes and from these to as many stages, in messages of the same length. It has no log.

Members of the coordinator are light as well: each is a registration and its heartbeats. Calls are compared with a bare
`grpc.aio` program that answers with as many bytes.

A clock is *late* at a stage by the time from the wave's last commit, in the history of the clock shard, to the arrival
of the published clock.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import resource
import statistics
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import grpc
import grpc.aio

from benchmarks.sizes import sized
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.decide.lifecycle.registry import MEMBERS_OF_LEAST_LEASE
from hetpipe.decide.sync.decision_log import FROM_NEWEST_SEGMENT
from hetpipe.decide.sync.records import PublishRecord, SegmentRecord
from hetpipe.decide.sync.segment import first_progress
from hetpipe.errors import Busy, HetpipeError, Unavailable
from hetpipe.observe.history import NullHistory, Value
from hetpipe.server.agent.log_relay import ClockShardAt, LogRelays
from hetpipe.server.coordinator.coordinator import Coordinator
from hetpipe.server.coordinator.main import newest_checkpoint, read_progress
from hetpipe.server.coordinator.servicer import CONCURRENT_CALLS as COORDINATOR_CALLS
from hetpipe.server.coordinator.servicer import NUM_THREADS, CoordinatorServicer
from hetpipe.server.coordinator.tasks import Tools
from hetpipe.server.shard.main import CALL_THREADS, CONCURRENT_CALLS
from hetpipe.server.shard.relayed_log import RelayedLog
from hetpipe.server.shard.retries import RetryingCalls, RetryPolicy, RetryState
from hetpipe.server.shard.server import ShardServer
from hetpipe.storage.memory_store import MemoryStore
from hetpipe.values.commands import StageKey
from hetpipe.values.ids import Clock, Incarnation, JobId, ShardIndex, StageIndex, Term, VirtualWorkerIndex, Wave
from hetpipe.values.leases import LEASE_SECONDS, heartbeat_seconds
from hetpipe.values.members import Lease, MemberId, MemberInfo, MemberRole
from hetpipe.values.requests import Blocks, Requester
from hetpipe.values.shard_config import ShardConfig
from hetpipe.values.sync import DataSpec, Membership, SyncSpec
from hetpipe.wire.call import Calls, RequestT, Unary
from hetpipe.wire.calls import (
    ACKNOWLEDGE,
    CONFIGURE,
    FOLLOW_LOG,
    GET_SHARD_CLOCKS,
    HEARTBEAT,
    JOIN,
    REGISTER,
    REPORT_INITIALIZED,
    REPORT_STAGED,
    AcknowledgeRequest,
    FollowLogRequest,
    GetShardClocksRequest,
    HeartbeatRequest,
    JoinRequest,
    RegisterRequest,
    ReportInitializedRequest,
    ReportStagedRequest,
)
from hetpipe.wire.channel import as_is
from hetpipe.wire.codec import from_bytes, to_bytes
from hetpipe.wire.coordinator_client import CoordinatorClient, all_members
from hetpipe.wire.server import Server, ServerConfig
from hetpipe.wire.shard_client import connect_shard

#: Stages of a job; four in each virtual worker.
SIZES = sized((64, 256, 1024), (16,))
NUM_STAGES, STAGES_PER_PROCESS = 4, 16
#: Shards, the clock shard among them.
NUM_SHARDS = sized(64, 4)
SHARDS_PER_CONNECTION = 8
NUM_WAVES = sized(6, 4)
#: Seconds per wave; 0: saturated.
PACES = sized((0.0, 5.0), (0.0, 0.1))
#: Members of a coordinator, and the connections that they share here.
MEMBERS, MEMBER_CONNECTIONS = sized((1_000, 10_000), (100,)), 8
#: Stages and pace of a run beside a coordinator with so many members.
BESIDE = sized((1024, 5.0, 1_000), (16, 0.1, 20))
#: Seconds of calls against each server, and calls at a time.
CALL_SECONDS, CALLS_AT_A_TIME = sized(3.0, 0.2), 32

#: Interval between the ticks of a coordinator.
_TICK_SECONDS = 0.2

_JOB, _TERM = JobId("thousand"), Term(1)

#: The share of a wave in which reports come, and the share of that which is chance.
_SPREAD, _CHANCE = 0.5, 0.05

#: Of the limit: what a stream is asked for, and the length of a report, a publication and its frame.
_SHARD, _NODE = b"shard", b"node"
_REPORT_BYTES, _MESSAGE_BYTES = 60, 40
_PIPE_BYTES = 65_536

#: Pause before a stage asks a silent relay again; the stages here do not follow the clock shard themselves.
_SILENT_SECONDS = 0.05
_PATIENCE_SECONDS = 300.0
T = TypeVar("T")


def measure() -> dict[str, Any]:
    """Stages and pace → figures of a run, or the error that refuses them, beside its limit."""
    return {
        f"{num_stages} stages, {f'a wave of {pace:g} s' if pace else 'saturated'}": {
            **_run(num_stages, pace),
            **_limit(num_stages, pace),
        }
        for num_stages in SIZES
        for pace in PACES
    }


def beside_coordinator() -> dict[str, Any]:
    """Figures of a run while members of a coordinator in another process send their heartbeats as their leases ask."""
    num_stages, pace, number = BESIDE
    with ExitStack() as children:
        server = children.enter_context(_Child(_serve_coordinator))
        members = children.enter_context(_Child(_send_heartbeats, server.receive(str), number))
        members.receive(str)
        server.pipe.send("usage")
        begun, before = SYSTEM_CLOCK.monotonic(), server.receive(_Usage)
        found = _run(num_stages, pace)
        server.pipe.send("usage")
        seconds, after = SYSTEM_CLOCK.monotonic() - begun, server.receive(_Usage)
        members.pipe.send(None)
        took = members.receive(list)
    return {
        **found,
        "heartbeats per second": round(len(took) / seconds),
        "milliseconds of a heartbeat, median": round(1000 * statistics.median(took), 1),
        "99th percentile of a heartbeat": round(1000 * statistics.quantiles(took, n=100)[98], 1),
        "coordinator, cores": round((after.seconds - before.seconds) / seconds, 2),
    }


def work_seconds(vw: int, wave: int, pace: float) -> float:
    """How long a virtual worker computes a wave, at a pace in seconds per wave of the slowest."""
    speed, chance = random.Random(f"{vw}").random(), random.Random(f"{vw} {wave}").random()
    return pace * (1.0 - _SPREAD * ((1.0 - _CHANCE) * speed + _CHANCE * chance))


def calls() -> dict[str, Any]:
    """Calls per second for the clocks of a job of 16 stages, and of as many bytes from a bare `grpc.aio` program."""
    with _Child(_serve_shard) as server:
        address = server.receive(str)
        connection = connect_shard(address)
        try:
            connection.invoke(CONFIGURE, _config(address, 16))
            request = GetShardClocksRequest(_JOB)
            reply = to_bytes(connection.invoke(GET_SHARD_CLOCKS, request))
        finally:
            connection.close()
        ours = _called(server, address, to_bytes(request))
    with _Child(_serve_bare, reply, GET_SHARD_CLOCKS) as bare:
        limit = _called(bare, bare.receive(str), to_bytes(request))
    with _Child(_serve_threads, reply, GET_SHARD_CLOCKS) as bare:
        threads = _called(bare, bare.receive(str), to_bytes(request))
    return {
        "hetpipe": round(ours.per_second),
        "bare grpc.aio": round(limit.per_second),
        "bare grpc with threads": round(threads.per_second),
        "hetpipe / bare grpc.aio": round(ours.per_second / limit.per_second, 3),
        "hetpipe / bare grpc with threads": round(ours.per_second / threads.per_second, 3),
        "bare grpc with threads / bare grpc.aio": round(threads.per_second / limit.per_second, 3),
        "hetpipe, microseconds of processor per call": round(1e6 * ours.processor_seconds),
        "bare grpc.aio, microseconds of processor per call": round(1e6 * limit.processor_seconds),
        "bare grpc with threads, microseconds of processor per call": round(1e6 * threads.processor_seconds),
        "bare grpc.aio / hetpipe, processor": round(limit.processor_seconds / ours.processor_seconds, 3),
    }


@dataclass(frozen=True, slots=True)
class _Called:
    per_second: float
    processor_seconds: float
    """Of the server, per call."""


def _called(server: _Child, address: str, request: bytes) -> _Called:
    server.pipe.send("usage")
    before = server.receive(_Usage)
    per_second = asyncio.run(_calls_per_second(address, request))
    server.pipe.send("usage")
    seconds = server.receive(_Usage).seconds - before.seconds
    return _Called(per_second, seconds / (per_second * CALL_SECONDS))


def members() -> dict[str, Any]:
    """Members → how long a coordinator takes for their registrations, heartbeats and list, and its memory."""
    return {f"{number} members": asyncio.run(_members(number)) for number in MEMBERS}


async def _members(number: int) -> dict[str, Any]:
    infos = [MemberInfo(MemberRole.AGENT, MemberId(f"n{index}"), "host", 1 + index) for index in range(number)]
    with _Child(_serve_coordinator) as server:
        address = server.receive(str)
        server.pipe.send("usage")
        before = server.receive(_Usage)
        registered = await _each(address, REGISTER, [RegisterRequest(info) for info in infos])
        leases = [from_bytes(Lease, reply) for reply in registered.replies]
        beats = [HeartbeatRequest(info.id, lease.registration) for info, lease in zip(infos, leases, strict=True)]
        renewed = await _each(address, HEARTBEAT, beats)
        with closing(CoordinatorClient(address)) as client:
            begun = SYSTEM_CLOCK.monotonic()
            found = all_members(client)
            listing_seconds = SYSTEM_CLOCK.monotonic() - begun
        assert len(found) == number, f"{len(found)} of {number} members are listed"
        server.pipe.send("usage")
        after = server.receive(_Usage)
    with _Child(_serve_bare, renewed.replies[0], HEARTBEAT) as bare:
        limit = await _each(bare.receive(str), HEARTBEAT, beats)
    return {
        "registrations per second": round(number / registered.seconds),
        "heartbeats per second": round(number / renewed.seconds),
        "bare grpc.aio": round(number / limit.seconds),
        "heartbeats / bare grpc.aio": round(limit.seconds / renewed.seconds, 3),
        "heartbeats per second that the leases ask for": round(number / _beat_seconds(number)),
        "seconds of the whole list": round(listing_seconds, 2),
        "kB of memory per member": round((after.num_bytes - before.num_bytes) / 1000 / number, 1),
    }


def _beat_seconds(number: int) -> float:
    """The interval that leases ask for, of so many members."""
    return heartbeat_seconds(LEASE_SECONDS * max(1.0, number / MEMBERS_OF_LEAST_LEASE))


def _nodes(num_stages: int) -> list[range]:
    """The stages of each process."""
    firsts = range(0, num_stages, STAGES_PER_PROCESS)
    return [range(first, min(first + STAGES_PER_PROCESS, num_stages)) for first in firsts]


def _run(num_stages: int, pace: float) -> dict[str, Any]:
    begun = SYSTEM_CLOCK.monotonic()
    with ExitStack() as children:
        server = children.enter_context(_Child(_serve_shard))
        address = server.receive(str)
        control = connect_shard(address)
        children.callback(control.close)
        try:
            control.invoke(CONFIGURE, _config(address, num_stages))
        except HetpipeError as error:
            return {"refused": str(error)}
        server.pipe.send("usage")
        before = server.receive(_Usage)
        children.enter_context(_Child(_light_shards, address))
        stages = [
            children.enter_context(_Child(_light_stages, address, node, num_stages, pace))
            for node in _nodes(num_stages)
        ]
        arrived = [clocks for stage in stages for clocks in stage.receive(list)]
        server.pipe.send("usage")
        after = server.receive(_Usage)
    # The first clocks are late by the time in which processes start.
    late = [found[clock] - after.committed[clock - 1] for found in arrived for clock in range(3, NUM_WAVES + 1)]
    published = [after.published[clock] - after.committed[clock - 1] for clock in range(3, NUM_WAVES + 1)]
    return {
        "milliseconds late, median": round(1000 * statistics.median(late), 1),
        "of these until it is published": round(1000 * statistics.median(published), 1),
        "99th percentile": round(1000 * statistics.quantiles(late, n=100)[98], 1),
        "milliseconds of processor per stage and wave": round(
            1000 * (after.seconds - before.seconds) / (num_stages * NUM_WAVES), 2
        ),
        "kB of memory per stage": round((after.num_bytes - before.num_bytes) / 1000 / num_stages, 1),
        "seconds": round(SYSTEM_CLOCK.monotonic() - begun, 1),
    }


def _limit(num_stages: int, pace: float) -> dict[str, Any]:
    """How late the same messages are at as many stages."""
    with ExitStack() as children:
        server = children.enter_context(_Child(_serve_bare_rounds, len(_nodes(num_stages)), num_stages))
        address = server.receive(str)
        children.enter_context(_Child(_bare_shards, address))
        nodes = [children.enter_context(_Child(_bare_stages, address, node, pace)) for node in _nodes(num_stages)]
        arrived = [rounds for node in nodes for rounds in node.receive(list)]
        began = server.receive(list)
    late = [rounds[number] - began[number - 1] for rounds in arrived for number in range(3, NUM_WAVES + 1)]
    return {"milliseconds late, median of the limit": round(1000 * statistics.median(late), 1)}


def _config(address: str, num_stages: int) -> ShardConfig:
    data = DataSpec(10_000_000, 1, 0, 1, None)
    return ShardConfig(
        job_id=_JOB,
        term=_TERM,
        shard=ShardIndex(0),
        num_shards=NUM_SHARDS,
        clock_shard_address=address,
        membership=Membership({VirtualWorkerIndex(vw): NUM_STAGES for vw in range(num_stages // NUM_STAGES)}),
        slices=(),
        sync=SyncSpec(minibatches_per_wave=1, staleness=0),
        data=data,
        checkpoint_every_waves=None,
        checkpoint_keep=1,
        run_dir=tempfile.gettempdir(),
        progress=first_progress(data),
    )


# -- processes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Usage:
    """Of a server so far."""

    seconds: float
    """Of the processor."""
    num_bytes: int
    """Resident."""
    committed: dict[int, float]
    """Of a clock shard: wave → time of its last commit."""
    published: dict[int, float]
    """Likewise: clock → time of its publication."""


class _Child:
    """A process that sends what it finds, and ends when its pipe is closed."""

    def __init__(self, run: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=run, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def receive(self, kind: type[T]) -> T:
        """Wait for what it sends next."""
        if not self.pipe.poll(_PATIENCE_SECONDS):
            raise TimeoutError(f"{self._process.name} has sent no {kind.__name__} for {_PATIENCE_SECONDS:g} s")
        found = self.pipe.recv()
        assert isinstance(found, kind), found
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


class _Times(NullHistory):
    """Keeps the time of the last commit of each wave, and of each publication."""

    def __init__(self) -> None:
        self.committed: dict[int, float] = {}
        self.published: dict[int, float] = {}

    def write(self, event: str, **fields: Value) -> None:
        """Of commits and publications, the time."""
        for name, key, times in (("commit", "wave", self.committed), ("publish", "clock", self.published)):
            number = fields.get(key)
            if event == name and isinstance(number, int):
                times[number] = SYSTEM_CLOCK.monotonic()


def _serve_shard(pipe: Connection) -> None:
    history = _Times()
    shards = ShardServer(lambda _: history)
    server = Server(ServerConfig(num_threads=CALL_THREADS, max_concurrent_calls=CONCURRENT_CALLS))
    shards.add_to(server)
    server.on_stop(shards.stop)
    pipe.send(server.start())
    while pipe.recv() == "usage":
        pipe.send(_usage(history))


def _serve_coordinator(pipe: Connection) -> None:
    def no_shard(info: MemberInfo) -> Calls:
        raise AssertionError(f"no job runs here, and {info} is asked")

    tools = Tools(
        open_shard=no_shard,
        read_progress=read_progress,
        newest_checkpoint=newest_checkpoint,
        listed_checkpoint=newest_checkpoint,
    )
    coordinator = Coordinator(MemoryStore(SYSTEM_CLOCK), tools, clock=SYSTEM_CLOCK, lease_seconds=_PATIENCE_SECONDS)
    server = Server(ServerConfig(num_threads=NUM_THREADS, max_concurrent_calls=COORDINATOR_CALLS))
    CoordinatorServicer(coordinator, host="host").add_to(server)
    pipe.send(server.start())
    while True:
        while not pipe.poll(_TICK_SECONDS):
            coordinator.tick()
        if pipe.recv() == "usage":
            pipe.send(_usage())


def _send_heartbeats(pipe: Connection, address: str, number: int) -> None:
    """Members of a coordinator; says when all are registered, and when asked, the seconds of each heartbeat."""

    async def send() -> list[float]:
        infos = [MemberInfo(MemberRole.AGENT, MemberId(f"n{index}"), "host", 1 + index) for index in range(number)]
        registered = await _each(address, REGISTER, [RegisterRequest(info) for info in infos])
        pipe.send("registered")
        channels = [grpc.aio.insecure_channel(address) for _ in range(MEMBER_CONNECTIONS)]
        took = list[float]()

        async def beat(index: int, lease: Lease) -> None:
            method = channels[index % len(channels)].unary_unary(HEARTBEAT.path, as_is, as_is)
            request = to_bytes(HeartbeatRequest(infos[index].id, lease.registration))
            await asyncio.sleep(_beat_seconds(number) * index / number)
            while True:
                begun = SYSTEM_CLOCK.monotonic()
                await method(request)
                took.append(SYSTEM_CLOCK.monotonic() - begun)
                await asyncio.sleep(_beat_seconds(number) - took[-1])

        beats = [
            asyncio.create_task(beat(index, from_bytes(Lease, reply))) for index, reply in enumerate(registered.replies)
        ]
        await asyncio.to_thread(pipe.recv)
        for one in beats:
            one.cancel()
        return took

    pipe.send(asyncio.run(send()))
    pipe.poll(None)


def _usage(times: _Times | None = None) -> _Usage:
    usage, pages = resource.getrusage(resource.RUSAGE_SELF), Path("/proc/self/statm").read_text().split()[1]
    committed, published = (dict(times.committed), dict(times.published)) if times else ({}, {})
    return _Usage(usage.ru_utime + usage.ru_stime, int(pages) * resource.getpagesize(), committed, published)


def _light_shards(pipe: Connection, address: str) -> None:
    """All but the clock shard: each follows the log and acknowledges what it gets. A connection for every few."""
    connections = [connect_shard(address) for _ in range(0, NUM_SHARDS, SHARDS_PER_CONNECTION)]

    def follow(shard: ShardIndex) -> None:
        connection = connections[shard // SHARDS_PER_CONNECTION]
        position = 0
        while True:
            # While many stages start, a stream may end late; shards follow anew then.
            with suppress(Unavailable, Busy):
                for batch in connection.stream(FOLLOW_LOG, FollowLogRequest(_JOB, _TERM, position)):
                    position = batch.records[-1].index + 1
                    if not batch.acknowledge_later:
                        connection.invoke(ACKNOWLEDGE, AcknowledgeRequest(_JOB, _TERM, shard, position))

    for shard in range(1, NUM_SHARDS):
        threading.Thread(target=follow, args=(ShardIndex(shard),), daemon=True).start()
    pipe.poll(None)


def _light_stages(pipe: Connection, address: str, stages: range, num_stages: int, pace: float) -> None:
    """The stages of one node; sends for each, clock → time of its arrival."""
    waits = RetryPolicy(who="light stages", report=lambda _: None, seconds=_PATIENCE_SECONDS)
    connection = RetryingCalls(connect_shard(address), RetryState("the clock shard", waits))
    relays = LogRelays(lambda at: connect_shard(at.address))
    num_workers = num_stages // NUM_STAGES

    def follow(index: int) -> dict[int, float]:
        vw, stage = VirtualWorkerIndex(index // NUM_STAGES), StageIndex(index % NUM_STAGES)
        requester = Requester(_JOB, _TERM, vw, Incarnation(0), stage)
        relayed = RelayedLog(SYSTEM_CLOCK)
        reading, writing = os.pipe()
        threading.Thread(target=_feed, args=(reading, relayed), daemon=True).start()
        key = StageKey(_JOB, vw, stage, Incarnation(0), _TERM)
        connection.invoke(JOIN, JoinRequest(requester))
        relays.add(key, ClockShardAt(address), lambda data: os.write(writing, data) == len(data))
        if vw == 0:
            connection.invoke(REPORT_INITIALIZED, ReportInitializedRequest(requester))
        position, arrived = FROM_NEWEST_SEGMENT, dict[int, float]()
        while len(arrived) <= NUM_WAVES:
            batch = relayed.take(position)
            if batch is None:  # silent: no processor for the relay
                SYSTEM_CLOCK.sleep(_SILENT_SECONDS)
                continue
            now = SYSTEM_CLOCK.monotonic()
            position = batch.records[-1].index + 1
            for record in batch.records:
                # Who begins late is told the segment only, whose start is published.
                clock = record.clock if isinstance(record, PublishRecord) else None
                clock = record.start if isinstance(record, SegmentRecord) else clock
                if clock is None or clock in arrived:
                    continue
                arrived[clock], wave = now, Wave(clock)
                blocks: Blocks = ((wave * num_workers + vw,),) if stage == 0 else ()
                if wave < NUM_WAVES:
                    SYSTEM_CLOCK.sleep(max(0.0, now + work_seconds(vw, wave, pace) - SYSTEM_CLOCK.monotonic()))
                    connection.invoke(REPORT_STAGED, ReportStagedRequest(requester, wave, blocks, Clock(0)))
        return arrived

    with ThreadPoolExecutor(len(stages)) as pool:
        pipe.send(list(pool.map(follow, stages)))
    pipe.poll(None)


def _feed(reading: int, relayed: RelayedLog) -> None:
    """Read what an agent writes, as a stage does."""
    while data := os.read(reading, _PIPE_BYTES):
        relayed.feed(data)


# -- the limit ---------------------------------------------------------------------------------------------------------


class _BareRounds:
    """A server that has the messages of a clock shard: calls of stages, and messages to followers."""

    def __init__(self) -> None:
        self.ready, self.reported, self.acknowledged = (asyncio.Semaphore(0) for _ in range(3))
        self._queues: dict[bytes, list[asyncio.Queue[bytes]]] = {_SHARD: [], _NODE: []}

    async def start(self) -> str:
        """Serve; returns the address."""
        server = grpc.aio.server()
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            FOLLOW_LOG.name: grpc.unary_stream_rpc_method_handler(cast("Any", self._follow)),
            REPORT_STAGED.name: grpc.unary_unary_rpc_method_handler(cast("Any", self._counting(self.reported))),
            ACKNOWLEDGE.name: grpc.unary_unary_rpc_method_handler(cast("Any", self._counting(self.acknowledged))),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(FOLLOW_LOG.service, handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._server = server  # which ends with its last reference
        return f"127.0.0.1:{port}"

    def tell(self, kind: bytes) -> int:
        """Send a message to all followers of a kind; returns to how many."""
        for queue in self._queues[kind]:
            queue.put_nowait(bytes(_MESSAGE_BYTES))
        return len(self._queues[kind])

    async def _follow(self, kind: bytes, _context: object) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._queues[kind].append(queue)
        self.ready.release()
        while True:
            yield await queue.get()

    @staticmethod
    def _counting(calls: asyncio.Semaphore) -> Callable[[bytes, object], Awaitable[bytes]]:
        async def count(_request: bytes, _context: object) -> bytes:
            calls.release()
            return b""

        return count


async def _times(semaphore: asyncio.Semaphore, number: int) -> None:
    for _ in range(number):
        await semaphore.acquire()


def _serve_bare_rounds(pipe: Connection, num_nodes: int, num_stages: int) -> None:
    """Each wave: calls of all stages, a message to all shards, an acknowledgement of each, a message to all nodes.

    Sends when the last call of each wave came.
    """

    async def serve() -> None:
        bare, began = _BareRounds(), list[float]()
        pipe.send(await bare.start())
        await _times(bare.ready, NUM_SHARDS - 1 + num_nodes)
        bare.tell(_NODE)
        for _ in range(NUM_WAVES):
            await _times(bare.reported, num_stages)
            began.append(SYSTEM_CLOCK.monotonic())
            await _times(bare.acknowledged, bare.tell(_SHARD))
            bare.tell(_NODE)
        pipe.send(began)
        await asyncio.to_thread(pipe.poll, None)

    asyncio.run(serve())


def _bare_shards(_pipe: Connection, address: str) -> None:
    async def one(channel: grpc.aio.Channel) -> None:
        acknowledge = channel.unary_unary(ACKNOWLEDGE.path, as_is, as_is)
        async for message in channel.unary_stream(FOLLOW_LOG.path, as_is, as_is)(_SHARD):
            await acknowledge(message)

    async def follow() -> None:
        channels = [grpc.aio.insecure_channel(address) for _ in range(0, NUM_SHARDS, SHARDS_PER_CONNECTION)]
        await asyncio.gather(*(one(channels[shard // SHARDS_PER_CONNECTION]) for shard in range(1, NUM_SHARDS)))

    asyncio.run(follow())


def _bare_stages(pipe: Connection, address: str, stages: range, pace: float) -> None:
    """The stages of one node; sends for each, the times of arrival."""
    pipes = [os.pipe() for _ in stages]

    async def follow(pool: ThreadPoolExecutor) -> list[list[float]]:
        loop = asyncio.get_running_loop()
        async with grpc.aio.insecure_channel(address) as channel:
            report = channel.unary_unary(REPORT_STAGED.path, as_is, as_is)

            async def one(stage: int, reading: int) -> list[float]:
                found = list[float]()
                while len(found) <= NUM_WAVES:
                    await loop.run_in_executor(pool, os.read, reading, _MESSAGE_BYTES)
                    wave = len(found)
                    found.append(SYSTEM_CLOCK.monotonic())
                    if wave < NUM_WAVES:
                        await asyncio.sleep(work_seconds(stage // NUM_STAGES, wave, pace))
                        await report(bytes(_REPORT_BYTES))
                return found

            async def relay() -> None:
                async for message in channel.unary_stream(FOLLOW_LOG.path, as_is, as_is)(_NODE):
                    for _, writing in pipes:
                        os.write(writing, message)

            relaying = asyncio.create_task(relay())
            found = await asyncio.gather(*(one(stage, pipes[at][0]) for at, stage in enumerate(stages)))
            relaying.cancel()
            return list(found)

    with ThreadPoolExecutor(len(stages)) as pool:
        pipe.send(asyncio.run(follow(pool)))
    pipe.poll(None)


# -- calls -------------------------------------------------------------------------------------------------------------


def _serve_bare(pipe: Connection, reply: bytes, call: Unary[Any, Any]) -> None:
    async def answer(_request: bytes, _context: object) -> bytes:
        return reply

    async def serve() -> None:
        server = grpc.aio.server()
        handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(answer)
        services = grpc.method_handlers_generic_handler(call.service, {call.name: handler})
        server.add_generic_rpc_handlers((services,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        pipe.send(f"127.0.0.1:{port}")
        while await asyncio.to_thread(pipe.recv) == "usage":
            pipe.send(_usage())

    asyncio.run(serve())


def _serve_threads(pipe: Connection, reply: bytes, call: Unary[Any, Any]) -> None:
    server = grpc.server(ThreadPoolExecutor(CALL_THREADS))
    handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(lambda _request, _context: reply)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(call.service, {call.name: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    pipe.send(f"127.0.0.1:{port}")
    while pipe.recv() == "usage":
        pipe.send(_usage())


async def _calls_per_second(address: str, request: bytes) -> float:
    """From one process, over one connection."""
    until, num_calls = SYSTEM_CLOCK.monotonic() + CALL_SECONDS, 0

    async with grpc.aio.insecure_channel(address) as channel:
        method = channel.unary_unary(GET_SHARD_CLOCKS.path, as_is, as_is)

        async def one_after_another() -> None:
            nonlocal num_calls
            while SYSTEM_CLOCK.monotonic() < until:
                await method(request)
                num_calls += 1

        await asyncio.gather(*(one_after_another() for _ in range(CALLS_AT_A_TIME)))
    return num_calls / CALL_SECONDS


@dataclass(frozen=True, slots=True)
class _Answered:
    replies: list[bytes]
    seconds: float


async def _each(address: str, call: Unary[RequestT, Any], requests: Sequence[RequestT]) -> _Answered:
    """Make a call once with each request, over a few connections."""
    channels = [grpc.aio.insecure_channel(address) for _ in range(MEMBER_CONNECTIONS)]
    waiting, replies = iter(enumerate(map(to_bytes, requests))), [b""] * len(requests)

    async def one_after_another(channel: grpc.aio.Channel) -> None:
        method = channel.unary_unary(call.path, as_is, as_is)
        for index, request in waiting:
            while not replies[index]:
                try:
                    replies[index] = await method(request)
                except grpc.aio.AioRpcError as error:  # repeated, as members do
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                    await asyncio.sleep(_SILENT_SECONDS)

    begun = SYSTEM_CLOCK.monotonic()
    await asyncio.gather(*(one_after_another(channels[n % len(channels)]) for n in range(CALLS_AT_A_TIME)))
    seconds = SYSTEM_CLOCK.monotonic() - begun
    for channel in channels:
        await channel.close()
    return _Answered(replies, seconds)
