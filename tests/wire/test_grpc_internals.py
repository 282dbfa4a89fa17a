"""The installed gRPC is as `hetpipe.wire.grpc_internals` takes it to be."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from hetpipe.wire.grpc_internals import TOO_MANY_CALLS, cancel_with_status, hung_up

_SECONDS = 20.0
_CALL = "/contract/Call"

#: A failure names it: what changed is most likely gRPC.
VERSION = f"gRPC {grpc.__version__}; see hetpipe/wire/grpc_internals.py"

Handler = Callable[[Iterator[bytes], grpc.ServicerContext], bytes]


class _Service(grpc.GenericRpcHandler):
    def __init__(self, handler: Handler) -> None:
        self._handler: Any = grpc.stream_unary_rpc_method_handler(self._call)
        self._behaviour = handler

    def _call(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        return self._behaviour(requests, context)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        del handler_call_details
        return self._handler


@contextmanager
def serving(handler: Handler, *, most_calls: int | None = None) -> Iterator[grpc.Channel]:
    """A channel to a server of one call."""
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads, handlers=[_Service(handler)], maximum_concurrent_rpcs=most_calls)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
        server.stop(None).wait(_SECONDS)


def called(channel: grpc.Channel, requests: Iterator[Any]) -> Any:
    return channel.stream_unary(_CALL).future(requests, timeout=_SECONDS)


def ended(call: Any) -> tuple[grpc.StatusCode, str]:
    """How a call failed."""
    with pytest.raises(grpc.RpcError) as raised:
        call.result(timeout=_SECONDS)
    assert isinstance(raised.value, grpc.Call)
    return raised.value.code(), raised.value.details() or ""


def held(until: threading.Event) -> Iterator[bytes]:
    """A request that never comes."""
    until.wait(_SECONDS)
    yield from ()


def test_a_call_that_waits_for_its_peer_is_ended_with_a_status_by_another_thread() -> None:
    contexts: list[grpc.ServicerContext] = []
    begun, over = threading.Event(), threading.Event()

    def waiting(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        contexts.append(context)
        begun.set()
        return b"".join(requests)

    with serving(waiting) as channel:
        call = called(channel, held(over))
        assert begun.wait(_SECONDS)
        assert cancel_with_status(contexts[0], grpc.StatusCode.RESOURCE_EXHAUSTED, "too slow"), VERSION
        assert ended(call) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too slow"), VERSION
        over.set()


def test_a_server_with_as_many_calls_as_it_may_says_so_in_these_words() -> None:
    begun, over = threading.Event(), threading.Event()

    def waiting(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        del requests, context
        begun.set()
        over.wait(_SECONDS)
        return b""

    with serving(waiting, most_calls=1) as channel:
        first = called(channel, iter(()))
        assert begun.wait(_SECONDS)
        assert ended(called(channel, iter(()))) == (grpc.StatusCode.RESOURCE_EXHAUSTED, TOO_MANY_CALLS), VERSION
        over.set()
        assert first.result(timeout=_SECONDS) == b""


def test_who_is_hung_up_on_is_told_from_who_finds_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def hang_up() -> None:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            code, details = ended(called(channel, iter(())))
        server.shutdown(socket.SHUT_RDWR)
        thread.join(_SECONDS)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert hung_up(details), (details, VERSION)

    # A pool of its own: the connection of the channel before may still be known with how it failed.
    options = (("grpc.use_local_subchannel_pool", 1),)
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        code, details = ended(called(channel, iter(())))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert not hung_up(details), (details, VERSION)
