"""A parameter-server process's heart: the jobs it serves, behind `rpc.shard_service.ShardHandler`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import grpc

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.clock import Clock as TimeSource
from hetpipe.errors import ProtocolViolation, StaleTerm, UnknownJob, UserError
from hetpipe.observe.history import History, HistoryWriter
from hetpipe.ps.clock_shard import ClockShard
from hetpipe.ps.config_check import check_config
from hetpipe.ps.in_process import InProcessClock, InProcessShard
from hetpipe.ps.job_shard import JobShard
from hetpipe.rpc.channel import split_address
from hetpipe.rpc.shard_client import GrpcClock
from hetpipe.rpc.tls import Tls
from hetpipe.rpc.watchers import Watchers
from hetpipe.spec.bounds import MAX_SHARDS, MAX_STAGES
from hetpipe.spec.ids import Clock, JobId, ShardIndex, Term, Wave
from hetpipe.spec.requests import Blocks, BuffersHeader, CheckpointFile, Meeting, PullHeader, PushHeader, Requester
from hetpipe.spec.run import ClockSnapshot, ShardConfig
from hetpipe.spec.sync import Progress
from hetpipe.sync.records import Record
from hetpipe.sync.segment import CHECKPOINT, STOP

#: Streams of one job that may follow its log at a time.
MAX_FOLLOWERS = MAX_SHARDS + MAX_STAGES

#: Barriers that nobody planned are for these.
_BARRIER_REASONS = (STOP, CHECKPOINT)

#: Longest time for which commits are kept from followers that gather them.
GATHER_SECONDS = 1.0

#: Opens the history of a job on this shard.
HistoryFactory = Callable[[ShardConfig], HistoryWriter]


class _Job:
    def __init__(self, job_shard: JobShard, clock: TimeSource) -> None:
        self.shard = job_shard
        self.bulk = InProcessShard(job_shard)
        self.clock = InProcessClock(job_shard) if job_shard.config.shard == 0 else None
        #: Followers of the log on the clock shard: those who want every record at once, and those who gather commits.
        self.watchers: dict[bool, Watchers] = {}
        if self.clock is not None:
            shard = job_shard.clock_shard
            for gathered, bell in ((False, shard.bell), (True, shard.news)):
                limit = MAX_STAGES if gathered else MAX_SHARDS
                self.watchers[gathered] = Watchers(limit=limit, what="the decision log", condition=bell, clock=clock)


class ShardServer:
    """Serves any number of jobs. Thread-safe."""

    def __init__(
        self,
        history: HistoryFactory,
        clock: TimeSource = SYSTEM_CLOCK,
        *,
        tls: Tls | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        """Serve no job yet.

        Args:
            history: opens the history of a job.
            clock: for waits.
            tls: how to prove oneself to the clock shard of a job.
            memory_bytes: what one job's weights may take; None: the machine's memory.
        """
        self._memory_bytes = machine_memory_bytes() if memory_bytes is None else memory_bytes
        self._history = history
        self._tls = tls
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: dict[JobId, _Job] = {}

    # -- from the coordinator ----------------------------------------------------------------------------------------

    def configure(self, config: ShardConfig) -> None:
        """Take over a job; the same term again is a no-op.

        Raises:
            StaleTerm: a later term is configured already.
            ProtocolViolation, ResourceExhausted, UserError: this shard could not serve it.
        """
        check_config(config, memory_bytes=self._memory_bytes)
        with self._lock:
            present = self._jobs.get(config.job_id)
            if present is not None:
                known = present.shard.config.term
                if config.term < known:
                    raise StaleTerm(f"job {config.job_id} is in term {known}; {config.term} is over")
                if config.term == known:
                    return
            job = _Job(JobShard(config, self._history(config)), self._clock)
            self._jobs[config.job_id] = job
        if present is not None:
            _end(present)
        remote = None
        if config.shard != 0:
            remote = GrpcClock(
                config.clock_shard_address, job_id=config.job_id, term=config.term, tls=self._tls, clock=self._clock
            )
        job.shard.start(remote, self._clock)

    def release(self, job_id: JobId) -> None:
        """Forget a job and free its tensors."""
        with self._lock:
            job = self._jobs.pop(job_id, None)
        if job is not None:
            _end(job)

    def request_barrier(self, job_id: JobId, term: Term, reason: str) -> Clock:
        """Set an unplanned barrier.

        Raises:
            ProtocolViolation: for a reason that no barrier is set for.
        """
        if reason not in _BARRIER_REASONS:
            raise ProtocolViolation(f"no barrier is set for {reason!r:.40}; ask for {' or '.join(_BARRIER_REASONS)}")
        return self._job(job_id, term).shard.clock_shard.request_barrier(reason)

    def clocks(self, job_id: JobId) -> ClockSnapshot:
        """The clocks of a job."""
        return self._job(job_id).shard.clock_shard.snapshot()

    def snapshots(self) -> dict[JobId, ClockSnapshot]:
        """The clocks of every job of which this is the clock shard; for heartbeats."""
        with self._lock:
            jobs = dict(self._jobs)
        return {job_id: job.shard.clock_shard.snapshot() for job_id, job in jobs.items() if job.clock is not None}

    def jobs(self) -> tuple[JobId, ...]:
        """The jobs that are served."""
        with self._lock:
            return tuple(self._jobs)

    def job_shards(self) -> tuple[JobShard, ...]:
        """This process's shard of every job."""
        with self._lock:
            return tuple(job.shard for job in self._jobs.values())

    def stop(self) -> None:
        """End every stream and every job."""
        with self._lock:
            jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            _end(job)

    # -- from stages and shards --------------------------------------------------------------------------------------

    def push(self, header: PushHeader, chunks: Iterable[bytes]) -> bool:
        """See `ShardTransport.push`."""
        return self._job(header.requester.job_id).bulk.push(header, chunks)

    def pull(self, header: PullHeader) -> Iterator[bytes]:
        """See `ShardTransport.pull`."""
        return self._job(header.requester.job_id).bulk.pull(header)

    def join(self, requester: Requester, link_address: str = "", replicas_address: str = "") -> Meeting:
        """See `ClockTransport.join`."""
        for address in filter(None, (link_address, replicas_address)):
            split_address(address)
        return self._clock_of(requester.job_id).join(requester, link_address, replicas_address)

    def initialized(self, requester: Requester) -> None:
        """See `ClockTransport.initialized`."""
        self._clock_of(requester.job_id).initialized(requester)

    def staged(self, requester: Requester, wave: Wave, blocks: Blocks | None) -> None:
        """See `ClockTransport.staged`."""
        self._clock_of(requester.job_id).staged(requester, wave, blocks)

    def hold(self, requester: Requester, switch: int) -> tuple[Clock, Clock]:
        """See `ClockTransport.hold`."""
        return self._clock_of(requester.job_id).hold(requester, switch)

    def progress(self, requester: Requester) -> Progress:
        """See `ClockTransport.progress`."""
        return self._clock_of(requester.job_id).progress(requester)

    def report_checkpoint(self, requester: Requester, clock: Clock, files: Sequence[CheckpointFile]) -> bool:
        """See `ClockTransport.report_checkpoint`."""
        return self._clock_of(requester.job_id).report_checkpoint(requester, clock, files)

    def acknowledge(self, job_id: JobId, term: Term, shard: ShardIndex, num_records: int) -> None:
        """See `ClockTransport.acknowledge`."""
        self._job(job_id, term).shard.clock_shard.acknowledge(shard, num_records)

    def push_buffers(self, header: BuffersHeader, chunks: Iterable[bytes]) -> None:
        """See `ClockTransport.push_buffers`."""
        self._clock_of(header.requester.job_id).push_buffers(header, chunks)

    def pull_buffers(self, header: BuffersHeader) -> Iterator[bytes]:
        """See `ClockTransport.pull_buffers`."""
        return self._clock_of(header.requester.job_id).pull_buffers(header)

    def follow(
        self, job_id: JobId, term: Term, start: int, context: grpc.ServicerContext, *, gathered: bool = False
    ) -> Iterator[Sequence[Record]]:
        """The records from `start` on, until the client goes, the job ends, or the stream has lasted long enough."""
        job = self._job(job_id, term)
        own = job.shard.clock_shard
        length = own.num_records
        if not 0 <= start <= length:
            raise ProtocolViolation(f"the decision log has {length} records, there is none to follow from {start}")
        position = start
        with job.watchers[gathered].watch(context) as watch:
            while (records := watch.wait(_records_after(own, position), look_seconds=GATHER_SECONDS)) is not None:
                position += len(records)
                yield records

    # -- inside ------------------------------------------------------------------------------------------------------

    def _job(self, job_id: JobId, term: Term | None = None) -> _Job:
        with self._lock:
            job = self._jobs.get(job_id)
        if job is None:
            raise UnknownJob(f"this parameter server does not serve job {job_id!r:.80}")
        if term is not None and term != job.shard.config.term:
            raise StaleTerm(f"request for term {term} of job {job_id}; it is in term {job.shard.config.term}")
        return job

    def _clock_of(self, job_id: JobId) -> InProcessClock:
        job = self._job(job_id)
        return job.clock if job.clock is not None else InProcessClock(job.shard)


def machine_memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _records_after(clock_shard: ClockShard, position: int) -> Callable[[], Sequence[Record] | None]:
    return lambda: clock_shard.records_from(position) or None


def _end(job: _Job) -> None:
    for watchers in job.watchers.values():
        watchers.close()
    job.shard.stop()


def file_history(host: str, pid: int, clock: TimeSource = SYSTEM_CLOCK) -> HistoryFactory:
    """Histories in the run's folder, `RUN_DIR/history/shard-N.jsonl`."""

    def open_history(config: ShardConfig) -> HistoryWriter:
        path = Path(config.run_dir) / "history" / f"shard-{config.shard}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return History(path, host=host, pid=pid, role="parameter_server", term=config.term, clock=clock)
        except OSError as error:
            raise UserError(
                f"shard {config.shard} cannot write {path}: {error.strerror}; every parameter server needs the folder "
                "of the run at the same path"
            ) from error

    return open_history
