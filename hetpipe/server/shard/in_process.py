"""Handlers of the calls of a job's shard: for its server, and for stages and shards in the same process.

Same objects and bytes with and without sockets; single-process runs call these handlers directly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hetpipe import failpoints
from hetpipe.errors import CheckpointNotWritten
from hetpipe.server.shard.job_shard import JobShard
from hetpipe.values.requests import BuffersHeader, Meeting, PullHeader, PushHeader, PushReply, Watermarks
from hetpipe.values.sync import Progress
from hetpipe.wire import calls
from hetpipe.wire.call import Chunk
from hetpipe.wire.calls import (
    AcknowledgeRequest,
    CheckpointParts,
    FollowLogRequest,
    GetProgressRequest,
    HeldClock,
    HoldClockRequest,
    JoinRequest,
    LogRecords,
    ReportCheckpointRequest,
    ReportInitializedRequest,
    ReportPreparedRequest,
    ReportShardCheckpointRequest,
    ReportStagedRequest,
)
from hetpipe.wire.serving import Context, Handlers

#: Longest wait for new records before a stream of them ends and the caller follows again.
_FOLLOW_SECONDS = 0.1


def tensor_calls(job_shard: JobShard) -> Handlers:
    """Handlers of slice transfers, for every shard."""
    shard = job_shard.shard

    def push(header: PushHeader, chunks: Iterable[Chunk], _: Context) -> PushReply:
        session = shard.begin_push(header)
        if isinstance(session, Watermarks):
            return PushReply(duplicate=True, marks=session)
        for chunk in failpoints.passing("push", chunks):
            session.write(chunk)
        marks = session.finish()
        failpoints.reach("push.after_stage")
        return PushReply(duplicate=False, marks=marks)

    def pull(header: PullHeader, _: Context) -> Iterator[Chunk]:
        with shard.pull(header) as chunks:
            yield from failpoints.passing("pull", chunks)

    handlers = Handlers()
    handlers.on_upload(calls.PUSH, push)
    handlers.on_download(calls.PULL, pull)
    return handlers


def clock_calls(job_shard: JobShard) -> Handlers:
    """Handlers of the calls that only the clock shard serves."""
    own = _ClockCalls(job_shard)
    handlers = Handlers(on_close=own.close)
    handlers.on(calls.JOIN, own.join)
    handlers.on(calls.REPORT_INITIALIZED, own.report_initialized)
    handlers.on(calls.REPORT_STAGED, own.report_staged)
    handlers.on(calls.HOLD_CLOCK, own.hold_clock)
    handlers.on(calls.REPORT_PREPARED, own.report_prepared)
    handlers.on(calls.GET_PROGRESS, own.get_progress)
    handlers.on_stream(calls.FOLLOW_LOG, own.follow_log)
    handlers.on(calls.ACKNOWLEDGE, own.acknowledge)
    handlers.on(calls.REPORT_CHECKPOINT, own.report_checkpoint)
    handlers.on(calls.REPORT_SHARD_CHECKPOINT, own.report_shard_checkpoint)
    handlers.on_upload(calls.PUSH_BUFFERS, own.push_buffers)
    handlers.on_download(calls.PULL_BUFFERS, own.pull_buffers)
    return handlers


class _ClockCalls:
    def __init__(self, job_shard: JobShard) -> None:
        self._job = job_shard
        self._clock = job_shard.clock_shard
        self._closed = False

    def join(self, request: JoinRequest, _: Context) -> Meeting:
        links = (request.link_address, request.replicas_address)
        return self._clock.join(request.requester, *links, ready=not request.only_meets)

    def report_initialized(self, request: ReportInitializedRequest, _: Context) -> None:
        self._clock.initialized(request.requester)

    def report_staged(self, request: ReportStagedRequest, _: Context) -> None:
        blocks = request.blocks if request.requester.stage == 0 else None
        self._clock.staged(request.requester, request.wave, blocks, segment=request.segment, squares=request.squares)

    def hold_clock(self, request: HoldClockRequest, _: Context) -> HeldClock:
        return HeldClock(*self._clock.hold(request.requester, request.switch))

    def report_prepared(self, request: ReportPreparedRequest, _: Context) -> None:
        self._clock.prepared(request.requester, request.index, can=request.can)

    def get_progress(self, request: GetProgressRequest, _: Context) -> Progress:
        self._clock.check_requester(request.requester)
        return self._clock.progress()

    def follow_log(self, request: FollowLogRequest, _: Context) -> Iterator[LogRecords]:
        condition = self._clock.stage_condition if request.gathered else self._clock.condition
        with condition:
            condition.wait_for(lambda: self._closed or self._clock.records_from(request.start), timeout=_FOLLOW_SECONDS)
            records = self._clock.records_from(request.start)
        if records:
            yield LogRecords(tuple(records))

    def acknowledge(self, request: AcknowledgeRequest, _: Context) -> None:
        self._clock.acknowledge(request.shard, request.num_records, request.durable, applied=request.applied)

    def report_checkpoint(self, request: ReportCheckpointRequest, _: Context) -> CheckpointParts:
        self._clock.check_requester(request.requester)
        self._job.keeper.follow(*self._clock.passed())  # the log follower may lag
        requester, clock, files = request.requester, request.clock, request.files
        try:
            is_complete = self._job.keeper.report(requester, clock, files, failure=request.failure)
        except CheckpointNotWritten:  # the checkpoint is not, but its part is
            self._clock.state_written(requester, clock, whole=not request.failure)
            raise
        self._clock.state_written(requester, clock, whole=not request.failure)
        return CheckpointParts(is_complete)

    def report_shard_checkpoint(self, request: ReportShardCheckpointRequest, _: Context) -> CheckpointParts:
        self._job.keeper.follow(*self._clock.passed())
        shard, clock, files = request.shard, request.clock, request.files
        return CheckpointParts(self._job.keeper.report_shard(shard, clock, files, failure=request.failure))

    def push_buffers(self, header: BuffersHeader, chunks: Iterable[Chunk], _: Context) -> None:
        self._clock.check_requester(header.requester)
        receiver, buffer = self._job.buffers.receive(header)
        for chunk in chunks:
            receiver.write(chunk)
        receiver.finish()
        self._job.buffers.sent(header, buffer)

    def pull_buffers(self, header: BuffersHeader, _: Context) -> Iterator[Chunk]:
        self._clock.check_requester(header.requester)
        yield from self._job.buffers.stream(header)

    def close(self) -> None:
        """End the follower's wait."""
        self._closed = True
        with self._clock.condition:  # the lock of both
            self._clock.condition.notify_all()
            self._clock.stage_condition.notify_all()
