"""Emulated links: a transfer takes at least as long as it would on the emulated link."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.values.run import LinkTime
from hetpipe.wire.call import Calls, Chunk, Download, ReplyT, RequestT, Streaming, Unary, Upload


def over(shard: Calls, time: LinkTime | None, *, clock: Clock = SYSTEM_CLOCK) -> Calls:
    """Wrap the calls of a shard in an emulated link with these times, if given."""
    return shard if time is None else DelayedCalls(shard, time, clock=clock)


class DelayedCalls:
    """`Calls` whose transfers take at least as long as their bytes would take on the link."""

    def __init__(self, inner: Calls, time: LinkTime, *, clock: Clock) -> None:
        self._inner = inner
        self._time = time
        self._clock = clock

    def invoke(self, call: Unary[RequestT, ReplyT], request: RequestT) -> ReplyT:
        """Implement `Calls.invoke`."""
        return self._inner.invoke(call, request)

    def stream(self, call: Streaming[RequestT, ReplyT], request: RequestT) -> Iterator[ReplyT]:
        """Implement `Calls.stream`."""
        return self._inner.stream(call, request)

    def upload(self, call: Upload[RequestT, ReplyT], header: RequestT, chunks: Iterable[Chunk]) -> ReplyT:
        """Implement `Calls.upload`. The delay comes first, as the time for the bytes to arrive."""
        self._clock.sleep(self._time.seconds(call.num_bytes(header)))
        return self._inner.upload(call, header, chunks)

    def download(self, call: Download[RequestT], header: RequestT) -> Iterator[Chunk]:
        """Implement `Calls.download`. The delay follows the last chunk; errors are not delayed."""
        started = self._clock.monotonic()
        yield from self._inner.download(call, header)
        left = started + self._time.seconds(call.num_bytes(header)) - self._clock.monotonic()
        self._clock.sleep(max(0.0, left))

    def close(self) -> None:
        """Implement `Calls.close`."""
        self._inner.close()
