"""The server side of a link: a gRPC server for one neighbour and one stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import DeadlineExceeded, HetpipeError, PeerUnreachable, PortInUse, ProtocolViolation
from hetpipe.values.identity import Role, StagePeer
from hetpipe.values.requests import LinkHello, LinkTransport, MemoryOffer, Requester
from hetpipe.wire.call import Rule
from hetpipe.wire.codec import from_bytes
from hetpipe.wire.limits import Limits
from hetpipe.wire.link_stream import (
    CALL,
    CONNECT,
    SERVICE,
    GrpcStream,
    LinkStream,
    SegmentStream,
    following_messages,
    hello_from_bytes,
    hello_to_bytes,
    incoming_messages,
    log_transport,
    outgoing_messages,
)
from hetpipe.wire.segment import Lane
from hetpipe.wire.segment_server import SegmentKey, SegmentServer
from hetpipe.wire.server import Server, ServerConfig
from hetpipe.wire.tls import Tls

if TYPE_CHECKING:
    from hetpipe.wire.serving import Handler

#: Timeout for the hello of a caller.
HELLO_SECONDS = 10.0

#: Segments of a link: what the serving stage sends, and what it receives.
_DIRECTIONS = ("downstream", "upstream")

#: Concurrent calls: the neighbour's, a retry of it, and some that are refused.
_NUM_CALLS = 8


class LinkServer:
    """Accepts one neighbour. `start` it, `accept` once; then close the stream, or call `close` if there is none."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        hello: LinkHello,
        neighbour: Requester,
        tls: Tls | None,
        offers_memory: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Set up the server; `start` opens the port.

        Args:
            host: the address at which the neighbour reaches this process.
            port: 0 lets the system choose.
            hello: identity of this end.
            neighbour: the only stage that is accepted.
            tls: None for plaintext, where the caller is not authenticated.
            offers_memory: frames may go through shared memory.
            clock: measures the wait.
        """
        self._hello = hello
        self._neighbour = neighbour
        self._clock = clock
        self._host, self._port = host, port
        self._lock = threading.Lock()
        self._taken = False
        self._outgoing: Future[Iterator[bytes]] = Future()
        self._arrived: Future[LinkStream] = Future()
        self._segments = SegmentServer(clock=clock, max_segments=len(_DIRECTIONS)) if offers_memory else None
        self._server = Server(
            ServerConfig(
                host=host,
                port=port,
                num_threads=_NUM_CALLS,
                max_concurrent_calls=_NUM_CALLS,
                tls=tls,
                insecure=tls is None,  # the agent was started with --insecure, or listens on loopback
                access=_only(neighbour),
                limits=Limits(idle_seconds=HELLO_SECONDS),
            )
        )
        handler: Handler = grpc.stream_stream_rpc_method_handler(self._connect)
        self._server.add(SERVICE, grpc.method_handlers_generic_handler(SERVICE, {CONNECT: handler}))

    def start(self) -> str:
        """Listen; returns `HOST:PORT`.

        Raises:
            PortInUse: the port is in use.
            UserError: `host` is not an address of this machine.
        """
        try:
            return self._server.start()
        except PortInUse as error:
            raise PortInUse(
                f"port {self._port} of {self._host}, on which {self._hello.requester} accepts its neighbour, is "
                "in use; choose other ports with --stage-port, or omit it where two virtual workers share a device"
            ) from error

    def accept(self, *, deadline_seconds: float) -> LinkStream:
        """Wait for the neighbour's connection and return its stream.

        Raises:
            DeadlineExceeded: it has not connected in time.
            PeerUnreachable: it disconnected before the choice of transport.
            ProtocolViolation: its choice of transport is malformed.
        """
        began = self._clock.monotonic()
        try:
            stream = self._arrived.result(deadline_seconds)
        except TimeoutError:
            elapsed = self._clock.monotonic() - began
            raise DeadlineExceeded(
                f"{self._hello.requester} waited {elapsed:.1f} s for {self._neighbour} to connect to "
                f"{self._server.address}"
            ) from None
        if isinstance(stream, SegmentStream):
            self._free()  # no other call is accepted
        return stream

    def close(self) -> None:
        """Break the stream, if any, and free the port."""
        if self._arrived.done() and self._arrived.exception() is None:
            self._arrived.result().cancel()
        self._free()

    def _free(self) -> None:
        self._outgoing.cancel()
        self._server.stop()
        if self._segments is not None:
            self._segments.stop()

    def _connect(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        hello = hello_from_bytes(next(messages, b""), expected=self._neighbour)
        if hello.memory:
            raise ProtocolViolation(f"{self._neighbour} offers memory, which only the stage that it connects to may do")
        with self._lock:
            if self._taken:
                raise ProtocolViolation(f"{self._neighbour} is already connected; a link cannot be resumed")
            self._taken = True
        if self._segments is None:
            self._arrive(self._stream(hello, messages, context, ""))
            yield from outgoing_messages(self._hello, self._outgoing)
            return
        context.add_callback(
            lambda: self._arrive(PeerUnreachable(f"{self._neighbour} left while it was offered memory"))
        )
        offers = tuple(self._segments.offer(SegmentKey(self._neighbour, each)) for each in _DIRECTIONS)
        yield hello_to_bytes(replace(self._hello, memory=offers))
        try:
            refusal, lanes = self._agreed(self._segments, offers, next(messages, None))
        except ProtocolViolation as error:
            self._arrive(error)
            raise
        log_transport(self._hello, self._neighbour, refusal)
        if lanes is None:
            self._arrive(self._stream(hello, messages, context, refusal))
            yield from following_messages(self._outgoing)
            return
        outgoing, incoming = lanes
        own = self._hello.requester
        self._arrive(SegmentStream(hello, own=own, outgoing=outgoing, incoming=incoming))

    def _arrive(self, outcome: LinkStream | HetpipeError) -> None:
        """Have `accept` return the stream, or raise the error; the first outcome counts."""
        with self._lock:
            is_first = not self._arrived.done()
            if isinstance(outcome, HetpipeError):
                if is_first:
                    self._arrived.set_exception(outcome)
                return
            if is_first:
                self._arrived.set_result(outcome)
        if not is_first:
            outcome.cancel()

    def _stream(
        self, hello: LinkHello, messages: Iterator[bytes], context: grpc.ServicerContext, refusal: str
    ) -> GrpcStream:
        incoming = incoming_messages(messages, hello.requester)
        return GrpcStream(hello, incoming, self._outgoing, context.cancel, self.close, refusal)

    def _agreed(
        self, segments: SegmentServer, offers: Sequence[MemoryOffer], answer: bytes | None
    ) -> tuple[str, tuple[Lane, Lane] | None]:
        """The reason for gRPC as the transport of frames; or this end of the segments.

        Raises:
            PeerUnreachable: the neighbour disconnected.
            ProtocolViolation: its answer is malformed, or it claims segments that it has not fetched.
        """
        if answer is None:
            raise PeerUnreachable("its call ended")
        refusal = from_bytes(LinkTransport, answer).refusal
        if refusal:
            return refusal, None
        outgoing, incoming = (segments.take(offer.segment) for offer in offers)
        if outgoing is None or incoming is None:
            raise ProtocolViolation(f"{self._neighbour} claims a shared-memory segment that it has not fetched")
        return "", (outgoing, incoming)


def _only(neighbour: Requester) -> Mapping[str, Rule]:
    """With TLS, the access check: only the certificate of this incarnation is accepted, whatever the hello contains."""
    return {CALL: {Role.STAGE: partial(_claim, neighbour.peer)}}


def _claim(peer: StagePeer, _message: Any) -> StagePeer:
    return peer
