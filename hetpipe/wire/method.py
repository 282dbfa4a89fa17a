"""A call as a typed value: its name, its messages, and whether the answer is a stream.

Client and server build on the same value, so mypy checks that both speak of the same messages. grpcio-tools would
generate stubs for this, but without types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from hetpipe.errors import ProtocolViolation

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)


@dataclass(frozen=True, slots=True)
class Unary(Generic[RequestT, ResponseT]):
    """One request, one response."""

    name: str
    request: type[RequestT]
    response: type[ResponseT]


@dataclass(frozen=True, slots=True)
class Streaming(Generic[RequestT, ResponseT]):
    """One request, a stream of responses."""

    name: str
    request: type[RequestT]
    response: type[ResponseT]


Method = Unary[Any, Any] | Streaming[Any, Any]

if TYPE_CHECKING:  # gRPC's own class cannot be subscripted when the program runs
    Handler = grpc.RpcMethodHandler[Any, Any]


def parse(kind: type[RequestT], data: bytes) -> RequestT:
    """The message of type `kind` in `data`, which comes from a peer.

    Raises:
        ProtocolViolation: it is no such message.
    """
    try:
        return kind.FromString(data)
    except DecodeError:
        raise ProtocolViolation(f"{len(data)} bytes that are no {kind.DESCRIPTOR.name}") from None


def serialize(message: Message) -> bytes:
    """A message as bytes."""
    return message.SerializeToString()


def as_is(message: bytes) -> bytes:
    """Bytes need no serializer."""
    return message


def unary_handler(
    method: Unary[RequestT, ResponseT], function: Callable[[RequestT, grpc.ServicerContext], ResponseT]
) -> tuple[str, grpc.RpcMethodHandler[RequestT, ResponseT]]:
    """The handler of one unary call, under its name."""
    return method.name, grpc.unary_unary_rpc_method_handler(
        function, request_deserializer=method.request.FromString, response_serializer=serialize
    )


def streaming_handler(
    method: Streaming[RequestT, ResponseT],
    function: Callable[[RequestT, grpc.ServicerContext], Iterator[ResponseT]],
) -> tuple[str, grpc.RpcMethodHandler[RequestT, ResponseT]]:
    """The handler of one streaming call, under its name."""
    return method.name, grpc.unary_stream_rpc_method_handler(
        function, request_deserializer=method.request.FromString, response_serializer=serialize
    )


def service_handler(service: str, handlers: Mapping[str, Handler]) -> grpc.GenericRpcHandler:
    """All calls of one service, for `Server.add`."""
    return grpc.method_handlers_generic_handler(service, dict(handlers))
