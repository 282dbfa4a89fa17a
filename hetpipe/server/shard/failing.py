"""Failpoints in a stage's calls: around its pushes, in its pulls, and before it reports a wave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hetpipe import failpoints
from hetpipe.wire.call import Calls, Chunk, Download, ReplyT, RequestT, Streaming, Unary, Upload
from hetpipe.wire.calls import PULL, PUSH, REPORT_STAGED


class FailpointCalls:
    """`Calls` with the failpoints of a stage, evaluated on each attempt of a retried call."""

    def __init__(self, inner: Calls) -> None:
        self._inner = inner

    def invoke(self, call: Unary[RequestT, ReplyT], request: RequestT) -> ReplyT:
        """Implement `Calls.invoke`."""
        if call.path == REPORT_STAGED.path:
            failpoints.reach("commit.before_propose")
        return self._inner.invoke(call, request)

    def stream(self, call: Streaming[RequestT, ReplyT], request: RequestT) -> Iterator[ReplyT]:
        """Implement `Calls.stream`."""
        return self._inner.stream(call, request)

    def upload(self, call: Upload[RequestT, ReplyT], header: RequestT, chunks: Iterable[Chunk]) -> ReplyT:
        """Implement `Calls.upload`."""
        if call.path != PUSH.path:
            return self._inner.upload(call, header, chunks)
        failpoints.reach("push.before_send")
        reply = self._inner.upload(call, header, failpoints.passing("push", chunks))
        failpoints.reach("push.after_reply")
        return reply

    def download(self, call: Download[RequestT], header: RequestT) -> Iterator[Chunk]:
        """Implement `Calls.download`."""
        chunks = self._inner.download(call, header)
        return iter(failpoints.passing("pull", chunks)) if call.path == PULL.path else chunks

    def close(self) -> None:
        """Implement `Calls.close`."""
        self._inner.close()
