"""A small service for the tests of servers and channels, with a message that exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.values.members import MemberId, Registration
from hetpipe.wire.call import Streaming, Unary
from hetpipe.wire.caller import Caller
from hetpipe.wire.calls import LeaveRequest
from hetpipe.wire.connection import Target
from hetpipe.wire.server import Server, ServerConfig
from hetpipe.wire.serving import Context, Handlers

SERVICE = "test.Echo"
SAY = Unary(service=SERVICE, name="Say", request=LeaveRequest, reply=LeaveRequest, access={}, deadline_seconds=5.0)
REPEAT = Streaming(
    service=SERVICE,
    name="Repeat",
    request=LeaveRequest,
    reply=LeaveRequest,
    access={},
    deadline_seconds=5.0,
    awaited="the next event",
)

Say = Callable[[LeaveRequest, Context], LeaveRequest]
Repeat = Callable[[LeaveRequest, Context], Iterator[LeaveRequest]]


def text_of(text: str) -> LeaveRequest:
    """A text as a request."""
    return LeaveRequest(MemberId(text), Registration(""))


def echo(request: LeaveRequest, _: Context) -> LeaveRequest:
    """The request again."""
    return request


def thrice(request: LeaveRequest, _: Context) -> Iterator[LeaveRequest]:
    """The request three times."""
    for _number in range(3):
        yield request


def echo_server(say: Say = echo, repeat: Repeat = thrice, *, clock: Clock = SYSTEM_CLOCK, **config: Any) -> Server:
    """A server that is not started."""
    server = Server(ServerConfig(**config), clock=clock)
    handlers = Handlers()
    handlers.on(SAY, say)
    handlers.on_stream(REPEAT, repeat)
    handlers.add_to(server, SERVICE)
    return server


@contextmanager
def serving(server: Server) -> Iterator[Caller]:
    """A client of the started server."""
    caller = Caller(Target(address=server.start(), role="echo"))
    try:
        yield caller
    finally:
        caller.close()
        server.stop(grace_seconds=0.0)


def say(caller: Caller, text: str = "hello", *, deadline_seconds: float = 5.0) -> str:
    """Send a text, get a text."""
    return caller.invoke(SAY, text_of(text), deadline_seconds=deadline_seconds).member_id


def repeat(caller: Caller, text: str = "hello", *, deadline_seconds: float = 5.0) -> Iterator[str]:
    """Send a text, get texts."""
    for response in caller.stream(REPEAT, text_of(text), deadline_seconds=deadline_seconds):
        yield response.member_id
