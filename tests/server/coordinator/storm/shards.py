"""Parameter servers of a storm: each keeps jobs as the real one does; the clock shard has a real decision log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from hetpipe.decide.sync.decision_log import DecisionLog
from hetpipe.decide.sync.segment import CHECKPOINTS
from hetpipe.errors import CheckpointError, PeerUnreachable, StaleTerm, UnknownJob
from hetpipe.server.coordinator.tasks import Tools
from hetpipe.server.shard.clock_shard import log_config
from hetpipe.values.ids import Clock, Incarnation, JobId, ShardIndex, Term, VirtualWorkerIndex
from hetpipe.values.members import MemberInfo
from hetpipe.values.run import ClockSnapshot
from hetpipe.values.run_document import RunDescription, RunDocument
from hetpipe.values.shard_config import ShardConfig
from hetpipe.values.sync import Progress

T = TypeVar("T")


@dataclass(slots=True)
class Served:
    """One job on one shard. The log is the clock shard's alone."""

    config: ShardConfig
    log: DecisionLog
    run: RunDocument | None
    #: The barrier whose checkpoint was looked for last.
    seen: Clock = Clock(-1)


@dataclass(slots=True)
class Shard:
    """One parameter server: what it keeps outlives its process, but not its disk."""

    index: int
    is_alive: bool = True
    pid: int = 200
    #: Of the coordinator that led it last.
    fence: int = 0
    #: Of all jobs that its process has served.
    highest_term: Term = Term(0)
    jobs: dict[JobId, Served] = field(default_factory=dict)
    lost: dict[JobId, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"shards.host:{7000 + self.index}"


class Shards:
    """All of them, and the checkpoints of all runs."""

    def __init__(self, random: Random, num_shards: int) -> None:
        self._random = random
        self.all = [Shard(index) for index in range(num_shards)]
        #: How likely a call goes wrong: before it has had an effect, and after.
        self.flakiness = 0.0
        #: Folder of a run → its checkpoints.
        self.checkpoints: dict[str, list[tuple[str, Progress]]] = {}
        #: The highest term that each job has had.
        self.terms: dict[JobId, Term] = {}

    def open(self, member: MemberInfo) -> Port:
        return Port(self, next(shard for shard in self.all if shard.address == member.address))

    @property
    def tools(self) -> Tools:
        return Tools(
            open_shard=self.open,
            read_progress=self._read,
            newest_checkpoint=self._newest,
            listed_checkpoint=lambda run_dir: self._newest(run_dir, exactly=True),
        )

    def _newest(self, run_dir: str, *, exactly: bool = False) -> str | None:
        kept = [
            (progress.clock, folder)
            for run, found in self.checkpoints.items()
            for folder, progress in found
            if run == run_dir or (not exactly and run.startswith(run_dir))
        ]
        return max(kept)[1] if kept else None

    def _read(self, folder: str) -> Progress:
        for found in self.checkpoints.values():
            for name, progress in found:
                if name == folder:
                    return progress
        raise CheckpointError(f"{folder}: there is no checkpoint")

    def clock(self, job_id: JobId, term: Term) -> Served | None:
        """What the clock shard keeps of a job, if it is there and in that term."""
        served = self.all[0].jobs.get(job_id)
        return served if self.all[0].is_alive and served is not None and served.config.term == term else None

    def follow(self) -> None:
        """Every shard carries out what the log says; checkpoints are written at barriers."""
        for job_id, served in self.all[0].jobs.items() if self.all[0].is_alive else ():
            log, term = served.log, served.config.term
            there = [shard for shard in self.all[: served.config.num_shards] if shard.is_alive]
            there = [s for s in there if job_id in s.jobs and s.jobs[job_id].config.term == term]
            before = -1
            while before != log.num_records:
                before = log.num_records
                for shard in there:
                    log.acknowledge(ShardIndex(shard.index), log.num_records)
            log.validate_state()
            segment = log.newest_segment
            if segment is not None and segment.start != served.seen and len(there) == served.config.num_shards:
                served.seen = segment.start
                if CHECKPOINTS & set(segment.reasons):
                    folder = f"{served.config.run_dir}/checkpoints/{segment.start}"
                    self.checkpoints.setdefault(served.config.run_dir, []).append((folder, log.progress))

    def call(self, shard: Shard, effect: Callable[[], T]) -> T:
        if not shard.is_alive or self._random.random() < self.flakiness:
            raise PeerUnreachable(f"parameter server at {shard.address} cannot be reached")
        answer = effect()
        if self._random.random() < self.flakiness:
            raise PeerUnreachable(f"parameter server at {shard.address}: the answer was lost")
        return answer


class Port:
    """A control connection: `ShardPort`."""

    def __init__(self, shards: Shards, shard: Shard) -> None:
        self._shards, self._shard = shards, shard

    def _served(self, job_id: JobId, term: Term | None = None) -> Served:
        served = self._shard.jobs.get(job_id)
        if served is None:
            raise UnknownJob(f"this parameter server does not serve job {job_id}")
        if term is not None and term != served.config.term:
            raise StaleTerm(f"request for term {term} of job {job_id}; it is in term {served.config.term}")
        return served

    def _ask(self, job_id: JobId, term: Term | None, effect: Callable[[Served], T]) -> T:
        return self._shards.call(self._shard, lambda: effect(self._served(job_id, term)))

    def configure(self, config: ShardConfig) -> None:
        self._shards.call(self._shard, lambda: self._configure(config))

    def _configure(self, config: ShardConfig) -> None:
        known = self._shard.jobs.get(config.job_id)
        if known is not None and config.term < known.config.term:
            raise StaleTerm(f"job {config.job_id} is in term {known.config.term}; {config.term} is over")
        highest = self._shards.terms.get(config.job_id, Term(0))
        assert config.term >= highest, f"term {config.term} after {highest}"
        self._shards.terms[config.job_id] = config.term
        self._shard.highest_term = max(self._shard.highest_term, config.term)
        if known is not None and config.term == known.config.term:
            return
        self._shard.lost.pop(config.job_id, None)
        self._shard.jobs[config.job_id] = Served(config, DecisionLog(log_config(config)), config.run)

    def request_barrier(self, job_id: JobId, term: Term, reason: str) -> Clock:
        def ask(served: Served) -> Clock:
            served.log.request_barrier(reason)
            return served.log.segment.end

        return self._ask(job_id, term, ask)

    def evict(self, job_id: JobId, term: Term, vw: VirtualWorkerIndex, incarnation: Incarnation) -> None:
        self._ask(job_id, term, lambda served: served.log.evict(vw, incarnation))

    def admit(
        self, job_id: JobId, term: Term, vw: VirtualWorkerIndex, incarnation: Incarnation, num_stages: int
    ) -> None:
        self._ask(job_id, term, lambda served: served.log.admit(vw, incarnation, num_stages))

    def drain(self, job_id: JobId, term: Term, vw: VirtualWorkerIndex, incarnation: Incarnation) -> None:
        self._ask(job_id, term, lambda served: served.log.drain(vw, incarnation))

    def keep_run(self, job_id: JobId, term: Term, run: RunDocument) -> None:
        def keep(served: Served) -> None:
            served.run = run

        self._ask(job_id, term, keep)

    def describe(self, job_id: JobId) -> RunDescription:
        def tell(served: Served) -> RunDescription:
            assert served.run is not None
            log = served.log
            return RunDescription(
                served.config.term, served.run, log.newest_lives(), log.snapshot(), log.asked, is_over=log.finished
            )

        return self._ask(job_id, None, tell)

    def clocks(self, job_id: JobId) -> ClockSnapshot:
        return self._ask(job_id, None, lambda served: served.log.snapshot())

    def release(self, job_id: JobId) -> None:
        self._shards.call(self._shard, lambda: self._shard.jobs.pop(job_id, None))

    def close(self) -> None:
        """Nothing is open."""
