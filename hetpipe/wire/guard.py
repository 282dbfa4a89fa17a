"""The interceptor around every call of a server: authorization, limits, request validation, and error translation.

Callers are checked against the table (`wire.calls`) and the limits (`wire.limits`), the request is parsed, and
exceptions become statuses. gRPC itself would read the single request of a unary call on a thread that waits for as long
as the peer likes, and would answer INTERNAL to an unreadable one. Every call is therefore registered as a stream of
requests, which is the same on the wire, and its first message is read here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError

from hetpipe import __version__
from hetpipe.clock import Clock
from hetpipe.errors import Busy, HetpipeError, PermissionDenied, ProtocolViolation, Unauthenticated
from hetpipe.observe.log import get_logger
from hetpipe.observe.rpc_counters import RPC_COUNTERS
from hetpipe.values.identity import Peer
from hetpipe.wire.access import check_claim, check_role, peer_of
from hetpipe.wire.audit import Refusals
from hetpipe.wire.call import Rule
from hetpipe.wire.feeds import Outlet, opens_feed
from hetpipe.wire.grpc_internals import cancel_with_status
from hetpipe.wire.limits import Admission, Limits, Uploads, room_of
from hetpipe.wire.status import INTERNAL_TEXT, metadata_of, status_of, text_of

_log = get_logger(__name__)

_Behaviour = Callable[..., Any]


class Guard(grpc.ServerInterceptor):
    """The interceptor of one server. Thread-safe."""

    def __init__(self, access: Mapping[str, Rule] | None, limits: Limits, *, num_threads: int, clock: Clock) -> None:
        """Create the interceptor.

        Args:
            access: the access table; None without TLS, where callers are anonymous.
            limits: per peer with a certificate; those of a plain address follow from the number of threads.
            num_threads: of the server.
            clock: measures how long peers take to send.
        """
        self._access = access
        self._limits = limits
        self._limits_of_address = limits.of_address(num_threads)
        self._num_threads = num_threads
        self._refusals = Refusals(clock)
        self._clock = clock
        self._admission = Admission()
        #: Of feeds, which occupy no threads: limited by peer, and by their owner (`wire.feeds`).
        self._feeds = Admission()
        #: The wrapped handlers, by the name of their call.
        self._wrapped: dict[str, Any] = {}
        #: By method name and context.
        self._uploads: Uploads[tuple[str, grpc.ServicerContext]] = Uploads(limits)

    def intercept_service(
        self, continuation: Callable[[Any], Any], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Wrap the handler of a call."""
        call: str = handler_call_details.method
        wrapped = self._wrapped.get(call)
        if wrapped is None:
            handler = continuation(handler_call_details)
            if handler is None:
                return grpc.stream_unary_rpc_method_handler(partial(self._unknown, call))
            wrapped = self._wrapped[call] = self._wrap(call, handler)
        return wrapped

    def _wrap(self, call: str, handler: Any) -> Any:
        shape = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        behaviour: _Behaviour = getattr(handler, shape)
        if opens_feed(behaviour):
            opening = partial(self._open_feed, call, handler, behaviour)
            cast("Any", opening).experimental_non_blocking = True
            return grpc.stream_stream_rpc_method_handler(cast("Any", opening), None, handler.response_serializer)
        if handler.response_streaming:
            streaming = partial(self._answer_with_stream, call, handler, behaviour)
            return grpc.stream_stream_rpc_method_handler(streaming, None, handler.response_serializer)
        answering = partial(self._answer, call, handler, behaviour)
        return grpc.stream_unary_rpc_method_handler(answering, None, handler.response_serializer)

    def in_flight(self, context: grpc.ServicerContext, num_bytes: int) -> AbstractContextManager[None]:
        """Count the bytes announced by the peer of `context` while they are transferred.

        Raises:
            Busy: on entry, if too many bytes are in flight.
        """
        name, limits = self._name_and_limits(context, self._peer(context))
        return self._admission.bytes_in_flight(name, max(0, num_bytes), limits)

    def end_overdue(self) -> None:
        """Cancel the calls of peers that take too long to send, and count refusals; to be called periodically."""
        self._refusals.summarise()
        for (call, context), error in self._uploads.overdue(now=self._clock.monotonic()):
            self._note_refusal(call, context, error)
            cancel_with_status(context, status_of(error), text_of(error))

    # -- a call ------------------------------------------------------------------------------------------------------

    def _answer(
        self, call: str, handler: Any, behaviour: _Behaviour, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Any:
        with RPC_COUNTERS.answering(call, cast("Any", context)):
            try:
                peer = self._peer(context)
                with self._counted(handler, context, peer):
                    return behaviour(self._request(call, handler, messages, context, peer), context)
            except Exception as error:
                self._abort(call, context, error)
                raise
            finally:
                self._uploads.end((call, context))

    def _answer_with_stream(
        self, call: str, handler: Any, behaviour: _Behaviour, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[Any]:
        with RPC_COUNTERS.answering(call, cast("Any", context)):
            try:
                peer = self._peer(context)
                with self._counted(handler, context, peer):
                    yield from behaviour(self._request(call, handler, messages, context, peer), context)
            except Exception as error:
                self._abort(call, context, error)
                raise
            finally:
                self._uploads.end((call, context))

    def _open_feed(
        self,
        call: str,
        handler: Any,
        behaviour: _Behaviour,
        messages: Iterator[bytes],
        context: grpc.ServicerContext,
        on_next: Callable[[bytes | None], None],
    ) -> None:
        """Let the handler open a feed, which is counted until its call ends."""
        outlet = Outlet(on_next, partial(self._end_feed, call, context, on_next))
        with ExitStack() as held:
            held.enter_context(RPC_COUNTERS.answering(call, cast("Any", context)))
            try:
                peer = self._peer(context)
                held.enter_context(self._counted_feed(context, peer))
                behaviour(self._request(call, handler, messages, context, peer), context, outlet)
            except Exception as error:
                self._abort(call, context, error)
                raise
            finally:
                self._uploads.end((call, context))
            release = held.pop_all().close
        if not context.add_callback(release):
            release()

    def _end_feed(
        self,
        call: str,
        context: grpc.ServicerContext,
        on_next: Callable[[bytes | None], None],
        error: Exception | None,
    ) -> None:
        """End a feed from any thread: `abort` works in the handler's only."""
        if isinstance(error, HetpipeError):
            self._note_refusal(call, context, error)
            context.set_trailing_metadata(metadata_of(error))
            context.set_code(status_of(error))
            context.set_details(text_of(error))
        elif error is not None:
            _log.error("call_failed", call=call, peer=context.peer(), exc_info=error)
            context.set_code(grpc.StatusCode.INTERNAL)
            context.set_details(INTERNAL_TEXT)
        on_next(None)

    def _counted_feed(self, context: grpc.ServicerContext, peer: Peer | None) -> AbstractContextManager[None]:
        """Count a feed while it is open; an address without a certificate may be a whole cluster.

        Raises:
            Busy: the peer has too many feeds, or has been refused too often.
        """
        name, limits = self._name_and_limits(context, peer)
        if peer is not None and self._refusals.is_too_much(name):
            raise Busy(f"{name} was refused too often; retry in a second")
        most = None if peer is None else limits.streams_per_peer
        return self._feeds.call(name, replace(limits, calls_per_peer=None, streams_per_peer=most), is_stream=True)

    def _unknown(self, call: str, _messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        sentence = f"{call[:200]!r} is not a call of this server, which runs hetpipe {__version__}"
        self._note(call, context, "UnknownCall", sentence)
        self._refusals.strain(self._name_and_limits(context, self._peer(context))[0])
        context.abort(grpc.StatusCode.UNIMPLEMENTED, sentence)

    def _counted(self, handler: Any, context: grpc.ServicerContext, peer: Peer | None) -> AbstractContextManager[None]:
        """Count the call while it runs.

        Raises:
            Busy: the peer or its role has too many calls, or the peer has been refused too often.
        """
        name, limits = self._name_and_limits(context, peer)
        if peer is not None and self._refusals.is_too_much(name):  # an address may be a whole cluster
            raise Busy(f"{name} was refused too often; retry in a second")
        is_stream = handler.request_streaming or handler.response_streaming
        group = ("", None) if peer is None else (peer.role, room_of(peer.role, self._num_threads))
        return self._admission.call(name, limits, is_stream=is_stream, group=group)

    def _request(
        self, call: str, handler: Any, messages: Iterator[bytes], context: grpc.ServicerContext, peer: Peer | None
    ) -> Any:
        """The request, or the stream of requests, of an authorized caller.

        Raises:
            Unauthenticated, PermissionDenied: the caller is not authorized.
            ProtocolViolation: the request cannot be parsed.
        """
        if peer is None and self._access is not None:
            peer = peer_of(context)  # whose message names the reason
        claim = None if peer is None else check_role(call, peer, self._access or {})
        if not handler.request_streaming:
            request = _read(handler.request_deserializer, self._only((call, context), messages))
            if peer is not None and claim is not None:
                check_claim(call, peer, claim, request)
            return request
        watched = self._watched((call, context), messages, first_only=handler.response_streaming)
        requests = map(partial(_read, handler.request_deserializer), watched)
        if peer is None or claim is None:
            return requests
        for first in requests:
            check_claim(call, peer, claim, first)
            return chain((first,), requests)
        return iter(())

    def _watched(
        self, key: tuple[str, grpc.ServicerContext], messages: Iterator[bytes], *, first_only: bool
    ) -> Iterator[bytes]:
        """`messages`, recording the waits for each; two kinds of stream may be silent for long once begun."""
        upload = self._uploads.begin(key, now=self._clock.monotonic())
        for message in messages:
            upload.waits_since = None
            if first_only:
                self._uploads.end(key)
            yield message
            upload.waits_since = self._clock.monotonic()
        upload.waits_since = None  # the end of the stream; `_answer` records the end of the call

    def _only(self, key: tuple[str, grpc.ServicerContext], messages: Iterator[bytes]) -> bytes:
        """The single message of a unary call."""
        self._uploads.begin(key, now=self._clock.monotonic())
        for message in messages:
            self._uploads.end(key)
            return message
        raise ProtocolViolation("the call ended before its request")

    # -- who calls, and how it ends ----------------------------------------------------------------------------------

    def _peer(self, context: grpc.ServicerContext) -> Peer | None:
        """The caller's identity from its certificate; None if unknown."""
        if self._access is not None:
            with suppress(Unauthenticated):
                return peer_of(context)
        return None

    def _identity(self, context: grpc.ServicerContext) -> str:
        """The caller's identity for the log; empty if unknown."""
        return str(self._peer(context) or "")

    def _name_and_limits(self, context: grpc.ServicerContext, peer: Peer | None) -> tuple[str, Limits]:
        return (address_of(context.peer()), self._limits_of_address) if peer is None else (str(peer), self._limits)

    def _note_refusal(self, call: str, context: grpc.ServicerContext, error: HetpipeError) -> None:
        self._note(call, context, type(error).__name__, str(error))
        if isinstance(error, PermissionDenied | Unauthenticated):
            self._refusals.strain(self._name_and_limits(context, self._peer(context))[0])
        RPC_COUNTERS.refused(call, reason=type(error).__name__)

    def _note(self, call: str, context: grpc.ServicerContext, error: str, sentence: str) -> None:
        who = self._name_and_limits(context, self._peer(context))[0]
        identity = self._identity(context)
        self._refusals.note(call, peer=context.peer(), identity=identity, error=error, sentence=sentence, who=who)

    def _abort(self, call: str, context: grpc.ServicerContext, error: Exception) -> None:
        """End the call with the status of `error`: `abort` raises. A call that already has a status is left alone."""
        if cast("Any", context).code() is not None:  # missing in the stubs
            return
        if call.startswith("/grpc.") and not isinstance(error, HetpipeError):
            return  # gRPC's own services end their calls themselves
        if isinstance(error, grpc.RpcError) or self._uploads.is_overdue((call, context)):
            # Raised to readers of a call that is over: the client went away, sent a message over the limit, which gRPC
            # itself rejects, or was cut off, which has been logged already.
            _log.info("call_broke_off", call=call, peer=context.peer(), identity=self._identity(context))
            return
        if isinstance(error, HetpipeError):
            self._note_refusal(call, context, error)
            context.set_trailing_metadata(metadata_of(error))
            context.abort(status_of(error), text_of(error))
        _log.error("call_failed", call=call, peer=context.peer(), exc_info=error)
        context.abort(grpc.StatusCode.INTERNAL, INTERNAL_TEXT)


def address_of(peer: str) -> str:
    """The peer address as reported by gRPC, without the port, which differs between connections.

    >>> address_of("ipv4:127.0.0.1:4711"), address_of("ipv6:%5B::1%5D:4711"), address_of("unix:")
    ('ipv4:127.0.0.1', 'ipv6:%5B::1%5D', 'unix:')
    """
    head, _, port = peer.rpartition(":")
    return head if port.isdigit() else peer


def _read(read: Callable[[bytes], Any] | None, data: bytes) -> Any:
    """Parse a request.

    Raises:
        ProtocolViolation: it is not such a message.
    """
    try:
        return data if read is None else read(data)
    except DecodeError:
        raise ProtocolViolation(f"the request of {len(data)} bytes is not a valid message of this call") from None
