"""The client of a parameter-server shard: plain values in, plain values out.

`GrpcShard` and `GrpcClock` are the network's answers to `server.shard.transport`; `ShardControl` is what the
coordinator uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from hetpipe import failpoints
from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.decide.sync.records import Record
from hetpipe.proto.v1 import parameter_server_pb2 as pb
from hetpipe.values import wire
from hetpipe.values.identity import Role, server_name, shard_server_name
from hetpipe.values.ids import Clock as ClockValue
from hetpipe.values.ids import Incarnation, JobId, ShardIndex, StageIndex, Term, VirtualWorkerIndex, Wave
from hetpipe.values.requests import (
    Blocks,
    BuffersHeader,
    CheckpointFile,
    Meeting,
    PullHeader,
    PushHeader,
    PushReply,
    Requester,
)
from hetpipe.values.run import ClockSnapshot
from hetpipe.values.run_document import RunDescription, RunDocument
from hetpipe.values.shard_config import ShardConfig
from hetpipe.values.sync import Progress
from hetpipe.wire import convert_shard as convert
from hetpipe.wire import shard_methods as methods
from hetpipe.wire.caller import Caller
from hetpipe.wire.connection import Connection, Target
from hetpipe.wire.fencing import fence_metadata
from hetpipe.wire.method import as_is, parse
from hetpipe.wire.tls import Tls
from hetpipe.wire.watchers import STREAM_DEADLINE_SECONDS

#: Deadline of a call that moves no tensors.
CONTROL_SECONDS = 10.0

#: Slowest transfer that is still waited for; a bulk call's deadline follows from its size.
_SLOWEST_BYTES_PER_SECOND = 1_000_000
_BULK_SECONDS = 60.0
_LONGEST_BULK_SECONDS = 3600.0


class _BulkCaller:
    """Raw byte streams to one shard."""

    def __init__(self, target: Target, clock: Clock) -> None:
        self._clock = clock
        self._connection = Connection(target, clock=clock)

    def send(self, name: str, header: bytes, chunks: Iterable[bytes], *, seconds: float) -> bytes:
        """Stream a header and chunks; returns the response's bytes."""
        with self._connection.calling(name, self._clock.monotonic()) as channel:
            call = channel.stream_unary(f"/{methods.TENSOR_SERVICE}/{name}", as_is, as_is)
            response: bytes = call(_with_header(header, chunks), timeout=seconds)
        return response

    def receive(self, name: str, header: bytes, *, seconds: float) -> Iterator[bytes]:
        """Ask by a header; yields the chunks."""
        with self._connection.calling(name, self._clock.monotonic()) as channel:
            call = channel.unary_stream(f"/{methods.TENSOR_SERVICE}/{name}", as_is, as_is)
            responses = call(header, timeout=seconds)
            try:
                yield from responses
            finally:
                responses.cancel()

    def close(self) -> None:
        """End all calls."""
        self._connection.close()


def _with_header(header: bytes, chunks: Iterable[bytes]) -> Iterator[bytes]:
    yield header
    yield from chunks


def _target(address: str, role: str, member_id: str, tls: Tls | None) -> Target:
    """The parameter server at `address`, which with TLS must be the one with that member id; empty: any."""
    name = shard_server_name(member_id) if member_id else server_name(Role.PARAMETER_SERVER)
    return Target(address=address, role=role, tls=tls, server_name=name)


def _bulk_seconds(num_elements: int) -> float:
    return min(_BULK_SECONDS + 8 * num_elements / _SLOWEST_BYTES_PER_SECOND, _LONGEST_BULK_SECONDS)


class GrpcShard:
    """A `ShardTransport` over the network."""

    def __init__(
        self,
        address: str,
        shard: ShardIndex,
        *,
        member_id: str = "",
        tls: Tls | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Connect on first use; see `GrpcClock`."""
        self._bulk = _BulkCaller(_target(address, f"parameter server {shard}", member_id, tls), clock)

    def push(self, header: PushHeader, chunks: Iterable[bytes]) -> PushReply:
        """See `ShardTransport.push`."""
        seconds = _bulk_seconds(sum(s.stop - s.start for s in header.slices))
        raw = convert.push_header_to_proto(header).SerializeToString()
        failpoints.reach("push.before_send")
        response = self._bulk.send(methods.PUSH, raw, failpoints.passing("push", chunks), seconds=seconds)
        failpoints.reach("push.after_reply")
        return convert.push_reply_from_proto(parse(pb.PushAcknowledgement, response))

    def pull(self, header: PullHeader) -> Iterator[bytes]:
        """See `ShardTransport.pull`."""
        seconds = _bulk_seconds(sum(s.stop - s.start for s in header.slices))
        raw = convert.pull_header_to_proto(header).SerializeToString()
        yield from failpoints.passing("pull", self._bulk.receive(methods.PULL, raw, seconds=seconds))

    def close(self) -> None:
        """End all calls."""
        self._bulk.close()


class GrpcClock:
    """A `ClockTransport` over the network."""

    def __init__(
        self,
        address: str,
        *,
        job_id: JobId,
        term: Term,
        requester: Requester | None = None,
        member_id: str = "",
        tls: Tls | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Connect on first use.

        Args:
            address: `HOST:PORT` of the clock shard.
            job_id: the job.
            term: its term.
            requester: the stage that follows the log; None for a shard.
            member_id: of the clock shard, which with TLS must prove it; empty: any parameter server will do.
            tls: who this process is; None: plaintext.
            clock: measures how long calls take.
        """
        target = _target(address, "parameter server 0 (clock shard)", member_id, tls)
        self._caller = Caller(target, service=methods.SERVICE, clock=clock)
        self._bulk = _BulkCaller(target, clock)
        self._job_id = job_id
        self._term = term
        self._follower = None if requester is None else convert.requester_to_proto(requester)

    def join(
        self, requester: Requester, link_address: str = "", replicas_address: str = "", *, ready: bool = True
    ) -> Meeting:
        """See `ClockTransport.join`."""
        request = pb.JoinRequest(
            requester=convert.requester_to_proto(requester),
            link_address=link_address,
            replicas_address=replicas_address,
            only_meets=not ready,
        )
        response = self._caller.unary(methods.JOIN, request, deadline_seconds=CONTROL_SECONDS)
        joined = tuple(StageIndex(stage) for stage in response.joined)
        return Meeting(response.link_address, response.replicas_address, joined, response.makes_weights)

    def initialized(self, requester: Requester) -> None:
        """See `ClockTransport.initialized`."""
        request = pb.ReportInitializedRequest(requester=convert.requester_to_proto(requester))
        self._caller.unary(methods.REPORT_INITIALIZED, request, deadline_seconds=CONTROL_SECONDS)

    def staged(self, requester: Requester, wave: Wave, blocks: Blocks | None, *, segment: ClockValue) -> None:
        """See `ClockTransport.staged`."""
        request = pb.ReportStagedRequest(
            requester=convert.requester_to_proto(requester),
            wave=wave,
            blocks=[pb.Block(indices=block) for block in blocks or ()],
            segment=segment,
        )
        failpoints.reach("commit.before_propose")
        self._caller.unary(methods.REPORT_STAGED, request, deadline_seconds=CONTROL_SECONDS)

    def hold(self, requester: Requester, switch: int) -> tuple[ClockValue, ClockValue]:
        """See `ClockTransport.hold`."""
        request = pb.HoldClockRequest(requester=convert.requester_to_proto(requester), switch=switch)
        response = self._caller.unary(methods.HOLD_CLOCK, request, deadline_seconds=CONTROL_SECONDS)
        return ClockValue(response.clock), ClockValue(response.barrier)

    def progress(self, requester: Requester) -> Progress:
        """See `ClockTransport.progress`."""
        request = pb.GetProgressRequest(requester=convert.requester_to_proto(requester))
        response = self._caller.unary(methods.GET_PROGRESS, request, deadline_seconds=CONTROL_SECONDS)
        return convert.progress_from_proto(response)

    def follow(self, start: int, *, gathered: bool = False) -> Iterator[Sequence[Record]]:
        """See `ClockTransport.follow`."""
        request = pb.FollowLogRequest(
            job_id=self._job_id, term=self._term, start=start, gathered=gathered, requester=self._follower
        )
        stream = self._caller.stream(methods.FOLLOW_LOG, request, deadline_seconds=STREAM_DEADLINE_SECONDS)
        for response in stream:
            yield tuple(convert.record_from_proto(record) for record in response.records)

    def acknowledge(
        self, shard: ShardIndex, num_records: int, durable: int | None = None, *, applied: bool = False
    ) -> None:
        """See `ClockTransport.acknowledge`."""
        request = pb.AcknowledgeRequest(
            job_id=self._job_id,
            term=self._term,
            shard=shard,
            num_records=num_records,
            durable=durable,
            applied=applied,
        )
        self._caller.unary(methods.ACKNOWLEDGE, request, deadline_seconds=CONTROL_SECONDS)

    def report_checkpoint(
        self, requester: Requester, clock: ClockValue, files: Sequence[CheckpointFile], *, failure: str = ""
    ) -> bool:
        """See `ClockTransport.report_checkpoint`."""
        request = pb.ReportCheckpointRequest(
            requester=convert.requester_to_proto(requester), clock=clock, files=_files(files), failure=failure
        )
        return self._caller.unary(methods.REPORT_CHECKPOINT, request, deadline_seconds=CONTROL_SECONDS).complete

    def report_shard_checkpoint(
        self, shard: ShardIndex, clock: ClockValue, files: Sequence[CheckpointFile], *, failure: str = ""
    ) -> bool:
        """See `ClockTransport.report_shard_checkpoint`."""
        request = pb.ReportShardCheckpointRequest(
            job_id=self._job_id, term=self._term, shard=shard, clock=clock, files=_files(files), failure=failure
        )
        response = self._caller.unary(methods.REPORT_SHARD_CHECKPOINT, request, deadline_seconds=CONTROL_SECONDS)
        return response.complete

    def push_buffers(self, header: BuffersHeader, chunks: Iterable[bytes]) -> None:
        """See `ClockTransport.push_buffers`."""
        raw = convert.buffers_header_to_proto(header).SerializeToString()
        self._bulk.send(methods.PUSH_BUFFERS, raw, chunks, seconds=_BULK_SECONDS)

    def pull_buffers(self, header: BuffersHeader) -> Iterator[bytes]:
        """See `ClockTransport.pull_buffers`."""
        raw = convert.buffers_header_to_proto(header).SerializeToString()
        return self._bulk.receive(methods.PULL_BUFFERS, raw, seconds=_BULK_SECONDS)

    def close(self) -> None:
        """End all calls."""
        self._caller.close()
        self._bulk.close()


def _files(files: Sequence[CheckpointFile]) -> list[pb.CheckpointFile]:
    return [pb.CheckpointFile(name=f.name, sha256=f.sha256, num_bytes=f.num_bytes) for f in files]


class ShardControl:
    """What the coordinator asks of a shard. Thread-safe."""

    def __init__(
        self,
        address: str,
        *,
        member_id: str = "",
        tls: Tls | None = None,
        clock: Clock = SYSTEM_CLOCK,
        fence: Callable[[], int] = int,
    ) -> None:
        """Connect on first use.

        Args:
            address: `HOST:PORT` of the shard.
            member_id: of the shard, which with TLS must prove it; empty: any parameter server will do.
            tls: who the coordinator is; None: plaintext.
            clock: measures how long calls take.
            fence: the number of the coordinator's lead.
        """
        target = _target(address, "parameter server", member_id, tls)
        self._caller = Caller(target, service=methods.SERVICE, clock=clock, metadata=fence_metadata(fence))

    def configure(self, config: ShardConfig) -> None:
        """Have the shard take over a job. Repeatable.

        Raises:
            HetpipeError: the shard's refusal, `PeerUnreachable` or `DeadlineExceeded`.
        """
        request = pb.ConfigureRequest(config=wire.to_json(ShardConfig, config))
        self._caller.unary(methods.CONFIGURE, request, deadline_seconds=CONTROL_SECONDS)

    def release(self, job_id: JobId) -> None:
        """Have the shard forget a job; one it does not know is no error."""
        self._caller.unary(methods.RELEASE, pb.ReleaseRequest(job_id=job_id), deadline_seconds=CONTROL_SECONDS)

    def request_barrier(self, job_id: JobId, term: Term, reason: str) -> ClockValue:
        """Set an unplanned barrier (clock shard); returns its clock."""
        request = pb.RequestBarrierRequest(job_id=job_id, term=term, reason=reason)
        response = self._caller.unary(methods.REQUEST_BARRIER, request, deadline_seconds=CONTROL_SECONDS)
        return ClockValue(response.clock)

    def evict(self, job_id: JobId, term: Term, vw: VirtualWorkerIndex, incarnation: Incarnation) -> None:
        """A life of a virtual worker is over (clock shard). Repeatable.

        Raises:
            StaleIncarnation: it never had such a life.
        """
        request = pb.EvictRequest(job_id=job_id, term=term, vw=vw, incarnation=incarnation)
        self._caller.unary(methods.EVICT, request, deadline_seconds=CONTROL_SECONDS)

    def drain(self, job_id: JobId, term: Term, vw: VirtualWorkerIndex, incarnation: Incarnation) -> None:
        """A life of a virtual worker is to leave at the next barrier (clock shard). Repeatable.

        Raises:
            StaleIncarnation: it never had such a life.
        """
        request = pb.DrainRequest(job_id=job_id, term=term, vw=vw, incarnation=incarnation)
        self._caller.unary(methods.DRAIN, request, deadline_seconds=CONTROL_SECONDS)

    def admit(
        self, job_id: JobId, term: Term, vw: VirtualWorkerIndex, incarnation: Incarnation, num_stages: int
    ) -> None:
        """A new life of a virtual worker, with that many stages, will come (clock shard). Repeatable.

        Raises:
            StaleIncarnation: it had a newer life already.
        """
        request = pb.AdmitRequest(job_id=job_id, term=term, vw=vw, incarnation=incarnation, num_stages=num_stages)
        self._caller.unary(methods.ADMIT, request, deadline_seconds=CONTROL_SECONDS)

    def keep_run(self, job_id: JobId, term: Term, run: RunDocument) -> None:
        """Have a run kept for the next coordinator, in place of what was kept before (clock shard). Repeatable."""
        request = pb.KeepRunRequest(job_id=job_id, term=term, run=wire.to_json(RunDocument, run))
        self._caller.unary(methods.KEEP_RUN, request, deadline_seconds=CONTROL_SECONDS)

    def describe(self, job_id: JobId) -> RunDescription:
        """A run, and what has become of it (clock shard).

        Raises:
            UnknownJob: this shard does not serve it.
        """
        response = self._caller.unary(
            methods.DESCRIBE_RUN, pb.DescribeRunRequest(job_id=job_id), deadline_seconds=CONTROL_SECONDS
        )
        return wire.from_json(RunDescription, response.description)

    def clocks(self, job_id: JobId) -> ClockSnapshot:
        """The clocks of a job (clock shard)."""
        request = pb.GetShardClocksRequest(job_id=job_id)
        response = self._caller.unary(methods.GET_SHARD_CLOCKS, request, deadline_seconds=CONTROL_SECONDS)
        return wire.from_json(ClockSnapshot, response.snapshot)

    def close(self) -> None:
        """End all calls."""
        self._caller.close()
