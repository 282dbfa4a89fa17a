"""(b) 256 MiB to and from one shard over loopback, against raw TCP sockets in the same run: one stream, and four.

The shard is a process of its own, as in real life, and so is the raw receiver. *Transport alone* streams the same
chunks to a method that forgets them; *bare* is a stream of gRPC and nothing else (`benchmarks.bare`). *Whole push* ends
when the clock is published: staged, checked finite, committed, applied. Four streams split the same bytes over four
stages' pushes or pulls at once. A second pair of such processes does what goes over gRPC under TLS, in the same rounds.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import torch

from benchmarks.bare import BareStream, serve_bare
from benchmarks.certificates import certify
from benchmarks.minimal import minimal_streams
from benchmarks.sizes import sized
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.decide.sync.segment import first_progress
from hetpipe.observe.history import NullHistory
from hetpipe.server.shard.chunks import ChunkReceiver, RunMap, chunks
from hetpipe.server.shard.server import ShardServer
from hetpipe.values.identity import NamedPeer, Peer, Role, server_name
from hetpipe.values.ids import (
    Clock,
    Incarnation,
    JobId,
    LayerIndex,
    ShardIndex,
    StageIndex,
    Term,
    VirtualWorkerIndex,
    Wave,
)
from hetpipe.values.plan import SlicePlan, TensorSpec
from hetpipe.values.requests import PullHeader, PushHeader, Requester, SliceHeader
from hetpipe.values.shard_config import ShardConfig
from hetpipe.values.sync import DataSpec, Membership, SyncSpec
from hetpipe.weights.allocator import keep_freed_memory
from hetpipe.weights.flat import FlatBuffer, FlatLayout
from hetpipe.wire.call import Calls, joined
from hetpipe.wire.calls import (
    CONFIGURE,
    FOLLOW_LOG,
    JOIN,
    PULL,
    PUSH,
    REPORT_INITIALIZED,
    REPORT_STAGED,
    FollowLogRequest,
    JoinRequest,
    ReportInitializedRequest,
    ReportStagedRequest,
)
from hetpipe.wire.channel import as_is, open_channel
from hetpipe.wire.segment_client import SharedMemoryCalls
from hetpipe.wire.server import Server, ServerConfig
from hetpipe.wire.shard_client import connect_shard
from hetpipe.wire.tls import Tls

TOTAL_BYTES = sized(256, 8) * 1024 * 1024
DISCARD = "benchmarks.Discard"
SOCKET_READ_BYTES = 4 * 1024 * 1024
#: Over what: the ends of the names of figures.
GRPC, MEMORY = "", ", shared memory"
ROUNDED = ", bfloat16"
PASSES = ", with passes"
UNDER_TLS = ", TLS"
#: Waves that the emulated virtual workers may commit; more than any run needs.
_PLENTY = 1_000_000


def serve_shard(pipe: Connection, certificates: Path | None) -> None:
    """A shard's process: serves until the pipe says stop."""
    keep_freed_memory(one_heap=False)
    torch.set_num_threads(2)
    tls = _tls(certificates)
    server = Server(ServerConfig(num_threads=32, tls=tls))
    shards = ShardServer(lambda _config: NullHistory(), tls=tls)
    shards.add_to(server)
    server.on_stop(shards.stop)

    def discard(messages: Iterator[bytes], _: grpc.ServicerContext) -> bytes:
        return str(sum(len(message) for message in messages)).encode()

    server.add(
        DISCARD, grpc.method_handlers_generic_handler(DISCARD, {"Push": grpc.stream_unary_rpc_method_handler(discard)})
    )
    pipe.send(server.start())
    pipe.recv()
    server.stop()


def serve_socket(pipe: Connection, certificates: Path | None) -> None:
    """The raw peer: per connection, takes bytes into a buffer of their size, or sends them. With the bare server."""
    keep_freed_memory(one_heap=False)  # as a shard
    listener = socket.create_server(("127.0.0.1", 0))
    _bare, address = serve_bare(8, _tls(certificates))
    pipe.send((listener.getsockname()[1], address))
    with ThreadPoolExecutor(8) as pool:
        while True:
            connection, _ = listener.accept()
            pool.submit(_raw_peer, connection)


def _raw_peer(connection: socket.socket) -> None:
    with connection:
        length = int.from_bytes(connection.recv(8), "little")
        buffer = memoryview(bytearray(length))
        while command := connection.recv(1):
            if command == b"p":
                _receive(connection, buffer)
                connection.sendall(b"k")
            else:
                connection.sendall(buffer)


def _receive(connection: socket.socket, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        done += connection.recv_into(buffer[done : done + SOCKET_READ_BYTES])


@dataclass(frozen=True, slots=True)
class Lane:
    """One of the streams that share the bytes: its slices and memory."""

    requester: Requester
    headers: tuple[SliceHeader, ...]
    runs: RunMap
    buffer: FlatBuffer


def _tls(certificates: Path | None) -> Tls | None:
    return None if certificates is None else Tls(certificates)


def _requester(index: int) -> Requester:
    return Requester(JobId("bench"), Term(1), VirtualWorkerIndex(0), Incarnation(0), StageIndex(index))


class Bench:
    """One shard, one raw peer, and what is measured between them. Seconds per operation, by name."""

    def __init__(self, num_streams: int, *, under_tls: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        keep_freed_memory(one_heap=True)
        self._resources = ExitStack()
        stages = [_requester(index) for index in range(num_streams)]
        server: Path | None = None
        owns: list[Path | None] = [None] * (1 + num_streams)
        if under_tls:
            folder = Path(self._resources.enter_context(tempfile.TemporaryDirectory()))
            services: list[Peer] = [NamedPeer(Role.PARAMETER_SERVER, "0"), NamedPeer(Role.COORDINATOR, "0")]
            server, *others = certify(folder, [*services, *(stage.peer for stage in stages)])
            owns = list(others)
        coordinator, *clients = map(_tls, owns)
        self._pipe, theirs = context.Pipe()
        self._shard_process = context.Process(target=serve_shard, args=(theirs, server), daemon=True)
        self._shard_process.start()
        address = self._pipe.recv()
        raw_pipe, raw_theirs = context.Pipe()
        self._raw_process = context.Process(target=serve_socket, args=(raw_theirs, server), daemon=True)
        self._raw_process.start()
        self._streams = num_streams
        self._pool = ThreadPoolExecutor(num_streams)
        lane_bytes = TOTAL_BYTES // num_streams
        port, bare = raw_pipe.recv()
        name = server_name(Role.PARAMETER_SERVER)
        self._bare = [BareStream(bare, str(i), tls=own, server_name=name) for i, own in enumerate(clients)]
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(num_streams)]
        for connection in self._sockets:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(lane_bytes.to_bytes(8, "little"))
        self._configure(address, coordinator)
        self._lanes = [self._lane(stage, lane_bytes) for stage in stages]
        grpc_only = [connect_shard(address, ShardIndex(0), tls=own) for own in clients]
        shared = [
            SharedMemoryCalls(connect_shard(address, ShardIndex(0), tls=own), stage)
            for own, stage in zip(clients, stages, strict=True)
        ]
        self._shards: dict[str, Sequence[Calls]] = {GRPC: grpc_only, MEMORY: shared}
        #: For calls without chunks, of each stage.
        self._callers = [connect_shard(address, ShardIndex(0), tls=own) for own in clients]
        self._minimal = self._resources.enter_context(minimal_streams(num_streams, lane_bytes))
        channels = [open_channel(address) for _ in range(num_streams)]
        self._discards = [channel.stream_unary(f"/{DISCARD}/Push", joined, as_is) for channel in channels]
        self._wave = 0
        #: The newest published clock, and those that follow.
        self._published = -1
        self._publications = self._follow()
        self._start()

    def _configure(self, address: str, coordinator: Tls | None) -> None:
        """One virtual worker of `num_streams` stages, each with an equal share of the parameters."""
        elements = TOTAL_BYTES // 4 // self._streams
        slices = tuple(
            SlicePlan(TensorSpec(f"p{i}", (elements,), "float32"), LayerIndex(i), ShardIndex(0), 0, elements)
            for i in range(self._streams)
        )
        data = DataSpec(_PLENTY, 1, 0, 1, None)
        connect_shard(address, tls=coordinator).invoke(
            CONFIGURE,
            ShardConfig(
                job_id=JobId("bench"),
                term=Term(1),
                shard=ShardIndex(0),
                num_shards=1,
                clock_shard_address=address,
                membership=Membership({VirtualWorkerIndex(0): self._streams}),
                slices=slices,
                sync=SyncSpec(minibatches_per_wave=1, staleness=1, deterministic=True),
                data=data,
                checkpoint_every_waves=None,
                checkpoint_keep=1,
                run_dir=tempfile.mkdtemp(),
                progress=first_progress(data),
            ),
        )

    def _lane(self, requester: Requester, lane_bytes: int) -> Lane:
        elements, index = lane_bytes // 4, requester.stage
        headers = (SliceHeader(f"p{index}", 0, elements, "float32"),)
        buffer = FlatBuffer(FlatLayout([(f"p{index}", (elements,), "float32")]), torch.device("cpu"))
        buffer.views[f"p{index}"].fill_(1e-3)
        return Lane(requester, headers, RunMap(headers, [0]), buffer)

    def _start(self) -> None:
        for shard, caller, lane in zip(self._shards[GRPC], self._callers, self._lanes, strict=True):
            shard.upload(PUSH, PushHeader(lane.requester, None, lane.headers), chunks(lane.buffer, lane.runs))
            caller.invoke(JOIN, JoinRequest(lane.requester, ""))
            caller.invoke(REPORT_INITIALIZED, ReportInitializedRequest(lane.requester))
        self._wait_for(0)

    def _wait_for(self, clock: int) -> None:
        """Until `clock` is published; by following the log, as stages do."""
        while self._published < clock:
            self._published = next(self._publications)

    def _follow(self) -> Iterator[int]:
        """The clocks that are published, from a stream that stays open, as that of a stage does."""
        from hetpipe.decide.sync.records import PublishRecord

        start = 0
        while True:
            request = FollowLogRequest(JobId("bench"), Term(1), start, requester=self._lanes[0].requester)
            for found in self._callers[0].stream(FOLLOW_LOG, request):
                start += len(found.records)
                yield from (record.clock for record in found.records if isinstance(record, PublishRecord))

    def close(self) -> None:
        """End both peers."""
        self._pipe.send("stop")
        self._shard_process.join(5)
        for process in (self._shard_process, self._raw_process):
            process.kill()
        self._resources.close()

    # -- what is timed -------------------------------------------------------------------------------------------------

    def _side_by_side(self, work: Callable[[int], None]) -> float:
        started = SYSTEM_CLOCK.monotonic()
        list(self._pool.map(work, range(self._streams)))
        return SYSTEM_CLOCK.monotonic() - started

    def raw_push(self) -> float:
        """The bytes into the raw peer's memory."""

        def work(index: int) -> None:
            self._sockets[index].sendall(b"p")
            self._sockets[index].sendall(self._lanes[index].buffer.memory())
            self._sockets[index].recv(1)

        return self._side_by_side(work)

    def raw_pull(self) -> float:
        """The bytes from the raw peer into this process's memory."""

        def work(index: int) -> None:
            self._sockets[index].sendall(b"g")
            _receive(self._sockets[index], self._lanes[index].buffer.memory())

        return self._side_by_side(work)

    def transport(self) -> float:
        """The chunks through gRPC, to a method that forgets them."""

        def work(index: int) -> None:
            lane = self._lanes[index]
            self._discards[index](chunks(lane.buffer, lane.runs), timeout=60)

        return self._side_by_side(work)

    def bare_pushes(self) -> dict[str, float]:
        """The bytes through gRPC alone into the raw peer's memory; and checked and added there."""
        return {
            "bare push": self._side_by_side(lambda index: self._bare[index].push(self._lanes[index].buffer.memory())),
            f"bare push{PASSES}": self._side_by_side(
                lambda index: self._bare[index].push_with_passes(self._lanes[index].buffer)
            ),
        }

    def bare_pulls(self) -> dict[str, float]:
        """The bytes through gRPC alone into this process's memory; and checked here."""
        return {
            "bare pull": self._side_by_side(lambda index: self._bare[index].pull(self._lanes[index].buffer.memory())),
            f"bare pull{PASSES}": self._side_by_side(
                lambda index: self._bare[index].pull_with_passes(self._lanes[index].buffer)
            ),
        }

    def push(self, over: str, *, rounded: bool = False) -> dict[str, float]:
        """A whole wave over gRPC or memory: staged, then committed and applied until the clock is published.

        Args:
            over: the transport.
            rounded: to `bfloat16` first, as with `sync.compress_pushes`.
        """
        for lane in self._lanes:
            lane.buffer.views[next(iter(lane.buffer.views))].fill_(1e-3)
        started = SYSTEM_CLOCK.monotonic()
        staged = [0.0] * self._streams

        def work(index: int) -> None:
            lane = self._lanes[index]
            header = PushHeader(lane.requester, Wave(self._wave), lane.headers)
            if rounded:
                lane.buffer.set_rounded_(lane.buffer)
            self._shards[over][index].upload(PUSH, header, chunks(lane.buffer, lane.runs, in_halves=rounded))
            staged[index] = SYSTEM_CLOCK.monotonic() - started
            blocks = ((self._wave,),) if lane.requester.stage == 0 else ()
            report = ReportStagedRequest(lane.requester, Wave(self._wave), blocks, Clock(0))
            self._callers[index].invoke(REPORT_STAGED, report)

        self._side_by_side(work)
        self._wave += 1
        self._wait_for(self._wave)
        whole = SYSTEM_CLOCK.monotonic() - started
        of = f"{over}{ROUNDED if rounded else ''}"
        return {f"push: staged and checked{of}": max(staged), f"push: whole{of}": whole}

    def minimal_push(self) -> float:
        """The same passes over the bytes in a program that does nothing else."""
        return self._side_by_side(lambda index: self._minimal[index].push(self._lanes[index].buffer))

    def minimal_pull(self) -> float:
        """Likewise."""
        return self._side_by_side(lambda index: self._minimal[index].pull(self._lanes[index].buffer))

    def pull(self, over: str) -> float:
        """The newest published weights."""

        def work(index: int) -> None:
            lane = self._lanes[index]
            receiver = ChunkReceiver(lane.buffer, lane.runs)
            header = PullHeader(lane.requester, Clock(self._wave), lane.headers)
            for chunk in self._shards[over][index].download(PULL, header):
                receiver.write(chunk)
            receiver.finish()

        return self._side_by_side(work)


def measure(rounds: int, num_streams: int) -> dict[str, list[float]]:
    """Seconds per operation; the first round warms up and is not counted."""
    seconds: dict[str, list[float]] = {}
    with closing(Bench(num_streams)) as bench, closing(Bench(num_streams, under_tls=True)) as secured:
        for number in range(rounds + 1):
            found = {"raw push": bench.raw_push(), "transport": bench.transport()}
            found |= bench.bare_pushes() | bench.push(GRPC) | bench.push(GRPC, rounded=True)
            found |= _under_tls(secured.bare_pushes() | secured.push(GRPC))
            found |= bench.push(MEMORY) | {"minimal push": bench.minimal_push()}
            found |= {"raw pull": bench.raw_pull(), **bench.bare_pulls(), "pull": bench.pull(GRPC)}
            found |= _under_tls(secured.bare_pulls() | {"pull": secured.pull(GRPC)})
            found |= {f"pull{MEMORY}": bench.pull(MEMORY), "minimal pull": bench.minimal_pull()}
            if number:
                for name, value in found.items():
                    seconds.setdefault(name, []).append(value)
    return seconds


def _under_tls(found: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}{UNDER_TLS}": value for name, value in found.items()}


def _relative(seconds: dict[str, list[float]], name: str, to: Sequence[float]) -> float:
    """Median of round-by-round ratios of speeds."""
    return round(statistics.median(b / a for a, b in zip(seconds[name], to, strict=True)), 3)


def ratios(seconds: dict[str, list[float]], raw: dict[str, list[float]]) -> dict[str, float]:
    """Speed relative to the raw sockets `raw`."""
    return {
        "transport": _relative(seconds, "transport", raw["raw push"]),
        "staged": _relative(seconds, "push: staged and checked", raw["raw push"]),
        "whole push": _relative(seconds, "push: whole", raw["raw push"]),
        "pull": _relative(seconds, "pull", raw["raw pull"]),
        f"whole push{UNDER_TLS}": _relative(seconds, f"push: whole{UNDER_TLS}", raw["raw push"]),
        f"pull{UNDER_TLS}": _relative(seconds, f"pull{UNDER_TLS}", raw["raw pull"]),
        f"whole push{ROUNDED}": _relative(seconds, f"push: whole{ROUNDED}", raw["raw push"]),
        f"whole push{MEMORY}": _relative(seconds, f"push: whole{MEMORY}", raw["raw push"]),
        f"pull{MEMORY}": _relative(seconds, f"pull{MEMORY}", raw["raw pull"]),
    }


def of_bare(seconds: dict[str, list[float]], passes: str = "") -> dict[str, float]:
    """Speed over gRPC relative to the bare stream, both with or both without TLS; `passes` may be `PASSES`."""
    found = {}
    for name, to in {
        "transport": "push",
        "push: staged and checked": "push",
        "push: whole": "push",
        "pull": "pull",
    }.items():
        for how in ("", UNDER_TLS):
            if f"{name}{how}" in seconds:
                found[f"{name}{how}"] = _relative(seconds, f"{name}{how}", seconds[f"bare {to}{passes}{how}"])
    return found


def of_minimal(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Speed over shared memory relative to the minimal program."""
    return {
        f"whole push{MEMORY}": _relative(seconds, f"push: whole{MEMORY}", seconds["minimal push"]),
        f"pull{MEMORY}": _relative(seconds, f"pull{MEMORY}", seconds["minimal pull"]),
    }


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    one, four = measure(rounds, 1), measure(rounds, 4)
    for streams, found in ((1, one), (4, four)):
        rates = {name: round(TOTAL_BYTES / statistics.median(v) / 1e9, 2) for name, v in found.items()}
        against = {"one raw socket": ratios(found, one), f"{streams} raw sockets": ratios(found, found)}
        against["a bare gRPC stream"] = of_bare(found)
        against["a bare gRPC stream with the same passes"] = of_bare(found, PASSES)
        against["the minimal program"] = of_minimal(found)
        sys.stdout.write(json.dumps({"streams": streams, "GB/s": rates, "relative to": against}, indent=1) + "\n")
