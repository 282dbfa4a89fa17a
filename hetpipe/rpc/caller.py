"""The client side of a call: deadline, time taken, and typed errors, the same for every service."""

from __future__ import annotations

from collections.abc import Generator

import grpc

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import HetpipeError, PeerUnreachable
from hetpipe.rpc.channel import open_channel
from hetpipe.rpc.method import RequestT, ResponseT, Streaming, Unary, serialize
from hetpipe.rpc.status import translate_rpc_error


class Caller:
    """Calls one service of one peer over a channel of its own. Thread-safe; `close` ends all calls."""

    def __init__(self, address: str, *, service: str, role: str, clock: Clock = SYSTEM_CLOCK) -> None:
        """Prepare the channel; it connects with the first call.

        Args:
            address: `HOST:PORT` of the peer.
            service: full name of the service.
            role: what the peer is, for error messages, for example `coordinator`.
            clock: measures how long calls take.

        Raises:
            UserError: the address is malformed.
        """
        self.address = address
        self._service = service
        self._role = role
        self._clock = clock
        self._channel = open_channel(address)

    def unary(
        self,
        method: Unary[RequestT, ResponseT],
        request: RequestT,
        *,
        deadline_seconds: float,
        awaited: str = "an answer",
    ) -> ResponseT:
        """One request, one response.

        Raises:
            HetpipeError: what the peer raised, `PeerUnreachable` or `DeadlineExceeded`.
        """
        call = self._channel.unary_unary(f"/{self._service}/{method.name}", serialize, method.response.FromString)
        started = self._clock.monotonic()
        try:
            response: ResponseT = call(request, timeout=deadline_seconds)
        except grpc.RpcError as error:
            raise self._translated(error, method.name, started, awaited) from error
        except ValueError as error:
            raise self._closed(error) from error
        return response

    def stream(
        self,
        method: Streaming[RequestT, ResponseT],
        request: RequestT,
        *,
        deadline_seconds: float,
        awaited: str = "the next event",
    ) -> Generator[ResponseT, None, None]:
        """One request, responses as they come. Closing the iterator cancels the call.

        Raises:
            HetpipeError: as `unary`, from the iterator.
        """
        call = self._channel.unary_stream(f"/{self._service}/{method.name}", serialize, method.response.FromString)
        started = self._clock.monotonic()
        try:
            responses = call(request, timeout=deadline_seconds)
        except ValueError as error:
            raise self._closed(error) from error
        try:
            yield from responses
        except grpc.RpcError as error:
            raise self._translated(error, method.name, started, awaited) from error
        finally:
            responses.cancel()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End all calls and the channel."""
        self._channel.close()

    def _translated(self, error: grpc.RpcError, call: str, started: float, awaited: str) -> HetpipeError:
        return translate_rpc_error(
            error,
            peer=self.address,
            role=self._role,
            call=call,
            elapsed_seconds=self._clock.monotonic() - started,
            awaited=awaited,
        )

    def _closed(self, error: ValueError) -> HetpipeError:
        """What a call on a closed channel means; gRPC itself raises a ValueError."""
        return PeerUnreachable(
            f"the connection to the {self._role} at {self.address} was closed on this side ({error})"
        )
