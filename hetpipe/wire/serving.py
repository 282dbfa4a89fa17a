"""The server side of every call: handlers, for gRPC and for callers in the same process.

A handler gets the request as a value and returns the reply as one; what it raises becomes a status (`wire.guard`). Who
may call, how large a request may be, and whether only the newest coordinator may give the order, says the call's row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import grpc

from hetpipe.errors import MalformedChunk, ProtocolViolation, ResourceExhausted
from hetpipe.wire.call import Call, Download, ReplyT, RequestT, Streaming, Unary, Upload
from hetpipe.wire.calls import CALLS
from hetpipe.wire.codec import from_bytes, to_bytes
from hetpipe.wire.fencing import FenceGuard, fence_of

if TYPE_CHECKING:  # gRPC's own class cannot be subscripted when the program runs
    from hetpipe.wire.server import Server

    Handler = grpc.RpcMethodHandler[Any, Any]

#: The call as gRPC knows it: who calls, and when it is over.
Context = grpc.ServicerContext

#: Counts announced bytes of a call's peer while they come: `Server.in_flight`.
_InFlight = Callable[[Context, int], AbstractContextManager[None]]


class LocalContext:
    """The context of a call within the process: nobody is known by a certificate, and nobody goes away."""

    def add_callback(self, _callback: Callable[[], None]) -> bool:
        """The call is never over before its handler."""
        return True

    def auth_context(self) -> dict[str, Any]:
        """No certificate."""
        return {}

    def peer(self) -> str:
        """Where it comes from."""
        return "in-process"


LOCAL = cast("Context", LocalContext())


class Handlers:
    """What answers calls; itself the `Calls` of callers in the same process. Thread-safe once it is complete."""

    def __init__(
        self, *, fence: Callable[[], FenceGuard] | None = None, on_close: Callable[[], None] = lambda: None
    ) -> None:
        """Handle nothing yet.

        Args:
            fence: which coordinator may give orders, now; for services with calls that are orders.
            on_close: called when a caller in the same process closes its `Calls`.
        """
        self._fence = fence
        self._on_close = on_close
        self._in_flight: _InFlight = _not_counted
        self._handles: dict[str, Callable[..., Any]] = {}
        self._handlers: dict[str, Handler] = {}

    def on(self, call: Unary[RequestT, ReplyT], handle: Callable[[RequestT, Context], ReplyT]) -> None:
        """Have `handle` answer a call."""

        def answer(request: RequestT, context: Context) -> bytes:
            self._check_order(call, context)
            return to_bytes(handle(request, context))

        read = reader(call, call.request)
        self._add(call, handle, grpc.unary_unary_rpc_method_handler(answer, request_deserializer=read))

    def on_stream(
        self, call: Streaming[RequestT, ReplyT], handle: Callable[[RequestT, Context], Iterator[ReplyT]]
    ) -> None:
        """Have `handle` answer a call with a stream; it ends by itself when the client is gone or the server stops."""

        def answer(request: RequestT, context: Context) -> Iterator[bytes]:
            for reply in handle(request, context):
                yield to_bytes(reply)

        read = reader(call, call.request)
        self._add(call, handle, grpc.unary_stream_rpc_method_handler(answer, request_deserializer=read))

    def on_upload(
        self, call: Upload[RequestT, ReplyT], handle: Callable[[RequestT, Iterable[bytes], Context], ReplyT]
    ) -> None:
        """Have `handle` take an upload: the header, and the chunks as they come."""
        read = reader(call, call.request)

        def answer(messages: Iterator[bytes], context: Context) -> bytes:
            first = next(messages, None)
            if first is None:
                raise MalformedChunk("the stream ended before its header")
            header = _header(read, first)
            with self._in_flight(context, call.num_bytes(header)):
                return to_bytes(handle(header, messages, context))

        self._add(call, handle, grpc.stream_unary_rpc_method_handler(answer))

    def on_download(self, call: Download[RequestT], handle: Callable[[RequestT, Context], Iterator[bytes]]) -> None:
        """Have `handle` give the chunks that a header asks for."""
        read = reader(call, call.request)

        def answer(message: bytes, context: Context) -> Iterator[bytes]:
            header = _header(read, message)
            with self._in_flight(context, call.num_bytes(header)) if call.needs_room else nullcontext():
                yield from handle(header, context)

        self._add(call, handle, grpc.unary_stream_rpc_method_handler(answer))

    def add_to(self, server: Server, *services: str) -> None:
        """Let `server` serve the calls of these services. Before it starts."""
        self._in_flight = server.in_flight
        for service in services:
            missing = [call.path for call in CALLS if call.service == service and call.path not in self._handlers]
            assert not missing, f"nobody handles {', '.join(missing)}"
            paths = [path for path in self._handlers if path.startswith(f"/{service}/")]
            handlers = {path.rpartition("/")[2]: self._handlers[path] for path in paths}
            server.add(service, grpc.method_handlers_generic_handler(service, handlers))

    # -- for callers in the same process -----------------------------------------------------------------------------

    def invoke(self, call: Unary[RequestT, ReplyT], request: RequestT) -> ReplyT:
        """See `Calls.invoke`."""
        reply: ReplyT = self._handles[call.path](request, LOCAL)
        return reply

    def stream(self, call: Streaming[RequestT, ReplyT], request: RequestT) -> Iterator[ReplyT]:
        """See `Calls.stream`."""
        replies: Iterator[ReplyT] = self._handles[call.path](request, LOCAL)
        return replies

    def upload(self, call: Upload[RequestT, ReplyT], header: RequestT, chunks: Iterable[bytes]) -> ReplyT:
        """See `Calls.upload`."""
        reply: ReplyT = self._handles[call.path](header, chunks, LOCAL)
        return reply

    def download(self, call: Download[RequestT], header: RequestT) -> Iterator[bytes]:
        """See `Calls.download`."""
        chunks: Iterator[bytes] = self._handles[call.path](header, LOCAL)
        return chunks

    def close(self) -> None:
        """See `Calls.close`."""
        self._on_close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _add(self, call: Call, handle: Callable[..., Any], handler: Handler) -> None:
        self._handles[call.path] = handle
        self._handlers[call.path] = handler

    def _check_order(self, call: Call, context: Context) -> None:
        """Let nobody but the newest coordinator give orders.

        Raises:
            StaleTerm: it is not.
        """
        if call.is_order:
            assert self._fence is not None, f"{call.name} is an order, and nobody knows whose orders count"
            self._fence().check(fence_of(context))


def reader(call: Call, kind: type[RequestT]) -> Callable[[bytes], RequestT]:
    """Reads the request of a call, of the class `kind`, or the header that opens its stream.

    It raises `ResourceExhausted` for one that is too large, and `ProtocolViolation` for what is no such message.
    """

    def read(data: bytes) -> RequestT:
        if len(data) > call.max_request_bytes:
            raise ResourceExhausted(
                f"a request of {call.name} has at most {call.max_request_bytes} bytes, and not {len(data)}"
            )
        return from_bytes(kind, data)

    return read


def _header(read: Callable[[bytes], RequestT], message: bytes) -> RequestT:
    """The header that opens a stream.

    Raises:
        MalformedChunk: it is no such message.
    """
    try:
        return read(message)
    except ProtocolViolation as error:
        raise MalformedChunk(f"the header cannot be read: {error}") from None


def _not_counted(_context: Context, _num_bytes: int) -> AbstractContextManager[None]:
    return nullcontext()
