"""Agents, small models of `hetpipe.server.agent`, around the stages of `tests.simulation.stage`."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from hetpipe.decide.sync.segment import DRAIN
from hetpipe.values.commands import (
    AgentReport,
    ChildExit,
    InspectCommand,
    InspectionResult,
    KeyedStageReport,
    NumberedCommand,
    StageKey,
    StartStageCommand,
    StopJobCommand,
    StopVirtualWorkerCommand,
)
from hetpipe.values.ids import Clock
from hetpipe.values.members import Registration
from hetpipe.values.run import StageConfig, StageDone, StageFailed, StageReady
from tests.server.coordinator.builders import measured, model, progress
from tests.simulation.parameter_servers import Served
from tests.simulation.stage import Stage

if TYPE_CHECKING:
    from tests.simulation.world import World


@dataclass(slots=True)
class Child:
    """One stage process, as its agent knows it."""

    key: StageKey
    config: StageConfig
    #: What it does; None until it has found the shards.
    process: Stage | None = None
    is_ready: bool = False
    #: It does nothing any more, but can be killed.
    hangs: bool = False
    #: It has told its end, and is about to exit with this status.
    exits: int | None = None
    #: How much longer than planned it computes, by its own word.
    slowness: float = 1.0

    def hang(self) -> None:
        """Do nothing any more."""
        self.hangs = True
        if self.process is not None:
            self.process.pause()

    def wake(self) -> None:
        """Go on as if nothing had been."""
        self.hangs = False
        if self.process is not None and self.process.alive:
            self.process.resume()

    def stop(self) -> None:
        """The process is gone."""
        if self.process is not None:
            self.process.world.crash_stage(self.process)


@dataclass(slots=True)
class Agent:
    """One agent process: its children end with it."""

    name: str
    pid: int
    num_devices: int
    samples: int
    """Of the data that its processes load."""
    is_alive: bool = True
    registration: Registration | None = None
    #: Of the coordinator that led it last.
    fence: int = 0
    stages: dict[StageKey, Child] = field(default_factory=dict)
    #: Under the present registration: the last command carried out, and batches sent.
    done: int = 0
    batch: int = 0
    waiting: list[AgentReport] = field(default_factory=list)
    unconfirmed: tuple[AgentReport, ...] = ()
    #: Until when it lets its stages leave; None: nobody told it to end.
    leaves_by: float | None = None
    has_told_departure: bool = False
    #: Until when nothing gets through to the coordinator, and no news do.
    cut_until: float = 0.0
    mute_until: float = 0.0

    def registered(self, registration: Registration, fence: int) -> None:
        self.registration, self.fence, self.done, self.batch = registration, fence, 0, 0
        self.waiting, self.unconfirmed = [*self.unconfirmed, *self.waiting], ()
        ready = [stage.key for stage in self.stages.values() if stage.is_ready and stage.exits is None]
        self.waiting += [KeyedStageReport(key, StageReady(pid=1)) for key in ready]

    def die(self, *, leaves_orphans: bool = False) -> None:
        """SIGKILL; its stages end with it, or do not notice for a while."""
        self.is_alive, self.registration = False, None
        for stage in () if leaves_orphans else self.stages.values():
            stage.stop()
        self.stages.clear()
        self.waiting, self.unconfirmed = [], ()
        self.leaves_by, self.has_told_departure = None, False

    def obey(self, numbered: NumberedCommand) -> None:
        match numbered.command:
            case InspectCommand(job_id=job_id) as command:
                found = model(4, samples=self.samples) if command.with_model else None
                measurements = tuple(measured(kind, 4) for kind in command.measure)
                self.waiting.append(InspectionResult(job_id, found, measurements=measurements))
            case StartStageCommand(config=config) as start:
                self._start(start.key, config)
            case StopJobCommand(job_id=job_id):
                for key in [key for key in self.stages if key.job_id == job_id]:
                    self.end(key, -15)
            case StopVirtualWorkerCommand() as stop:
                for key in [key for key in self.stages if stop.means(key)]:
                    self.end(key, -9, ordered=True)
        self.done = numbered.sequence

    def _start(self, key: StageKey, config: StageConfig) -> None:
        if self.leaves_by is not None:
            failed = StageFailed("Unavailable", "the agent was told to end", secondary=True)
            self.waiting += [KeyedStageReport(key, failed), ChildExit(key, 0, 1)]
        elif key not in self.stages:
            self.stages[key] = Child(key, config)

    def end(self, key: StageKey, code: int, *, ordered: bool = False) -> None:
        """A process ends."""
        self.stages.pop(key).stop()
        self.waiting.append(ChildExit(key, 1, code, ordered=ordered))

    def fail(self, key: StageKey, error: str, *, secondary: bool = False) -> None:
        """A stage says why it cannot go on."""
        stage = self.stages[key]
        if stage.exits is None:
            sentence = f"{error} of life {key.incarnation}"
            self.waiting.append(KeyedStageReport(key, StageFailed(error, sentence, secondary=secondary)))
            stage.exits = 1
            stage.stop()


class Training:
    """What agents see of their stage processes, and stage processes of the shards."""

    def __init__(self, world: World, random: Random) -> None:
        self._world, self._random = world, random

    def step(self) -> None:
        for agent in self._world.agents.values():
            for stage in list(agent.stages.values()):
                if not stage.hangs and self._random.random() < 0.7:
                    self._step(agent, stage)

    def _step(self, agent: Agent, stage: Child) -> None:
        key = stage.key
        if stage.exits is not None:
            agent.end(key, stage.exits)
            return
        first = self._world.shards.all[0]
        served = first.jobs.get(key.job_id)
        is_served = served is not None and served.config.term == key.term and not served.training.is_over
        if first.is_alive and not is_served:
            if self._random.random() < 0.2:
                agent.fail(key, "UnknownJob" if served is None else "StaleTerm")
        elif served is not None and is_served and self._is_half_configured(served):
            # The first push to the other shard is refused there: it serves another term.
            if self._random.random() < 0.2:
                agent.fail(key, "StaleTerm")
        elif stage.process is None:
            if served is not None and is_served and served.training.servers:
                stage.process = served.training.begin_stage(stage.config)
        else:
            self._look(agent, stage, stage.process)

    def _is_half_configured(self, served: Served) -> bool:
        """Whether a coordinator ended between configuring the clock shard and the others."""
        others = self._world.shards.all[1 : served.config.num_shards]
        found = [shard.jobs.get(served.config.job_id) for shard in others if shard.is_reachable]
        return any(one is not None and one.config.term < served.config.term for one in found)

    def _look(self, agent: Agent, stage: Child, process: Stage) -> None:
        """What has become of it."""
        if not process.alive:
            self._ended(agent, stage, process)
        elif process.has_joined and not stage.is_ready:
            stage.is_ready = True
            agent.waiting.append(KeyedStageReport(stage.key, StageReady(pid=1)))
        elif stage.is_ready and self._world.is_beat:
            self._report(agent, stage, process)
        is_reachable = process.world.servers[0].is_reachable
        is_known = process.alive and is_reachable and not process.world.is_gone(process.vw, process.incarnation)
        if process.alive and is_reachable and not is_known and self._random.random() < 0.3:
            agent.fail(stage.key, "StaleIncarnation")

    @staticmethod
    def _ended(agent: Agent, stage: Child, process: Stage) -> None:
        if not process.is_done:
            agent.fail(stage.key, process.error, secondary=process.error == "LinkClosed")
            return
        log = process.log
        left = log.left.get((stage.key.vw, stage.key.incarnation))
        if log.is_over and log.segment is not None:
            done = StageDone(log.segment.start, "+".join(log.segment.reasons))
        else:
            assert left is not None, f"{process} has ended in order, at no barrier"
            done = StageDone(left.start, DRAIN)
        agent.waiting.append(KeyedStageReport(stage.key, done))
        stage.exits = 0

    @staticmethod
    def _report(agent: Agent, stage: Child, process: Stage) -> None:
        clock = process.log.committed.get(stage.key.vw, Clock(0))
        seconds = 0.1 * process.minibatches * stage.slowness
        told = progress(minibatches=process.minibatches, clock=clock, compute_seconds=seconds)
        agent.waiting.append(KeyedStageReport(stage.key, told))
