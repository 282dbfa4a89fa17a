"""Undocumented behaviour of gRPC that hetpipe relies on: a private attribute and the texts of some errors.

gRPC guarantees none of it. `tests/wire/test_grpc_internals.py` verifies the installed version with real connections; if
a later version differs, that test fails first, and the change belongs here.
"""

from __future__ import annotations

import grpc

#: Error text of a server that rejects a call because of its concurrency limit, without having read it.
TOO_MANY_CALLS = "Concurrent RPC limit exceeded!"

#: Error texts of a connection that was accepted and closed before the server sent anything.
_CONNECTING = "failed to connect"
_CLOSED = ("Socket closed", "Connection reset by peer")


def hung_up(details: str) -> bool:
    """Whether a server accepted the connection and closed it before sending anything, judging by the error details."""
    return _CONNECTING in details and any(closed in details for closed in _CLOSED)


def cancel_with_status(context: grpc.ServicerContext, code: grpc.StatusCode, text: str) -> bool:
    """End a call with a status from a thread other than the handler's.

    The documented `cancel` takes no status, so the peer could not distinguish it from a crashing server; `abort` works
    only in the handler's thread, which is blocked on the peer.

    Returns:
        Whether the peer receives the status. Without the private attribute the call is only cancelled.
    """
    cancel = getattr(getattr(getattr(context, "_rpc_event", None), "call", None), "cancel", None)
    if cancel is None:
        context.cancel()
        return False
    number: int = code.value[0]
    cancel(number, text)
    return True
