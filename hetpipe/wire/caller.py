"""The gRPC client: `Calls` over a connection, with deadlines and typed errors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import grpc

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import ProtocolViolation, Unavailable
from hetpipe.wire.call import Chunk, Download, ReplyT, RequestT, Streaming, Unary, Upload, joined
from hetpipe.wire.channel import as_is
from hetpipe.wire.codec import from_bytes, to_bytes
from hetpipe.wire.connection import Connection, Target
from hetpipe.wire.fencing import fence_metadata
from hetpipe.wire.patience import stream_while_busy, while_busy
from hetpipe.wire.segment import Lane, SegmentBroken

#: Slowest transfer rate allowed for, and the longest deadline: a transfer's deadline follows from its size.
_SLOWEST_BYTES_PER_SECOND = 500_000
_LONGEST_TRANSFER_SECONDS = 3600.0

#: Statuses of a server that is away or has forgotten a segment.
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)


class Caller:
    """Client of one peer over a channel of its own. Thread-safe; `close` cancels all calls."""

    def __init__(self, target: Target, *, clock: Clock = SYSTEM_CLOCK, fence: Callable[[], int] | None = None) -> None:
        """Set up the connection; it is established by the first call.

        Args:
            target: the peer.
            clock: measures the duration of calls.
            fence: the fence of the coordinator's lead, sent with its orders.

        Raises:
            UserError: the address is malformed.
        """
        self._clock = clock
        self._connection = Connection(target, clock=clock)
        self._metadata = None if fence is None else fence_metadata(fence)

    def invoke(
        self, call: Unary[RequestT, ReplyT], request: RequestT, *, deadline_seconds: float | None = None
    ) -> ReplyT:
        """Make a unary call; retried while the peer is busy, until the deadline.

        Args:
            call: the row.
            request: the request value.
            deadline_seconds: overrides the row's deadline.

        Raises:
            HetpipeError: the peer's own error, `PeerUnreachable` or `DeadlineExceeded`.
        """
        started = self._clock.monotonic()
        until = started + (call.deadline_seconds if deadline_seconds is None else deadline_seconds)
        data = to_bytes(request)

        def attempt() -> bytes:
            left = max(0.0, until - self._clock.monotonic())
            with self._connection.calling(call.name, started, call.awaited) as channel:
                metadata = None if self._metadata is None else self._metadata()
                answer: bytes = channel.unary_unary(call.path, as_is, as_is)(data, timeout=left, metadata=metadata)
            return answer

        return from_bytes(call.reply, while_busy(attempt, until=until, clock=self._clock))

    def stream(
        self, call: Streaming[RequestT, ReplyT], request: RequestT, *, deadline_seconds: float | None = None
    ) -> Generator[ReplyT, None, None]:
        """Make a streaming call; yields replies as they arrive. Closing the iterator cancels the call.

        Raises:
            HetpipeError: as for `invoke`; raised by the iterator.
        """
        until = self._clock.monotonic() + (call.deadline_seconds if deadline_seconds is None else deadline_seconds)
        data = to_bytes(request)
        begin = self._connection_stream(call.path, call.name, call.awaited, data, until)
        for answer in stream_while_busy(begin, until=until, clock=self._clock):
            yield from_bytes(call.reply, answer)

    def upload(
        self,
        call: Upload[RequestT, ReplyT],
        header: RequestT,
        chunks: Iterable[Chunk],
        *,
        through: Lane | None = None,
    ) -> ReplyT:
        """Send a header, then chunks; returns the reply.

        Args:
            call: the row.
            header: the request value.
            chunks: what follows it.
            through: the shared memory for the chunks; None: they are messages of the call.

        Raises:
            HetpipeError: as for `invoke`; `Busy` is not retried.
        """
        seconds = _transfer_seconds(call.deadline_seconds, call.num_bytes(header))
        data = to_bytes(header)
        with self._connection.calling(call.name, self._clock.monotonic(), call.awaited) as channel:
            method = channel.stream_unary(call.path, joined, as_is)
            if through is None:
                answer: bytes = method(_after(data, chunks), timeout=seconds)
            else:
                with _freed_on_failure(through):
                    future = method.future(iter((data,)), timeout=seconds, metadata=through.metadata())
                    answer = _sent(through, chunks, future)
        return from_bytes(call.reply, answer)

    def download(self, call: Download[RequestT], header: RequestT, *, through: Lane | None = None) -> Iterator[Chunk]:
        """Yield the chunks requested by a header; `through` shared memory, as in `upload`.

        Raises:
            HetpipeError: as for `upload`; raised by the iterator.
        """
        seconds = _transfer_seconds(call.deadline_seconds, call.num_bytes(header))
        until = self._clock.monotonic() + seconds
        if through is None:
            yield from self._connection_stream(call.path, call.name, call.awaited, to_bytes(header), until)()
            return
        with (
            self._connection.calling(call.name, self._clock.monotonic(), call.awaited) as channel,
            _freed_on_failure(through),
        ):
            method = channel.unary_stream(call.path, as_is, as_is)
            answers = method(to_bytes(header), timeout=seconds, metadata=through.metadata())
            yield from _received(through, answers)

    @property
    def peer(self) -> str:
        """The peer, for log lines."""
        return f"{self._connection.target.role} at {self._connection.target.address}"

    def close(self) -> None:
        """Cancel all calls and close the channel."""
        self._connection.close()

    def _connection_stream(
        self, path: str, name: str, awaited: str, data: bytes, until: float
    ) -> Callable[[], Generator[bytes, None, None]]:
        def begin() -> Generator[bytes, None, None]:
            started = self._clock.monotonic()
            with self._connection.calling(name, started, awaited) as channel:
                answers = channel.unary_stream(path, as_is, as_is)(data, timeout=max(0.0, until - started))
                try:
                    yield from answers
                finally:
                    answers.cancel()

        return begin


def _transfer_seconds(least: float, num_bytes: int) -> float:
    return min(least + num_bytes / _SLOWEST_BYTES_PER_SECOND, _LONGEST_TRANSFER_SECONDS)


def _after(header: bytes, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    yield header
    yield from chunks


@contextmanager
def _freed_on_failure(lane: Lane) -> Iterator[None]:
    """Close a lane whose server is away or has forgotten it; after any other error it is as good as before."""
    try:
        yield
    except grpc.RpcError as error:
        if error.code() in _LOST:
            lane.close()
        raise
    except Unavailable:
        lane.close()
        raise


def _sent(lane: Lane, chunks: Iterable[Chunk], future: Any) -> bytes:
    """The reply to an upload whose chunks go through memory."""
    try:
        lane.send(chunks, is_over=future.done)
    except SegmentBroken:
        if not future.done():
            future.cancel()
            raise
        # The call itself knows why it ended.
    except BaseException:
        future.cancel()
        lane.close()
        raise
    answer: bytes = future.result()
    return answer


def _received(lane: Lane, answers: Any) -> Iterator[memoryview]:
    """The chunks of a download that come through memory."""
    try:
        try:
            with closing(lane.receive(is_over=answers.done)) as chunks:
                yield from chunks
        except SegmentBroken:
            if not answers.done():
                raise
        for _ in answers:  # raises what the server says
            raise ProtocolViolation("a download came through memory and as messages")
        if lane.is_closed:
            raise SegmentBroken("a transfer through shared memory broke off before its end")
    finally:
        answers.cancel()
