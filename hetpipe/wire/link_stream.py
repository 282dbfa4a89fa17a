"""One stream of raw messages between two neighbouring stages, as seen by either end.

The call is `LinkService/Connect`. The first message in each direction is a `LinkHello`; the rest belongs to
`hetpipe.link`. The stream has no deadline and lives as long as the stages: keepalive detects a dead peer, and waits for
frames have deadlines of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Final

import grpc

from hetpipe.errors import PeerUnreachable, ProtocolViolation
from hetpipe.values.requests import LinkHello, Requester
from hetpipe.wire.codec import from_bytes, to_bytes

SERVICE: Final = "hetpipe.proto.v2.LinkService"
CONNECT: Final = "Connect"
CALL: Final = f"/{SERVICE}/{CONNECT}"


@dataclass(frozen=True, slots=True)
class LinkStream:
    """A stream after the exchange of hellos."""

    peer: LinkHello
    incoming: Iterator[bytes]
    """Messages from the other end until it ends its side; raises `PeerUnreachable` when the stream breaks."""
    outgoing: Future[Iterator[bytes]]
    cancel: Callable[[], object]
    """Breaks the stream immediately; the return value has no meaning. May be called from any thread."""
    close: Callable[[], None]
    """Releases the channel or server. Called once, when both iterators have ended or are no longer needed."""

    def send(self, messages: Iterator[bytes]) -> None:
        """Send `messages`; this end of the stream ends with them. They are iterated on a gRPC thread."""
        self.outgoing.set_result(messages)


def outgoing_messages(hello: LinkHello, following: Future[Iterator[bytes]]) -> Iterator[bytes]:
    """One end's outgoing messages: its hello, then those passed to `LinkStream.send`; none of these if cancelled."""
    yield hello_to_bytes(hello)
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


def name_in_full(requester: Requester) -> str:
    """A stage's name with job and term."""
    return f"{requester} of job {requester.job_id}, term {requester.term},"
