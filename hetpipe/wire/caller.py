"""The client side of a call: deadline, time taken, and typed errors, the same for every service."""

from __future__ import annotations

from collections.abc import Generator

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.wire.connection import Connection, Target
from hetpipe.wire.fencing import Metadata
from hetpipe.wire.method import RequestT, ResponseT, Streaming, Unary, serialize
from hetpipe.wire.patience import stream_while_busy, while_busy


class Caller:
    """Calls one service of one peer over a channel of its own. Thread-safe; `close` ends all calls."""

    def __init__(
        self, target: Target, *, service: str, clock: Clock = SYSTEM_CLOCK, metadata: Metadata | None = None
    ) -> None:
        """Prepare the connection; it is made with the first call.

        Args:
            target: whom to call.
            service: full name of the service.
            clock: measures how long calls take.
            metadata: goes with every unary call.

        Raises:
            UserError: the address is malformed.
        """
        self._service = service
        self._clock = clock
        self._connection = Connection(target, clock=clock)
        self._metadata = metadata

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
        started = self._clock.monotonic()

        def attempt() -> ResponseT:
            left = max(0.0, started + deadline_seconds - self._clock.monotonic())
            with self._connection.calling(method.name, started, awaited) as channel:
                call = channel.unary_unary(f"/{self._service}/{method.name}", serialize, method.response.FromString)
                metadata = None if self._metadata is None else self._metadata()
                return call(request, timeout=left, metadata=metadata)

        return while_busy(attempt, until=started + deadline_seconds, clock=self._clock)

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
        until = self._clock.monotonic() + deadline_seconds
        yield from stream_while_busy(
            lambda: self._stream(method, request, until=until, awaited=awaited), until=until, clock=self._clock
        )

    def _stream(
        self, method: Streaming[RequestT, ResponseT], request: RequestT, *, until: float, awaited: str
    ) -> Generator[ResponseT, None, None]:
        started = self._clock.monotonic()
        with self._connection.calling(method.name, started, awaited) as channel:
            call = channel.unary_stream(f"/{self._service}/{method.name}", serialize, method.response.FromString)
            responses = call(request, timeout=max(0.0, until - started))
            try:
                yield from responses
            finally:
                responses.cancel()

    def close(self) -> None:
        """End all calls and the channel."""
        self._connection.close()
