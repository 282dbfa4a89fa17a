"""Decoders of messages: what a service makes of them before it does anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.message import Message

from hetpipe.checkpoint.manifest import check_files
from hetpipe.decide.sync.records import (
    BarrierRecord,
    CommitRecord,
    PublishRecord,
    Record,
    SegmentMember,
    SegmentRecord,
    TermRecord,
)
from hetpipe.decide.sync.shard_state import ShardState
from hetpipe.proto.v1 import coordinator_pb2 as pb
from hetpipe.proto.v1 import link_pb2 as link_pb
from hetpipe.proto.v1 import parameter_server_pb2 as shard_pb
from hetpipe.server.shard.buffer_exchange import Attendance, BufferExchange
from hetpipe.values.commands import (
    AgentNews,
    ChildExit,
    InspectCommand,
    InspectionResult,
    NumberedCommand,
    StageNews,
    StopVirtualWorkerCommand,
)
from hetpipe.values.events import (
    Evaluated,
    JobEnded,
    JobEvent,
    JobState,
    NumberedEvent,
    StateChanged,
    WorkerLeft,
    WorkerLost,
)
from hetpipe.values.ids import Clock, Incarnation, JobId, Term, VirtualWorkerIndex, Wave
from hetpipe.values.members import Member
from hetpipe.values.requests import BuffersHeader, CheckpointFile, PullHeader, PushReply, SliceHeader, Watermarks
from hetpipe.values.sync import Progress
from hetpipe.wire import convert, convert_jobs, convert_shard
from hetpipe.wire.link_stream import hello_from_bytes
from hetpipe.wire.method import parse
from tests.fuzz.decoder import SHARD_CONFIG, Decode, Decoder
from tests.profiler.builders import measurement
from tests.server.coordinator.builders import (
    JOB_ID,
    agent_member,
    clocks,
    job,
    model,
    shard_member,
    submission,
)
from tests.server.shard.builders import headers_of, push_header, requester
from tests.wire.test_convert import KEY, REPORTS, START


def _message_decoder(kind: type[Message], use: Callable[[Any], object]) -> Decode:
    return lambda data: use(parse(kind, data))


def _messages() -> Iterator[tuple[type[Message], Callable[[Any], object], list[Message]]]:
    """Messages of either direction, what makes values of them, and examples."""
    members = [convert.member_to_proto(Member(info, 1, 2.0)) for info in (agent_member(), shard_member(1))]
    yield (
        pb.RegisterRequest,
        lambda m: convert.member_info_from_proto(m.member),
        [pb.RegisterRequest(member=member.info) for member in members],
    )
    yield (
        pb.ListMembersResponse,
        lambda m: [convert.member_from_proto(member) for member in m.members],
        [pb.ListMembersResponse(members=members)],
    )
    beat = pb.HeartbeatRequest(member_id="a", clocks={"j": convert.clocks_to_proto(clocks(1, 2))}, job_ids=["j"])
    yield pb.HeartbeatRequest, lambda m: {j: convert.clocks_from_proto(m.clocks[j]) for j in m.clocks}, [beat]
    news: list[AgentNews] = [
        *(StageNews(KEY, report) for report in REPORTS),
        InspectionResult(JOB_ID, model(), measurements=(measurement("cpu"),)),
        ChildExit(KEY, 12, -9, "MemoryError"),
    ]
    yield (
        pb.ReportRequest,
        lambda m: [convert.news_from_proto(item) for item in m.news],
        [pb.ReportRequest(news=[convert.news_to_proto(item)]) for item in news],
    )
    yield pb.SubmitJobRequest, convert_jobs.submission_from_proto, [convert_jobs.submission_to_proto(submission(job()))]
    yield pb.StopJobRequest, lambda m: convert_jobs.stop_mode_from_proto(m.mode), [pb.StopJobRequest(mode=1)]  # type: ignore[arg-type]
    commands = [
        NumberedCommand(1, START),
        NumberedCommand(2, InspectCommand(JOB_ID, "{}", "/", "/")),
        NumberedCommand(3, StopVirtualWorkerCommand(JOB_ID, VirtualWorkerIndex(1), Incarnation(2), Term(1))),
    ]
    yield pb.WatchCommandsResponse, convert.command_from_proto, [convert.command_to_proto(c) for c in commands]
    events: list[JobEvent] = [
        Evaluated(Clock(3), 1, 10, {"loss": 1.0}),
        JobEnded(JobState.FINISHED, result={"loss": {"last": None}}),
        StateChanged(JobState.RUNNING),
        WorkerLost(VirtualWorkerIndex(1), Incarnation(2), "it was killed"),
        WorkerLeft(VirtualWorkerIndex(1), Incarnation(2), returns=True),
    ]
    yield (
        pb.WatchJobResponse,
        convert_jobs.event_from_proto,
        [convert_jobs.event_to_proto(NumberedEvent(1, event)) for event in events],
    )
    worker = pb.WorkerStatus(vw=1, incarnation=2, deaths=1, state="leaving")
    yield (
        pb.DrainWorkerResponse,
        lambda m: convert_jobs.worker_from_proto(m.worker),
        [pb.DrainWorkerResponse(worker=worker)],
    )
    yield (
        pb.AddWorkerResponse,
        lambda m: [convert_jobs.worker_from_proto(one) for one in m.workers],
        [pb.AddWorkerResponse(workers=[worker])],
    )
    status = pb.JobStatus(job_id="j", state=5, processes=[pb.Process(role="stage", pid=1)])  # type: ignore[arg-type]
    yield (
        pb.GetStatusResponse,
        lambda m: convert_jobs.status_from_proto(m.status),
        [pb.GetStatusResponse(status=status)],
    )


_SEGMENT = SegmentRecord(
    1, Clock(0), (), 0, (SegmentMember(VirtualWorkerIndex(0), requester().incarnation, 1, joined=True),)
)
_ATTENDANCE = Attendance(_SEGMENT, {VirtualWorkerIndex(0): requester().incarnation})


def _shard_messages() -> Iterator[tuple[type[Message], Callable[[Any], object], list[Message]]]:
    headers = headers_of(SHARD_CONFIG.slices)
    push = convert_shard.push_header_to_proto(push_header(requester(), 0, headers))
    yield shard_pb.PushHeader, lambda m: _state().admit(convert_shard.push_header_from_proto(m)), [push]
    pull = convert_shard.pull_header_to_proto(PullHeader(requester(), Clock(0), headers))
    yield shard_pb.PullHeader, lambda m: _judge_pull(convert_shard.pull_header_from_proto(m)), [pull]
    buffers = BuffersHeader(requester(), Clock(0), (SliceHeader("mean", 0, 5, "float32"),))
    yield (
        shard_pb.BuffersHeader,
        lambda m: BufferExchange(lambda: _ATTENDANCE).check(convert_shard.buffers_header_from_proto(m)),
        [convert_shard.buffers_header_to_proto(buffers)],
    )
    records: list[Record] = [
        TermRecord(0, SHARD_CONFIG.term),
        _SEGMENT,
        CommitRecord(2, VirtualWorkerIndex(0), requester().incarnation, Wave(0), 1),
        BarrierRecord(3, Clock(4), "epoch", 0),
        PublishRecord(4, Clock(1), (Clock(0), Clock(1))),
    ]
    yield (
        shard_pb.FollowLogResponse,
        lambda m: [convert_shard.record_from_proto(record) for record in m.records],
        [shard_pb.FollowLogResponse(records=[convert_shard.record_to_proto(record) for record in records])],
    )
    done = convert_shard.progress_to_proto(Progress(Clock(1), 0, b"\x01", 1, 1))
    yield shard_pb.GetProgressResponse, convert_shard.progress_from_proto, [done]
    part = shard_pb.CheckpointFile(name="shard-1.safetensors", sha256="0f" * 32, num_bytes=10)
    yield (
        shard_pb.ReportShardCheckpointRequest,
        lambda m: check_files([CheckpointFile(f.name, f.sha256, f.num_bytes) for f in m.files], "shard 1 reports"),
        [shard_pb.ReportShardCheckpointRequest(job_id="job", term=1, shard=1, clock=3, files=[part])],
    )
    hello = link_pb.LinkHello(requester=convert_shard.requester_to_proto(requester()), room=4)
    yield link_pb.LinkHello, _hello, [hello]
    reply = convert_shard.push_reply_to_proto(PushReply(duplicate=True, marks=Watermarks(Clock(3), Clock(2), Clock(3))))
    yield shard_pb.PushAcknowledgement, convert_shard.push_reply_from_proto, [reply]


def _hello(message: link_pb.LinkHello) -> object:
    return hello_from_bytes(message.SerializeToString(), expected=requester())


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


def message_decoders() -> Iterator[Decoder]:
    for kind, use, examples in (*_messages(), *_shard_messages()):
        raw = tuple(example.SerializeToString() for example in examples)
        yield Decoder(f"message {kind.DESCRIPTOR.name}", _message_decoder(kind, use), raw, kind)
