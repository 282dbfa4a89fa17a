"""What a client gets when a call fails: gRPC's own class of it cannot be made without a call."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from hetpipe.wire.status import Metadata


class FailedCall(grpc.RpcError, grpc.Call):
    """A call that a server has ended with a status; nothing of it is under way any more."""

    def __init__(self, code: grpc.StatusCode, details: str = "", trailing: Metadata = ()) -> None:
        self._answer = (code, details, trailing)

    def code(self) -> grpc.StatusCode:
        return self._answer[0]

    def details(self) -> str:
        return self._answer[1]

    def initial_metadata(self) -> Metadata:
        return ()

    def trailing_metadata(self) -> Metadata:  # type: ignore[override]  # its two bases are typed differently
        return self._answer[2]

    def is_active(self) -> bool:
        return False

    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return False

    def time_remaining(self) -> float:
        return 0.0
