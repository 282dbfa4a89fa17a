"""The lives of a job's virtual workers, as a machine without I/O: facts in, instructions out (`reliability.md`, P5).

Whatever ends a process of a virtual worker ends that life of it: at once the clock shard is told, so that nobody waits
for it, and the rest of its processes are killed. When all that is done it is started anew on the same devices, and the
others never stopped. What is wrong with the job itself, or what no other life would mend, comes out as a `Failure`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hetpipe.coordinator import worker_orders, worker_words
from hetpipe.coordinator.configs import Assignment, later_life, stage_commands
from hetpipe.coordinator.exchange import (
    Admitted,
    Announce,
    ClocksTold,
    Evicted,
    Instruction,
    MemberGone,
    MemberSeen,
    SendCommand,
    ShardNotAsked,
    Tick,
)
from hetpipe.coordinator.patience import Patience
from hetpipe.coordinator.root_cause import Failure, Rank, root_cause
from hetpipe.coordinator.stage_table import (
    StageState,
    StageTable,
    failure_of_exit,
    failure_of_report,
    wants_memory,
)
from hetpipe.coordinator.worker_checks import overdue
from hetpipe.coordinator.worker_life import LifeState, LifeStep, WorkerLife
from hetpipe.errors import JobFailed, StaleIncarnation
from hetpipe.spec.commands import ChildExit, StageNews, StartStageCommand
from hetpipe.spec.events import WorkerRejoined, WorkerStatus
from hetpipe.spec.ids import AgentId, Incarnation, VirtualWorkerIndex
from hetpipe.spec.members import MemberId, MemberInfo
from hetpipe.spec.run import StageDone, StageFailed, StageReady

#: States in which the clock shard is asked for something.
_ASKING = frozenset({LifeState.ENDING, LifeState.ADMITTING})

LivesInput = StageNews | ChildExit | MemberGone | MemberSeen | Evicted | Admitted | ShardNotAsked | ClocksTold | Tick

Told = Instruction | Failure
"""What comes out: an instruction for the shell, or why the job cannot go on."""


class WorkerLives:
    """All virtual workers of one job. Not thread-safe; every call gives the monotonic time."""

    def __init__(self, assignment: Assignment, stages: StageTable, *, patience: Patience, now: float) -> None:
        """Nothing is started before `begin`; `stages` are filled here; `patience` has the waits that no user sets."""
        self._assignment = assignment
        self._stages = stages
        self._patience = patience
        self._survive = assignment.job.survive
        self._workers = {vw.index: WorkerLife(vw.index, now) for vw in assignment.plan.virtual_workers}
        #: Agents of the plan that are no members now.
        self._absent: set[AgentId] = set()
        #: No new lives: a user wants the job to stop.
        self._is_closing = False
        #: Nothing is done about failures any more.
        self._is_halted = False
        #: Parameter servers are missing: a new life would only fail, too.
        self.is_on_hold = False
        #: Since when the run is known to be over, and since when nobody is left and one waits for an agent.
        self._over_at: float | None = None
        self._alone_since: float | None = None
        self._ticked = now
        self._out: list[Told] = []

    # -- questions ---------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[WorkerLife]:
        """In index order."""
        return iter(self._workers.values())

    @property
    def statuses(self) -> tuple[WorkerStatus, ...]:
        """All of them, as people see them."""
        return tuple(worker.status for worker in self)

    @property
    def up(self) -> frozenset[VirtualWorkerIndex]:
        """Those that are not lost."""
        return frozenset(worker.vw for worker in self if worker.is_up)

    @property
    def can_run(self) -> bool:
        """Whether training begins: some are ready, and all others have lost their first life."""
        late = any(worker.state is LifeState.STARTING and worker.deaths == 0 for worker in self)
        return not late and any(worker.state is LifeState.READY for worker in self)

    @property
    def is_over(self) -> bool:
        """Whether a stage came to the end of the run."""
        return any(life.state is StageState.DONE for life in self._stages)

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
            case MemberGone():
                self._agent_gone(fact, now=now)
            case MemberSeen(info=info):
                self._agent_seen(info)
            case Evicted() | Admitted() | ShardNotAsked():
                self._shard_answered(fact, now=now)
            case ClocksTold(clocks=clocks):
                for worker in self:
                    if worker.state is LifeState.READY and worker.vw in clocks.local:
                        worker.has_clock(clocks.local[worker.vw])
            case Tick():
                self._tick(now=now)
        if not self._is_halted:
            for worker in self:
                self._advance(worker, now=now)
        out, self._out = self._out, []
        return out

    # -- what is heard -----------------------------------------------------------------------------------------------

    def _stage_reported(self, news: StageNews, *, now: float) -> None:
        life = self._stages.get(news.key)
        if life is None:
            return
        life.heard = now
        match news.report:
            case StageReady(pid=pid, link=link):
                life.pid, life.link, life.state = pid, link, StageState.READY
            case StageDone(reason=reason):
                life.state, life.done_reason = StageState.DONE, reason
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
        failure = failure_of_exit(life, news, now=now)
        if failure is not None:
            self._fails(self._workers[life.key.vw], failure, now=now)

    def _agent_gone(self, gone: MemberGone, *, now: float) -> None:
        agents = {life.agent for life in self._stages if MemberId(life.agent) == gone.member}
        self._absent |= agents
        failure = Failure(Rank.GONE, JobFailed.__name__, gone.sentence, now)
        for agent in agents:
            for vw in {life.key.vw for life in self._stages.lose_agent(agent)}:
                if self._workers[vw].state is not LifeState.DONE:
                    self._fails(self._workers[vw], failure, now=now)

    def _agent_seen(self, info: MemberInfo) -> None:
        """An agent that was gone is back, if it has what the plan gives it; what it still runs of a lost life goes."""
        agent = AgentId(info.id)
        if agent not in self._absent or not worker_orders.has_devices(info, self._assignment.plan):
            return
        self._absent.discard(agent)
        agents = tuple(info.agent_info if known.agent == agent else known for known in self._assignment.agents)
        self._assignment = replace(self._assignment, agents=agents)
        for worker in self:
            if not worker.is_up:
                self._kill(worker)

    def _shard_answered(self, answer: Evicted | Admitted | ShardNotAsked, *, now: float) -> None:
        worker = self._workers[answer.vw]
        awaited = LifeState.ADMITTING if isinstance(answer, Admitted) else worker.state
        if worker.incarnation != answer.incarnation or worker.state is not awaited or self._is_halted:
            return
        match answer:
            case Evicted() if worker.state is LifeState.ENDING:
                worker.evicted = True
                worker.heard_from_shard()
            case Admitted(restore=restore):
                worker.take(LifeStep.ADMITTED, now=now)
                worker.begins()
                for command in later_life(self._assignment, worker.vw, worker.incarnation, restore):
                    self._out.append(self._start(command, now=now))
                for agent in self._absent_of(worker):
                    # It went while the clock shard was asked.
                    self._agent_gone(MemberGone(MemberId(agent), f"agent {agent} is gone"), now=now)
            case ShardNotAsked(error=error) if error == StaleIncarnation.__name__:
                # It has seen a later life than this coordinator knows of.
                worker.incarnation = Incarnation(worker.incarnation + 1)
                worker.ask_at = now + self._patience.retry_seconds
            case ShardNotAsked():
                worker.not_asked(answer.sentence, again_at=now + self._patience.retry_seconds, now=now)
                if worker.unheard_seconds(now) >= self._survive.absence.total_seconds():
                    self._out.append(worker_words.unheard(worker, answer.error, now=now))

    # -- a life goes wrong -------------------------------------------------------------------------------------------

    def _fails(self, worker: WorkerLife, failure: Failure, *, now: float) -> None:
        """Something of the newest life went wrong, or of one that is lost already."""
        if self._is_halted:
            return
        if not self._assignment.job.has_shards:
            # The stages alone hold the weights, which are lost with one of them.
            self._out.append(worker_words.final(failure, self._assignment.job.sync.kind))
            return
        worker.failures.append(failure)
        if worker.is_up and root_cause(worker.failures).rank is not Rank.REPORTED:
            self._lose(worker, now=now)

    def _lose(self, worker: WorkerLife, *, now: float) -> None:
        worker.take(LifeStep.LOST, now=now)
        worker.ends()
        worker.ask_at = now
        self._kill(worker)

    def _kill(self, worker: WorkerLife) -> None:
        """End what is left of its processes, wherever somebody listens."""
        self._out += worker_orders.kills(worker, self._assignment, self._stages, absent=self._absent)

    def _decide(self, worker: WorkerLife, *, now: float) -> None:
        """Name the cause, once nothing nearer to it can come."""
        if worker.cause is not None or not worker.failures:
            return
        if now < self._patience.decision_time(worker.failures) and not self._has_exited(worker):
            return
        worker.cause = root_cause(worker.failures)
        if worker.cause.rank is Rank.REPORTED:
            self._out.append(worker.cause)
        else:
            self._out.append(Announce(worker_words.lost(worker, worker.cause)))

    def _has_exited(self, worker: WorkerLife) -> bool:
        return all(life.exited for life in self._stages.of(worker.vw))

    # -- going on ----------------------------------------------------------------------------------------------------

    def _advance(self, worker: WorkerLife, *, now: float) -> None:
        """Go on as far as it goes."""
        self._decide(worker, now=now)
        before = None
        while worker.state is not before:
            before = worker.state
            self._take_step(worker, now=now)
        if worker.ask_at is not None and now >= worker.ask_at and worker.state in _ASKING:
            worker.ask_at = None
            self._out.append(worker_orders.question(worker, self._assignment))

    def _take_step(self, worker: WorkerLife, *, now: float) -> None:
        match worker.state:
            case LifeState.STARTING | LifeState.READY:
                self._get_on(worker, now=now)
            case LifeState.ENDING:
                self._end(worker, now=now)
            case LifeState.AWAITING:
                self._return(worker, now=now)
            case LifeState.ADMITTING if self._is_needless:
                worker.take(LifeStep.GIVEN_UP, now=now)
            case _:
                """The next fact decides."""

    @property
    def _is_needless(self) -> bool:
        """Whether nobody needs another life."""
        return self._is_closing or self.is_over

    def _get_on(self, worker: WorkerLife, *, now: float) -> None:
        if worker.state is LifeState.STARTING and self._stages.all_ready(worker.vw):
            worker.take(LifeStep.GOT_READY, now=now)
            if worker.incarnation:
                self._out.append(Announce(WorkerRejoined(worker.vw, worker.incarnation)))
        if self._stages.all_done(worker.vw):
            worker.take(LifeStep.GOT_DONE, now=now)
        elif worker.state is LifeState.STARTING and worker.incarnation and self._is_over_for(now):
            # It cannot have joined: who has tells of its end at about the same time.
            worker.take(LifeStep.GIVEN_UP, now=now)
            self._kill(worker)

    def _is_over_for(self, now: float) -> bool:
        """Whether the run has been over for long enough to have heard it from everybody."""
        if self._over_at is None and self.is_over:
            self._over_at = now
        return self._over_at is not None and now - self._over_at >= self._patience.settle_seconds

    def _end(self, worker: WorkerLife, *, now: float) -> None:
        is_gone = self._has_exited(worker) or now - worker.since >= self._patience.exit_seconds
        if not (worker.evicted and is_gone and worker.cause is not None):
            return
        if self._is_needless or worker.is_hopeless(self._survive.restarts):
            worker.take(LifeStep.GIVEN_UP, now=now)
            if not self._is_needless:
                self._out.append(Announce(worker_words.quarantined(worker, worker.cause)))
            self._check_left(now=now)
            return
        worker.take(LifeStep.ENDED, now=now)
        worker.returns_at = now + min(worker.pause_seconds, self._survive.backoff.total_seconds())

    def _check_left(self, *, now: float) -> None:
        """Without anybody left to train, or to come to the barrier of a stop, the job has failed."""
        if self.is_over or any(worker.state is not LifeState.OUT for worker in self):
            return
        cause = root_cause([worker.cause for worker in self if worker.cause is not None])
        self._out.append(worker_words.nobody_left(cause, now=now))

    def _return(self, worker: WorkerLife, *, now: float) -> None:
        if self._is_needless:
            worker.take(LifeStep.GIVEN_UP, now=now)
            self._check_left(now=now)
        elif now >= worker.returns_at and not self.is_on_hold and not self._absent_of(worker):
            worker.take(LifeStep.RETURNS, now=now)
            worker.incarnation = Incarnation(worker.incarnation + 1)
            worker.ask_at = now

    def _absent_of(self, worker: WorkerLife) -> list[AgentId]:
        return sorted({life.agent for life in self._stages.of(worker.vw)} & self._absent)

    def _start(self, command: StartStageCommand, *, now: float) -> SendCommand:
        agent = self._assignment.plan.stage(command.config.vw, command.config.stage).agent
        self._stages.add(command.key, agent, command.config.host, now=now)
        return SendCommand(agent, command)

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
        """With nobody to train, agents are not waited for for ever."""
        waits = [worker for worker in self if worker.state is LifeState.AWAITING and self._absent_of(worker)]
        if self.up or not waits:
            self._alone_since = None
            return
        if self._alone_since is None:
            self._alone_since = now
        alone = now - self._alone_since
        if alone >= self._survive.absence.total_seconds():
            self._out.append(worker_words.nobody_back(waits[0], self._absent_of(waits[0]), alone, now=now))

    def _notice(self, worker: WorkerLife, *, now: float) -> None:
        """Say what is waited for."""
        if worker.is_up or worker.state is LifeState.OUT or now - worker.noticed < self._patience.notice_seconds:
            return
        worker.noticed = now
        waiting = worker_words.waiting(worker, self._absent_of(worker), now=now)
        if waiting is not None:
            self._out.append(Announce(waiting))
