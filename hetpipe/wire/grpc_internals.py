"""What is known of gRPC beyond its documentation, in one place: a private attribute and sentences of its own.

None of it is promised by gRPC. `tests/wire/test_grpc_internals.py` holds the installed version to all of it with real
connections; where a later version differs, that test fails first, and what to do is here.
"""

from __future__ import annotations

import grpc

#: The sentence with which a server refuses a call because it has as many as it may; it has not looked at this one.
TOO_MANY_CALLS = "Concurrent RPC limit exceeded!"

#: In what gRPC says when a connection was accepted and then closed before a word was said.
_CONNECTING = "failed to connect"
_CLOSED = ("Socket closed", "Connection reset by peer")


def hung_up(details: str) -> bool:
    """Whether a client reached the server, and was refused before a word was said, by the details of its error."""
    return _CONNECTING in details and any(closed in details for closed in _CLOSED)


def cancel_with_status(context: grpc.ServicerContext, code: grpc.StatusCode, text: str) -> bool:
    """End a call from another thread than its own, with a status.

    The documented `cancel` knows no status, so the peer could not tell it from a server that dies; `abort` works in the
    call's own thread only, which waits for the peer.

    Returns:
        Whether the peer gets the status. Without the private attribute the call is cancelled all the same.
    """
    cancel = getattr(getattr(getattr(context, "_rpc_event", None), "call", None), "cancel", None)
    if cancel is None:
        context.cancel()
        return False
    number: int = code.value[0]
    cancel(number, text)
    return True
