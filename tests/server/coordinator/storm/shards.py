"""Parameter servers of a storm: each job has the decision log, shard states and disks of `tests.simulation`.

A process holds a `Server` per job. Killing it kills them all; each comes back with what is on its disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TypeVar

from hetpipe.decide.sync.decision_log import DecisionLog
from hetpipe.decide.sync.segment import CHECKPOINTS
from hetpipe.errors import CheckpointError, PeerUnreachable, StaleTerm, UnknownJob
from hetpipe.server.coordinator.tasks import Tools
from hetpipe.server.shard.clock_shard import log_config
from hetpipe.values.ids import Clock, JobId, Term
from hetpipe.values.members import MemberInfo
from hetpipe.values.requests import SliceHeader
from hetpipe.values.run import ClockSnapshot, StageConfig
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
from tests.decide.sync.scenario import Scenario, slice_header
from tests.simulation.job import Faults, Job, draw_weather
from tests.simulation.network import Network
from tests.simulation.run import Run
from tests.simulation.scheduler import Scheduler
from tests.simulation.server import Server
from tests.simulation.stage import Stage
from tests.support.method_calls import MethodCalls

T = TypeVar("T")


class TrainingRun(Run):
    """One term of a job as a coordinator has configured it."""

    def __init__(self, config: ShardConfig, scheduler: Scheduler, network: Network, *, fsync: bool) -> None:
        super().__init__(_job(config, fsync=fsync), scheduler, network)
        self.config = config
        #: Whether no shard serves this term any more.
        self.is_over = False
        self._configs: dict[Stage, StageConfig] = {}
        self._slices: dict[tuple[Stage, int], tuple[SliceHeader, ...]] = {}
        self._configured: dict[int, Server] = {}

    def configure(self, config: ShardConfig) -> Server:
        """One of its shards is configured; with the last one, all begin to follow the log."""
        self.job.slices[int(config.shard)] = config.slices
        server = self._configured[config.shard] = Server(self, config.shard)
        server.name = f"{self.job.id}@{self.job.term} {server.name}"
        server.open()
        if len(self._configured) == config.num_shards:
            self.servers = [self._configured[index] for index in range(config.num_shards)]
            for each in self.servers:
                if each.alive:
                    each.start()
        return server

    def begin_stage(self, config: StageConfig) -> Stage:
        """A stage process begins."""
        vw, incarnation = int(config.vw), int(config.incarnation)
        num_stages = len(config.plan.virtual_workers[config.vw].stages)
        stage = Stage(self, vw, incarnation, config.stage, num_stages)
        self._configs[stage] = config
        there = self.stages.setdefault((vw, incarnation), [])
        self.stages[vw, incarnation] = sorted([*there, stage], key=lambda one: one.index)
        self.scheduler.at(1, stage.start, stage)
        return stage

    def has_met(self, stage: Stage) -> bool:
        return super().has_met(stage) and all(
            one.alive or one.is_done for one in self.stages[stage.vw, stage.incarnation]
        )

    def headers(self, stage: Stage, shard: int) -> tuple[SliceHeader, ...]:
        """Those of the layers that the coordinator's plan gives it."""
        found = self._slices.get((stage, shard))
        if found is None:
            config = self._configs[stage]
            mine = config.plan.slices_of_stage(config.plan.stage(config.vw, config.stage))
            found = self._slices[stage, shard] = tuple(slice_header(s) for s in mine if s.shard == shard)
        return found

    def is_gone(self, vw: int, incarnation: int) -> bool:
        return self.is_over or super().is_gone(vw, incarnation)


def _job(config: ShardConfig, *, fsync: bool) -> Job:
    sync, data = config.sync, config.data
    scenario = Scenario(
        num_stages=tuple(config.membership.num_stages.values()),
        num_shards=config.num_shards,
        n=sync.minibatches_per_wave,
        d=sync.staleness,
        weights=sync.weights,
        deterministic=sync.deterministic,
        num_samples=data.num_samples,
        batch_size=data.batch_size,
        epochs=data.epochs,
        total_minibatches=data.total_minibatches,
        pull=sync.pull,
        every=config.checkpoint_every_waves,
    )
    job = Job(scenario, Faults(), fsync=fsync, name=(config.job_id, config.term), log_config=log_config(config))
    job.slices.clear()
    return job


@dataclass(slots=True)
class Served:
    """One job on one shard."""

    config: ShardConfig
    training: TrainingRun
    server: Server
    #: What a coordinator that has never heard of the job is told of it.
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

    def __init__(self, random: Random, num_shards: int) -> None:
        self._random = random
        self.all = [Shard(index) for index in range(num_shards)]
        #: How likely a call goes wrong: before it has had an effect, and after.
        self.flakiness = 0.0
        #: Folder of a run → its checkpoints.
        self.checkpoints: dict[str, list[tuple[str, Progress]]] = {}
        #: The highest term that each job has had.
        self.terms: dict[JobId, Term] = {}
        #: Time and network of stages and shards.
        self.scheduler = Scheduler(random.getrandbits(32))
        self.network = Network(self.scheduler, draw_weather(random))
        #: Whether what is acknowledged outlives a machine, too.
        self.fsync = random.random() < 0.5
        #: Terms of jobs that a shard serves, or has served.
        self.runs: dict[tuple[JobId, Term], TrainingRun] = {}

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
            training = shards.runs[name] = TrainingRun(config, shards.scheduler, shards.network, fsync=shards.fsync)
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

    def _decide(self, request: EvictRequest | AdmitRequest | DrainRequest, name: str, *about: int) -> None:
        decide = partial(self._decided, name, about)
        self._ask(request.job_id, request.term, decide)

    @staticmethod
    def _decided(name: str, about: tuple[int, ...], served: Served) -> None:
        served.server.clock_part.decide(name, *about)

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
