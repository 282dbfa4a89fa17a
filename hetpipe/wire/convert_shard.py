"""Shard messages: plain values to protobuf and back. The pairs are tested to be inverse."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


def requester_to_proto(value: Requester) -> pb.Requester:
    """As a message."""
    return pb.Requester(
        job_id=value.job_id, term=value.term, vw=value.vw, incarnation=value.incarnation, stage=value.stage
    )


def requester_from_proto(message: pb.Requester) -> Requester:
    """Inverse of `requester_to_proto`."""
    return Requester(
        JobId(message.job_id),
        Term(message.term),
        VirtualWorkerIndex(message.vw),
        Incarnation(message.incarnation),
        StageIndex(message.stage),
    )


def slice_to_proto(value: SliceHeader) -> pb.Slice:
    """As a message."""
    return pb.Slice(parameter=value.parameter, start=value.start, stop=value.stop, dtype=value.dtype)


def slice_from_proto(message: pb.Slice) -> SliceHeader:
    """Inverse of `slice_to_proto`."""
    return SliceHeader(message.parameter, message.start, message.stop, message.dtype)


def push_header_to_proto(value: PushHeader) -> pb.PushHeader:
    """As a message."""
    return pb.PushHeader(
        requester=requester_to_proto(value.requester),
        wave=value.wave,
        slices=[slice_to_proto(s) for s in value.slices],
    )


def push_header_from_proto(message: pb.PushHeader) -> PushHeader:
    """Inverse of `push_header_to_proto`."""
    return PushHeader(
        requester_from_proto(message.requester),
        Wave(message.wave) if message.HasField("wave") else None,
        tuple(slice_from_proto(s) for s in message.slices),
    )


def push_reply_to_proto(value: PushReply) -> pb.PushAcknowledgement:
    """As a message."""
    staged, committed, durable = value.marks
    return pb.PushAcknowledgement(duplicate=value.duplicate, staged=staged, committed=committed, durable=durable)


def push_reply_from_proto(message: pb.PushAcknowledgement) -> PushReply:
    """Inverse of `push_reply_to_proto`."""
    marks = Watermarks(Clock(message.staged), Clock(message.committed), Clock(message.durable))
    return PushReply(message.duplicate, marks)


def pull_header_to_proto(value: PullHeader) -> pb.PullHeader:
    """As a message."""
    return pb.PullHeader(
        requester=requester_to_proto(value.requester),
        clock=value.clock,
        slices=[slice_to_proto(s) for s in value.slices],
    )


def pull_header_from_proto(message: pb.PullHeader) -> PullHeader:
    """Inverse of `pull_header_to_proto`."""
    return PullHeader(
        requester_from_proto(message.requester),
        Clock(message.clock),
        tuple(slice_from_proto(s) for s in message.slices),
    )


def buffers_header_to_proto(value: BuffersHeader) -> pb.BuffersHeader:
    """As a message."""
    return pb.BuffersHeader(
        requester=requester_to_proto(value.requester),
        clock=value.clock,
        buffers=[slice_to_proto(b) for b in value.buffers],
    )


def buffers_header_from_proto(message: pb.BuffersHeader) -> BuffersHeader:
    """Inverse of `buffers_header_to_proto`."""
    return BuffersHeader(
        requester_from_proto(message.requester),
        Clock(message.clock),
        tuple(slice_from_proto(b) for b in message.buffers),
    )


def progress_to_proto(value: Progress) -> pb.GetProgressResponse:
    """As a message."""
    return pb.GetProgressResponse(
        clock=value.clock, epoch=value.epoch, used=value.used, minibatches=value.minibatches, samples=value.samples
    )


def progress_from_proto(message: pb.GetProgressResponse) -> Progress:
    """Inverse of `progress_to_proto`."""
    return Progress(Clock(message.clock), message.epoch, message.used, message.minibatches, message.samples)


def record_to_proto(record: Record) -> pb.LogRecord:
    """As a message."""
    message = pb.LogRecord(index=record.index)
    match record:
        case TermRecord():
            message.term.CopyFrom(pb.TermDecision(term=record.term))
        case InitializeRecord():
            message.initialize.CopyFrom(_member_to_proto(record))
        case CommitRecord():
            message.commit.CopyFrom(
                pb.CommitDecision(
                    vw=record.vw, incarnation=record.incarnation, wave=record.wave, samples=record.samples
                )
            )
        case EvictRecord():
            message.evict.CopyFrom(_member_to_proto(record))
        case BarrierRecord():
            message.barrier.CopyFrom(pb.BarrierDecision(clock=record.clock, reason=record.reason, epoch=record.epoch))
        case PublishRecord():
            message.publish.CopyFrom(pb.PublishDecision(clock=record.clock, retained=record.retained))
        case SegmentRecord():
            message.segment.CopyFrom(_segment_to_proto(record))
    return message


def record_from_proto(message: pb.LogRecord) -> Record:  # noqa: PLR0911 - one per kind of record
    """Inverse of `record_to_proto`.

    Raises:
        ProtocolViolation: a kind of record this version does not know.
    """
    index = message.index
    match message.WhichOneof("decision"):
        case "term":
            return TermRecord(index, Term(message.term.term))
        case "initialize":
            vw, incarnation, clock = _member(message.initialize)
            return InitializeRecord(index, clock, vw, incarnation)
        case "commit":
            commit = message.commit
            vw, incarnation = VirtualWorkerIndex(commit.vw), Incarnation(commit.incarnation)
            return CommitRecord(index, vw, incarnation, Wave(commit.wave), commit.samples)
        case "evict":
            return EvictRecord(index, *_member(message.evict))
        case "barrier":
            return BarrierRecord(index, Clock(message.barrier.clock), message.barrier.reason, message.barrier.epoch)
        case "publish":
            retained = tuple(Clock(clock) for clock in message.publish.retained)
            return PublishRecord(index, Clock(message.publish.clock), retained)
        case "segment":
            return _segment(index, message.segment)
        case other:
            raise ProtocolViolation(f"record {index} of the decision log is of unknown kind {other}")


def _member_to_proto(record: InitializeRecord | EvictRecord) -> pb.MemberDecision:
    return pb.MemberDecision(vw=record.vw, incarnation=record.incarnation, clock=record.clock)


def _segment_to_proto(record: SegmentRecord) -> pb.SegmentDecision:
    return pb.SegmentDecision(
        start=record.start,
        reasons=record.reasons,
        epoch=record.epoch,
        members=_members_to_proto(record.members),
        left=_members_to_proto(record.left),
    )


def _members_to_proto(members: Sequence[SegmentMember]) -> list[pb.SegmentMember]:
    return [
        pb.SegmentMember(vw=m.vw, incarnation=m.incarnation, num_stages=m.num_stages, joined=m.joined) for m in members
    ]


def _segment(index: int, message: pb.SegmentDecision) -> SegmentRecord:
    members, left = _members(message.members), _members(message.left)
    return SegmentRecord(index, Clock(message.start), tuple(message.reasons), message.epoch, members, left)


def _members(messages: Iterable[pb.SegmentMember]) -> tuple[SegmentMember, ...]:
    return tuple(
        SegmentMember(VirtualWorkerIndex(m.vw), Incarnation(m.incarnation), m.num_stages, m.joined) for m in messages
    )


def _member(message: pb.MemberDecision) -> tuple[VirtualWorkerIndex, Incarnation, Clock]:
    return VirtualWorkerIndex(message.vw), Incarnation(message.incarnation), Clock(message.clock)
