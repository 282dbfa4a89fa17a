"""The least that a stream of chunks costs over gRPC for Python: messages of bytes, and one copy of each at either end.

The serializers are the identity; the options, the certificates and the size of chunks are hetpipe's. No heads, no
checksums, no checks, no credit, no admission: how near hetpipe comes is what these cost.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING

import grpc

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


def serve_bare(num_threads: int, tls: Tls | None = None) -> tuple[grpc.Server, str]:
    """A server, and its address; a stream has memory of its own here, which is kept."""
    kept: dict[bytes, memoryview] = {}

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

    server = grpc.server(
        ThreadPoolExecutor(num_threads), options=[*message_options(MAX_MESSAGE_BYTES), *keepalive_options()]
    )
    methods: dict[str, Handler] = {
        "Up": grpc.stream_unary_rpc_method_handler(up),
        "Down": grpc.unary_stream_rpc_method_handler(down),
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
        self._name = name

    def push(self, memory: memoryview) -> None:
        """Until all of it is there."""
        self._up(chain((f"{self._name} {memory.nbytes}".encode(),), _chunks(memory)))

    def pull(self, memory: memoryview, *, times: int = 1) -> None:
        """Until all of it is here, `times` one after the other."""
        _receive(self._down(f"{self._name} {memory.nbytes} {times}".encode()), memory)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()
