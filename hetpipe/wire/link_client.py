"""The client side of a link: one stream to the previous stage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress

import grpc

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import PeerUnreachable, ProtocolViolation, UserError
from hetpipe.values.requests import LinkHello, LinkTransport, MemoryOffer, Requester
from hetpipe.wire.channel import as_is
from hetpipe.wire.codec import to_bytes
from hetpipe.wire.connection import Connection, Target
from hetpipe.wire.link_stream import (
    CALL,
    GrpcStream,
    LinkStream,
    SegmentStream,
    hello_from_bytes,
    incoming_messages,
    log_transport,
    outgoing_messages,
)
from hetpipe.wire.segment import Lane, SegmentRefused
from hetpipe.wire.segment_client import fetch_segment
from hetpipe.wire.tls import Tls

_RETRY_SECONDS = 0.1


def connect_link(
    address: str,
    *,
    hello: LinkHello,
    neighbour: Requester,
    tls: Tls | None,
    deadline_seconds: float,
    needs_memory: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> LinkStream:
    """Connect to the stage `neighbour` at `address`; retried until it accepts connections.

    With TLS, the server must have the certificate of exactly this incarnation of the stage. Offered
    memory is used; if it cannot be mapped, gRPC is, unless `needs_memory`.

    Raises:
        UserError: `needs_memory`, and the memory cannot be mapped.
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
                return _call(connection, hello, neighbour, began, left, needs_memory=needs_memory)
            except PeerUnreachable:
                if clock.monotonic() - began + _RETRY_SECONDS >= deadline_seconds:
                    raise
            clock.sleep(_RETRY_SECONDS)
    except BaseException:
        connection.close()
        raise


def _call(
    connection: Connection, hello: LinkHello, neighbour: Requester, began: float, seconds: float, *, needs_memory: bool
) -> LinkStream:
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
        preamble: tuple[bytes, ...] = ()
        refusal = ""
        if welcome.memory:
            try:
                lanes = _fetched(welcome.memory)
            except SegmentRefused as error:
                refusal = str(error)
            log_transport(hello, neighbour, refusal)
            if not refusal:
                outgoing.set_result(iter((to_bytes(LinkTransport("")),)))
                with suppress(grpc.RpcError), _cancelled_after(seconds, call.cancel):
                    for _ in responses:  # until the other end has read it and ended the call
                        pass
                stack.callback(connection.close)
                return SegmentStream(welcome, own=hello.requester, outgoing=lanes[1], incoming=lanes[0])
            if needs_memory:
                raise UserError(
                    f"{hello.requester} cannot share memory with {neighbour}: {refusal}; the job says `link: "
                    "shared_memory`, and with `link: auto` they use gRPC"
                )
            preamble = (to_bytes(LinkTransport(refusal)),)
        kept = stack.pop_all()

    def close() -> None:
        kept.close()
        connection.close()

    incoming = incoming_messages(responses, neighbour)
    return GrpcStream(welcome, incoming, outgoing, call.cancel, close, refusal, preamble)


def _fetched(offers: Sequence[MemoryOffer]) -> tuple[Lane, Lane]:
    """The segments of both directions.

    Raises:
        SegmentRefused: they cannot be fetched; nothing is mapped.
    """
    if len(offers) != 2:  # noqa: PLR2004 - one for each direction
        raise ProtocolViolation(f"a link needs two segments; {len(offers)} were offered")
    first = fetch_segment(offers[0])
    try:
        return first, fetch_segment(offers[1])
    except BaseException:
        first.close()
        raise


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
