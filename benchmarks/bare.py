"""The least that a stream of chunks costs over gRPC for Python: messages of bytes, and one copy of each at either end.

The serializers are the identity; the options, the certificates and the size of chunks are hetpipe's. No heads, no
checksums, no checks, no credit, no admission: how near hetpipe comes is what these cost. *With passes*, the same stream
also reads the bytes as often as a parameter server and its client do: a checksum at either end, and for a push the
check that all is finite, and the addition to the weights. So it is the most that pushes and pulls can reach over gRPC.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING

import grpc
import torch

from hetpipe.checksum import SUM_BYTES, checksum
from hetpipe.weights.flat import FlatBuffer, FlatLayout, finite
from hetpipe.wire.channel import MAX_MESSAGE_BYTES, as_is, keepalive_options, message_options, open_channel
from hetpipe.wire.segment import address_of
from hetpipe.wire.tls import Tls

if TYPE_CHECKING:
    from hetpipe.wire.serving import Handler

_SERVICE = "benchmarks.Bare"
_CHUNK_BYTES = 1 << 20


def _chunks(memory: memoryview) -> Iterator[bytes]:
    for offset in range(0, memory.nbytes, _CHUNK_BYTES):
        yield bytes(memory[offset : offset + _CHUNK_BYTES])


def _receive(messages: Iterator[bytes], memory: memoryview) -> None:
    """Copy messages into the memory, from its beginning again after its end."""
    address, done = address_of(memory), 0
    for message in messages:
        ctypes.memmove(address + done, address_of(message), len(message))
        done = (done + len(message)) % memory.nbytes


def _summed(memory: memoryview) -> Iterator[bytes]:
    """Messages with a checksum before the bytes, which are copied once as well."""
    for offset in range(0, memory.nbytes, _CHUNK_BYTES):
        piece = memory[offset : offset + _CHUNK_BYTES]
        yield b"".join((checksum(piece, place=offset), piece))


def _receive_summed(messages: Iterator[bytes], target: FlatBuffer, *, is_finite: bool) -> None:
    memory, numbers = target.memory(), next(iter(target.views.values()))
    address, done = address_of(memory), 0
    for message in messages:
        length = len(message) - SUM_BYTES
        ctypes.memmove(address + done, address_of(message) + SUM_BYTES, length)
        assert checksum(memory[done : done + length], place=done) == message[:SUM_BYTES]
        if is_finite:
            assert finite(numbers[done // 4 : (done + length) // 4])
        done += length


def _buffer(num_bytes: int) -> FlatBuffer:
    return FlatBuffer(FlatLayout([("p", (num_bytes // 4,), "float32")]), torch.device("cpu"))


def serve_bare(num_threads: int, tls: Tls | None = None) -> tuple[grpc.Server, str]:
    """A server, and its address; a stream has memory of its own here, which is kept."""
    kept: dict[bytes, memoryview] = {}
    #: With passes: the weights of a stream, and its update.
    weights: dict[bytes, tuple[FlatBuffer, FlatBuffer]] = {}

    def memory(stream: bytes, num_bytes: bytes) -> memoryview:
        if stream not in kept or kept[stream].nbytes != int(num_bytes):
            kept[stream] = memoryview(bytearray(b"1" * int(num_bytes)))
        return kept[stream]

    def up(messages: Iterator[bytes], _: grpc.ServicerContext) -> bytes:
        _receive(messages, memory(*next(messages).split()))
        return b""

    def down(request: bytes, _: grpc.ServicerContext) -> Iterator[bytes]:
        stream, num_bytes, times = request.split()
        for _time in range(int(times)):
            yield from _chunks(memory(stream, num_bytes))

    def buffers(stream: bytes, num_bytes: bytes) -> tuple[FlatBuffer, FlatBuffer]:
        if stream not in weights:
            weights[stream] = (_buffer(int(num_bytes)), _buffer(int(num_bytes)))
        return weights[stream]

    def up_with_passes(messages: Iterator[bytes], _: grpc.ServicerContext) -> bytes:
        stream, num_bytes = next(messages).split()
        current, update = buffers(stream, num_bytes)
        _receive_summed(messages, update, is_finite=True)
        update.add_(current)
        weights[stream] = (update, current)
        return b""

    def down_with_passes(request: bytes, _: grpc.ServicerContext) -> Iterator[bytes]:
        yield from _summed(buffers(*request.split())[0].memory())

    server = grpc.server(
        ThreadPoolExecutor(num_threads), options=[*message_options(MAX_MESSAGE_BYTES), *keepalive_options()]
    )
    methods: dict[str, Handler] = {
        "Up": grpc.stream_unary_rpc_method_handler(up),
        "Down": grpc.unary_stream_rpc_method_handler(down),
        "UpWithPasses": grpc.stream_unary_rpc_method_handler(up_with_passes),
        "DownWithPasses": grpc.unary_stream_rpc_method_handler(down_with_passes),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
    host = "127.0.0.1:0"
    port = server.add_insecure_port(host) if tls is None else server.add_secure_port(host, tls.server_credentials())
    server.start()
    return server, f"127.0.0.1:{port}"


class BareStream:
    """The client of one stream, over a channel of its own."""

    def __init__(self, address: str, name: str, *, tls: Tls | None = None, server_name: str = "") -> None:
        """Connect on first use."""
        credentials = None if tls is None else tls.channel_credentials(tls.material)
        self._channel = open_channel(address, credentials=credentials, server_name=server_name)
        self._up = self._channel.stream_unary(f"/{_SERVICE}/Up", as_is, as_is)
        self._down = self._channel.unary_stream(f"/{_SERVICE}/Down", as_is, as_is)
        self._up_with_passes = self._channel.stream_unary(f"/{_SERVICE}/UpWithPasses", as_is, as_is)
        self._down_with_passes = self._channel.unary_stream(f"/{_SERVICE}/DownWithPasses", as_is, as_is)
        self._name = name

    def push(self, memory: memoryview) -> None:
        """Until all of it is there."""
        self._up(chain((f"{self._name} {memory.nbytes}".encode(),), _chunks(memory)))

    def pull(self, memory: memoryview, *, times: int = 1) -> None:
        """Until all of it is here, `times` one after the other."""
        _receive(self._down(f"{self._name} {memory.nbytes} {times}".encode()), memory)

    def push_with_passes(self, update: FlatBuffer) -> None:
        """Until it is checked and added."""
        memory = update.memory()
        self._up_with_passes(chain((f"{self._name} {memory.nbytes}".encode(),), _summed(memory)))

    def pull_with_passes(self, target: FlatBuffer) -> None:
        """Until all of it is here and checked."""
        _receive_summed(
            self._down_with_passes(f"{self._name} {target.memory().nbytes}".encode()), target, is_finite=False
        )

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()
