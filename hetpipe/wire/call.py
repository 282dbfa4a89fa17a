"""A remote call as a typed value, and `Calls`: the four ways to make one.

A call is a row of the table in `wire.calls`: its name, the frozen dataclasses that are its request and its reply, the
allowed callers, its deadline, and whether it may be repeated. Client and server are built from the row alone
(`wire.caller`, `wire.serving`), so a call is defined there, in the proto file, and in its handler.

Callers hold a `Calls`: a connection, handlers in the same process, or a wrapper around another `Calls` that adds
retries or delays. A wrapper treats all calls alike and never names one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from hetpipe.values.identity import Peer, Role
from hetpipe.wire.channel import MAX_MESSAGE_BYTES
from hetpipe.wire.segment import Parts

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")

#: A chunk of a transfer: its bytes, a view of them, or its consecutive parts. Views, as of shared memory, are valid
#: until the next chunk is requested.
Chunk = bytes | memoryview | Parts

#: Extracts the claimed caller from a request; `None`: the request names none.
Claim = Callable[[Any], Peer | None]

#: Allowed roles, each with its claim.
Rule = Mapping[Role, Claim]

#: Maximum size of a request that holds only names and numbers, and no list that grows with a job.
SMALL_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """Attributes common to all calls."""

    service: str
    """Full name of the service."""
    name: str
    access: Rule
    """Allowed callers, with TLS."""
    deadline_seconds: float
    """Deadline of the client; for a stream, of the whole stream. The deadline of a tensor transfer grows with its size.
    """
    awaited: str = "an answer"
    """What the client waits for; used in the message of `DeadlineExceeded`."""
    is_repeatable: bool = True
    """Whether the call is idempotent: a second copy of a request has no further effect."""
    is_order: bool = False
    """Whether only the leading coordinator may make it; the request then carries the leader's fence (`wire.fencing`).
    """
    max_request_bytes: int = MAX_MESSAGE_BYTES
    """Maximum size of a request; for a transfer, of its header."""

    @property
    def path(self) -> str:
        """The method name used by gRPC and the access table."""
        return f"/{self.service}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unary(_Row, Generic[RequestT, ReplyT]):
    """One request, one reply."""

    request: type[RequestT]
    reply: type[ReplyT]


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming(_Row, Generic[RequestT, ReplyT]):
    """One request, a stream of replies."""

    request: type[RequestT]
    reply: type[ReplyT]
    resume: Callable[[RequestT, ReplyT], RequestT] | None = None
    """Builds the request that resumes the stream after a reply; None: a broken stream restarts from the beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload(_Row, Generic[RequestT, ReplyT]):
    """A header and chunks of raw bytes, one reply. The chunks bypass the codec."""

    request: type[RequestT]
    reply: type[ReplyT]
    num_bytes: Callable[[RequestT], int]
    """The number of bytes a header announces, not yet validated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Download(_Row, Generic[RequestT]):
    """A request header, answered by chunks of raw bytes. The chunks bypass the codec."""

    request: type[RequestT]
    num_bytes: Callable[[RequestT], int]
    """The number of bytes a header requests, not yet validated."""
    needs_room: bool = False
    """Whether the server needs as much memory for the reply as for an upload of that size."""


Call = Unary[Any, Any] | Streaming[Any, Any] | Upload[Any, Any] | Download[Any]


def joined(chunk: Chunk) -> bytes:
    """Serializer of the chunks of a gRPC call."""
    return bytes(chunk) if isinstance(chunk, bytes | memoryview) else b"".join(chunk)


class Calls(Protocol):
    """Client interface to one peer, remote or in-process. Thread-safe.

    Errors are the peer's own typed ones, or `PeerUnreachable` and `DeadlineExceeded`, which name the peer. A call never
    blocks on the state of other processes: "not yet" is a reply.
    """

    def invoke(self, call: Unary[RequestT, ReplyT], request: RequestT) -> ReplyT:
        """Make a unary call."""
        ...

    def stream(self, call: Streaming[RequestT, ReplyT], request: RequestT) -> Iterator[ReplyT]:
        """Make a streaming call; yields replies as they arrive. Closing the iterator cancels the call."""
        ...

    def upload(self, call: Upload[RequestT, ReplyT], header: RequestT, chunks: Iterable[Chunk]) -> ReplyT:
        """Send a header, then chunks. A retrying wrapper iterates `chunks` again for each attempt."""
        ...

    def download(self, call: Download[RequestT], header: RequestT) -> Iterator[Chunk]:
        """Yield the chunks requested by a header. Refusals are raised before the first chunk."""
        ...

    def close(self) -> None:
        """Close the connection; pending calls end with `PeerUnreachable`."""
        ...
