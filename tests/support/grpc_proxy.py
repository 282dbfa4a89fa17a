"""A gRPC proxy for tests: stands between a client and a server and does to calls what bad networks do.

It knows no messages: a call of any of the four kinds is a stream of bytes each way, with metadata before and a status
behind, and is passed on as such. What happens to which call is `testing.call_faults`; `done` says what did happen.

With TLS it shows the client a certificate of its own, which must be one that the client would accept of the server, and
shows the server another one: who the server takes the client for. So a proxy stands for one client.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.wire.channel import MAX_MESSAGE_BYTES, as_is, message_options, open_channel
from hetpipe.wire.listening import listen
from hetpipe.wire.tls import Tls
from tests.support.call_faults import Deed, Fate, Faults, Flip, fate_of

if TYPE_CHECKING:
    from hetpipe.wire.serving import Handler

#: Calls under way at a time.
_NUM_THREADS = 64

#: Longest time that a call is held back for another one to overtake it.
_HOLD_SECONDS = 0.05

#: After a server's answer, time for the end of a request whose last message it has to be seen by who sends it on.
_END_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyTls:
    """Who the proxy is."""

    server: Tls
    """Shown to the client."""
    client: Tls
    """Shown to the server."""
    server_name: str
    """The name that the server's certificate must have."""


@dataclass(frozen=True, slots=True)
class Done:
    """One deed."""

    method: str
    number: int
    """Of the call among those of its method, from 0."""
    deed: Deed


class _BrokenError(Exception):
    """The call ends here as if its connection had broken."""


class GrpcProxy:
    """One proxy, in a `with` block. Thread-safe."""

    def __init__(
        self,
        upstream: str,
        rules: Sequence[Faults] = (),
        *,
        seed: int = 0,
        tls: ProxyTls | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Listen on a port of this machine.

        Args:
            upstream: `HOST:PORT` of the server.
            rules: the first one that matches a call counts.
            seed: of chance.
            tls: who the proxy is; None: plaintext both ways.
            clock: for delays.
        """
        self._rules = tuple(rules)
        self._seed = seed
        self._numbers: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._wire = _Wire(_open(upstream, tls), clock)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="proxy")
        self._server = grpc.server(
            self._threads,
            handlers=[_any_method(self._handler)],
            options=[*message_options(MAX_MESSAGE_BYTES), ("grpc.so_reuseport", 0)],
        )
        #: `HOST:PORT` for the client.
        self.address = listen(self._server, "127.0.0.1", 0, None if tls is None else tls.server.server_credentials())
        self._server.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.stop(0.0).wait()
        self._wire.close()
        self._threads.shutdown(wait=False)

    def cut(self, *, replies_only: bool = False) -> None:
        """From now on nothing gets through; calls under way end as if their connection broke.

        Args:
            replies_only: the server still gets requests and acts on them.
        """
        self._wire.cut(replies_only=replies_only)

    def heal(self) -> None:
        """From now on calls get through again."""
        self._wire.heal()

    def settle(self) -> None:
        """Wait until every late repetition has arrived."""
        self._wire.settle()

    @property
    def done(self) -> tuple[Done, ...]:
        """Everything that was done, in order."""
        return self._wire.done

    @property
    def deeds(self) -> Counter[Deed]:
        """How often each thing was done."""
        return Counter(done.deed for done in self.done)

    def _handler(self, method: str) -> Handler:
        with self._lock:
            number = self._numbers[method]
            self._numbers[method] += 1
        fate = fate_of(self._rules, method, seed=self._seed, number=number)

        def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            call = _Call(self._wire, method, number, context)
            try:
                yield from call.replies(fate, requests)
            except _BrokenError as broken:
                context.abort(grpc.StatusCode.UNAVAILABLE, f"the test's proxy: {broken}")

        return grpc.stream_stream_rpc_method_handler(serve)


class _Wire:
    """The connection to the server, which can be cut. Thread-safe."""

    def __init__(self, channel: grpc.Channel, clock: Clock) -> None:
        self._channel = channel
        self.clock = clock
        self._lock = threading.Lock()
        #: Notified when a call is passed on.
        self._passed = threading.Condition(self._lock)
        self._num_passed = 0
        self._calls: set[Any] = set()
        self._done: list[Done] = []
        self._late = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="late")
        self._repetitions: list[Future[None]] = []
        #: What gets through.
        self.requests_pass = self.replies_pass = True

    @property
    def done(self) -> tuple[Done, ...]:
        with self._lock:
            return tuple(self._done)

    def note(self, done: Done) -> None:
        with self._lock:
            self._done.append(done)

    def cut(self, *, replies_only: bool) -> None:
        with self._lock:
            self.requests_pass, self.replies_pass = replies_only, False
            calls = () if replies_only else tuple(self._calls)
        for call in calls:
            call.cancel()

    def heal(self) -> None:
        self.requests_pass = self.replies_pass = True

    def hold_back(self) -> bool:
        """Wait until another call is passed on; whether one was."""
        with self._passed:
            before = self._num_passed
            return self._passed.wait_for(lambda: self._num_passed > before, _HOLD_SECONDS)

    def begin(self, method: str, requests: Iterator[bytes], **options: Any) -> Any:
        """Pass a call on."""
        call = self._channel.stream_stream(method, as_is, as_is)(requests, **options)
        with self._passed:
            self._num_passed += 1
            self._calls.add(call)
            self._passed.notify_all()
        return call

    def end(self, call: Any) -> None:
        """A call that `begin` began is over."""
        with self._lock:
            self._calls.discard(call)
        call.cancel()

    def send_later(self, seconds: float, method: str, requests: Sequence[bytes], **options: Any) -> None:
        """Send a call once more after a while, and throw its answer away."""

        def send() -> None:
            self.clock.sleep(seconds)
            if not self.requests_pass:
                return
            call = self.begin(method, iter(requests), **options)
            try:
                for _ in call:
                    pass
            except grpc.RpcError:
                pass  # whatever the server says to it, nobody hears
            finally:
                self.end(call)

        with self._lock:
            self._repetitions.append(self._late.submit(send))

    def settle(self) -> None:
        with self._lock:
            repetitions, self._repetitions = self._repetitions, []
        wait(repetitions)

    def close(self) -> None:
        self._late.shutdown()
        self._channel.close()


class _Call:
    """One call on its way."""

    def __init__(self, wire: _Wire, method: str, number: int, context: grpc.ServicerContext) -> None:
        self._wire = wire
        self._method = method
        self._number = number
        self._context = context
        self._metadata = [pair for pair in context.invocation_metadata() or () if _is_of_user(str(pair[0]))]
        #: Messages of the request that have been passed on.
        self._sent: list[bytes] = []
        #: All of them.
        self._is_sent = threading.Event()
        self._breaks_request = False
        self._has_opened = False
        #: The newest call to the server, once it has begun.
        self._upstream: Future[Any] = Future()

    def replies(self, fate: Fate, requests: Iterator[bytes]) -> Iterator[bytes]:
        """What the client gets."""
        self._begin(fate)
        first = replace(fate, drop_reply=True) if fate.repeat else fate
        yield from self._answer(first, self._outgoing(requests, fate))
        if fate.repeat:
            self._see_the_end(requests)
            self._note(Deed.REPEATED)
            yield from self._answer(fate, iter(self._sent))
        if fate.drop_reply:
            self._note(Deed.REPLY_DROPPED)
            raise _BrokenError("the reply is dropped")
        if fate.repeat_late_seconds is not None and self._is_sent.is_set():
            self._note(Deed.REPEATED_LATE)
            self._wire.send_later(fate.repeat_late_seconds, self._method, self._sent, **self._options())

    def _see_the_end(self, requests: Iterator[bytes]) -> None:
        """The server may answer a last message before gRPC has asked for another one, and then nobody asks any more."""
        if not self._is_sent.wait(_END_SECONDS) and next(requests, None) is not None:
            raise _BrokenError("there was an answer before the whole request")

    def _begin(self, fate: Fate) -> None:
        """What happens before the server sees anything."""
        if fate.delay_seconds:
            self._note(Deed.DELAYED)
            self._wire.clock.sleep(fate.delay_seconds)
        if fate.hold_back and self._wire.hold_back():
            self._note(Deed.HELD_BACK)
        if not self._wire.requests_pass:
            self._note(Deed.CUT)
            raise _BrokenError("the connection is cut")
        if fate.drop_request:
            self._note(Deed.REQUEST_DROPPED)
            raise _BrokenError("the request is dropped")

    def _answer(self, fate: Fate, requests: Iterator[bytes]) -> Iterator[bytes]:
        """What the server says, as far as it reaches the client."""
        call = self._wire.begin(self._method, requests, **self._options())
        if not self._upstream.done():
            self._upstream.set_result(call)
        self._context.add_callback(call.cancel)
        try:
            for position, message in enumerate(call):
                self._check_replies_pass()
                if not fate.drop_reply:
                    self._open(call)
                    yield self._flipped(message, position, fate.flip_reply, Deed.REPLY_FLIPPED)
                    if position + 1 == fate.reply_messages:
                        self._note(Deed.REPLY_BROKEN)
                        raise _BrokenError("the reply is broken off")
            self._close(call, fate)
        except grpc.RpcError as error:
            self._close(error, fate)
        finally:
            self._wire.end(call)

    def _outgoing(self, requests: Iterator[bytes], fate: Fate) -> Iterator[bytes]:
        """The request on its way to the server; read by a thread of the call to it."""
        try:
            for position, message in enumerate(requests):
                if position == fate.request_messages:
                    self._breaks_request = True
                    self._upstream.result().cancel()
                    return
                passed = self._flipped(message, position, fate.flip_request, Deed.REQUEST_FLIPPED)
                self._sent.append(passed)
                yield passed
            self._is_sent.set()
        except grpc.RpcError:
            self._upstream.result().cancel()  # the client has given up

    def _open(self, call: Any) -> None:
        """Give the client the server's metadata, once."""
        if not self._has_opened:
            self._has_opened = True
            self._context.send_initial_metadata(tuple(call.initial_metadata() or ()))

    def _close(self, call: Any, fate: Fate) -> None:
        """Give the client the server's status, unless its connection is to have broken."""
        if self._breaks_request:
            self._note(Deed.REQUEST_BROKEN)
            raise _BrokenError("the request is broken off")
        self._check_replies_pass()
        if not fate.drop_reply:
            self._open(call)
            self._context.set_trailing_metadata(tuple(call.trailing_metadata() or ()))
            self._context.set_details(call.details() or "")
            self._context.set_code(call.code())

    def _check_replies_pass(self) -> None:
        if not self._wire.replies_pass:
            self._note(Deed.CUT)
            raise _BrokenError("the connection is cut")

    def _flipped(self, message: bytes, position: int, flip: Flip | None, deed: Deed) -> bytes:
        if flip is None or flip.message != position or not message:
            return message
        self._note(deed)
        return flip.apply(message)

    def _options(self) -> dict[str, Any]:
        return {"metadata": self._metadata, "timeout": self._context.time_remaining()}

    def _note(self, deed: Deed) -> None:
        self._wire.note(Done(self._method, self._number, deed))


def _is_of_user(key: str) -> bool:
    """Whether a key of metadata is the caller's and not gRPC's own."""
    return not key.startswith("grpc-") and key != "user-agent"


def _any_method(handler_of: Callable[[str], Handler]) -> grpc.GenericRpcHandler:
    """Takes every call there is."""

    class AnyMethod(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler:
            return handler_of(handler_call_details.method)

    return AnyMethod()


def _open(upstream: str, tls: ProxyTls | None) -> grpc.Channel:
    if tls is None:
        return open_channel(upstream)
    credentials = tls.client.channel_credentials(tls.client.material)
    return open_channel(upstream, credentials=credentials, server_name=tls.server_name)
