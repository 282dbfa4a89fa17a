"""The server side of every call: handlers, for gRPC and for in-process callers.

A handler takes the request as a value and returns the reply as one; its exceptions become statuses (`wire.guard`).
Allowed callers, the maximum request size, and whether the leader's fence is required are declared in the call's row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import grpc

from hetpipe.errors import MalformedChunk, ProtocolViolation, ResourceExhausted
from hetpipe.values.quantities import bytes_text
from hetpipe.wire.call import Call, Chunk, Download, ReplyT, RequestT, Streaming, Unary, Upload, joined
from hetpipe.wire.calls import CALLS
from hetpipe.wire.codec import from_bytes, to_bytes
from hetpipe.wire.feeds import Outlet, feed_opener
from hetpipe.wire.fencing import FenceGuard, fence_of

if TYPE_CHECKING:  # gRPC's class is not subscriptable at run time
    from hetpipe.wire.server import Server

    Handler = grpc.RpcMethodHandler[Any, Any]

#: The gRPC context: identity of the caller, and callbacks on termination.
Context = grpc.ServicerContext

#: Counts the bytes announced by a peer while they are transferred: `Server.in_flight`.
_InFlight = Callable[[Context, int], AbstractContextManager[None]]


class LocalContext:
    """The context of an in-process call: no certificate, and no disconnection."""

    def add_callback(self, _callback: Callable[[], None]) -> bool:
        """Accept the callback; an in-process call never ends before its handler."""
        return True

    def auth_context(self) -> dict[str, Any]:
        """No certificate."""
        return {}

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """None."""
        return ()

    def peer(self) -> str:
        """The caller's address."""
        return "in-process"


LOCAL = cast("Context", LocalContext())


class Handlers:
    """The handlers of a process; also the `Calls` of in-process callers. Thread-safe once all are registered."""

    def __init__(
        self, *, fence: Callable[[], FenceGuard] | None = None, on_close: Callable[[], None] = lambda: None
    ) -> None:
        """Start without handlers.

        Args:
            fence: the highest fence seen; for services with calls that are orders.
            on_close: called when an in-process caller closes its `Calls`.
        """
        self._fence = fence
        self._on_close = on_close
        self._in_flight: _InFlight = _not_counted
        self._handles: dict[str, Callable[..., Any]] = {}
        self._handlers: dict[str, Handler] = {}

    def on(self, call: Unary[RequestT, ReplyT], handle: Callable[[RequestT, Context], ReplyT]) -> None:
        """Register the handler of a unary call."""
        encoded = _encoder()

        def answer(request: RequestT, context: Context) -> bytes:
            if call.is_order:
                self._check_order(call, context)
            return encoded(handle(request, context))

        read = reader(call, call.request)
        self._add(call, handle, grpc.unary_unary_rpc_method_handler(answer, request_deserializer=read))

    def on_stream(
        self, call: Streaming[RequestT, ReplyT], handle: Callable[[RequestT, Context], Iterator[ReplyT]]
    ) -> None:
        """Register the handler of a streaming call; it is ended when the client disconnects or the server stops."""

        def answer(request: RequestT, context: Context) -> Iterator[bytes]:
            for reply in handle(request, context):
                yield to_bytes(reply)

        read = reader(call, call.request)
        self._add(call, handle, grpc.unary_stream_rpc_method_handler(answer, request_deserializer=read))

    def on_feed(
        self, call: Streaming[RequestT, ReplyT], open_feed: Callable[[RequestT, Context, Outlet[ReplyT]], None]
    ) -> None:
        """Register the handler of a streaming call that occupies no thread (`wire.feeds`), for remote callers only."""
        encoded = _encoder()

        @feed_opener
        def answer(request: RequestT, context: Context, outlet: Outlet[bytes]) -> None:
            open_feed(request, context, Outlet(lambda reply: outlet.send(encoded(reply)), outlet.end))

        read = reader(call, call.request)
        self._add(call, open_feed, grpc.unary_stream_rpc_method_handler(cast("Any", answer), request_deserializer=read))

    def on_upload(
        self, call: Upload[RequestT, ReplyT], handle: Callable[[RequestT, Iterable[Chunk], Context], ReplyT]
    ) -> None:
        """Register the handler of an upload: it takes the header and the chunks as they arrive."""
        read = reader(call, call.request)

        def answer(messages: Iterator[bytes], context: Context) -> bytes:
            first = next(messages, None)
            if first is None:
                raise MalformedChunk("the stream ended before its header")
            header = _header(read, first)
            with self._in_flight(context, call.num_bytes(header)):
                return to_bytes(handle(header, messages, context))

        self._add(call, handle, grpc.stream_unary_rpc_method_handler(answer))

    def on_download(self, call: Download[RequestT], handle: Callable[[RequestT, Context], Iterator[Chunk]]) -> None:
        """Register the handler of a download: it yields the chunks requested by a header."""
        read = reader(call, call.request)

        def answer(message: bytes, context: Context) -> Iterator[Chunk]:
            header = _header(read, message)
            with self._in_flight(context, call.num_bytes(header)) if call.needs_room else nullcontext():
                yield from handle(header, context)

        self._add(call, handle, grpc.unary_stream_rpc_method_handler(answer, response_serializer=joined))

    def add_to(self, server: Server, *services: str) -> None:
        """Register the handlers of these services with `server`, before it starts."""
        self._in_flight = server.in_flight
        for service in services:
            missing = [call.path for call in CALLS if call.service == service and call.path not in self._handlers]
            assert not missing, f"no handler for {', '.join(missing)}"
            paths = [path for path in self._handlers if path.startswith(f"/{service}/")]
            handlers = {path.rpartition("/")[2]: self._handlers[path] for path in paths}
            server.add(service, grpc.method_handlers_generic_handler(service, handlers))

    # -- in-process calls ---------------------------------------------------------------------------------------------

    def invoke(self, call: Unary[RequestT, ReplyT], request: RequestT) -> ReplyT:
        """Call the handler of a unary call in this thread."""
        reply: ReplyT = self._handles[call.path](request, LOCAL)
        return reply

    def stream(self, call: Streaming[RequestT, ReplyT], request: RequestT) -> Iterator[ReplyT]:
        """Call the handler of a streaming call in this thread."""
        replies: Iterator[ReplyT] = self._handles[call.path](request, LOCAL)
        return replies

    def upload(self, call: Upload[RequestT, ReplyT], header: RequestT, chunks: Iterable[Chunk]) -> ReplyT:
        """Call the handler of an upload in this thread."""
        reply: ReplyT = self._handles[call.path](header, chunks, LOCAL)
        return reply

    def download(self, call: Download[RequestT], header: RequestT) -> Iterator[Chunk]:
        """Call the handler of a download in this thread."""
        chunks: Iterator[Chunk] = self._handles[call.path](header, LOCAL)
        return chunks

    def close(self) -> None:
        """Call `on_close`; the handlers stay registered."""
        self._on_close()

    # -- internals ----------------------------------------------------------------------------------------------------

    def _add(self, call: Call, handle: Callable[..., Any], handler: Handler) -> None:
        self._handles[call.path] = handle
        self._handlers[call.path] = handler

    def _check_order(self, call: Call, context: Context) -> None:
        """Check that an order comes from the newest coordinator.

        Raises:
            StaleTerm: it does not.
        """
        assert self._fence is not None, f"{call.name} is an order, but this service tracks no fence"
        self._fence().check(fence_of(context))


def reader(call: Call, kind: type[RequestT]) -> Callable[[bytes], RequestT]:
    """Build the parser of a call's requests, of class `kind`, or of the header that opens its stream.

    It raises `ResourceExhausted` for a request that is too large, and `ProtocolViolation` for an invalid one.
    """

    def read(data: bytes) -> RequestT:
        if len(data) > call.max_request_bytes:
            raise ResourceExhausted(
                f"the request of {call.name} has {bytes_text(len(data), round_up=True)}; the limit is "
                f"{bytes_text(call.max_request_bytes)}"
            )
        return from_bytes(kind, data)

    return read


def _encoder() -> Callable[[object], bytes]:
    """An encoder of replies: one that is sent to several clients in a row is encoded once."""
    newest: tuple[object, bytes] = (None, to_bytes(None))

    def encoded(reply: object) -> bytes:
        nonlocal newest
        known, data = newest
        if known is not reply:
            data = to_bytes(reply)
            newest = (reply, data)
        return data

    return encoded


def _header(read: Callable[[bytes], RequestT], message: bytes) -> RequestT:
    """Parse the header that opens a stream.

    Raises:
        MalformedChunk: it is not such a message.
    """
    try:
        return read(message)
    except ProtocolViolation as error:
        raise MalformedChunk(f"the header cannot be read: {error}") from None


def _not_counted(_context: Context, _num_bytes: int) -> AbstractContextManager[None]:
    return nullcontext()
