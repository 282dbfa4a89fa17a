"""Agents and stage processes of a storm: small models of `hetpipe.server.agent` and `hetpipe.pipeline`."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from hetpipe.decide.sync.decision_log import DecisionLog
from hetpipe.decide.sync.segment import DRAIN, divide
from hetpipe.values.commands import (
    AgentNews,
    ChildExit,
    InspectCommand,
    InspectionResult,
    NumberedCommand,
    StageKey,
    StageNews,
    StartStageCommand,
    StopJobCommand,
    StopVirtualWorkerCommand,
)
from hetpipe.values.ids import Clock, Wave
from hetpipe.values.members import Registration
from hetpipe.values.run import StageConfig, StageDone, StageFailed, StageReady
from tests.server.coordinator.builders import measured, model, progress
from tests.server.coordinator.storm.shards import Served

if TYPE_CHECKING:
    from tests.server.coordinator.storm.world import World


@dataclass(slots=True)
class Stage:
    """One stage process."""

    key: StageKey
    config: StageConfig
    is_ready: bool = False
    #: It does nothing any more, but can be killed.
    hangs: bool = False
    #: It has told its end, and is about to exit with this status.
    exits: int | None = None
    #: How much longer than planned it computes.
    slowness: float = 1.0
    minibatches: int = 0
    told_clock: int = 0


@dataclass(slots=True)
class Agent:
    """One agent process: its children end with it."""

    name: str
    pid: int
    num_devices: int
    is_alive: bool = True
    registration: Registration | None = None
    #: Of the coordinator that led it last.
    fence: int = 0
    stages: dict[StageKey, Stage] = field(default_factory=dict)
    #: Under the present registration: the last command carried out, and batches sent.
    done: int = 0
    batch: int = 0
    waiting: list[AgentNews] = field(default_factory=list)
    unconfirmed: tuple[AgentNews, ...] = ()
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
        self.waiting += [StageNews(key, StageReady(pid=1)) for key in ready]

    def die(self) -> None:
        """SIGKILL."""
        self.is_alive, self.registration = False, None
        self.stages.clear()
        self.waiting, self.unconfirmed = [], ()
        self.leaves_by, self.has_told_departure = None, False

    def obey(self, numbered: NumberedCommand) -> None:
        match numbered.command:
            case InspectCommand(job_id=job_id) as command:
                found = model(4) if command.with_model else None
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
            self.waiting += [StageNews(key, failed), ChildExit(key, 0, 1)]
        elif key not in self.stages:
            self.stages[key] = Stage(key, config)

    def end(self, key: StageKey, code: int, *, ordered: bool = False) -> None:
        """A process ends."""
        del self.stages[key]
        self.waiting.append(ChildExit(key, 1, code, ordered=ordered))

    def fail(self, key: StageKey, error: str, *, secondary: bool = False) -> None:
        """A stage says why it cannot go on."""
        stage = self.stages[key]
        if stage.exits is None:
            sentence = f"{error} of life {key.incarnation}"
            self.waiting.append(StageNews(key, StageFailed(error, sentence, secondary=secondary)))
            stage.exits = 1


class Training:
    """What all stage processes do."""

    def __init__(self, world: World, random: Random) -> None:
        self._world, self._random = world, random

    def step(self) -> None:
        for agent in self._world.agents.values():
            for stage in list(agent.stages.values()):
                if not stage.hangs and self._random.random() < 0.7:
                    self._step(agent, stage)

    def _step(self, agent: Agent, stage: Stage) -> None:
        key = stage.key
        if stage.exits is not None:
            agent.end(key, stage.exits)
            return
        shard = self._world.shards.all[0]
        if not shard.is_alive:
            return
        served = shard.jobs.get(key.job_id)
        if served is None or served.config.term != stage.config.plan.term:
            if self._random.random() < 0.2:
                agent.fail(key, "UnknownJob" if served is None else "StaleTerm")
            return
        self._go_on(agent, stage, served)
        self._report(agent, stage, served.log)

    def _go_on(self, agent: Agent, stage: Stage, served: Served) -> None:
        """What the decision log lets it do."""
        key, log = stage.key, served.log
        if log.finished and self._counts(log, key) and (stage.is_ready or not self._is_newcomer(log, key)):
            self._done(agent, stage, log.published, log.segment.reasons)
        elif log.has_left(key.vw, key.incarnation):
            self._done(agent, stage, log.leavers[key.vw].committed, (DRAIN,))
        elif not self._counts(log, key):
            agent.fail(key, "StaleIncarnation")
        elif stage.is_ready:
            self._train(agent, stage, served)
        else:
            self._get_ready(agent, stage, log)

    def _train(self, agent: Agent, stage: Stage, served: Served) -> None:
        key, log = stage.key, served.log
        if len(self._siblings(stage)) < self._num_stages(stage):
            if self._random.random() < 0.3:
                agent.fail(key, "LinkClosed", secondary=True)
        elif log.makes_weights(key.vw):
            log.initialized(key.vw, key.incarnation, key.stage)
        elif key.stage == 0:
            self._wave(stage, served)

    def _done(self, agent: Agent, stage: Stage, clock: Clock, reasons: tuple[str, ...]) -> None:
        agent.waiting.append(StageNews(stage.key, StageDone(clock, "+".join(reasons))))
        stage.exits = 0

    @staticmethod
    def _is_newcomer(log: DecisionLog, key: StageKey) -> bool:
        newcomer = log.newcomers.get(key.vw)
        return newcomer is not None and newcomer.incarnation == key.incarnation

    def _counts(self, log: DecisionLog, key: StageKey) -> bool:
        member = log.members.get(key.vw)
        return self._is_newcomer(log, key) or (member is not None and member.incarnation == key.incarnation)

    @staticmethod
    def _num_stages(stage: Stage) -> int:
        return len(stage.config.plan.virtual_workers[stage.key.vw].stages)

    def _siblings(self, stage: Stage) -> list[Stage]:
        """The live stages of the same life, those that have come to their end included."""
        own = (stage.key.job_id, stage.key.vw, stage.key.incarnation)
        there = [other for agent in self._world.agents.values() for other in agent.stages.values()]
        return [one for one in there if (one.key.job_id, one.key.vw, one.key.incarnation) == own]

    def _get_ready(self, agent: Agent, stage: Stage, log: DecisionLog) -> None:
        key = stage.key
        if len(self._siblings(stage)) < self._num_stages(stage) or not self._is_newcomer(log, key):
            return
        stage.is_ready = True
        log.join(key.vw, key.incarnation, key.stage)
        agent.waiting.append(StageNews(key, StageReady(pid=1)))

    def _wave(self, stage: Stage, served: Served) -> None:
        log, key = served.log, stage.key
        siblings = self._siblings(stage)
        member = log.members.get(key.vw)
        if member is None or any(one.hangs or not one.is_ready or one.exits is not None for one in siblings):
            return
        wave = member.committed
        if wave >= log.segment.end or member.reports.get(Wave(wave)) or not self._may(log, wave):
            return
        n, start = served.config.sync.minibatches_per_wave, log.segment.start
        blocks = divide(log.progress, served.config.data, log.dealt_to).get(key.vw, ())
        mine = tuple(tuple(block) for block in blocks[(wave - start) * n : (wave - start + 1) * n])
        segment = log.segment.start
        for one in siblings:
            first = one.key.stage == 0
            log.staged(key.vw, key.incarnation, Wave(wave), one.key.stage, mine if first else None, segment=segment)
            one.minibatches += len(mine)

    @staticmethod
    def _may(log: DecisionLog, wave: int) -> bool:
        staleness = log.config.sync.staleness
        return staleness is None or log.published >= wave - staleness

    def _report(self, agent: Agent, stage: Stage, log: DecisionLog) -> None:
        if stage.is_ready and stage.exits is None:
            member = log.members.get(stage.key.vw)
            clock = 0 if member is None else member.committed
            seconds = 0.1 * stage.minibatches * stage.slowness
            told = progress(minibatches=stage.minibatches, clock=clock, compute_seconds=seconds)
            agent.waiting.append(StageNews(stage.key, told))
