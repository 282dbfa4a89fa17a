"""The server side of a link: a gRPC server for one neighbour and one stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import DeadlineExceeded, PortInUse, ProtocolViolation
from hetpipe.values.identity import Role, StagePeer
from hetpipe.values.requests import LinkHello, Requester
from hetpipe.wire.call import Rule
from hetpipe.wire.limits import Limits
from hetpipe.wire.link_stream import (
    CALL,
    CONNECT,
    SERVICE,
    LinkStream,
    hello_from_bytes,
    incoming_messages,
    outgoing_messages,
)
from hetpipe.wire.server import Server, ServerConfig
from hetpipe.wire.tls import Tls

if TYPE_CHECKING:
    from hetpipe.wire.serving import Handler

#: Timeout for the hello of a caller.
HELLO_SECONDS = 10.0

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
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Set up the server; `start` opens the port.

        Args:
            host: the address at which the neighbour reaches this process.
            port: 0 lets the system choose.
            hello: identity of this end.
            neighbour: the only stage that is accepted.
            tls: None for plaintext, where the caller is not authenticated.
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
                "in use; choose other ports with --stage-port"
            ) from error

    def accept(self, *, deadline_seconds: float) -> LinkStream:
        """Wait for the neighbour's connection and return its stream.

        Raises:
            DeadlineExceeded: it has not connected in time.
        """
        began = self._clock.monotonic()
        try:
            return self._arrived.result(deadline_seconds)
        except TimeoutError:
            elapsed = self._clock.monotonic() - began
            raise DeadlineExceeded(
                f"{self._hello.requester} waited {elapsed:.1f} s for {self._neighbour} to connect to "
                f"{self._server.address}"
            ) from None

    def close(self) -> None:
        """Break the stream, if any, and free the port."""
        self._outgoing.cancel()
        if self._arrived.done():
            self._arrived.result().cancel()
        self._server.stop()

    def _connect(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        hello = hello_from_bytes(next(messages, b""), expected=self._neighbour)
        with self._lock:
            if self._taken:
                raise ProtocolViolation(f"{self._neighbour} is already connected; a link cannot be resumed")
            self._taken = True
        incoming = incoming_messages(messages, hello.requester)
        self._arrived.set_result(LinkStream(hello, incoming, self._outgoing, context.cancel, self.close))
        yield from outgoing_messages(self._hello, self._outgoing)


def _only(neighbour: Requester) -> Mapping[str, Rule]:
    """With TLS, the access check: only the certificate of this incarnation is accepted, whatever the hello contains."""
    return {CALL: {Role.STAGE: partial(_claim, neighbour.peer)}}


def _claim(peer: StagePeer, _message: Any) -> StagePeer:
    return peer
