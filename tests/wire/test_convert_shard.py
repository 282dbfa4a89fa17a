"""Shard messages are the inverse of their values, over the wire, and the calls are those of the proto file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpipe.decide.sync.records import (
    BarrierRecord,
    CommitRecord,
    EvictRecord,
    InitializeRecord,
    PublishRecord,
    Record,
    SegmentMember,
    SegmentRecord,
    TermRecord,
)
from hetpipe.errors import ProtocolViolation
from hetpipe.proto.v1 import parameter_server_pb2 as pb
from hetpipe.values.ids import Clock, Incarnation, JobId, StageIndex, Term, VirtualWorkerIndex, Wave
from hetpipe.values.requests import (
    BuffersHeader,
    PullHeader,
    PushHeader,
    PushReply,
    Requester,
    SliceHeader,
    Watermarks,
)
from hetpipe.values.sync import Progress
from hetpipe.wire import convert_shard as convert
from hetpipe.wire.method import Streaming
from hetpipe.wire.shard_methods import METHODS, SERVICE

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
INT64 = st.integers(-(2**63), 2**63 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
CLOCK = INT64.map(Clock)
VW = INT32.map(VirtualWorkerIndex)
LIFE = INT64.map(Incarnation)

REQUESTERS = st.builds(Requester, TEXT.map(JobId), INT64.map(Term), VW, LIFE, INT32.map(StageIndex))
SLICE = st.builds(SliceHeader, TEXT, INT64, INT64, TEXT)
SLICES = st.lists(SLICE, max_size=4).map(tuple)
RECORDS: st.SearchStrategy[Record] = st.one_of(
    st.builds(TermRecord, INT64, INT64.map(Term)),
    st.builds(InitializeRecord, INT64, CLOCK, VW, LIFE),
    st.builds(CommitRecord, INT64, VW, LIFE, INT64.map(Wave), INT64),
    st.builds(EvictRecord, INT64, VW, LIFE, CLOCK),
    st.builds(BarrierRecord, INT64, CLOCK, TEXT, INT64),
    st.builds(PublishRecord, INT64, CLOCK, st.lists(CLOCK, max_size=4).map(tuple)),
    st.builds(
        SegmentRecord,
        INT64,
        CLOCK,
        st.lists(TEXT, max_size=3).map(tuple),
        INT64,
        st.lists(st.builds(SegmentMember, VW, LIFE, INT32, st.booleans()), max_size=3).map(tuple),
        st.lists(st.builds(SegmentMember, VW, LIFE, INT32, st.booleans()), max_size=3).map(tuple),
    ),
)


def test_the_methods_are_those_of_the_proto_file() -> None:
    service = pb.DESCRIPTOR.services_by_name["ParameterServerService"]

    assert service.full_name == SERVICE
    assert {
        (method.name, method.input_type.name, method.output_type.name, method.server_streaming)
        for method in service.methods
    } == {
        (method.name, method.request.DESCRIPTOR.name, method.response.DESCRIPTOR.name, isinstance(method, Streaming))
        for method in METHODS
    }
    assert len(METHODS) == len(service.methods)


@given(REQUESTERS)
def test_requesters(value: Requester) -> None:
    raw = convert.requester_to_proto(value).SerializeToString()
    assert convert.requester_from_proto(pb.Requester.FromString(raw)) == value


@given(SLICE)
def test_slices(value: SliceHeader) -> None:
    raw = convert.slice_to_proto(value).SerializeToString()
    assert convert.slice_from_proto(pb.Slice.FromString(raw)) == value


@given(st.builds(PushHeader, REQUESTERS, st.none() | INT64.map(Wave), SLICES))
def test_push_headers(value: PushHeader) -> None:
    raw = convert.push_header_to_proto(value).SerializeToString()
    assert convert.push_header_from_proto(pb.PushHeader.FromString(raw)) == value


def test_wave_0_is_not_the_first_weights() -> None:
    who = Requester(JobId("job"), Term(1), VirtualWorkerIndex(0), Incarnation(0), StageIndex(0))
    for wave in (None, Wave(0)):
        raw = convert.push_header_to_proto(PushHeader(who, wave, ())).SerializeToString()
        assert convert.push_header_from_proto(pb.PushHeader.FromString(raw)).wave == wave


@given(st.builds(PushReply, st.booleans(), st.builds(Watermarks, CLOCK, CLOCK, CLOCK)))
def test_push_replies(value: PushReply) -> None:
    raw = convert.push_reply_to_proto(value).SerializeToString()
    assert convert.push_reply_from_proto(pb.PushAcknowledgement.FromString(raw)) == value


@given(st.builds(PullHeader, REQUESTERS, CLOCK, SLICES))
def test_pull_headers(value: PullHeader) -> None:
    raw = convert.pull_header_to_proto(value).SerializeToString()
    assert convert.pull_header_from_proto(pb.PullHeader.FromString(raw)) == value


@given(st.builds(BuffersHeader, REQUESTERS, CLOCK, SLICES))
def test_buffers_headers(value: BuffersHeader) -> None:
    raw = convert.buffers_header_to_proto(value).SerializeToString()
    assert convert.buffers_header_from_proto(pb.BuffersHeader.FromString(raw)) == value


@given(st.builds(Progress, CLOCK, INT64, st.binary(max_size=20), INT64, INT64))
def test_progress(value: Progress) -> None:
    raw = convert.progress_to_proto(value).SerializeToString()
    assert convert.progress_from_proto(pb.GetProgressResponse.FromString(raw)) == value


@given(RECORDS)
def test_records(value: Record) -> None:
    raw = convert.record_to_proto(value).SerializeToString()
    back = convert.record_from_proto(pb.LogRecord.FromString(raw))

    assert type(back) is type(value)
    assert back == value


def test_a_record_of_a_kind_to_come() -> None:
    with pytest.raises(ProtocolViolation, match="record 5 of the decision log is of unknown kind"):
        convert.record_from_proto(pb.LogRecord(index=5))
