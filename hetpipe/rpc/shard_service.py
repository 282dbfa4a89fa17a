"""The service of a parameter-server shard: turns messages into plain values for a `ShardHandler`, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import grpc

from hetpipe.errors import MalformedChunk, ProtocolViolation
from hetpipe.proto.v1 import parameter_server_pb2 as pb
from hetpipe.rpc import convert_shard as convert
from hetpipe.rpc import shard_methods as methods
from hetpipe.rpc.method import RequestT, parse, service_handler, streaming_handler, unary_handler
from hetpipe.rpc.server import Server
from hetpipe.spec import wire
from hetpipe.spec.ids import Clock, JobId, ShardIndex, Term, Wave
from hetpipe.spec.plan import DTYPE_BYTES
from hetpipe.spec.requests import (
    Blocks,
    BuffersHeader,
    CheckpointFile,
    Meeting,
    PullHeader,
    PushHeader,
    Requester,
    SliceHeader,
)
from hetpipe.spec.run import ClockSnapshot, ShardConfig
from hetpipe.spec.sync import Progress
from hetpipe.sync.records import Record

if TYPE_CHECKING:
    from hetpipe.rpc.method import Handler


#: Counts announced bytes of a call's peer while they come: `Server.in_flight`.
InFlight = Callable[[grpc.ServicerContext, int], AbstractContextManager[None]]


class ShardHandler(Protocol):
    """What a shard does. Thread-safe; raises hetpipe's typed errors."""

    def configure(self, config: ShardConfig) -> None:
        """Take over a job."""
        ...

    def release(self, job_id: JobId) -> None:
        """Forget a job."""
        ...

    def push(self, header: PushHeader, chunks: Iterable[bytes]) -> bool:
        """Stage slices; returns whether they had been staged before."""
        ...

    def pull(self, header: PullHeader) -> Iterator[bytes]:
        """The chunks of published slices."""
        ...

    def join(self, requester: Requester, link_address: str = "", replicas_address: str = "") -> Meeting:
        """A stage is there."""
        ...

    def initialized(self, requester: Requester) -> None:
        """A stage's first weights are on every shard."""
        ...

    def staged(self, requester: Requester, wave: Wave, blocks: Blocks | None) -> None:
        """A stage's part of a wave is on every shard."""
        ...

    def hold(self, requester: Requester, switch: int) -> tuple[Clock, Clock]:
        """Choose the clock of a switch point."""
        ...

    def request_barrier(self, job_id: JobId, term: Term, reason: str) -> Clock:
        """Set an unplanned barrier."""
        ...

    def clocks(self, job_id: JobId) -> ClockSnapshot:
        """The clocks of a job."""
        ...

    def progress(self, requester: Requester) -> Progress:
        """The progress at the start of the segment under way."""
        ...

    def report_checkpoint(self, requester: Requester, clock: Clock, files: Sequence[CheckpointFile]) -> bool:
        """A stage's part of a checkpoint is on disk."""
        ...

    def follow(
        self, job_id: JobId, term: Term, start: int, context: grpc.ServicerContext, *, gathered: bool
    ) -> Iterator[Sequence[Record]]:
        """The decision log from a record on, as it grows."""
        ...

    def acknowledge(self, job_id: JobId, term: Term, shard: ShardIndex, num_records: int) -> None:
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


def _control_handlers(handler: ShardHandler) -> Iterator[tuple[str, Handler]]:
    def configure(request: pb.ConfigureRequest, _: grpc.ServicerContext) -> pb.ConfigureResponse:
        handler.configure(wire.from_json(ShardConfig, request.config))
        return pb.ConfigureResponse()

    def release(request: pb.ReleaseRequest, _: grpc.ServicerContext) -> pb.ReleaseResponse:
        handler.release(JobId(request.job_id))
        return pb.ReleaseResponse()

    def request_barrier(request: pb.RequestBarrierRequest, _: grpc.ServicerContext) -> pb.RequestBarrierResponse:
        clock = handler.request_barrier(JobId(request.job_id), Term(request.term), request.reason)
        return pb.RequestBarrierResponse(clock=clock)

    def clocks(request: pb.GetShardClocksRequest, _: grpc.ServicerContext) -> pb.GetShardClocksResponse:
        snapshot = handler.clocks(JobId(request.job_id))
        return pb.GetShardClocksResponse(snapshot=wire.to_json(ClockSnapshot, snapshot))

    def follow(request: pb.FollowLogRequest, context: grpc.ServicerContext) -> Iterator[pb.FollowLogResponse]:
        job_id, term = JobId(request.job_id), Term(request.term)
        for records in handler.follow(job_id, term, request.start, context, gathered=request.gathered):
            yield pb.FollowLogResponse(records=[convert.record_to_proto(record) for record in records])

    def acknowledge(request: pb.AcknowledgeRequest, _: grpc.ServicerContext) -> pb.AcknowledgeResponse:
        shard = ShardIndex(request.shard)
        handler.acknowledge(JobId(request.job_id), Term(request.term), shard, request.num_records)
        return pb.AcknowledgeResponse()

    yield unary_handler(methods.CONFIGURE, configure)
    yield unary_handler(methods.RELEASE, release)
    yield unary_handler(methods.REQUEST_BARRIER, request_barrier)
    yield unary_handler(methods.GET_SHARD_CLOCKS, clocks)
    yield streaming_handler(methods.FOLLOW_LOG, follow)
    yield unary_handler(methods.ACKNOWLEDGE, acknowledge)
    yield from _stage_handlers(handler)


def _stage_handlers(handler: ShardHandler) -> Iterator[tuple[str, Handler]]:
    """The control calls that a stage makes."""

    def join(request: pb.JoinRequest, _: grpc.ServicerContext) -> pb.JoinResponse:
        requester = convert.requester_from_proto(request.requester)
        meeting = handler.join(requester, request.link_address, request.replicas_address)
        return pb.JoinResponse(link_address=meeting.link, replicas_address=meeting.replicas, joined=meeting.joined)

    def initialized(request: pb.ReportInitializedRequest, _: grpc.ServicerContext) -> pb.ReportInitializedResponse:
        handler.initialized(convert.requester_from_proto(request.requester))
        return pb.ReportInitializedResponse()

    def staged(request: pb.ReportStagedRequest, _: grpc.ServicerContext) -> pb.ReportStagedResponse:
        requester = convert.requester_from_proto(request.requester)
        blocks = tuple(tuple(block.indices) for block in request.blocks) if requester.stage == 0 else None
        handler.staged(requester, Wave(request.wave), blocks)
        return pb.ReportStagedResponse()

    def hold(request: pb.HoldClockRequest, _: grpc.ServicerContext) -> pb.HoldClockResponse:
        clock, barrier = handler.hold(convert.requester_from_proto(request.requester), request.switch)
        return pb.HoldClockResponse(clock=clock, barrier=barrier)

    def progress(request: pb.GetProgressRequest, _: grpc.ServicerContext) -> pb.GetProgressResponse:
        return convert.progress_to_proto(handler.progress(convert.requester_from_proto(request.requester)))

    def report_checkpoint(request: pb.ReportCheckpointRequest, _: grpc.ServicerContext) -> pb.ReportCheckpointResponse:
        requester = convert.requester_from_proto(request.requester)
        files = [CheckpointFile(file.name, file.sha256, file.num_bytes) for file in request.files]
        complete = handler.report_checkpoint(requester, Clock(request.clock), files)
        return pb.ReportCheckpointResponse(complete=complete)

    yield unary_handler(methods.JOIN, join)
    yield unary_handler(methods.REPORT_INITIALIZED, initialized)
    yield unary_handler(methods.REPORT_STAGED, staged)
    yield unary_handler(methods.HOLD_CLOCK, hold)
    yield unary_handler(methods.GET_PROGRESS, progress)
    yield unary_handler(methods.REPORT_CHECKPOINT, report_checkpoint)


def _tensor_handlers(handler: ShardHandler, in_flight: InFlight) -> dict[str, Handler]:
    def push(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        header = convert.push_header_from_proto(_first(messages, pb.PushHeader))
        with in_flight(context, _announced_bytes(header.slices)):
            duplicate = handler.push(header, messages)
        return pb.PushAcknowledgement(duplicate=duplicate).SerializeToString()

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
