"""One stream of raw messages between two neighbouring stages, as both of its ends see it.

The call is `LinkService/Connect`. The first message each way is a `LinkHello`; what follows belongs to `hetpipe.link`.
No deadline ends the stream, which lives as long as the stages do: keepalive tells of a dead peer, and who waits for a
frame has a deadline of its own.
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
    """A stream whose hellos are exchanged."""

    peer: LinkHello
    incoming: Iterator[bytes]
    """The other end's messages, to its end of the stream; raises `PeerUnreachable` when the stream breaks."""
    outgoing: Future[Iterator[bytes]]
    cancel: Callable[[], object]
    """Break the stream at once; what it returns says nothing. From any thread."""
    close: Callable[[], None]
    """End what the stream needs: channel or server. Once, when both iterators have ended or do not matter."""

    def send(self, messages: Iterator[bytes]) -> None:
        """Have `messages` sent; this end of the stream ends with them. They are asked for on a thread of gRPC."""
        self.outgoing.set_result(messages)


def outgoing_messages(hello: LinkHello, following: Future[Iterator[bytes]]) -> Iterator[bytes]:
    """What one end sends: its hello, and what `LinkStream.send` is given; nothing more if that is cancelled."""
    yield hello_to_bytes(hello)
    try:
        messages = following.result()
    except CancelledError:
        return
    yield from messages


def incoming_messages(messages: Iterator[bytes], peer: Requester) -> Iterator[bytes]:
    """`messages` with gRPC's errors as ours."""
    try:
        yield from messages
    except grpc.RpcError as error:
        details = error.details() if isinstance(error, grpc.Call) else None
        raise PeerUnreachable(f"the stream from {peer} broke: {details or 'it was cancelled'}") from error


def hello_to_bytes(hello: LinkHello) -> bytes:
    """As the first message of a stream."""
    return to_bytes(hello)


def hello_from_bytes(message: bytes, *, expected: Requester) -> LinkHello:
    """Inverse of `hello_to_bytes`.

    Raises:
        ProtocolViolation: it is no hello, or that of another stage than `expected`.
    """
    hello = from_bytes(LinkHello, message)
    if hello.requester != expected:
        raise ProtocolViolation(f"{name_in_full(hello.requester)} called where {name_in_full(expected)} was expected")
    if hello.room < 1:
        raise ProtocolViolation(f"{expected} has no room for a frame")
    return hello


def name_in_full(requester: Requester) -> str:
    """A stage with its job and term."""
    return f"{requester} of job {requester.job_id}, term {requester.term},"
