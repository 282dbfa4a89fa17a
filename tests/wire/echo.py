"""A small service for the tests of servers and channels, on messages that exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.proto.v1 import coordinator_pb2 as pb
from hetpipe.wire.caller import Caller
from hetpipe.wire.connection import Target
from hetpipe.wire.method import Streaming, Unary, service_handler, streaming_handler, unary_handler
from hetpipe.wire.server import Server, ServerConfig

SERVICE = "test.Echo"
SAY = Unary("Say", pb.LeaveRequest, pb.LeaveRequest)
REPEAT = Streaming("Repeat", pb.LeaveRequest, pb.LeaveRequest)

Context = grpc.ServicerContext
Say = Callable[[pb.LeaveRequest, grpc.ServicerContext], pb.LeaveRequest]
Repeat = Callable[[pb.LeaveRequest, grpc.ServicerContext], Iterator[pb.LeaveRequest]]


def echo(request: pb.LeaveRequest, _: grpc.ServicerContext) -> pb.LeaveRequest:
    """The request again."""
    return request


def thrice(request: pb.LeaveRequest, _: grpc.ServicerContext) -> Iterator[pb.LeaveRequest]:
    """The request three times."""
    for _number in range(3):
        yield request


def echo_server(say: Say = echo, repeat: Repeat = thrice, *, clock: Clock = SYSTEM_CLOCK, **config: Any) -> Server:
    """A server that is not started."""
    server = Server(ServerConfig(**config), clock=clock)
    handlers = dict([unary_handler(SAY, say), streaming_handler(REPEAT, repeat)])
    server.add(SERVICE, service_handler(SERVICE, handlers))
    return server


@contextmanager
def serving(server: Server) -> Iterator[Caller]:
    """A client of the started server."""
    caller = Caller(Target(address=server.start(), role="echo"), service=SERVICE)
    try:
        yield caller
    finally:
        caller.close()
        server.stop(grace_seconds=0.0)


def say(caller: Caller, text: str = "hello", *, deadline_seconds: float = 5.0) -> str:
    """Send a text, get a text."""
    return caller.unary(SAY, pb.LeaveRequest(member_id=text), deadline_seconds=deadline_seconds).member_id


def repeat(caller: Caller, text: str = "hello", *, deadline_seconds: float = 5.0) -> Iterator[str]:
    """Send a text, get texts."""
    for response in caller.stream(REPEAT, pb.LeaveRequest(member_id=text), deadline_seconds=deadline_seconds):
        yield response.member_id
