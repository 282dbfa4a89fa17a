"""A remote call as a typed value, and `Calls`: the four ways to make one.

A call is a row of the table in `wire.calls`: its name, the frozen dataclasses that are its request and its reply, who
may make it, how long it may take, and whether it may be repeated. Client and server are built from the row alone
(`wire.caller`, `wire.serving`), so a call is spelled there, in the proto file, and where it is carried out.

Whoever makes calls has a `Calls`: a connection, objects of the same process, or a wrapper around another `Calls` that
retries or delays. A wrapper handles every call alike and never names one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from hetpipe.values.identity import Peer, Role
from hetpipe.wire.channel import MAX_MESSAGE_BYTES

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")

#: Says in whose name a request is made. `None`: it does not say.
Claim = Callable[[Any], Peer | None]

#: Roles that may make a call, each with the claim that must be its own.
Rule = Mapping[Role, Claim]

#: Largest request that holds names and numbers only, and no list that grows with a job.
SMALL_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """What all calls have."""

    service: str
    """Full name of the service."""
    name: str
    access: Rule
    """Who may make it, with TLS."""
    deadline_seconds: float
    """How long the client waits; of a stream, for all of it. A transfer of tensors has more, by its size."""
    awaited: str = "an answer"
    """What the client waits for, for the sentence when it waited in vain."""
    is_repeatable: bool = True
    """Whether a second copy of a request changes nothing that the first has not changed."""
    is_order: bool = False
    """Whether only the newest coordinator may make it: it carries the number of its lead (`wire.fencing`)."""
    max_request_bytes: int = MAX_MESSAGE_BYTES
    """Largest request; of a transfer, its header."""

    @property
    def path(self) -> str:
        """The name under which gRPC and the access table know it."""
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
    """The request that goes on after a reply, where the stream breaks; None: it begins anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload(_Row, Generic[RequestT, ReplyT]):
    """A header and chunks of raw bytes, one reply. The chunks never pass the codec."""

    request: type[RequestT]
    reply: type[ReplyT]
    num_bytes: Callable[[RequestT], int]
    """What a header announces, before anybody has judged it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Download(_Row, Generic[RequestT]):
    """A header, chunks of raw bytes. The chunks never pass the codec."""

    request: type[RequestT]
    num_bytes: Callable[[RequestT], int]
    """What a header asks for, before anybody has judged it."""
    needs_room: bool = False
    """Whether the server needs as much memory for the answer as for an upload of that size."""


Call = Unary[Any, Any] | Streaming[Any, Any] | Upload[Any, Any] | Download[Any]


class Calls(Protocol):
    """Makes calls of one peer, wherever it is. Thread-safe.

    Errors are the peer's own typed ones, or `PeerUnreachable` and `DeadlineExceeded`, which name the peer. Nothing here
    waits for anybody but the peer: "not yet" is an answer.
    """

    def invoke(self, call: Unary[RequestT, ReplyT], request: RequestT) -> ReplyT:
        """One request, one reply."""
        ...

    def stream(self, call: Streaming[RequestT, ReplyT], request: RequestT) -> Iterator[ReplyT]:
        """One request, replies as they come. Closing the iterator ends the call."""
        ...

    def upload(self, call: Upload[RequestT, ReplyT], header: RequestT, chunks: Iterable[bytes]) -> ReplyT:
        """A header, then chunks. Whoever retries iterates `chunks` again for each attempt."""
        ...

    def download(self, call: Download[RequestT], header: RequestT) -> Iterator[bytes]:
        """The chunks that a header asks for. Refusals are raised before the first chunk."""
        ...

    def close(self) -> None:
        """Free the connection; calls under way end with `PeerUnreachable`."""
        ...
