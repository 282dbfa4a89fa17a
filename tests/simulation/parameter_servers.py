"""Parameter servers: each job has a decision log and shard states of its own, with disks (`tests.simulation.run`).

A process holds a `Server` per job. Killing it kills them all; each comes back with what is on its disk.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from hetpipe.decide.sync.decision_log import DecisionLog
from hetpipe.decide.sync.segment import CHECKPOINTS
from hetpipe.errors import CheckpointError, HetpipeError, PeerUnreachable, StaleTerm, UnknownJob
from hetpipe.server.coordinator.tasks import Tools
from hetpipe.values.ids import Clock, JobId, Term
from hetpipe.values.members import MemberInfo
from hetpipe.values.run import ClockSnapshot
from hetpipe.values.run_document import RunDescription, RunDocument
from hetpipe.values.shard_config import ShardConfig
from hetpipe.values.sync import Progress
from hetpipe.wire.calls import (
    AdmitRequest,
    Barrier,
    DescribeRunRequest,
    DrainRequest,
    EvictRequest,
    GetShardClocksRequest,
    KeepRunRequest,
    ReleaseRequest,
    RequestBarrierRequest,
)
from tests.simulation.network import Network
from tests.simulation.run import Run
from tests.simulation.scheduler import Scheduler
from tests.simulation.server import Server
from tests.simulation.setting import Setting
from tests.support.method_calls import MethodCalls

T = TypeVar("T")


@dataclass(slots=True)
class Served:
    """One job on one shard."""

    config: ShardConfig
    training: Run
    server: Server
    #: The run document for a coordinator without any state of the job.
    run: RunDocument | None
    #: The barrier whose checkpoint was looked for last.
    seen: Clock = Clock(-1)

    @property
    def log(self) -> DecisionLog:
        """The clock shard's."""
        return self.server.clock_part.log


@dataclass(slots=True)
class Shard:
    """One parameter server: what it keeps outlives its process, but not its disk."""

    index: int
    is_alive: bool = True
    is_paused: bool = False
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

    def kill(self, *, power: bool = False) -> None:
        """SIGKILL, or its machine loses power."""
        if self.is_alive:
            self.is_alive = self.is_paused = False
            for served in self.jobs.values():
                served.server.crash(power=power)

    def pause(self) -> None:
        """SIGSTOP."""
        if self.is_alive:
            self.is_paused = True
            for served in self.jobs.values():
                served.server.pause()

    def resume(self) -> None:
        """SIGCONT."""
        if self.is_alive:
            self.is_paused = False
            for served in self.jobs.values():
                served.server.resume()

    @property
    def is_reachable(self) -> bool:
        """Whether it would answer."""
        return self.is_alive and not self.is_paused

    def begin(self) -> None:
        """A new process takes what is on the disk."""
        self.is_alive = True
        for served in self.jobs.values():
            if served.training.servers:
                served.server.restart()
            else:
                served.server.alive = True

    def drop(self, job_id: JobId) -> None:
        """Serve a job no more, and delete what is kept of it."""
        served = self.jobs.pop(job_id, None)
        if served is not None:
            served.server.crash()
            served.training.is_over = True

    def lose_disk(self) -> None:
        """What was kept of all jobs is gone, with the process."""
        self.kill()
        for job_id in list(self.jobs):
            self.drop(job_id)


class Shards:
    """All of them, and the checkpoints of all runs."""

    def __init__(self, random: Random, setting: Setting, *, traces: bool = False) -> None:
        self._random = random
        self.setting = setting
        self.all = [Shard(index) for index in range(setting.num_shards)]
        #: How likely a call goes wrong: before it has had an effect, and after.
        self.flakiness = 0.0
        #: Folder of a run → its checkpoints.
        self.checkpoints: dict[str, list[tuple[str, Progress]]] = {}
        #: The highest term that each job has had.
        self.terms: dict[JobId, Term] = {}
        #: Time and network of stages and shards.
        self.scheduler = Scheduler(random.getrandbits(32), traces=traces)
        self.network = Network(self.scheduler, setting.weather)
        #: Terms of jobs that a shard serves, or has served.
        self.runs: dict[tuple[JobId, Term], Run] = {}

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

    def write_checkpoints(self) -> None:
        """At barriers that ask for one, once every shard has come there."""
        for served in self.all[0].jobs.values() if self.all[0].is_alive else ():
            log, servers = served.log, served.training.servers
            log.validate_state()
            segment = log.newest_segment
            if segment is None or segment.start == served.seen or served.training.is_over:
                continue
            if all(server.alive and server.shard.state.followed > segment.index for server in servers):
                served.seen = segment.start
                if CHECKPOINTS & set(segment.reasons):
                    folder = f"{served.config.run_dir}/checkpoints/{segment.start}"
                    self.checkpoints.setdefault(served.config.run_dir, []).append((folder, log.progress))
                if served.training.promises.finished:
                    served.training.promises.check_the_end()

    def follow_clock_shard(self, shard: Shard) -> None:
        """Lose the jobs of which the clock shard serves a later term: the log of this one is not told any more."""
        clock_shard = self.all[0]
        if not (shard.is_reachable and clock_shard.is_reachable):
            return
        for job_id, served in list(shard.jobs.items()):
            newest = clock_shard.jobs.get(job_id)
            if newest is not None and newest.config.term > served.config.term:
                shard.drop(job_id)

    def call(self, shard: Shard, effect: Callable[[], T]) -> T:
        if not shard.is_reachable or self._random.random() < self.flakiness:
            raise PeerUnreachable(f"parameter server at {shard.address} cannot be reached")
        answer = effect()
        if self._random.random() < self.flakiness:
            raise PeerUnreachable(f"parameter server at {shard.address}: the answer was lost")
        return answer


class Port(MethodCalls):
    """A coordinator's connection."""

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

    def _decide(self, request: EvictRequest | AdmitRequest | DrainRequest, name: str, *about: int) -> None:
        """Have the decision log hear of something; it may hear of it once more, long after it has answered."""

        def hear(served: Served) -> None:
            served.server.clock_part.decide(name, *about)

        def hear_again() -> None:
            with suppress(HetpipeError):
                self._ask(request.job_id, request.term, hear)

        self._ask(request.job_id, request.term, hear)
        weather, random = self._shards.network.weather, self._shards.scheduler.random
        if weather.duplication and random.random() < weather.duplication:
            self._shards.scheduler.at(1 + random.randint(0, weather.lateness), hear_again)

    def configure(self, config: ShardConfig) -> None:
        self._shards.call(self._shard, lambda: self._configure(config))

    def _configure(self, config: ShardConfig) -> None:
        shards, shard = self._shards, self._shard
        known = shard.jobs.get(config.job_id)
        if known is not None and config.term < known.config.term:
            raise StaleTerm(f"job {config.job_id} is in term {known.config.term}; {config.term} is over")
        highest = shards.terms.get(config.job_id, Term(0))
        assert config.term >= highest, f"term {config.term} after {highest}"
        shards.terms[config.job_id] = config.term
        shard.highest_term = max(shard.highest_term, config.term)
        if known is not None and config.term == known.config.term:
            return
        shard.lost.pop(config.job_id, None)
        shard.drop(config.job_id)
        name = config.job_id, config.term
        training = shards.runs.get(name)
        if training is None or training.is_over:
            training = shards.runs[name] = Run(config, shards.scheduler, shards.network, shards.setting)
        shard.jobs[config.job_id] = Served(config, training, training.configure(config), config.run)

    def request_barrier(self, request: RequestBarrierRequest) -> Barrier:
        def ask(served: Served) -> Barrier:
            served.training.request_barrier(served.server, request.reason)
            return Barrier(served.log.segment.end)

        return self._ask(request.job_id, request.term, ask)

    def evict(self, request: EvictRequest) -> None:
        self._decide(request, "evict", request.vw, request.incarnation)

    def admit(self, request: AdmitRequest) -> None:
        self._decide(request, "admit", request.vw, request.incarnation, request.num_stages)

    def drain(self, request: DrainRequest) -> None:
        self._decide(request, "drain", request.vw, request.incarnation)

    def keep_run(self, request: KeepRunRequest) -> None:
        def keep(served: Served) -> None:
            served.run = request.run

        self._ask(request.job_id, request.term, keep)

    def describe_run(self, request: DescribeRunRequest) -> RunDescription:
        def tell(served: Served) -> RunDescription:
            assert served.run is not None
            log = served.log
            return RunDescription(
                served.config.term, served.run, log.newest_lives(), log.snapshot(), log.asked, is_over=log.finished
            )

        return self._ask(request.job_id, None, tell)

    def get_shard_clocks(self, request: GetShardClocksRequest) -> ClockSnapshot:
        return self._ask(request.job_id, None, lambda served: served.log.snapshot())

    def release(self, request: ReleaseRequest) -> None:
        self._shards.call(self._shard, lambda: self._shard.drop(request.job_id))
