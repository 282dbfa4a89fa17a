"""Core of a parameter-server process: its jobs and call handlers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import structlog

from hetpipe import failpoints
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.clock import Clock as TimeSource
from hetpipe.conditions import Conditions
from hetpipe.decide.sync.segment import CHECKPOINT, STOP
from hetpipe.errors import (
    HetpipeError,
    PeerUnreachable,
    PermissionDenied,
    ProtocolViolation,
    StaleTerm,
    StateLost,
    UnknownJob,
)
from hetpipe.roots import Roots
from hetpipe.server.shard.config_check import check_config, check_life, check_run
from hetpipe.server.shard.followers import Followers
from hetpipe.server.shard.in_process import clock_calls, tensor_calls
from hetpipe.server.shard.job_shard import JobShard
from hetpipe.server.shard.job_storage import (
    JobStorage,
    StateOptions,
    claim,
    disclaim,
    forget_job,
    kept_fences,
    old_jobs,
)
from hetpipe.server.shard.run_history import HistoryFactory
from hetpipe.values.addresses import split_address
from hetpipe.values.conditions import Condition
from hetpipe.values.identity import NamedPeer, Role
from hetpipe.values.ids import JobId, ShardIndex, Term
from hetpipe.values.members import NO_TERM
from hetpipe.values.requests import (
    Meeting,
    MemoryOffer,
    PullHeader,
    PushHeader,
    PushReply,
    Requester,
)
from hetpipe.values.run import ClockSnapshot
from hetpipe.values.shard_config import ShardConfig
from hetpipe.wire import calls
from hetpipe.wire.access import caller_of
from hetpipe.wire.call import Chunk, ReplyT, Unary
from hetpipe.wire.calls import (
    SHARD_SERVICE,
    TENSOR_SERVICE,
    AdmitRequest,
    Barrier,
    DrainRequest,
    EvictRequest,
    FollowLogRequest,
    JoinRequest,
    KeepRunRequest,
    LogRecords,
    MoveRequest,
    RequestBarrierRequest,
    ShareMemoryRequest,
)
from hetpipe.wire.feeds import Outlet
from hetpipe.wire.fencing import FenceGuard
from hetpipe.wire.segment_server import SegmentKey, SegmentServer
from hetpipe.wire.server import Server
from hetpipe.wire.serving import Context, Handlers
from hetpipe.wire.shard_client import connect_shard
from hetpipe.wire.tls import Tls

log = structlog.get_logger(__name__)

#: Valid reasons of unplanned barriers.
_BARRIER_REASONS = (STOP, CHECKPOINT)


class _Job:
    def __init__(self, job_shard: JobShard, clock: TimeSource) -> None:
        self.shard = job_shard
        self.tensors = tensor_calls(job_shard)
        self.clock = clock_calls(job_shard) if job_shard.config.shard == 0 else None
        #: On the clock shard.
        self.followers = None if self.clock is None else Followers(job_shard.clock_shard, clock)

    def end_streams(self) -> None:
        """End the streams of the log's followers."""
        if self.followers is not None:
            self.followers.close()

    def end(self) -> None:
        """Stop serving; the state on disk stays."""
        self.end_streams()
        self.shard.stop()


class ShardServer:
    """Serves any number of jobs. Thread-safe."""

    def __init__(
        self,
        history: HistoryFactory,
        clock: TimeSource = SYSTEM_CLOCK,
        *,
        tls: Tls | None = None,
        memory_bytes: int | None = None,
        state: StateOptions | None = None,
        roots: Roots | None = None,
    ) -> None:
        """Start without jobs.

        Args:
            history: opens the history of a job.
            clock: for waits.
            tls: credentials for the clock shard of a job.
            memory_bytes: limit of one job's weights; None: the machine's memory.
            state: folder in which jobs are persisted across restarts; None: no persistence.
            roots: folders below which jobs may have their runs; None: anywhere.
        """
        self._memory_bytes = machine_memory_bytes() if memory_bytes is None else memory_bytes
        self._history = history
        self._tls = tls
        self._clock = clock
        #: Fence check of coordinators.
        self.fence = FenceGuard()
        #: Held while a job is taken over.
        self._configuring = threading.Lock()
        self._lock = threading.Lock()
        self._is_ending = False
        self._jobs: dict[JobId, _Job] = {}
        #: Highest term of any job that was ever served here.
        self.highest_term = NO_TERM
        self._state = state
        self._roots = roots or Roots()
        self._segments = SegmentServer(clock=clock)
        #: Lock on the folder for state, held until this process ends.
        self._claim: int | None = None
        #: Jobs whose state on disk is lost or damaged, with the reasons.
        self.lost: dict[JobId, str] = {}
        #: The job in transition from one term to the next.
        self._changing_term: JobId | None = None
        self._on_condition: Callable[[], None] = lambda: None
        #: The handlers of this shard's calls, also for callers in the same process.
        self.calls = self._handlers()

    def recover(self) -> None:
        """Recover the jobs that an earlier process persisted in its folder. Call before serving.

        Raises:
            UserError: another process has that folder, or it cannot be written.
        """
        root = None if self._state is None else self._state.root
        if root is not None:
            self._claim = claim(root)
            self.fence = kept_fences(root)
        for job_id, config in () if root is None else old_jobs(root):
            try:
                if isinstance(config, StateLost):
                    raise config
                self.configure(config)
            except HetpipeError as error:
                _log_lost(error)
                self.lost[job_id] = str(error)

    # -- from the coordinator ----------------------------------------------------------------------------------------

    def configure(self, config: ShardConfig) -> None:
        """Take over a job, replacing an earlier term of it; the same term again is a no-op.

        Raises:
            StaleTerm: a later term is configured already.
            ProtocolViolation, ResourceExhausted, UserError: this shard cannot serve it, or not in that folder.
        """
        self._roots.check_run(config.run_dir, storage=config.storage)
        check_config(config, memory_bytes=self._memory_bytes)
        with self._configuring:
            self._begin(config)

    def _begin(self, config: ShardConfig) -> None:
        with self._lock:
            present = self._jobs.get(config.job_id)
            if present is not None:
                known = present.shard.config.term
                if config.term < known:
                    raise StaleTerm(f"job {config.job_id} is in term {known}; {config.term} is over")
                if config.term == known:
                    return
                del self._jobs[config.job_id]
                self._changing_term = config.job_id
        try:
            if present is not None:
                # First of all, to free memory and disk space for the new term: the old one cannot be continued.
                present.end_streams()
                present.shard.forget()
            job = self._enter(config)
        finally:
            self._changing_term = None
        remote = None
        if config.shard != 0:
            remote = connect_shard(
                config.clock_shard_address,
                ShardIndex(0),
                member_id=config.clock_shard_id,
                tls=self._tls,
                clock=self._clock,
            )
        job.shard.start(remote, self._clock, on_lost=lambda error: self._on_lost(config, error))

    def _enter(self, config: ShardConfig) -> _Job:
        with self._lock:
            job = _Job(self._job_shard(config), self._clock)
            self._jobs[config.job_id] = job
            self.highest_term = max(self.highest_term, config.term)
            self.lost.pop(config.job_id, None)
        return job

    def release(self, job_id: JobId) -> None:
        """Forget a job and free its tensors."""
        with self._lock:
            job = self._jobs.pop(job_id, None)
            self.lost.pop(job_id, None)
        if job is not None:
            job.end_streams()
            job.shard.forget()
        elif self._state is not None and self._state.root is not None:
            forget_job(self._state.root, job_id)

    def clocks(self, job_id: JobId) -> ClockSnapshot:
        """Clocks of a job."""
        return self._job(job_id).shard.clock_shard.snapshot()

    def snapshots(self) -> dict[JobId, ClockSnapshot]:
        """Clocks of every job whose clock shard is here; for heartbeats."""
        with self._lock:
            jobs = dict(self._jobs)
        return {job_id: job.shard.clock_shard.snapshot() for job_id, job in jobs.items() if job.clock is not None}

    def jobs(self) -> tuple[JobId, ...]:
        """The served jobs."""
        with self._lock:
            return tuple(self._jobs)

    def lost_jobs(self) -> dict[JobId, str]:
        """Jobs whose persisted state is lost or damaged, with reasons."""
        with self._lock:
            return dict(self.lost)

    def conditions(self) -> dict[JobId, tuple[Condition, ...]]:
        """Conditions of each job in this process; for heartbeats."""
        return {job.config.job_id: job.conditions.active() for job in self.job_shards()}

    def on_condition(self, listener: Callable[[], None]) -> None:
        """Register `listener`, which is called from any thread when a condition of a job begins or ends."""
        self._on_condition = listener

    def job_shards(self) -> tuple[JobShard, ...]:
        """This process's shard of every job."""
        with self._lock:
            return tuple(job.shard for job in self._jobs.values())

    def stop(self) -> None:
        """End every stream and every job; later calls fail with a retryable error."""
        with self._lock:
            self._is_ending = True
            jobs, self._jobs = self._jobs, {}
        self._segments.stop()
        for job in jobs.values():
            job.end()
        claimed, self._claim = self._claim, None
        if claimed is not None and self._state is not None and self._state.root is not None:
            disclaim(self._state.root, claimed)

    # -- calls -------------------------------------------------------------------------------------------------------

    def add_to(self, server: Server) -> None:
        """Register the calls of this shard with `server`, before it starts."""
        self.calls.add_to(server, SHARD_SERVICE, TENSOR_SERVICE)

    def _handlers(self) -> Handlers:
        """Handlers of every call of a shard; most delegate to those of a job."""
        handlers = Handlers(fence=lambda: self.fence)
        handlers.on(calls.CONFIGURE, lambda config, _: self.configure(config))
        handlers.on(calls.RELEASE, lambda request, _: self.release(request.job_id))
        handlers.on(calls.REQUEST_BARRIER, self._request_barrier)
        handlers.on(calls.EVICT, self._evict)
        handlers.on(calls.DRAIN, self._drain)
        handlers.on(calls.MOVE, self._move)
        handlers.on(calls.ADMIT, self._admit)
        handlers.on(calls.KEEP_RUN, self._keep_run)
        handlers.on(calls.DESCRIBE_RUN, lambda request, _: self._job(request.job_id).shard.clock_shard.describe())
        handlers.on(calls.GET_SHARD_CLOCKS, lambda request, _: self.clocks(request.job_id))
        handlers.on(calls.JOIN, self._join)
        handlers.on(calls.REPORT_INITIALIZED, partial(self._of_clock_shard, calls.REPORT_INITIALIZED))
        handlers.on(calls.REPORT_STAGED, partial(self._of_clock_shard, calls.REPORT_STAGED))
        handlers.on(calls.HOLD_CLOCK, partial(self._of_clock_shard, calls.HOLD_CLOCK))
        handlers.on(calls.REPORT_PREPARED, partial(self._of_clock_shard, calls.REPORT_PREPARED))
        handlers.on(calls.GET_PROGRESS, partial(self._of_clock_shard, calls.GET_PROGRESS))
        handlers.on(calls.SHARE_MEMORY, self._share_memory)
        handlers.on(calls.REPORT_CHECKPOINT, partial(self._of_clock_shard, calls.REPORT_CHECKPOINT))
        handlers.on(calls.REPORT_SHARD_CHECKPOINT, partial(self._of_shard, calls.REPORT_SHARD_CHECKPOINT))
        handlers.on(calls.ACKNOWLEDGE, partial(self._of_shard, calls.ACKNOWLEDGE))
        handlers.on_feed(calls.FOLLOW_LOG, self._follow_log)
        handlers.on_upload(calls.PUSH, self.push)
        handlers.on_download(calls.PULL, self.pull)
        handlers.on_upload(
            calls.PUSH_BUFFERS,
            lambda header, chunks, _: self._clock_of(header.requester).upload(calls.PUSH_BUFFERS, header, chunks),
        )
        handlers.on_download(
            calls.PULL_BUFFERS,
            lambda header, _: self._clock_of(header.requester).download(calls.PULL_BUFFERS, header),
        )
        return handlers

    def _request_barrier(self, request: RequestBarrierRequest, _: Context) -> Barrier:
        """Set an unplanned barrier.

        Raises:
            ProtocolViolation: the reason is unknown.
        """
        reason = request.reason
        if reason not in _BARRIER_REASONS:
            raise ProtocolViolation(
                f"unknown reason for a barrier: {reason!r:.40}; use {' or '.join(_BARRIER_REASONS)}"
            )
        return Barrier(self._job(request.job_id, request.term).shard.clock_shard.request_barrier(reason))

    def _evict(self, request: EvictRequest, _: Context) -> None:
        check_life(request.vw, request.incarnation)
        self._job(request.job_id, request.term).shard.clock_shard.evict(request.vw, request.incarnation)

    def _drain(self, request: DrainRequest, _: Context) -> None:
        check_life(request.vw, request.incarnation)
        self._job(request.job_id, request.term).shard.clock_shard.drain(request.vw, request.incarnation)

    def _move(self, request: MoveRequest, _: Context) -> None:
        check_life(request.vw, request.move.incarnation, cut=request.move.bounds)
        self._job(request.job_id, request.term).shard.clock_shard.move(request.vw, request.move)

    def _admit(self, request: AdmitRequest, _: Context) -> None:
        vw, incarnation, num_stages = request.vw, request.incarnation, request.num_stages
        check_life(vw, incarnation, num_stages, request.bounds)
        clock_shard = self._job(request.job_id, request.term).shard.clock_shard
        clock_shard.admit(vw, incarnation, num_stages, request.minibatches_per_wave, request.bounds)

    def _keep_run(self, request: KeepRunRequest, _: Context) -> None:
        """Store the run document for the next coordinator.

        Raises:
            ProtocolViolation: it is of another job, or contradicts this shard's configuration.
        """
        shard = self._job(request.job_id, request.term).shard
        check_run(shard.config, request.run)
        shard.clock_shard.keep_run(request.run)

    def _join(self, request: JoinRequest, _: Context) -> Meeting:
        for address in filter(None, (request.link_address, request.replicas_address)):
            split_address(address)
        return self._clock_of(request.requester).invoke(calls.JOIN, request)

    def _of_clock_shard(self, call: Unary[Any, ReplyT], request: Any, _: Context) -> ReplyT:
        """Handle a call of one of the job's stages at its clock shard."""
        return self._clock_of(request.requester).invoke(call, request)

    def _of_shard(self, call: Unary[Any, ReplyT], request: Any, context: Context) -> ReplyT:
        """Handle a call of another shard of the job at its clock shard."""
        self._check_shard(context, request.job_id, request.shard)
        job = self._job(request.job_id, request.term)
        return self._clock_calls(job).invoke(call, request)

    def push(self, header: PushHeader, chunks: Iterable[Chunk], context: Context) -> PushReply:
        """Stage slices."""
        job, key = self._job(header.requester.job_id), SegmentKey(header.requester, calls.PUSH.name)
        with self._segments.receiving(key, chunks, context) as found:
            reply = job.tensors.upload(calls.PUSH, header, found)
        context.add_callback(lambda: failpoints.reach("push.after_reply"))
        return reply

    def pull(self, header: PullHeader, context: Context) -> Iterator[Chunk]:
        """Chunks of published slices."""
        job, key = self._job(header.requester.job_id), SegmentKey(header.requester, calls.PULL.name)
        return self._segments.sending(key, job.tensors.download(calls.PULL, header), context)

    def _share_memory(self, request: ShareMemoryRequest, _: Context) -> MemoryOffer:
        """Offer a shared-memory segment for the chunks of a kind of call.

        Raises:
            ProtocolViolation: chunks of that kind are sent through gRPC only.
        """
        if request.call not in (calls.PUSH.name, calls.PULL.name):
            raise ProtocolViolation(f"memory is shared for Push and Pull, not for {request.call!r:.40}")
        who = request.requester
        self._job(who.job_id, who.term).shard.shard.check_requester(who)
        return self._segments.offer(SegmentKey(who, request.call))

    def _follow_log(self, request: FollowLogRequest, context: Context, outlet: Outlet[LogRecords]) -> None:
        """Implement `Followers.follow`."""
        self._check_follower(context, request.job_id)
        job = self._job(request.job_id, request.term)
        followers = job.shard.of_clock_shard(job.followers)
        followers.follow(request.start, context, outlet, gathered=request.gathered, who=request.requester)

    def _check_follower(self, context: Context, job_id: JobId) -> None:
        """Reject agents without devices of the job, and the parameter servers of other jobs.

        Raises:
            PermissionDenied: the caller is one of them.
        """
        peer = caller_of(context)
        if not isinstance(peer, NamedPeer) or peer.role is not Role.AGENT:
            self._check_shard(context, job_id)
        elif peer.name not in self._job(job_id).shard.clock_shard.agents:
            raise PermissionDenied(f"{peer} has no devices of job {job_id}")

    def _check_shard(self, context: Context, job_id: JobId, shard: ShardIndex | None = None) -> None:
        """Reject callers other than the job's own parameter servers, and impersonation of `shard`.

        Raises:
            PermissionDenied: the caller is not one of them, or another one.
        """
        peer = caller_of(context)
        if not isinstance(peer, NamedPeer):  # a stage follows under its own identity; without TLS there are none
            return
        ids = [member.id for member in self._job(job_id).shard.clock_shard.shards]
        own = [index for index, member_id in enumerate(ids) if member_id == peer.member_id]
        if not own:
            raise PermissionDenied(f"{peer} is not one of the {len(ids)} parameter servers of job {job_id}")
        if shard is not None and shard not in own:
            raise PermissionDenied(f"{peer} is shard {own[0]} of job {job_id}, and may not act as shard {shard}")

    # -- inside ------------------------------------------------------------------------------------------------------

    def _job_shard(self, config: ShardConfig) -> JobShard:
        """Create a job's shard, new or restored from an earlier process.

        Raises:
            StateLost: the state of an earlier process is unusable.
        """
        history = self._history(config)
        conditions = Conditions(self._clock)
        conditions.on_change(self._report_condition)
        state = None if self._state is None else JobStorage(config, self._state, history, conditions)
        return JobShard(config, history, state, conditions)

    def _report_condition(self) -> None:
        self._on_condition()

    def _on_lost(self, config: ShardConfig, error: StateLost) -> None:
        """Mark a job as lost, as its state is damaged or of an old term: its calls fail with the reason."""
        if isinstance(error.__cause__, StaleTerm):
            log.info("the clock shard serves a later term", sentence=str(error))
        else:
            _log_lost(error)
        with self._lock:
            job = self._jobs.get(config.job_id)
            if job is None or job.shard.config.term != config.term:
                return
            del self._jobs[config.job_id]
            self.lost[config.job_id] = str(error)
        job.end()

    def _job(self, job_id: JobId, term: Term | None = None) -> _Job:
        with self._lock:
            job = self._jobs.get(job_id)
            is_ending, lost = self._is_ending, self.lost.get(job_id)
            is_changing = self._changing_term == job_id
        if job is None and lost is not None:
            raise StateLost(lost)
        if job is None and is_ending:
            raise PeerUnreachable("this parameter server is shutting down")
        if job is None and is_changing:
            raise PeerUnreachable(f"job {job_id} begins a new term on this parameter server")
        if job is None:
            raise UnknownJob(f"this parameter server does not serve job {job_id!r:.80}")
        if term is not None and term != job.shard.config.term:
            raise StaleTerm(f"request for term {term} of job {job_id}; it is in term {job.shard.config.term}")
        return job

    def _clock_of(self, requester: Requester) -> Handlers:
        return self._clock_calls(self._job(requester.job_id))

    @staticmethod
    def _clock_calls(job: _Job) -> Handlers:
        return job.clock if job.clock is not None else clock_calls(job.shard)


def machine_memory_bytes() -> int:
    """Memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _log_lost(error: HetpipeError) -> None:
    log.error("state_lost", error=type(error).__name__, sentence=str(error))
