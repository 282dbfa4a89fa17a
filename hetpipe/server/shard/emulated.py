"""A shard behind an emulated link: what it transfers takes the link's time as well."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.server.shard.chunks import slice_bytes
from hetpipe.server.shard.transport import ShardTransport
from hetpipe.values.requests import PullHeader, PushHeader, PushReply, SliceHeader
from hetpipe.values.run import LinkTime


def over(shard: ShardTransport, time: LinkTime | None, *, clock: Clock = SYSTEM_CLOCK) -> ShardTransport:
    """`shard` over a link of these times, or as it is."""
    return shard if time is None else EmulatedShard(shard, time, clock=clock)


class EmulatedShard:
    """A `ShardTransport`: each call lasts at least as long as its bytes would take over the link."""

    def __init__(self, shard: ShardTransport, time: LinkTime, *, clock: Clock) -> None:
        self._shard = shard
        self._time = time
        self._clock = clock

    def push(self, header: PushHeader, chunks: Iterable[bytes]) -> PushReply:
        """See `ShardTransport.push`. The time passes first: the shard has the bytes when they have arrived."""
        self._clock.sleep(self._time.seconds(_num_bytes(header.slices)))
        return self._shard.push(header, chunks)

    def pull(self, header: PullHeader) -> Iterator[bytes]:
        """See `ShardTransport.pull`. A refusal comes at once."""
        started = self._clock.monotonic()
        yield from self._shard.pull(header)
        left = started + self._time.seconds(_num_bytes(header.slices)) - self._clock.monotonic()
        self._clock.sleep(max(0.0, left))

    def close(self) -> None:
        """See `ShardTransport.close`."""
        self._shard.close()


def _num_bytes(slices: tuple[SliceHeader, ...]) -> int:
    return sum(map(slice_bytes, slices))
