"""Every decoder of what a peer sends: its name, the function, and valid examples.

A decoder may raise the package's own errors and nothing else. One that reads text is given bytes that need not be text,
as the network delivers them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import torch
import yaml
from google.protobuf.message import Message

from hetpipe.agent.children import Inspection
from hetpipe.agent.inspection_order import InspectionAnswer, InspectionOrder
from hetpipe.check.reading import read_history
from hetpipe.coordinator.redis_records import event_of, member_of
from hetpipe.coordinator.store import JobRecord
from hetpipe.errors import HetpipeError
from hetpipe.link import wire as link_wire
from hetpipe.link.credit import Window
from hetpipe.link.policy import Frame, FrameKind, LinkLimits
from hetpipe.link.stream import Assembler, credit_message, messages_of
from hetpipe.observe.history import MemoryHistory
from hetpipe.observe.metrics import read_metrics
from hetpipe.observe.timeline import merge_timelines
from hetpipe.profiler.order import ProfileAnswer, ProfileOrder
from hetpipe.proto.v1 import coordinator_pb2 as pb
from hetpipe.proto.v1 import link_pb2 as link_pb
from hetpipe.proto.v1 import parameter_server_pb2 as shard_pb
from hetpipe.ps.buffer_exchange import Attendance, BufferExchange
from hetpipe.ps.chunks import ChunkReceiver, RunMap
from hetpipe.ps.clock_shard import ClockShard
from hetpipe.ps.config_check import check_config, check_run
from hetpipe.ps.manifest import VERSION, Manifest, check_files, manifest_bytes, parse_manifest
from hetpipe.ps.shard import Shard
from hetpipe.rpc import convert, convert_jobs, convert_shard
from hetpipe.rpc.link_stream import hello_from_bytes
from hetpipe.rpc.method import parse
from hetpipe.rpc.status import error_from_name, metadata_of, translate_rpc_error
from hetpipe.spec import wire
from hetpipe.spec.cluster import Cluster
from hetpipe.spec.commands import (
    AgentNews,
    ChildExit,
    InspectCommand,
    InspectionResult,
    NumberedCommand,
    StageNews,
    StopVirtualWorkerCommand,
)
from hetpipe.spec.document import Document, parse_document
from hetpipe.spec.events import (
    Evaluated,
    JobEnded,
    JobEvent,
    JobState,
    NumberedEvent,
    StateChanged,
    Waiting,
    WorkerLeft,
    WorkerLost,
)
from hetpipe.spec.ids import Clock, Incarnation, JobId, Term, VirtualWorkerIndex, Wave
from hetpipe.spec.job import load_job
from hetpipe.spec.job_json import job_from_json
from hetpipe.spec.job_yaml import YamlSyntaxError, parse_yaml
from hetpipe.spec.measurement import Measurement, ProfileStep
from hetpipe.spec.members import Member, MemberInfo
from hetpipe.spec.plan import ModelReport
from hetpipe.spec.plan_document import PlanDocument
from hetpipe.spec.profile import Profile
from hetpipe.spec.requests import BuffersHeader, CheckpointFile, PullHeader, PushReply, SliceHeader, Watermarks
from hetpipe.spec.run import ClockSnapshot, StageConfig, StageReport
from hetpipe.spec.run_document import LifeSeen, RunDescription, RunDocument
from hetpipe.spec.shard_config import ShardConfig
from hetpipe.spec.sync import Progress
from hetpipe.sync.records import (
    BarrierRecord,
    CommitRecord,
    PublishRecord,
    Record,
    SegmentMember,
    SegmentRecord,
    TermRecord,
)
from hetpipe.sync.shard_state import ShardState
from hetpipe.weights.flat import FlatBuffer, FlatLayout
from tests.coordinator.builders import (
    BASE,
    JOB_ID,
    agent_member,
    clocks,
    job,
    model,
    shard_member,
    submission,
)
from tests.profiler.builders import layer, measurement
from tests.ps.builders import chunk_of, headers_of, push_header, requester, run_document, shard_config, slices_of
from tests.rpc.test_convert import KEY, REPORTS, START
from tests.spec.document_cases import CLUSTER, PLAN, PROFILE

Decode = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class Decoder:
    """One decoder."""

    name: str
    decode: Decode
    examples: tuple[bytes, ...]
    message: type[Message] | None = None
    """The message it reads, so that its fields can be changed one by one."""


SHARD_CONFIG = shard_config(slices_of([3, 40]), stages=(1, 2), run_dir="/run")
RUN = run_document(SHARD_CONFIG)
LIVES = (LifeSeen(VirtualWorkerIndex(0), Incarnation(2), 1, "member"),)


# -- JSON that becomes a dataclass -------------------------------------------------------------------------------------


def _values() -> Iterator[tuple[Any, list[Any]]]:
    """Types that travel as JSON, with examples."""
    yield StageConfig, [START.config]
    yield ClockSnapshot, [clocks(1, 2)]
    yield StageReport, list(REPORTS)
    yield ModelReport, [model()]
    yield Measurement, [measurement("cpu", layer(parameters=3))]
    yield ProfileStep, [ProfileStep("cpu", "head", 2, 8)]
    yield InspectionAnswer, [InspectionAnswer(model(), (measurement("cpu"),))]
    yield (
        InspectionOrder,
        [InspectionOrder(job={"a": 1}, import_path="/", with_model=True, measure=("cpu",), cache_folder="/c")],
    )
    yield ProfileOrder, [ProfileOrder(job={"a": 1}, import_path="/", cache_folder="/c")]
    yield ProfileAnswer, [ProfileAnswer((measurement("cpu"),), ())]
    yield MemberInfo, [agent_member(), shard_member(0)]
    yield JobRecord, [JobRecord(job_id=JOB_ID, name="a", state=JobState.RUNNING, run_dir="/r", submitted_wall=1.0)]
    yield RunDescription, [RunDescription(SHARD_CONFIG.term, RUN, LIVES, clocks(1, 2), ("stop",), is_over=False)]
    events = [StateChanged(JobState.RUNNING), Waiting("a", 1.0), Evaluated(Clock(1), 0, 1, {"loss": 0.5})]
    yield JobEvent, [*events, WorkerLost(VirtualWorkerIndex(1), Incarnation(2), "it was killed")]


def _json_decoder(kind: Any) -> Decode:
    return lambda data: wire.from_json(kind, data)


def _keep_run(data: bytes) -> None:
    check_run(SHARD_CONFIG, wire.from_json(RunDocument, data))


def _configure(data: bytes) -> object:
    config: ShardConfig = wire.from_json(ShardConfig, data)
    check_config(config, memory_bytes=1 << 20)
    return ClockShard(config, MemoryHistory()), Shard(config, MemoryHistory())


MANIFEST = Manifest(
    VERSION,
    "job",
    Progress(Clock(2), 0, b"\x03", 2, 4),
    {VirtualWorkerIndex(0): 1},
    tuple(CheckpointFile(f"{part}.safetensors", "00" * 32, 10) for part in ("shard-0", "vw-0-stage-0")),
    num_shards=1,
)


def _json_decoders() -> Iterator[Decoder]:
    for kind, examples in _values():
        texts = tuple(wire.to_json(kind, example).encode() for example in examples)
        yield Decoder(f"json {getattr(kind, '__name__', 'union')} {len(texts)}", _json_decoder(kind), texts)
    configs = (SHARD_CONFIG, replace(SHARD_CONFIG, run=RUN))
    yield Decoder("json ShardConfig", _configure, tuple(wire.to_json(ShardConfig, c).encode() for c in configs))
    yield Decoder("json RunDocument", _keep_run, (wire.to_json(RunDocument, RUN).encode(),))
    yield Decoder("checkpoint manifest", parse_manifest, (manifest_bytes(MANIFEST),))
    yield Decoder("submitted job", job_from_json, (submission(job()).job_json.encode(),))


# -- documents of people and of other programs -------------------------------------------------------------------------


def _document_decoder(kind: type[Document]) -> Decode:
    return lambda data: parse_document(kind, data.decode(errors="replace"), what="document")


def _job_yaml(data: bytes) -> object:
    try:
        value, _ = parse_yaml(data.decode(errors="replace"))
    except YamlSyntaxError:  # whoever reads the file makes its own error from it
        return None
    return load_job(value if isinstance(value, dict) else {})


def _documents() -> Iterator[Decoder]:
    for kind, example in ((Cluster, CLUSTER), (Profile, PROFILE), (PlanDocument, PLAN)):
        yield Decoder(f"document {kind.__name__}", _document_decoder(kind), (json.dumps(example).encode(),))
    text = yaml.safe_dump({**BASE, "seed": 0}, sort_keys=False)
    yield Decoder("job file", _job_yaml, (text.encode(), text.replace("seed: 0", "seed: &zero 0").encode()))


# -- messages ----------------------------------------------------------------------------------------------------------


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


def _message_decoders() -> Iterator[Decoder]:
    for kind, use, examples in (*_messages(), *_shard_messages()):
        raw = tuple(example.SerializeToString() for example in examples)
        yield Decoder(f"message {kind.DESCRIPTOR.name}", _message_decoder(kind, use), raw, kind)


# -- raw bytes ---------------------------------------------------------------------------------------------------------

_LAYOUT = FlatLayout([("a", (3,), "float32"), ("b", (40,), "float32")])
_RUNS = RunMap(
    (SliceHeader("a", 0, 3, "float32"), SliceHeader("b", 0, 40, "float32")), [slot.offset for slot in _LAYOUT.slots]
)
_CHUNK_LENGTH_BYTES = 2
_MESSAGE_LENGTH_BYTES = 4


def _chunks(data: bytes) -> object:
    """A stream of chunks, each after its length."""
    receiver = ChunkReceiver(FlatBuffer(_LAYOUT, torch.device("cpu")), _RUNS)
    while data:
        length = int.from_bytes(data[:_CHUNK_LENGTH_BYTES], "little")
        receiver.write(data[_CHUNK_LENGTH_BYTES : _CHUNK_LENGTH_BYTES + length])
        data = data[_CHUNK_LENGTH_BYTES + length :]
    receiver.finish()
    return receiver


def _chunk_example(*lengths: int) -> bytes:
    stream, offset = b"", 0
    for length in lengths:
        chunk = chunk_of(offset, bytes(length))
        stream += len(chunk).to_bytes(_CHUNK_LENGTH_BYTES, "little") + chunk
        offset += length
    return stream


LIMITS = LinkLimits()


def _frame(data: bytes) -> object:
    header = link_wire.decode(memoryview(data), LIMITS)
    if isinstance(header, link_wire.FrameHeader):
        for tensor in header.tensors:
            assert tensor is None or tensor.num_bytes <= LIMITS.frame_bytes
    return header


def _frame_example(*tensors: torch.Tensor | None) -> bytes:
    frame = Frame(FrameKind.FORWARD, 3, 1, 2, tensors, 4)
    return bytes(link_wire.encode(frame).first.numpy().tobytes())


_STREAM_LIMITS = LinkLimits(frame_bytes=1 << 20)


def _link_stream(data: bytes) -> object:
    """The messages of a gRPC link, each after its length; the receiver has room for three frames."""
    window = Window(3)
    assembler = Assembler(_STREAM_LIMITS, admit=window.arrive)
    received = []
    while data:
        length = int.from_bytes(data[:_MESSAGE_LENGTH_BYTES], "little")
        received.append(assembler.feed(data[_MESSAGE_LENGTH_BYTES : _MESSAGE_LENGTH_BYTES + length]))
        data = data[_MESSAGE_LENGTH_BYTES + length :]
    return received


def _link_stream_example(*tensors: torch.Tensor | None) -> bytes:
    frame = Frame(FrameKind.BACKWARD, 3, 1, 2, tensors, 4)
    messages = [*messages_of(link_wire.encode(frame)), credit_message(2)]
    return b"".join(len(message).to_bytes(_MESSAGE_LENGTH_BYTES, "little") + message for message in messages)


class _FailedCall(grpc.RpcError, grpc.Call):
    """A failed call whose trailing metadata a peer wrote: class name, sentence and problems, one per line."""

    def __init__(self, data: bytes) -> None:
        self._name, _, rest = data.partition(b"\n")
        self._sentence, _, self._problems = rest.partition(b"\n")

    def trailing_metadata(self) -> Any:
        return (("hetpipe-error", self._name.decode(errors="replace")), ("hetpipe-problems-bin", self._problems))

    def details(self) -> str:
        return self._sentence.decode(errors="replace")

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNKNOWN


_FailedCall.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]  # what is not asked for need not be there


def _status(data: bytes) -> object:
    error = translate_rpc_error(_FailedCall(data), peer="p", role="r", call="c", elapsed_seconds=0.0)
    assert isinstance(error, HetpipeError)
    metadata_of(error)
    return str(error)


def _child_line(data: bytes) -> object:
    heard: list[object] = []
    Inspection(JOB_ID, heard.append).heard(data)
    return heard


_FOLDER = TemporaryDirectory(prefix="hetpipe-fuzz-")


def _written(data: bytes, *parts: str) -> Path:
    path = Path(_FOLDER.name).joinpath(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _history(data: bytes) -> object:
    _written(data, "history", "shard-0.jsonl")
    return read_history(Path(_FOLDER.name))


def _trace(data: bytes) -> None:
    merge_timelines([_written(data, "trace", "stage.jsonl")], Path(_FOLDER.name) / "trace.json")


def _metrics(data: bytes) -> object:
    _written(data, "metrics", "vw-0.jsonl")
    return read_metrics(Path(_FOLDER.name))


def _redis_fields(data: bytes) -> dict[str, str]:
    """Fields of a hash, one `name=value` per line."""
    lines = (line.partition("=") for line in data.decode(errors="replace").split("\n"))
    return {name: value for name, _, value in lines}


def _redis_records() -> Iterator[Decoder]:
    member = f"info={wire.to_json(MemberInfo, agent_member())}\nregistration=r\norder=3"
    yield Decoder("redis member", lambda data: member_of(_redis_fields(data)), (member.encode(),))
    event = f"id=12-0\nevent={wire.to_json(JobEvent, StateChanged(JobState.RUNNING))}"
    yield Decoder("redis event", _redis_event, (event.encode(),))


def _redis_event(data: bytes) -> object:
    fields = _redis_fields(data)
    return event_of(fields.get("id", ""), fields)


def _run_files() -> Iterator[Decoder]:
    """Files that the processes of a run write into its folder, and others read."""
    origin = {"t": 0.5, "host": "n0", "pid": 1, "role": "stage", "term": 1}
    history = (
        {**origin, "event": "forward", "vw": 0, "incarnation": 0, "stage": 0, "p": 1, "clock": 0, "local_through": 0},
        {**origin, "event": "used", "vw": 0, "wave": 1, "epoch": 0, "indices": [1, 2]},
        {**origin, "event": "barrier", "clock": 1, "reason": "end"},
    )
    yield Decoder("history file", _history, tuple(json.dumps(line).encode() for line in history))
    place = {"process_index": 0, "process_name": "a", "thread_index": 0, "thread_name": "b"}
    head = json.dumps({"origin": {**place, "host": "n0", "wall_offset_seconds": 1.5}})
    span = json.dumps({"name": "forward", "cat": "compute", "args": {"p": 1}, "ts": 1.0, "dur": 2.0})
    yield Decoder("trace file", _trace, (f"{head}\n{span}\n".encode(), head.encode()))
    wave = {"t": 0.5, "wave": 1, "p": 2, "minibatches": 1, "samples": 4, "loss": 0.5}
    rest = {"learning_rate": 0.1, "gradient_norm": None, "max_norm": None}
    yield Decoder("metrics file", _metrics, (json.dumps({**wave, **rest}).encode(),))
    lines = ({"ok": wire.plain(InspectionAnswer, InspectionAnswer(model()))}, {"error": "JobError", "problems": ["a"]})
    yield Decoder("inspection line", _child_line, tuple(json.dumps(line).encode() for line in lines))


def _error_name(data: bytes) -> object:
    return error_from_name(data.decode(errors="replace"), "sentence", ["one"])


def _raw_decoders() -> Iterator[Decoder]:
    yield Decoder("tensor chunks", _chunks, (_chunk_example(64, 192), _chunk_example(256)))
    yield Decoder(
        "link frame",
        _frame,
        (
            _frame_example(torch.zeros(3), None),
            _frame_example(torch.zeros(2, 0, 5), torch.zeros(40_000)),
            bytes(link_wire.encode_close().numpy().tobytes()),
        ),
    )
    yield Decoder(
        "link stream",
        _link_stream,
        (_link_stream_example(torch.zeros(3), None), _link_stream_example(torch.zeros(20_000), torch.zeros(2))),
    )
    yield Decoder("call status", _status, (b'JobError\nsentence\n["one", "two"]', b"StaleTerm\nsentence\n"))
    yield Decoder("error name", _error_name, (b"LinkClosed", b"DocumentError"))


DECODERS: tuple[Decoder, ...] = tuple(
    chain(_json_decoders(), _documents(), _message_decoders(), _raw_decoders(), _redis_records(), _run_files())
)
