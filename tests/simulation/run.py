"""One term of a job: its shards, its stages, and what was promised.

Shards hold the real decision log and real shard states (`server`), stages are models (`stage`). A coordinator has
configured it, and agents begin, end and kill its stages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hetpipe.server.shard.clock_shard import log_config
from hetpipe.values.ids import VirtualWorkerIndex
from hetpipe.values.requests import SliceHeader
from hetpipe.values.run import StageConfig
from hetpipe.values.shard_config import ShardConfig
from tests.decide.sync.scenario import Scenario, slice_header
from tests.simulation.job import Job
from tests.simulation.network import Network
from tests.simulation.promises import Promises
from tests.simulation.scheduler import Scheduler
from tests.simulation.server import Server
from tests.simulation.setting import Setting
from tests.simulation.stage import Stage


class Run:
    """What stages and shards know of the world."""

    def __init__(self, config: ShardConfig, scheduler: Scheduler, network: Network, setting: Setting) -> None:
        self.job = _job(config, fsync=setting.fsync)
        self.config = config
        #: How likely a shard takes one when it has followed the log.
        self.snapshots = setting.snapshots
        self.scheduler = scheduler
        self.network = network
        self.promises = Promises(self.job)
        self.servers: list[Server] = []
        #: Life → its stages.
        self.stages: dict[tuple[int, int], list[Stage]] = {}
        #: Whether no shard serves this term any more.
        self.is_over = False
        #: Link → when its latest frame arrives: frames keep their order.
        self._frame_times: dict[tuple[Stage, int], int] = {}
        self._configs: dict[Stage, StageConfig] = {}
        self._slices: dict[tuple[Stage, int], tuple[SliceHeader, ...]] = {}
        self._configured: dict[int, Server] = {}

    # -- what a coordinator and agents do ----------------------------------------------------------------------------

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

    # -- what stages ask ---------------------------------------------------------------------------------------------

    def headers(self, stage: Stage, shard: int) -> tuple[SliceHeader, ...]:
        """What a stage holds of a shard: that of the layers which the coordinator's plan gives it."""
        found = self._slices.get((stage, shard))
        if found is None:
            config = self._configs[stage]
            mine = config.plan.slices_of_stage(config.plan.stage(config.vw, config.stage))
            found = self._slices[stage, shard] = tuple(slice_header(s) for s in mine if s.shard == shard)
        return found

    def has_met(self, stage: Stage) -> bool:
        """Whether a stage that begins has found its neighbours."""
        there = self.stages[stage.vw, stage.incarnation]
        return len(there) == stage.num_stages and all(one.alive or one.is_done for one in there)

    def makes_weights(self, vw: int) -> bool:
        """Whether a virtual worker shall make the initial weights."""
        return self.servers[0].clock_part.log.makes_weights(VirtualWorkerIndex(vw))

    def is_gone(self, vw: int, incarnation: int) -> bool:
        """Whether the clock shard would say that a life is over."""
        log, index = self.servers[0].clock_part.log, VirtualWorkerIndex(vw)
        lives = (log.members.get(index), log.newcomers.get(index), log.leavers.get(index))
        return self.is_over or not any(life is not None and life.incarnation == incarnation for life in lives)

    def send_frame(self, sender: Stage, index: int, take: Callable[[Stage], None]) -> None:
        """From a stage to its neighbour, in order."""
        receiver = next(one for one in self.stages[sender.vw, sender.incarnation] if one.index == index)
        link = (sender, index)
        arrival = max(self.scheduler.now + self.compute_ticks(), self._frame_times.get(link, 0))
        self._frame_times[link] = arrival
        if receiver.alive:  # who is gone gets nothing, though its neighbour has yet to notice
            self.scheduler.at(arrival - self.scheduler.now, lambda: take(receiver), receiver)

    def compute_ticks(self) -> int:
        """How long a minibatch takes at a stage."""
        return self.scheduler.random.randint(1, 3)

    # -- what happens to it ------------------------------------------------------------------------------------------

    def crash_stage(self, stage: Stage) -> None:
        """Kill it."""
        if stage.alive:
            self.scheduler.trace(stage, "is killed")
            stage.end()
            self.close_links(stage)

    def close_links(self, stage: Stage) -> None:
        """The neighbours of a stage that is gone notice."""
        for other in self.stages[stage.vw, stage.incarnation]:
            if abs(other.index - stage.index) == 1 and other.alive:
                self.scheduler.at(3, partial(other.leave, "ends: lost its neighbour", "LinkClosed"), other)

    def request_barrier(self, first: Server, reason: str) -> None:
        """At the clock shard."""
        if reason == "stop" and not self.promises.finished and self.promises.start >= self.job.progress.clock:
            self.promises.stop_is_asked = True
        first.clock_part.decide("request_barrier", reason)


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
    job = Job(scenario, fsync=fsync, name=(config.job_id, config.term), log_config=log_config(config))
    job.slices.clear()
    return job
