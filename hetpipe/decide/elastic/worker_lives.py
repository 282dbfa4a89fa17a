"""The lives of a job's virtual workers, as a machine without I/O: facts in, instructions out (`reliability.md`, P5).

Whatever ends a process of a virtual worker ends that life of it: at once the clock shard is told, so that nobody waits
for it, and the rest of its processes are killed. When all that is done it is started anew on the same devices, and the
others never stopped. What is wrong with the job itself, or what no other life would mend, comes out as a `Failure`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hetpipe.decide.elastic import worker_orders, worker_words
from hetpipe.decide.elastic.worker_checks import overdue
from hetpipe.decide.elastic.worker_life import LifeStep, WorkerLife
from hetpipe.decide.elastic.worker_outs import Outs
from hetpipe.decide.elastic.worker_steps import Told, WorkerSteps
from hetpipe.decide.lifecycle.configs import Assignment, later_life, stage_commands, with_agents
from hetpipe.decide.lifecycle.exchange import (
    AddAsked,
    Admitted,
    AfterDrain,
    AgentDeparts,
    Announce,
    ClocksTold,
    DrainAsked,
    Drained,
    Evicted,
    KeptOut,
    MemberGone,
    MemberSeen,
    NewWorker,
    Replanned,
    SendCommand,
    ShardNotAsked,
    Tick,
)
from hetpipe.decide.lifecycle.patience import Patience
from hetpipe.decide.lifecycle.root_cause import Failure, Rank
from hetpipe.decide.lifecycle.stage_table import (
    StageState,
    StageTable,
    failure_of_exit,
    failure_of_report,
    wants_memory,
)
from hetpipe.errors import JobFailed, StaleIncarnation
from hetpipe.values.commands import ChildExit, StageNews
from hetpipe.values.events import WorkerStatus
from hetpipe.values.ids import AgentId, Incarnation, VirtualWorkerIndex
from hetpipe.values.life_state import COMPUTING, LifeState
from hetpipe.values.members import MemberId, MemberInfo
from hetpipe.values.plan import VirtualWorkerPlan
from hetpipe.values.run import StageDone, StageEmulation, StageFailed, StagePhase, StageReady

ShardAnswer = Evicted | Admitted | Drained | ShardNotAsked

LivesInput = (
    StageNews
    | ChildExit
    | MemberGone
    | MemberSeen
    | AgentDeparts
    | ShardAnswer
    | Replanned
    | DrainAsked
    | AddAsked
    | KeptOut
    | ClocksTold
    | Tick
)


class WorkerLives(WorkerSteps):
    """All virtual workers of one job. Not thread-safe; every call gives the monotonic time."""

    def __init__(
        self,
        assignment: Assignment,
        stages: StageTable,
        *,
        patience: Patience,
        now: float,
        adopted: Mapping[VirtualWorkerIndex, WorkerLife] | None = None,
    ) -> None:
        """See `WorkerSteps`; nothing is started before `begin`."""
        super().__init__(assignment, stages, patience=patience, now=now, adopted=adopted)
        kept = [worker.vw for worker in self if worker.stays_out]
        self._outs = Outs(kept, retry_seconds=patience.retry_seconds)
        #: Since when nobody is left and one waits for an agent.
        self._alone_since: float | None = None
        self._ticked = now

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def assignment(self) -> Assignment:
        """The plan of everybody's newest or next life, and the agents as they are now."""
        return self._assignment

    def gone_of(self, vw: VirtualWorkerIndex) -> frozenset[AgentId]:
        """Of the agents of its next life, those that are no members now."""
        return self._agents_of(self._workers[vw]) & self._absent

    @property
    def is_on_leave(self) -> bool:
        """Whether a virtual worker waits for nobody but agents that went, or are about to go, on notice."""
        expected = self._on_leave | self._departing
        away = [set(self._away_of(worker)) for worker in self if worker.state is LifeState.AWAITING]
        return any(agents and agents <= expected for agents in away)

    @property
    def is_ending(self) -> bool:
        """Whether nobody is started anew any more."""
        return self._is_needless or self._is_halted

    @property
    def statuses(self) -> tuple[WorkerStatus, ...]:
        """All of them, as people see them."""
        return tuple(worker.status for worker in self)

    @property
    def states(self) -> dict[VirtualWorkerIndex, LifeState]:
        """Where each stands."""
        return {worker.vw: worker.state for worker in self}

    @property
    def can_run(self) -> bool:
        """Whether training begins: some are ready, and all others are past their first life."""
        late = any(worker.state is LifeState.STARTING and worker.incarnation == 0 for worker in self)
        return not late and any(worker.state is LifeState.READY for worker in self)

    @property
    def all_done(self) -> bool:
        """Whether everyone who counts came to the end of the run."""
        return self.is_over and all(worker.state is LifeState.DONE or not worker.is_up for worker in self)

    # -- orders ------------------------------------------------------------------------------------------------------

    def begin(self, *, now: float) -> list[SendCommand]:
        """Start the first life of each."""
        return [self._start(command, now=now) for command in stage_commands(self._assignment)]

    def close(self) -> None:
        """Start nobody anew: the run goes to its next barrier and stops."""
        self._is_closing = True

    def halt(self) -> None:
        """From here on processes end because they were told to."""
        self._is_halted = True

    def drain(self, vw: VirtualWorkerIndex, then: AfterDrain, now: float) -> list[Told]:
        """Have a virtual worker go: after the next barrier if it computes, else at once.

        Args:
            vw: who. Nothing happens when it is out, or came to the end of the run.
            then: whether it stays out, or comes back as soon as its agents are there. Once it was asked to stay out,
                only `add` brings it back.
            now: monotonic seconds.

        Returns:
            What to do, in order.
        """
        return self.handle(DrainAsked(vw, then), now=now)

    def replan(self, plan: VirtualWorkerPlan, emulations: tuple[StageEmulation, ...]) -> None:
        """From its next life on a virtual worker computes by another plan.

        Args:
            plan: of that life, on the agents of the last one.
            emulations: how its stages play their devices; empty if they do not.
        """
        self._assignment = self._assignment.with_worker(plan, emulations)
        self._workers[plan.index].is_replanned = True

    def enlarge(self, new: NewWorker, *, now: float) -> None:
        """A virtual worker is to begin that the run has not had yet: with life 1, as life 0 is of the run's start.

        It takes its first step with the next fact.
        """
        agents = with_agents(self._assignment.agents, new.agents)
        self._assignment = replace(self._assignment.with_worker(new.plan), agents=agents)
        self._workers[new.plan.index] = WorkerLife(new.plan.index, now, LifeState.AWAITING, is_replanned=True)

    def handle(self, fact: LivesInput, *, now: float) -> list[Told]:  # noqa: C901 - one case per kind of fact
        """Take one fact in.

        Returns:
            What to do, in order, and what the job cannot survive.

        Raises:
            InvalidTransition: a bug of this class.
        """
        match fact:
            case StageNews():
                self._stage_reported(fact, now=now)
            case ChildExit():
                self._child_exited(fact, now=now)
            case MemberGone() | MemberSeen() | AgentDeparts():
                self._agent_told(fact, now=now)
            case Evicted() | Admitted() | Drained() | ShardNotAsked():
                self._shard_answered(fact, now=now)
            case DrainAsked() | AddAsked():
                self._wished(fact, now=now)
            case ClocksTold(clocks=clocks):
                for worker in self:
                    if worker.state in COMPUTING and worker.vw in clocks.local:
                        worker.has_clock(clocks.local[worker.vw])
            case KeptOut():
                self._outs.answered(fact, now=now)
            case Tick():
                self._tick(now=now)
        if not self._is_halted:
            for worker in self:
                self._advance(worker, now=now)
            self._out += self._outs.order(self, self._assignment, now=now)
        out, self._out = self._out, []
        return out

    # -- what is heard -----------------------------------------------------------------------------------------------

    def _stage_reported(self, news: StageNews, *, now: float) -> None:
        life = self._stages.get(news.key)
        if life is None:
            return
        life.heard = now
        match news.report:
            case StagePhase(phase=phase, seconds=seconds):
                life.phase = f"{phase} ({seconds:.0f} s)"
            case StageReady(pid=pid, link=link):
                life.pid, life.link, life.state = pid, link, StageState.READY
            case StageDone(clock=clock, reason=reason):
                life.state, life.done_reason = StageState.DONE, reason
                self._workers[life.key.vw].left_at = clock if life.has_left else None
            case StageFailed() as report:
                life.state = StageState.FAILED
                worker = self._workers[life.key.vw]
                worker.wants += wants_memory(report)
                self._fails(worker, failure_of_report(life, report, is_lost=not worker.is_up, now=now), now=now)
            case _:
                """It lives."""

    def _child_exited(self, news: ChildExit, *, now: float) -> None:
        life = self._stages.get(news.key)
        if life is None or life.exited:
            return
        life.exited, life.pid = True, news.pid
        worker = self._workers[life.key.vw]
        failure = failure_of_exit(life, news, is_lost=not worker.is_up, now=now)
        if failure is not None:
            self._fails(worker, failure, now=now)

    def _agent_told(self, fact: MemberGone | MemberSeen | AgentDeparts, *, now: float) -> None:
        match fact:
            case MemberGone():
                self._agent_gone(fact, now=now)
            case MemberSeen(info=info):
                self._agent_seen(info)
            case AgentDeparts(agent=agent):
                self._agent_departs(agent, now=now)

    def _agent_gone(self, gone: MemberGone, *, now: float) -> None:
        agents = {agent for worker in self for agent in self._agents_of(worker) if MemberId(agent) == gone.member}
        self._absent |= agents
        self._on_leave |= agents & self._departing
        self._departing -= agents
        failure = Failure(Rank.GONE, JobFailed.__name__, gone.sentence, now)
        for agent in agents:
            for vw in {life.key.vw for life in self._stages.lose_agent(agent)}:
                if self._workers[vw].state is not LifeState.DONE:
                    self._fails(self._workers[vw], failure, now=now)

    def _agent_seen(self, info: MemberInfo) -> None:
        """An agent that was gone is back, if it has what the plan gives it; what it still runs of a lost life goes."""
        agent = AgentId(info.id)
        if agent not in self._absent | self._departing or not worker_orders.has_devices(info, self._assignment.plan):
            return
        for known in (self._absent, self._departing, self._on_leave):
            known.discard(agent)
        agents = tuple(info.agent_info if known.agent == agent else known for known in self._assignment.agents)
        self._assignment = replace(self._assignment, agents=agents)
        for worker in self:
            if not worker.is_up:
                self._kill(worker)

    def _agent_departs(self, agent: AgentId, *, now: float) -> None:
        """An agent is about to go: whoever has a stage there goes before it, and comes back with it."""
        if agent in self._absent:
            return
        for worker in self:
            if agent in self._agents_of(worker):
                self._departing.add(agent)
                self._drain(worker, stays_out=False, now=now)

    def _shard_answered(self, answer: ShardAnswer, *, now: float) -> None:
        worker = self._workers[answer.vw]
        awaited = LifeState.ADMITTING if isinstance(answer, Admitted) else worker.state
        if worker.incarnation != answer.incarnation or worker.state is not awaited or self._is_halted:
            return
        match answer:
            case Evicted() if worker.state is LifeState.ENDING:
                worker.evicted = True
                worker.heard_from_shard()
            case Drained() if worker.state is LifeState.LEAVING:
                worker.heard_from_shard()
            case Admitted(restore=restore):
                worker.take(LifeStep.ADMITTED, now=now)
                worker.begins()
                worker.is_replanned = False
                self._stages.forget(worker.vw)
                for command in later_life(self._assignment, worker.vw, worker.incarnation, restore):
                    self._out.append(self._start(command, now=now))
                for agent in self._agents_of(worker) & self._absent:
                    # It went while the clock shard was asked.
                    self._agent_gone(MemberGone(MemberId(agent), f"agent {agent} is gone"), now=now)
            case ShardNotAsked(error=StaleIncarnation.__name__) if worker.state is LifeState.ADMITTING:
                # It has seen a later life than this coordinator knows of.
                worker.incarnation = Incarnation(worker.incarnation + 1)
                worker.ask_at = now + self._patience.retry_seconds
            case ShardNotAsked():
                worker.not_asked(answer.sentence, again_at=now + self._patience.retry_seconds, now=now)
                if worker.unheard_seconds(now) >= self._survive.absence.total_seconds():
                    self._out.append(worker_words.unheard(worker, answer.error, now=now))

    # -- what is wished ----------------------------------------------------------------------------------------------

    def _wished(self, wish: DrainAsked | AddAsked, *, now: float) -> None:
        worker = self._workers[wish.vw]
        match wish:
            case DrainAsked(then=then):
                self._drain(worker, stays_out=then == "out", now=now)
            case AddAsked():
                self._add(worker, now=now)

    def _drain(self, worker: WorkerLife, *, stays_out: bool, now: float) -> None:
        """Have it go; one that has done nothing yet is sent away without a barrier."""
        if self._is_halted or not self._assignment.job.has_shards or worker.state in {LifeState.DONE, LifeState.OUT}:
            return
        worker.stays_out = worker.stays_out or stays_out
        match worker.state:
            case LifeState.READY:
                worker.take(LifeStep.DRAIN_ASKED, now=now)
                worker.ask_at = now
            case LifeState.STARTING | LifeState.ADMITTING as before:
                if before is LifeState.ADMITTING:
                    worker.begins()
                worker.take(LifeStep.DRAIN_ASKED, now=now)
                worker.sent_away, worker.ask_at = True, now
                self._kill(worker)
            case _:
                """It goes already, or is between two lives."""

    def _add(self, worker: WorkerLife, *, now: float) -> None:
        worker.is_wanted(now=now)
        if worker.state is LifeState.OUT and not self._is_halted:
            worker.take(LifeStep.ADD_ASKED, now=now)

    # -- time --------------------------------------------------------------------------------------------------------

    def _tick(self, *, now: float) -> None:
        paused = now - self._ticked
        if paused > self._patience.longest_tick_seconds or self.is_on_hold:
            # It was this process that did not listen; or they may be in the midst of a call to a lost server.
            for life in self._stages:
                life.heard = min(now, life.heard + paused)
        self._ticked = now
        if self._is_halted:
            return
        stall, ready = self._survive.stall.total_seconds(), self._patience.ready_seconds
        for worker in self:
            for failure in overdue(worker, self._stages, stall_seconds=stall, ready_seconds=ready, now=now):
                self._fails(worker, failure, now=now)
            self._notice(worker, now=now)
        self._check_agents(now=now)

    def _check_agents(self, *, now: float) -> None:
        """With nobody to train, agents are not waited for for ever, unless they went on notice."""
        waits = [worker for worker in self if worker.state is LifeState.AWAITING and self._away_of(worker)]
        if any(worker.is_up for worker in self) or not waits or self.is_on_leave:
            self._alone_since = None
            return
        if self._alone_since is None:
            self._alone_since = now
        alone = now - self._alone_since
        if alone >= self._survive.absence.total_seconds():
            self._out.append(worker_words.nobody_back(waits[0], self._away_of(waits[0]), alone, now=now))

    def _notice(self, worker: WorkerLife, *, now: float) -> None:
        """Say what is waited for."""
        is_well = worker.is_up and not worker.unheard
        if is_well or worker.state is LifeState.OUT or now - worker.noticed < self._patience.notice_seconds:
            return
        worker.noticed = now
        waiting = worker_words.waiting(worker, self._away_of(worker), now=now)
        if waiting is not None:
            self._out.append(Announce(waiting))
