"""The end of a link that is called: a server for one neighbour and one stream."""

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

#: Longest wait for the hello of a caller.
HELLO_SECONDS = 10.0

#: Calls at the same time: the neighbour's, one that tries again, and some that are refused.
_NUM_CALLS = 8


class LinkServer:
    """Listens for one neighbour. `start` it, `accept` once; then the stream's `close` ends it, or else `close`."""

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
        """Prepare; nobody can call yet.

        Args:
            host: own address, under which the neighbour reaches this process.
            port: 0 lets the system choose.
            hello: who serves.
            neighbour: who may call; everybody else is refused.
            tls: None for plaintext, where the caller is believed who it is.
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
                insecure=tls is None,  # the agent was told so, or listens on loopback
                access=_only(neighbour),
                limits=Limits(idle_seconds=HELLO_SECONDS),
            )
        )
        handler: Handler = grpc.stream_stream_rpc_method_handler(self._connect)
        self._server.add(SERVICE, grpc.method_handlers_generic_handler(SERVICE, {CONNECT: handler}))

    def start(self) -> str:
        """Listen; returns `HOST:PORT`.

        Raises:
            PortInUse: the port is taken.
            UserError: `host` is no address of this machine.
        """
        try:
            return self._server.start()
        except PortInUse as error:
            raise PortInUse(
                f"port {self._port} of {self._host}, where {self._hello.requester} should await its neighbour, is "
                "taken; choose others with --stage-port"
            ) from error

    def accept(self, *, deadline_seconds: float) -> LinkStream:
        """The neighbour's stream, once it has called.

        Raises:
            DeadlineExceeded: it has not called in time.
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
        """Break the stream, if there is one, and free the port."""
        self._outgoing.cancel()
        if self._arrived.done():
            self._arrived.result().cancel()
        self._server.stop()

    def _connect(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        hello = hello_from_bytes(next(messages, b""), expected=self._neighbour)
        with self._lock:
            if self._taken:
                raise ProtocolViolation(f"{self._neighbour} has its link already; a link cannot be taken up again")
            self._taken = True
        incoming = incoming_messages(messages, hello.requester)
        self._arrived.set_result(LinkStream(hello, incoming, self._outgoing, context.cancel, self.close))
        yield from outgoing_messages(self._hello, self._outgoing)


def _only(neighbour: Requester) -> Mapping[str, Rule]:
    """With TLS, the one place that says who may call: the certificate of that very life, whatever the hello says."""
    return {CALL: {Role.STAGE: partial(_claim, neighbour.peer)}}


def _claim(peer: StagePeer, _message: Any) -> StagePeer:
    return peer
