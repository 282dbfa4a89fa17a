"""Reads the only request of a call before it has a thread (`wire.threads`): undocumented behaviour of gRPC's server.

gRPC guarantees none of it, as in `wire.grpc_internals`. `tests/wire/test_threads.py` verifies the installed version; if
a later version differs, that test fails first, and the change belongs here.
"""
# ruff: noqa: SLF001

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
from grpc import _server as _typed
from grpc._cython import cygrpc  # type: ignore[attr-defined]

_server: Any = _typed

#: What its pool is asked to run: `context.run(ANSWER, event, state, behaviour, requests, deserializer, serializer)`,
#: where `requests` makes the argument of `behaviour`.
_ANSWERS = frozenset({_server._unary_response_in_pool, _server._stream_response_in_pool})
_BEHAVIOUR = 4
_REQUESTS = 5

#: The arguments that a pool is given.
Task = tuple[Any, ...]


class Arrived:
    """The requests of a call of which the only one was read before a thread was taken: an iterator over it."""

    __slots__ = ("_state", "data")

    def __init__(self, state: Any) -> None:
        self._state = state
        self.data: bytes | None = state.request
        """None: the call ended without it."""

    def __iter__(self) -> Iterator[bytes]:
        """Yield it.

        Raises:
            grpc.RpcError: the client went away before.
        """
        if self.data is not None:
            yield self.data
        elif self._state.client == _server._CANCELLED:
            _server._raise_rpc_error(self._state)


def behaviour_of(task: Task) -> Any:
    """The handler that a pool is asked to run; None: it is asked for something else."""
    return task[_BEHAVIOUR] if len(task) > _REQUESTS and task[1] in _ANSWERS else None


def call_of(task: Task) -> tuple[str, grpc.ServicerContext]:
    """The name of the call and its context."""
    event, state = task[2:_BEHAVIOUR]
    return event.call_details.method.decode("utf-8", "replace"), _server._Context(event, state, None)


def read_ahead(task: Task, deliver: Callable[[Task, int], None]) -> None:
    """Read the only request of a call without a thread, as gRPC's own handlers do; for handlers of streams of requests.

    To be called where the pool is given the task: gRPC holds the lock of the call.

    Args:
        task: what the pool is asked to run.
        deliver: called once by gRPC's own thread, which it must not hold up, with what to run then, whose handler gets
            an `Arrived`, and the length of the request.
    """
    event, state = task[2:_BEHAVIOUR]
    receive = _server._receive_message(state, event.call, None)

    def received(result: Any) -> Any:
        ended = receive(result)
        arrived, state.request = Arrived(state), None
        deliver((*task[:_REQUESTS], lambda: arrived, *task[_REQUESTS + 1 :]), len(arrived.data or b""))
        return ended

    event.call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), received)
    state.due.add(_server._RECEIVE_MESSAGE_TOKEN)
