"""Decoders of messages: every request and every reply of the table of calls, and what a service judges first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hetpipe.checkpoint.manifest import check_files
from hetpipe.decide.sync.records import SegmentMember, SegmentRecord, TermRecord
from hetpipe.decide.sync.shard_state import ShardState
from hetpipe.server.shard.buffer_exchange import Attendance, BufferExchange
from hetpipe.values.ids import Clock, JobId, VirtualWorkerIndex
from hetpipe.values.requests import BuffersHeader, LinkHello, PullHeader, PushHeader
from hetpipe.wire.calls import CALLS, ReportShardCheckpointRequest, SubmitJobRequest
from hetpipe.wire.checks import check_submission
from hetpipe.wire.codec import from_bytes, message_type, to_bytes
from hetpipe.wire.link_stream import hello_from_bytes
from tests.fuzz.decoder import SHARD_CONFIG, Decoder
from tests.server.shard.builders import requester
from tests.wire.examples import EXAMPLES

_SEGMENT = SegmentRecord(
    1, Clock(0), (), 0, (SegmentMember(VirtualWorkerIndex(0), requester().incarnation, 1, joined=True),)
)
_ATTENDANCE = Attendance(_SEGMENT, {VirtualWorkerIndex(0): requester().incarnation})


def _state() -> ShardState:
    state = ShardState(
        job_id=JobId("job"),
        term=SHARD_CONFIG.term,
        slices=SHARD_CONFIG.slices,
        founders=SHARD_CONFIG.membership.members,
        start=Clock(0),
        staleness=1,
    )
    state.follow(TermRecord(0, SHARD_CONFIG.term))
    state.follow(_SEGMENT)
    return state


def _judge_pull(header: PullHeader) -> None:
    state = _state()
    state.check_request(header.requester)
    state.slice_index.of(header.slices)
    state.check_pull(header.clock)


#: What is judged of a value before anything is done with it.
_JUDGES: dict[type, Callable[[Any], object]] = {
    PushHeader: lambda header: _state().admit(header),
    PullHeader: _judge_pull,
    BuffersHeader: lambda header: BufferExchange(lambda: _ATTENDANCE).check(header),
    ReportShardCheckpointRequest: lambda request: check_files(request.files, "shard 1 reports"),
    SubmitJobRequest: lambda request: check_submission(request.submission),
}


def _decode(kind: type, data: bytes) -> object:
    value: object = from_bytes(kind, data)
    judge = _JUDGES.get(kind)
    return value if judge is None else judge(value)


def message_decoders() -> Iterator[Decoder]:
    kinds = {kind for call in CALLS for kind in (call.request, getattr(call, "reply", type(None)))} - {type(None)}
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        if not message_type(kind).DESCRIPTOR.fields:
            continue
        raw = tuple(to_bytes(example) for example in EXAMPLES[kind])
        yield Decoder(f"message {kind.__name__}", partial(_decode, kind), raw, message_type(kind))
    hello = to_bytes(LinkHello(requester(), 4))
    yield Decoder(
        "message LinkHello", partial(hello_from_bytes, expected=requester()), (hello,), message_type(LinkHello)
    )
