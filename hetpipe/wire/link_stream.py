"""One stream of raw messages between two neighbouring stages, as seen by either end.

The call is `LinkService/Connect`. The first message in each direction is a `LinkHello`. If that of the
serving stage offers shared memory, the client answers with a `LinkTransport`. All further messages belong to
`hetpipe.link`. They use the call or, if both stages share memory, two segments (docs/semantics/shared-memory.md); then
the call ends. A stream has no deadline and lives as long as the stages: keepalive or the end of a segment's connection
detect a dead peer, and waits for frames have deadlines of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import Final, Protocol, TypeVar

import grpc

from hetpipe.errors import PeerUnreachable, ProtocolViolation
from hetpipe.observe.log import get_logger
from hetpipe.values.requests import LinkHello, Requester
from hetpipe.wire.codec import from_bytes, to_bytes
from hetpipe.wire.segment import Lane, Parts, SegmentBroken

_log = get_logger(__name__)

T = TypeVar("T")

_JOIN_SECONDS = 5.0

SERVICE: Final = "hetpipe.proto.v2.LinkService"
CONNECT: Final = "Connect"
CALL: Final = f"/{SERVICE}/{CONNECT}"


class LinkStream(Protocol):
    """A stream after the exchange of hellos."""

    @property
    def peer(self) -> LinkHello:
        """The other end's hello."""
        ...

    @property
    def refusal(self) -> str:
        """Reason for gRPC although memory was offered; else empty."""
        ...

    def send(self, messages: Iterator[Parts]) -> None:
        """Send `messages`; this end of the stream ends with them. They are iterated on a thread of the stream."""
        ...

    def send_now(self, make: Callable[[], Parts]) -> bool:
        """Send a message on the calling thread if that needs no wait; whether it was sent.

        Only while the stream waits for the next one of `messages`, which must not end meanwhile.

        Args:
            make: makes the message, if it is sent.
        """
        ...

    def receive(self, read: Callable[[bytes | memoryview], T]) -> Generator[T, None, None]:
        """Yield the result of `read` for each message, until the other end ends its side.

        Args:
            read: copies the message, reading each byte once, before it validates it; keeps no view.

        Raises:
            PeerUnreachable: the stream broke.
        """
        ...

    def cancel(self) -> object:
        """Break the stream immediately; the return value has no meaning. May be called from any thread."""
        ...

    def close(self) -> None:
        """Release everything. Called once, when both directions have ended or are no longer needed."""
        ...


@dataclass(frozen=True, slots=True)
class GrpcStream:
    """A stream whose messages go through the call; see `LinkStream`."""

    peer: LinkHello
    incoming: Iterator[bytes]
    """Messages from the other end until it ends its side; raises `PeerUnreachable` when the stream breaks."""
    outgoing: Future[Iterator[bytes]]
    cancel: Callable[[], object]
    close: Callable[[], None]
    refusal: str = ""
    preamble: tuple[bytes, ...] = ()
    """Sent before the messages."""

    def send(self, messages: Iterator[Parts]) -> None:
        """Send `messages`, on a gRPC thread."""
        self.outgoing.set_result(chain(self.preamble, map(b"".join, messages)))

    def send_now(self, make: Callable[[], Parts]) -> bool:
        """Implement `LinkStream.send_now`: gRPC sends on threads of its own."""
        del make
        return False

    def receive(self, read: Callable[[bytes | memoryview], T]) -> Generator[T, None, None]:
        """Read the other end's messages."""
        yield from map(read, self.incoming)


class SegmentStream:
    """A stream whose messages go through shared memory, in a segment for each direction; see `LinkStream`."""

    refusal = ""

    def __init__(self, peer: LinkHello, *, own: Requester, outgoing: Lane, incoming: Lane) -> None:
        """Take over both segments."""
        self.peer = peer
        self._outgoing = outgoing
        self._incoming = incoming
        self._name = f"link: {own} writes to {peer.requester}"
        self._thread: threading.Thread | None = None
        #: Reason for an early end of sending: the root cause if receiving ends as a consequence.
        self._failure: PeerUnreachable | None = None

    def send(self, messages: Iterator[Parts]) -> None:
        """Send `messages`, on a thread of this stream."""
        self._thread = threading.Thread(target=self._send, args=(messages,), name=self._name, daemon=True)
        self._thread.start()

    def send_now(self, make: Callable[[], Parts]) -> bool:
        """Implement `LinkStream.send_now`."""
        try:
            return self._outgoing.send_now(make)
        except PeerUnreachable as error:
            self._fail(error)
            return True

    def receive(self, read: Callable[[bytes | memoryview], T]) -> Generator[T, None, None]:
        """Read the other end's messages."""
        if not self._incoming.take_turn():
            raise SegmentBroken("this end of the link is closed")
        try:
            with closing(self._incoming.receive_copies(read)) as messages:
                yield from messages
        except SegmentBroken as error:
            raise self._failure or error from None
        finally:
            self._incoming.end_turn()

    def cancel(self) -> None:
        """Close both segments."""
        self._outgoing.close()
        self._incoming.close()

    def close(self) -> None:
        """Close both segments, and wait for the thread."""
        self.cancel()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)

    def _send(self, messages: Iterator[Parts]) -> None:
        if not self._outgoing.take_turn():
            return
        try:
            self._outgoing.send(messages, is_over=None)
        except PeerUnreachable as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - whatever ends the messages ends the stream, as with gRPC
            _log.exception("link_failed", peer=str(self.peer.requester))
            self._fail(PeerUnreachable(f"nothing can be sent any more: {type(error).__name__}: {error}"))
        finally:
            self._outgoing.end_turn()

    def _fail(self, error: PeerUnreachable) -> None:
        self._failure = error
        self._incoming.end_reading()  # chunks that have arrived still count


def outgoing_messages(hello: LinkHello, following: Future[Iterator[bytes]]) -> Iterator[bytes]:
    """Outgoing messages of one end: its hello, then those of `following`, if that is not cancelled."""
    yield hello_to_bytes(hello)
    yield from following_messages(following)


def following_messages(following: Future[Iterator[bytes]]) -> Iterator[bytes]:
    """The messages of the future `following`; none if it is cancelled."""
    try:
        messages = following.result()
    except CancelledError:
        return
    yield from messages


def incoming_messages(messages: Iterator[bytes], peer: Requester) -> Iterator[bytes]:
    """`messages`, with gRPC errors translated."""
    try:
        yield from messages
    except grpc.RpcError as error:
        details = error.details() if isinstance(error, grpc.Call) else None
        raise PeerUnreachable(f"the stream from {peer} broke: {details or 'it was cancelled'}") from error


def hello_to_bytes(hello: LinkHello) -> bytes:
    """Serialize a hello as the first message of a stream."""
    return to_bytes(hello)


def hello_from_bytes(message: bytes, *, expected: Requester) -> LinkHello:
    """Parse a hello; the inverse of `hello_to_bytes`.

    Raises:
        ProtocolViolation: it is not a hello, or comes from a stage other than `expected`.
    """
    hello = from_bytes(LinkHello, message)
    if hello.requester != expected:
        raise ProtocolViolation(
            f"{name_in_full(hello.requester)} connected where {name_in_full(expected)} was expected"
        )
    if hello.room < 1:
        raise ProtocolViolation(f"{expected} announced no capacity for a frame")
    return hello


def log_transport(hello: LinkHello, peer: Requester, refusal: str) -> None:
    """Log the transport of frames if memory was offered, with the reason if it is not used."""
    if refusal:
        _log.warning("transport_chosen", transport="grpc", reason=refusal, link=str(hello.requester), peer=str(peer))
    else:
        _log.info("transport_chosen", transport="shared memory", link=str(hello.requester), peer=str(peer))


def name_in_full(requester: Requester) -> str:
    """A stage's name with job and term."""
    return f"{requester} of job {requester.job_id}, term {requester.term},"
