"""The client side of a link: one stream to the previous stage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager

import grpc

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import PeerUnreachable
from hetpipe.values.requests import LinkHello, Requester
from hetpipe.wire.channel import as_is
from hetpipe.wire.connection import Connection, Target
from hetpipe.wire.link_stream import (
    CALL,
    LinkStream,
    hello_from_bytes,
    incoming_messages,
    outgoing_messages,
)
from hetpipe.wire.tls import Tls

_RETRY_SECONDS = 0.1


def connect_link(
    address: str,
    *,
    hello: LinkHello,
    neighbour: Requester,
    tls: Tls | None,
    deadline_seconds: float,
    clock: Clock = SYSTEM_CLOCK,
) -> LinkStream:
    """Connect to the stage `neighbour` at `address`; retried until it accepts connections.

    With TLS, the server must have the certificate of exactly this incarnation of the stage.

    Raises:
        PeerUnreachable: no connection within `deadline_seconds`.
        HetpipeError: the neighbour refused, or another process answered.
    """
    target = Target(address=address, role=str(neighbour), tls=tls, server_name=neighbour.peer.server_name)
    connection = Connection(target, clock=clock)
    began = clock.monotonic()
    try:
        while True:
            left = deadline_seconds - (clock.monotonic() - began)
            try:
                return _call(connection, hello, neighbour, began, left)
            except PeerUnreachable:
                if clock.monotonic() - began + _RETRY_SECONDS >= deadline_seconds:
                    raise
            clock.sleep(_RETRY_SECONDS)
    except BaseException:
        connection.close()
        raise


def _call(connection: Connection, hello: LinkHello, neighbour: Requester, began: float, seconds: float) -> LinkStream:
    """Make one attempt. The stream holds its channel for its whole lifetime, also across certificate rotation."""
    outgoing: Future[Iterator[bytes]] = Future()
    with ExitStack() as stack:
        stack.callback(outgoing.cancel)
        channel = stack.enter_context(connection.channel())
        call = channel.stream_stream(CALL, as_is, as_is)(outgoing_messages(hello, outgoing))
        stack.callback(call.cancel)
        responses: Iterator[bytes] = iter(call)
        try:
            with _cancelled_after(seconds, call.cancel):
                first = next(responses, b"")
        except grpc.RpcError as error:
            raise connection.translated(error, "Connect", began, f"{hello.requester} to be accepted") from error
        welcome = hello_from_bytes(first, expected=neighbour)
        kept = stack.pop_all()

    def close() -> None:
        kept.close()
        connection.close()

    return LinkStream(welcome, incoming_messages(responses, neighbour), outgoing, call.cancel, close)


@contextmanager
def _cancelled_after(seconds: float, cancel: Callable[[], object]) -> Iterator[None]:
    """Call `cancel` if the block takes longer: gRPC's iterators have no deadline of their own."""
    timer = threading.Timer(seconds, cancel)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
