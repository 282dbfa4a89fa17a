"""The failpoints of a stage's calls: around its pushes, in its pulls, and before it reports a wave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hetpipe import failpoints
from hetpipe.wire.call import Calls, Download, ReplyT, RequestT, Streaming, Unary, Upload
from hetpipe.wire.calls import PULL, PUSH, REPORT_STAGED


class FailpointCalls:
    """`Calls` with the failpoints of a stage; each attempt of a call that is repeated passes them anew."""

    def __init__(self, inner: Calls) -> None:
        self._inner = inner

    def invoke(self, call: Unary[RequestT, ReplyT], request: RequestT) -> ReplyT:
        """See `Calls.invoke`."""
        if call.path == REPORT_STAGED.path:
            failpoints.reach("commit.before_propose")
        return self._inner.invoke(call, request)

    def stream(self, call: Streaming[RequestT, ReplyT], request: RequestT) -> Iterator[ReplyT]:
        """See `Calls.stream`."""
        return self._inner.stream(call, request)

    def upload(self, call: Upload[RequestT, ReplyT], header: RequestT, chunks: Iterable[bytes]) -> ReplyT:
        """See `Calls.upload`."""
        if call.path != PUSH.path:
            return self._inner.upload(call, header, chunks)
        failpoints.reach("push.before_send")
        reply = self._inner.upload(call, header, failpoints.passing("push", chunks))
        failpoints.reach("push.after_reply")
        return reply

    def download(self, call: Download[RequestT], header: RequestT) -> Iterator[bytes]:
        """See `Calls.download`."""
        chunks = self._inner.download(call, header)
        return iter(failpoints.passing("pull", chunks)) if call.path == PULL.path else chunks

    def close(self) -> None:
        """See `Calls.close`."""
        self._inner.close()
