"""(j) Frames from one stage to the next on one host: links against a raw TCP socket; and the demo over each kind.

Two processes. A round sends the same bytes over each contender in turn, one tensor per frame, and ends when the other
process has received the last one. Raw TCP reads all frames into the same memory; links make a tensor for each. Then a
frame goes there and back over each in turn, for the time of one way.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import torch

from benchmarks.bare import BareStream, serve_bare
from benchmarks.certificates import certify
from benchmarks.hand_overs import HandOvers, pair
from benchmarks.sizes import sized
from benchmarks.stages import use_one_thread
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.link.catalogue import LinkNetwork, call, listen
from hetpipe.link.cut import Cut
from hetpipe.link.policy import Frame, FrameKind, Link, LinkLimits
from hetpipe.values.ids import Incarnation, JobId, StageIndex, Term, VirtualWorkerIndex
from hetpipe.values.policies import LinkKind
from hetpipe.values.requests import Requester
from hetpipe.wire.tls import Tls

ROOT = Path(__file__).resolve().parents[1]

_FRAME_KIB = sized((64, 1024, 4096, 16384, 65536), (64, 1024))

#: Bytes of one frame.
SIZES = {f"{kib // 1024} MiB" if kib >= 1024 else f"{kib} KiB": kib * 1024 for kib in _FRAME_KIB}

#: Bytes of one measurement, but at most so many frames.
TOTAL_BYTES = sized(256, 4) * 1024 * 1024
MOST_FRAMES = 1024

#: Round trips of one measurement, and the bytes of a frame that goes there and back.
NUM_TRIPS = sized(300, 20)
TRIP_BYTES = 64 * 1024

RAW = "raw TCP"
HAND_OVERS = "hand-overs alone"

#: The links: kind, and whether with TLS.
LINKS: Mapping[str, tuple[LinkKind, bool]] = {
    "grpc": ("grpc", False),
    "grpc with TLS": ("grpc", True),
    "gloo": ("gloo", False),
    "shared memory": ("shared_memory", False),
    "shared memory with TLS": ("shared_memory", True),
}

#: gRPC and nothing else, and whether with TLS.
BARE: Mapping[str, bool] = {"bare gRPC": False, "bare gRPC with TLS": True}

#: What `to_bare` compares.
_GRPC_OF = {"grpc": "bare gRPC", "grpc with TLS": "bare gRPC with TLS"}

_HOST = "127.0.0.1"
_SECONDS = 120.0

#: What a stage of a pipeline with 4 minibatches per wave has.
_LIMITS = LinkLimits(incoming_frames=10, outgoing_frames=4)

_JOB, _VW = JobId("bench"), VirtualWorkerIndex(0)


def num_frames(frame_bytes: int) -> int:
    """Frames of one measurement."""
    return min(MOST_FRAMES, TOTAL_BYTES // frame_bytes)


def _cut(own: int) -> Cut:
    return Cut(own=_stage(own), neighbour=_stage(1 - own), limits=_LIMITS)


def _stage(index: int) -> Requester:
    return Requester(_JOB, Term(1), _VW, Incarnation(0), StageIndex(index))


def _footing(folder: Path, *, tls: bool) -> LinkNetwork:
    return LinkNetwork(host=_HOST, tls=Tls(folder) if tls else None)


def receive_everything(pipe: Connection, folder: Path) -> None:
    """The second process, stage 1: connects all contenders, then receives what it is told to."""
    use_one_thread()
    raw = socket.create_connection((_HOST, pipe.recv()))
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what it says arrives when it is said
    links = {
        name: call(kind, _cut(1), pipe.recv(), _footing(folder, tls=tls), deadline_seconds=_SECONDS)
        for name, (kind, tls) in LINKS.items()
    }
    names = _stage(0).peer.server_name
    bare = {
        name: BareStream(pipe.recv(), "0", tls=Tls(folder) if tls else None, server_name=names)
        for name, tls in BARE.items()
    }
    sends, receives, descriptor = pipe.recv(), pipe.recv(), pipe.recv()
    hand_overs = HandOvers(sends, receives, descriptor.detach(), is_first=False)
    while (order := pipe.recv()) is not None:
        name, frame_bytes = order
        if name in BARE:
            raw.sendall(b"r")
            bare[name].pull(memoryview(bytearray(frame_bytes)), times=num_frames(frame_bytes))
            raw.sendall(b"k")
        elif frame_bytes:
            _receive_raw(raw, frame_bytes) if name == RAW else _receive_frames(links[name], num_frames(frame_bytes))
        elif name == HAND_OVERS:
            for _ in range(NUM_TRIPS):
                hand_overs.send(hand_overs.receive())
        elif name == RAW:
            for _ in range(NUM_TRIPS):
                raw.sendall(_exactly(raw, TRIP_BYTES))
        else:
            _echo(links[name])
    for link in links.values():
        link.close()
    for stream in bare.values():
        stream.close()
    hand_overs.close()
    raw.close()


def _receive_raw(raw: socket.socket, frame_bytes: int) -> None:
    buffer = memoryview(bytearray(frame_bytes))
    raw.sendall(b"r")
    for _ in range(num_frames(frame_bytes)):
        done = 0
        while done < frame_bytes:
            done += raw.recv_into(buffer[done:])
    raw.sendall(b"k")


def _receive_frames(link: Link, count: int) -> None:
    link.send(Frame(FrameKind.BACKWARD, 0, 0, 0), deadline_seconds=_SECONDS)
    for _ in range(count):
        link.receive(timeout_seconds=_SECONDS)
    link.send(Frame(FrameKind.BACKWARD, count, 0, 0), deadline_seconds=_SECONDS)


def _exactly(raw: socket.socket, num_bytes: int) -> bytearray:
    buffer, done = bytearray(num_bytes), 0
    while done < num_bytes:
        done += raw.recv_into(memoryview(buffer)[done:])
    return buffer


def _echo(link: Link) -> None:
    for _ in range(NUM_TRIPS):
        frame = link.receive(timeout_seconds=_SECONDS)
        link.send(Frame(FrameKind.BACKWARD, frame.minibatch, 0, 0, frame.tensors), deadline_seconds=_SECONDS)


class Bench:
    """This process, stage 0."""

    def __init__(self, pipe: Connection, folder: Path) -> None:
        self._pipe = pipe
        with socket.create_server((_HOST, 0)) as listener:
            pipe.send(listener.getsockname()[1])
            self._raw, _ = listener.accept()
        self._raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links = {name: self._link(kind, _footing(folder, tls=tls)) for name, (kind, tls) in LINKS.items()}
        self._servers = []
        for tls in BARE.values():
            server, address = serve_bare(2, Tls(folder) if tls else None)
            self._servers.append(server)
            pipe.send(address)
        (sends, receives, descriptor), theirs = pair()
        self._hand_overs = HandOvers(sends, receives, descriptor, is_first=True)
        pipe.send(theirs[0])
        pipe.send(theirs[1])
        pipe.send(DupFd(theirs[2]))

    def _link(self, kind: LinkKind, footing: LinkNetwork) -> Link:
        listener = listen(kind, _cut(0), footing)
        self._pipe.send(listener.address)
        return listener.accept(deadline_seconds=_SECONDS)

    def seconds(self, name: str, frame_bytes: int) -> float:
        """How long the frames take over one contender."""
        self._pipe.send((name, frame_bytes))
        if name in BARE:
            self._raw.recv(1)
            began = SYSTEM_CLOCK.monotonic()
            self._raw.recv(1)
            return SYSTEM_CLOCK.monotonic() - began
        return self._raw_seconds(frame_bytes) if name == RAW else self._link_seconds(self._links[name], frame_bytes)

    def _raw_seconds(self, frame_bytes: int) -> float:
        frame = bytearray(b"1" * frame_bytes)
        self._raw.recv(1)
        began = SYSTEM_CLOCK.monotonic()
        for _ in range(num_frames(frame_bytes)):
            self._raw.sendall(frame)
        self._raw.recv(1)
        return SYSTEM_CLOCK.monotonic() - began

    def _link_seconds(self, link: Link, frame_bytes: int) -> float:
        tensor = torch.ones(frame_bytes, dtype=torch.uint8)
        link.receive(timeout_seconds=_SECONDS)
        began = SYSTEM_CLOCK.monotonic()
        for p in range(1, num_frames(frame_bytes) + 1):
            link.send(Frame(FrameKind.FORWARD, p, 0, 0, (tensor,)), deadline_seconds=_SECONDS)
        link.receive(timeout_seconds=_SECONDS)
        return SYSTEM_CLOCK.monotonic() - began

    def one_way(self, name: str) -> float:
        """Seconds from `send` until a frame of `TRIP_BYTES` is received: half of the median round trip."""
        self._pipe.send((name, 0))
        tensor, trips = torch.ones(TRIP_BYTES, dtype=torch.uint8), []
        for p in range(1, NUM_TRIPS + 1):
            began = SYSTEM_CLOCK.monotonic()
            if name == RAW:
                self._raw.sendall(bytes(TRIP_BYTES))
                _exactly(self._raw, TRIP_BYTES)
            elif name == HAND_OVERS:
                self._hand_overs.send(tensor)
                self._hand_overs.receive()
            else:
                self._links[name].send(Frame(FrameKind.FORWARD, p, 0, 0, (tensor,)), deadline_seconds=_SECONDS)
                self._links[name].receive(timeout_seconds=_SECONDS)
            trips.append(SYSTEM_CLOCK.monotonic() - began)
        return statistics.median(trips) / 2.0

    def close(self) -> None:
        """Let the other process end, too."""
        self._pipe.send(None)
        for link in self._links.values():
            link.close()
        for server in self._servers:
            server.stop(None)
        self._hand_overs.close()
        self._raw.close()


@contextmanager
def _two_processes() -> Iterator[Bench]:
    use_one_thread()
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        own, other = certify(Path(stack.enter_context(tempfile.TemporaryDirectory())), [_stage(0).peer, _stage(1).peer])
        pipe, theirs = context.Pipe()
        process = context.Process(target=receive_everything, args=(theirs, other), daemon=True)
        process.start()
        stack.callback(process.kill)
        bench = Bench(pipe, own)
        yield bench
        bench.close()
        process.join(_SECONDS)


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Frame size → contender → bytes per second of each round; the first round warms up and is not counted."""
    found: dict[str, dict[str, list[float]]] = {size: {name: [] for name in (RAW, *BARE, *LINKS)} for size in SIZES}
    with _two_processes() as bench:
        for number in range(rounds + 1):
            for size, frame_bytes in SIZES.items():
                for name, rates in found[size].items():
                    rate = num_frames(frame_bytes) * frame_bytes / bench.seconds(name, frame_bytes)
                    if number:
                        rates.append(rate)
    return found


def measure_one_way(rounds: int) -> dict[str, float]:
    """Contender → median over rounds of the microseconds of one way."""
    found: dict[str, list[float]] = {name: [] for name in (RAW, HAND_OVERS, *LINKS)}
    with _two_processes() as bench:
        for number in range(rounds + 1):
            for name, seconds in found.items():
                taken = bench.one_way(name)
                if number:
                    seconds.append(taken)
    return {name: round(statistics.median(seconds) * 1e6, 1) for name, seconds in found.items()}


def table(found: Mapping[str, Mapping[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Medians in GB/s."""
    return {
        size: {name: round(statistics.median(rates) / 1e9, 2) for name, rates in by_name.items()}
        for size, by_name in found.items()
    }


def ratios(found: Mapping[str, Mapping[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Speed relative to the raw socket: medians of round-by-round ratios."""
    return {size: {name: _ratio(by_name[name], by_name[RAW]) for name in LINKS} for size, by_name in found.items()}


def to_gloo(found: Mapping[str, Mapping[str, list[float]]]) -> dict[str, float]:
    """Speed of shared memory relative to gloo: medians of round-by-round ratios."""
    return {size: _ratio(by_name["shared memory"], by_name["gloo"]) for size, by_name in found.items()}


def to_bare(found: Mapping[str, Mapping[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Speed of gRPC links relative to bare gRPC: medians of round-by-round ratios."""
    return {
        size: {name: _ratio(by_name[name], by_name[bare]) for name, bare in _GRPC_OF.items()}
        for size, by_name in found.items()
    }


def _ratio(rates: list[float], to: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(rates, to, strict=True)), 3)


def demo_rate(kind: LinkKind) -> float:
    """Samples per second of the demo's job over one kind of links; a whole run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hetpipe.cli.main", "train", "examples/digits/job.yaml", "--json"]
        command += ["--set", f"link={kind}", "--run-dir", f"{folder}/run"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return float(result["samples_per_second"])


def demo(rounds: int) -> dict[str, Any]:
    """The demo's speed over each kind of links, in turns."""
    kinds: tuple[LinkKind, ...] = ("shared_memory", "grpc", "gloo")
    turns = [[demo_rate(kind) for kind in kinds] for _ in range(rounds)]
    memory, grpc, gloo = ([turn[index] for turn in turns] for index in range(len(kinds)))
    return {
        "shared memory": round(statistics.median(memory), 1),
        "grpc": round(statistics.median(grpc), 1),
        "gloo": round(statistics.median(gloo), 1),
        "grpc / gloo": _ratio(grpc, gloo),
        "shared memory / gloo": _ratio(memory, gloo),
    }


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    rates = measure(rounds)
    figures = {
        "GB/s": table(rates),
        "of raw TCP": ratios(rates),
        "of bare gRPC": to_bare(rates),
        "of gloo": to_gloo(rates),
        "microseconds, one way": measure_one_way(rounds),
        "demo, samples per second": demo(rounds),
    }
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
