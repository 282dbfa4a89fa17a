"""The service of a parameter-server shard: turns messages into plain values for a `ShardHandler`, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import grpc

from hetpipe import failpoints
from hetpipe.decide.sync.records import Record
from hetpipe.errors import MalformedChunk, ProtocolViolation
from hetpipe.proto.v1 import parameter_server_pb2 as pb
from hetpipe.values import wire
from hetpipe.values.bounds import cut
from hetpipe.values.identity import NamedPeer
from hetpipe.values.ids import Clock, Incarnation, JobId, ShardIndex, Term, VirtualWorkerIndex, Wave
from hetpipe.values.plan import DTYPE_BYTES
from hetpipe.values.requests import (
    Blocks,
    BuffersHeader,
    CheckpointFile,
    Meeting,
    PullHeader,
    PushHeader,
    PushReply,
    Requester,
    SliceHeader,
)
from hetpipe.values.run import ClockSnapshot
from hetpipe.values.run_document import RunDescription, RunDocument
from hetpipe.values.shard_config import ShardConfig
from hetpipe.values.sync import Progress
from hetpipe.wire import convert_shard as convert
from hetpipe.wire import shard_methods as methods
from hetpipe.wire.access import caller_of
from hetpipe.wire.fencing import FenceGuard, fence_of
from hetpipe.wire.method import RequestT, ResponseT, Unary, parse, service_handler, streaming_handler, unary_handler
from hetpipe.wire.server import Server

if TYPE_CHECKING:
    from hetpipe.wire.method import Handler


#: Counts announced bytes of a call's peer while they come: `Server.in_flight`.
InFlight = Callable[[grpc.ServicerContext, int], AbstractContextManager[None]]


class ShardHandler(Protocol):
    """What a shard does. Thread-safe; raises hetpipe's typed errors."""

    @property
    def fence(self) -> FenceGuard:
        """Which coordinator may give orders."""
        ...

    def check_shard(self, peer: NamedPeer, job_id: JobId, shard: ShardIndex | None = None) -> None:
        """Let nobody but a job's own parameter servers act as one of them, or as `shard`."""
        ...

    def configure(self, config: ShardConfig) -> None:
        """Take over a job."""
        ...

    def release(self, job_id: JobId) -> None:
        """Forget a job."""
        ...

    def push(self, header: PushHeader, chunks: Iterable[bytes]) -> PushReply:
        """Stage slices."""
        ...

    def pull(self, header: PullHeader) -> Iterator[bytes]:
        """The chunks of published slices."""
        ...

    def join(
        self, requester: Requester, link_address: str = "", replicas_address: str = "", *, ready: bool = True
    ) -> Meeting:
        """A stage is there."""
        ...

    def initialized(self, requester: Requester) -> None:
        """A stage's first weights are on every shard."""
        ...

    def staged(self, requester: Requester, wave: Wave, blocks: Blocks | None, *, segment: Clock) -> None:
        """A stage's part of a wave is on every shard."""
        ...

    def hold(self, requester: Requester, switch: int) -> tuple[Clock, Clock]:
        """Choose the clock of a switch point."""
        ...

    def request_barrier(self, job_id: JobId, term: Term, reason: str) -> Clock:
        """Set an unplanned barrier."""
        ...

    def evict(self, job_id: JobId, term: Term, vw: VirtualWorkerIndex, incarnation: Incarnation) -> None:
        """A life of a virtual worker is over."""
        ...

    def drain(self, job_id: JobId, term: Term, vw: VirtualWorkerIndex, incarnation: Incarnation) -> None:
        """A life of a virtual worker is to leave at the next barrier."""
        ...

    def admit(
        self, job_id: JobId, term: Term, vw: VirtualWorkerIndex, incarnation: Incarnation, num_stages: int
    ) -> None:
        """A new life of a virtual worker will come."""
        ...

    def keep_run(self, job_id: JobId, term: Term, run: RunDocument) -> None:
        """Keep what the next coordinator is to be told."""
        ...

    def describe(self, job_id: JobId) -> RunDescription:
        """A run, and what has become of it."""
        ...

    def clocks(self, job_id: JobId) -> ClockSnapshot:
        """The clocks of a job."""
        ...

    def progress(self, requester: Requester) -> Progress:
        """The progress at the start of the segment under way."""
        ...

    def report_checkpoint(
        self, requester: Requester, clock: Clock, files: Sequence[CheckpointFile], *, failure: str = ""
    ) -> bool:
        """A stage's part of a checkpoint is on disk, or why not."""
        ...

    def report_shard_checkpoint(
        self,
        job_id: JobId,
        term: Term,
        shard: ShardIndex,
        clock: Clock,
        files: Sequence[CheckpointFile],
        *,
        failure: str = "",
    ) -> bool:
        """A shard's part of a checkpoint is on disk, or why not."""
        ...

    def follow(
        self,
        job_id: JobId,
        term: Term,
        start: int,
        context: grpc.ServicerContext,
        *,
        gathered: bool,
        who: Requester | None,
    ) -> Iterator[Sequence[Record]]:
        """The decision log from a record on, as it grows."""
        ...

    def acknowledge(
        self,
        job_id: JobId,
        term: Term,
        shard: ShardIndex,
        num_records: int,
        durable: int | None = None,
        *,
        applied: bool = False,
    ) -> None:
        """A shard has carried out records."""
        ...

    def push_buffers(self, header: BuffersHeader, chunks: Iterable[bytes]) -> None:
        """Take a stage's model buffers at a barrier."""
        ...

    def pull_buffers(self, header: BuffersHeader) -> Iterator[bytes]:
        """What the buffers became."""
        ...


def add_shard_service(server: Server, handler: ShardHandler) -> None:
    """Serve `handler` on `server`. Before it starts."""
    server.add(methods.SERVICE, service_handler(methods.SERVICE, dict(_control_handlers(handler))))
    tensors = _tensor_handlers(handler, server.in_flight)
    server.add(methods.TENSOR_SERVICE, service_handler(methods.TENSOR_SERVICE, tensors))


def _order(
    handler: ShardHandler, method: Unary[RequestT, ResponseT], function: Callable[[RequestT], ResponseT]
) -> tuple[str, Handler]:
    """The handler of a call by which a coordinator changes something: only the newest one may."""

    def fenced(request: RequestT, context: grpc.ServicerContext) -> ResponseT:
        handler.fence.check(fence_of(context))
        return function(request)

    return unary_handler(method, fenced)


def _control_handlers(handler: ShardHandler) -> Iterator[tuple[str, Handler]]:
    def check_shard(context: grpc.ServicerContext, job_id: JobId, shard: ShardIndex | None = None) -> None:
        peer = caller_of(context)
        if isinstance(peer, NamedPeer):  # a stage follows under its own name; without TLS nobody is known
            handler.check_shard(peer, job_id, shard)

    def configure(request: pb.ConfigureRequest) -> pb.ConfigureResponse:
        handler.configure(wire.from_json(ShardConfig, request.config))
        return pb.ConfigureResponse()

    def release(request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        handler.release(JobId(request.job_id))
        return pb.ReleaseResponse()

    def clocks(request: pb.GetShardClocksRequest, _: grpc.ServicerContext) -> pb.GetShardClocksResponse:
        snapshot = handler.clocks(JobId(request.job_id))
        return pb.GetShardClocksResponse(snapshot=wire.to_json(ClockSnapshot, snapshot))

    def follow(request: pb.FollowLogRequest, context: grpc.ServicerContext) -> Iterator[pb.FollowLogResponse]:
        job_id, term = JobId(request.job_id), Term(request.term)
        who = convert.requester_from_proto(request.requester) if request.HasField("requester") else None
        check_shard(context, job_id)
        for records in handler.follow(job_id, term, request.start, context, gathered=request.gathered, who=who):
            yield pb.FollowLogResponse(records=[convert.record_to_proto(record) for record in records])

    def acknowledge(request: pb.AcknowledgeRequest, context: grpc.ServicerContext) -> pb.AcknowledgeResponse:
        job_id, term, shard = JobId(request.job_id), Term(request.term), ShardIndex(request.shard)
        check_shard(context, job_id, shard)
        durable = request.durable if request.HasField("durable") else None
        handler.acknowledge(job_id, term, shard, request.num_records, durable, applied=request.applied)
        return pb.AcknowledgeResponse()

    def report_part(
        request: pb.ReportShardCheckpointRequest, context: grpc.ServicerContext
    ) -> pb.ReportShardCheckpointResponse:
        job_id, term, shard = JobId(request.job_id), Term(request.term), ShardIndex(request.shard)
        check_shard(context, job_id, shard)
        files, failure = _files(request.files), cut(request.failure)
        complete = handler.report_shard_checkpoint(job_id, term, shard, Clock(request.clock), files, failure=failure)
        return pb.ReportShardCheckpointResponse(complete=complete)

    yield _order(handler, methods.CONFIGURE, configure)
    yield _order(handler, methods.RELEASE, release)
    yield unary_handler(methods.GET_SHARD_CLOCKS, clocks)
    yield streaming_handler(methods.FOLLOW_LOG, follow)
    yield unary_handler(methods.ACKNOWLEDGE, acknowledge)
    yield unary_handler(methods.REPORT_SHARD_CHECKPOINT, report_part)
    yield from _order_handlers(handler)
    yield from _stage_handlers(handler)


def _order_handlers(handler: ShardHandler) -> Iterator[tuple[str, Handler]]:
    """What the coordinator wants of the decision log."""

    def request_barrier(request: pb.RequestBarrierRequest) -> pb.RequestBarrierResponse:
        clock = handler.request_barrier(JobId(request.job_id), Term(request.term), request.reason)
        return pb.RequestBarrierResponse(clock=clock)

    def evict(request: pb.EvictRequest) -> pb.EvictResponse:
        vw, incarnation = VirtualWorkerIndex(request.vw), Incarnation(request.incarnation)
        handler.evict(JobId(request.job_id), Term(request.term), vw, incarnation)
        return pb.EvictResponse()

    def drain(request: pb.DrainRequest) -> pb.DrainResponse:
        vw, incarnation = VirtualWorkerIndex(request.vw), Incarnation(request.incarnation)
        handler.drain(JobId(request.job_id), Term(request.term), vw, incarnation)
        return pb.DrainResponse()

    def admit(request: pb.AdmitRequest) -> pb.AdmitResponse:
        vw, incarnation = VirtualWorkerIndex(request.vw), Incarnation(request.incarnation)
        handler.admit(JobId(request.job_id), Term(request.term), vw, incarnation, request.num_stages)
        return pb.AdmitResponse()

    def keep_run(request: pb.KeepRunRequest) -> pb.KeepRunResponse:
        handler.keep_run(JobId(request.job_id), Term(request.term), wire.from_json(RunDocument, request.run))
        return pb.KeepRunResponse()

    def describe(request: pb.DescribeRunRequest) -> pb.DescribeRunResponse:
        description = handler.describe(JobId(request.job_id))  # whoever asks is about to lead the run
        return pb.DescribeRunResponse(description=wire.to_json(RunDescription, description))

    yield _order(handler, methods.REQUEST_BARRIER, request_barrier)
    yield _order(handler, methods.EVICT, evict)
    yield _order(handler, methods.DRAIN, drain)
    yield _order(handler, methods.ADMIT, admit)
    yield _order(handler, methods.KEEP_RUN, keep_run)
    yield _order(handler, methods.DESCRIBE_RUN, describe)


def _stage_handlers(handler: ShardHandler) -> Iterator[tuple[str, Handler]]:
    """The control calls that a stage makes."""

    def join(request: pb.JoinRequest, _: grpc.ServicerContext) -> pb.JoinResponse:
        requester = convert.requester_from_proto(request.requester)
        meeting = handler.join(requester, request.link_address, request.replicas_address, ready=not request.only_meets)
        return pb.JoinResponse(
            link_address=meeting.link,
            replicas_address=meeting.replicas,
            joined=meeting.joined,
            makes_weights=meeting.makes_weights,
        )

    def initialized(request: pb.ReportInitializedRequest, _: grpc.ServicerContext) -> pb.ReportInitializedResponse:
        handler.initialized(convert.requester_from_proto(request.requester))
        return pb.ReportInitializedResponse()

    def staged(request: pb.ReportStagedRequest, _: grpc.ServicerContext) -> pb.ReportStagedResponse:
        requester = convert.requester_from_proto(request.requester)
        blocks = tuple(tuple(block.indices) for block in request.blocks) if requester.stage == 0 else None
        handler.staged(requester, Wave(request.wave), blocks, segment=Clock(request.segment))
        return pb.ReportStagedResponse()

    def hold(request: pb.HoldClockRequest, _: grpc.ServicerContext) -> pb.HoldClockResponse:
        clock, barrier = handler.hold(convert.requester_from_proto(request.requester), request.switch)
        return pb.HoldClockResponse(clock=clock, barrier=barrier)

    def progress(request: pb.GetProgressRequest, _: grpc.ServicerContext) -> pb.GetProgressResponse:
        return convert.progress_to_proto(handler.progress(convert.requester_from_proto(request.requester)))

    def report_checkpoint(request: pb.ReportCheckpointRequest, _: grpc.ServicerContext) -> pb.ReportCheckpointResponse:
        requester = convert.requester_from_proto(request.requester)
        files, failure = _files(request.files), cut(request.failure)
        complete = handler.report_checkpoint(requester, Clock(request.clock), files, failure=failure)
        return pb.ReportCheckpointResponse(complete=complete)

    yield unary_handler(methods.JOIN, join)
    yield unary_handler(methods.REPORT_INITIALIZED, initialized)
    yield unary_handler(methods.REPORT_STAGED, staged)
    yield unary_handler(methods.HOLD_CLOCK, hold)
    yield unary_handler(methods.GET_PROGRESS, progress)
    yield unary_handler(methods.REPORT_CHECKPOINT, report_checkpoint)


def _files(files: Iterable[pb.CheckpointFile]) -> list[CheckpointFile]:
    return [CheckpointFile(file.name, file.sha256, file.num_bytes) for file in files]


def _tensor_handlers(handler: ShardHandler, in_flight: InFlight) -> dict[str, Handler]:
    def push(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        header = convert.push_header_from_proto(_first(messages, pb.PushHeader))
        with in_flight(context, _announced_bytes(header.slices)):
            reply = handler.push(header, messages)
        context.add_callback(lambda: failpoints.reach("push.after_reply"))
        return convert.push_reply_to_proto(reply).SerializeToString()

    def pull(message: bytes, _: grpc.ServicerContext) -> Iterator[bytes]:
        header = _header(pb.PullHeader, message)
        yield from handler.pull(convert.pull_header_from_proto(header))

    def push_buffers(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        header = convert.buffers_header_from_proto(_first(messages, pb.BuffersHeader))
        with in_flight(context, _announced_bytes(header.buffers)):
            handler.push_buffers(header, messages)
        return b""

    def pull_buffers(message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        header = convert.buffers_header_from_proto(_header(pb.BuffersHeader, message))
        with in_flight(context, _announced_bytes(header.buffers)):  # they are combined in a buffer of that size
            yield from handler.pull_buffers(header)

    return {
        methods.PUSH: grpc.stream_unary_rpc_method_handler(push),
        methods.PULL: grpc.unary_stream_rpc_method_handler(pull),
        methods.PUSH_BUFFERS: grpc.stream_unary_rpc_method_handler(push_buffers),
        methods.PULL_BUFFERS: grpc.unary_stream_rpc_method_handler(pull_buffers),
    }


def _announced_bytes(pieces: Sequence[SliceHeader]) -> int:
    """What a header announces, before anybody has judged it."""
    return sum(max(0, piece.stop - piece.start) * DTYPE_BYTES.get(piece.dtype, 1) for piece in pieces)


def _first(messages: Iterator[bytes], kind: type[RequestT]) -> RequestT:
    """The header that opens a stream.

    Raises:
        MalformedChunk: it is missing or no such message.
    """
    message = next(messages, None)
    if message is None:
        raise MalformedChunk("the stream ended before its header")
    return _header(kind, message)


def _header(kind: type[RequestT], message: bytes) -> RequestT:
    try:
        return parse(kind, message)
    except ProtocolViolation as error:
        raise MalformedChunk(f"the header cannot be read: {error}") from None
