"""`Calls` for fakes: a call is the method of its name, `ReportStaged` the method `report_staged`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from hetpipe.wire.call import Call, Chunk, Download, ReplyT, RequestT, Streaming, Unary, Upload


class MethodCalls:
    """What a fake does not have, is not called. Replies are not looked at."""

    def invoke(self, call: Unary[RequestT, ReplyT], request: RequestT) -> ReplyT:
        reply: ReplyT = self._method(call)(request)
        return reply

    def stream(self, call: Streaming[RequestT, ReplyT], request: RequestT) -> Iterator[ReplyT]:
        replies: Iterator[ReplyT] = self._method(call)(request)
        return replies

    def upload(self, call: Upload[RequestT, ReplyT], header: RequestT, chunks: Iterable[Chunk]) -> ReplyT:
        reply: ReplyT = self._method(call)(header, chunks)
        return reply

    def download(self, call: Download[RequestT], header: RequestT) -> Iterator[Chunk]:
        chunks: Iterator[Chunk] = self._method(call)(header)
        return chunks

    def close(self) -> None:
        """Nothing is open."""

    def _method(self, call: Call) -> Any:
        return getattr(self, method_name(call))


def method_name(call: Call) -> str:
    """The name of the method that is a call."""
    return _lower(call.name)


@cache
def _lower(name: str) -> str:
    """`ReportStaged` as `report_staged`; runs of tests ask some thousand times."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
