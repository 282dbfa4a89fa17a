"""The virtual workers of a job over all their restarts, as a state machine without I/O. Pure.

`TABLE` defines all transitions: a step that is not in a state's row is illegal, and there is no fallback; the state
changes only through `VirtualWorker.take`. `VirtualWorkers` contains all of them: facts go in (`handle`), instructions
come out, and anything the job cannot survive comes out as a `Failure` (`reliability.md`, P5).

The end of any process of a virtual worker ends that incarnation: it is evicted at the clock shard immediately, so that
others stop waiting for it, and its remaining processes are killed. After that it is restarted on the same devices; the
others never stop. Read `VirtualWorkers.handle` first: it records a fact (`_on_stage_report` … `_tick`), then advances
every virtual worker as far as possible (`_advance`). The functions below the classes build the requests to the clock
shard and the messages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from hetpipe.decide.elastic.script import cannot_come, next_add
from hetpipe.decide.lifecycle.configs import Assignment, agents_of, later_life, stage_commands, with_agents
from hetpipe.decide.lifecycle.exchange import (
    AddRequested,
    Admit,
    AdmitAcknowledged,
    AfterDrain,
    AgentDeparts,
    Announce,
    ClocksReported,
    Drain,
    DrainAcknowledged,
    DrainedPersisted,
    DrainRequested,
    Evict,
    EvictAcknowledged,
    Instruction,
    MemberGone,
    MemberRegistered,
    MoveAnswered,
    MoveRequested,
    NewPlan,
    NewWorker,
    PersistDrained,
    Replanned,
    SendCommand,
    ShardCallFailed,
    Tick,
)
from hetpipe.decide.lifecycle.patience import Patience
from hetpipe.decide.lifecycle.root_cause import Failure, Rank, root_cause
from hetpipe.decide.lifecycle.stage_table import (
    StageState,
    StageTable,
    failure_of_exit,
    failure_of_report,
    ran_out_of_memory,
)
from hetpipe.errors import DeadlineExceeded, InvalidTransition, JobFailed, ScriptFailed, StaleIncarnation
from hetpipe.values.barrier_reasons import BarrierReasons
from hetpipe.values.commands import ChildExit, KeyedStageReport, StartStageCommand, StopVirtualWorkerCommand
from hetpipe.values.events import Waiting, WorkerLeft, WorkerLost, WorkerQuarantined, WorkerRejoined, WorkerStatus
from hetpipe.values.freezing import joining, lineup_for, outgrown
from hetpipe.values.ids import AgentId, Clock, Incarnation, VirtualWorkerIndex
from hetpipe.values.life_state import COMPUTING, UP, LifeState
from hetpipe.values.members import MemberId, MemberInfo, MemberRole
from hetpipe.values.plan import Plan, VirtualWorkerPlan
from hetpipe.values.run import StageDone, StageEmulation, StageFailed, StagePhase, StageReady
from hetpipe.values.sync import PlanVersion


class LifeStep(StrEnum):
    """Events of a virtual worker."""

    GOT_READY = "got_ready"
    """Every stage is linked with its neighbours."""
    GOT_DONE = "got_done"
    """Every stage has reached its end."""
    LOST = "lost"
    """One of its processes died, hangs, or did not become ready."""
    DRAIN_ASKED = "drain_asked"
    """It is drained: it leaves after the next barrier if it computes, else immediately."""
    LEFT = "left"
    """All its stages have passed the barrier at which it leaves, and their processes have ended."""
    ADD_ASKED = "add_asked"
    """It is to be restarted although it was out."""
    ENDED = "ended"
    """It is evicted, its processes have ended, and the cause is known."""
    RETURNS = "returns"
    """The back-off is over, and its agents are available."""
    ADMITTED = "admitted"
    """The clock shard expects the next incarnation: its stages are started."""
    GIVEN_UP = "given_up"
    """It is not restarted: it failed too often, is drained, or the run is about to end."""


_S = LifeState

TABLE: Mapping[LifeState, Mapping[LifeStep, LifeState]] = {
    _S.STARTING: {
        LifeStep.GOT_READY: _S.READY,
        LifeStep.GOT_DONE: _S.DONE,
        LifeStep.LOST: _S.ENDING,
        LifeStep.DRAIN_ASKED: _S.ENDING,
        LifeStep.GIVEN_UP: _S.OUT,
    },
    _S.READY: {LifeStep.GOT_DONE: _S.DONE, LifeStep.LOST: _S.ENDING, LifeStep.DRAIN_ASKED: _S.LEAVING},
    _S.LEAVING: {LifeStep.GOT_DONE: _S.DONE, LifeStep.LOST: _S.ENDING, LifeStep.LEFT: _S.AWAITING},
    _S.DONE: {},
    _S.ENDING: {LifeStep.ENDED: _S.AWAITING, LifeStep.GIVEN_UP: _S.OUT},
    _S.AWAITING: {LifeStep.RETURNS: _S.ADMITTING, LifeStep.GIVEN_UP: _S.OUT},
    _S.ADMITTING: {
        LifeStep.ADMITTED: _S.STARTING,
        LifeStep.DRAIN_ASKED: _S.ENDING,
        LifeStep.GIVEN_UP: _S.OUT,
    },
    _S.OUT: {LifeStep.ADD_ASKED: _S.AWAITING},
}

#: Number of incarnations that may run out of memory: with the same plan the next one will, too.
_MAX_OUT_OF_MEMORY = 2

#: States with a pending request to the clock shard.
_ASKING = frozenset({LifeState.LEAVING, LifeState.ENDING, LifeState.ADMITTING})

#: Seconds that an incarnation with a new plan waits for the checkpoint with its optimizer state, before it uses an
#: older one.
_CHECKPOINT_SECONDS = 20.0


@dataclass(slots=True)
class VirtualWorker:
    """One virtual worker. Only `take` changes its state."""

    vw: VirtualWorkerIndex
    #: When the state was entered, in monotonic seconds.
    since: float
    state: LifeState = LifeState.STARTING
    #: The newest incarnation, including one being admitted.
    incarnation: Incarnation = Incarnation(0)
    #: Incarnations that ended before the run.
    deaths: int = 0
    #: Of these the latest consecutive ones without a committed wave, and all that ran out of memory.
    crashes: int = 0
    out_of_memory: int = 0
    #: Failures of the newest incarnation, and the one identified as the cause; None until that is decided.
    failures: list[Failure] = field(default_factory=list)
    cause: Failure | None = None
    #: Whether the clock shard has evicted the newest incarnation.
    evicted: bool = False
    #: Whether the newest incarnation was ended on request before it had done any work, so that there is no cause.
    sent_away: bool = False
    #: Whether it stays out after its newest incarnation, as requested.
    stays_out: bool = False
    #: Whether its next incarnation uses a new plan, and the clock of the barrier at which its newest incarnation has
    #: left; None if it has not.
    is_replanned: bool = False
    left_at: Clock | None = None
    #: When to call the clock shard; None while a call is pending or not needed.
    ask_at: float | None = None
    #: Since when the calls have failed, and the latest reason.
    unanswered_since: float | None = None
    refusal: str = ""
    #: When the back-off ends.
    returns_at: float = 0.0
    #: Its local clock when the newest incarnation was first reported to count, and whether it has committed a wave
    #: since.
    first_clock: Clock | None = None
    has_committed: bool = False
    #: When the current wait was last reported.
    noticed: float = 0.0

    def __str__(self) -> str:
        """Name for messages."""
        return f"virtual worker {self.vw}"

    @property
    def is_up(self) -> bool:
        """Whether processes of its newest incarnation count."""
        return self.state in UP

    @property
    def will_train(self) -> bool:
        """Whether it computes, or will restart without a request."""
        return self.state not in {LifeState.DONE, LifeState.OUT} and not self.stays_out

    @property
    def status(self) -> WorkerStatus:
        """Status for displays."""
        return WorkerStatus(self.vw, self.incarnation, self.deaths, self.state)

    def take(self, step: LifeStep, *, now: float) -> None:
        """Apply `step` at monotonic second `now`.

        Raises:
            InvalidTransition: the table has no such step. The state is unchanged.
        """
        following = TABLE[self.state].get(step)
        if following is None:
            raise InvalidTransition(
                f"{self} cannot take {step} in state {self.state} (incarnation {self.incarnation}, lost "
                f"{self.deaths} times)"
            )
        self.state = following
        self.since = self.noticed = now

    def begin_incarnation(self) -> None:
        """Reset everything known of the newest incarnation."""
        self.failures, self.cause = [], None
        self.evicted = self.sent_away = False
        self.first_clock, self.has_committed = None, False
        self.left_at = None
        self.request_answered()

    def request_failed(self, sentence: str, *, again_at: float, now: float) -> None:
        """Record a failed call of the clock shard with its reason; retry at `again_at`."""
        self.ask_at, self.refusal = again_at, sentence
        if self.unanswered_since is None:
            self.unanswered_since = now

    def unanswered_seconds(self, now: float) -> float:
        """For how long calls of the clock shard have failed."""
        return 0.0 if self.unanswered_since is None else now - self.unanswered_since

    def request_answered(self) -> None:
        """Record a successful call of the clock shard."""
        self.ask_at = self.unanswered_since = None
        self.refusal = ""

    def on_clock(self, clock: Clock) -> None:
        """Record its local clock as reported by the clock shard."""
        if self.first_clock is None:
            self.first_clock = clock
        self.has_committed = clock > self.first_clock or self.has_committed

    def request_restart(self, *, now: float) -> None:
        """Request that its next incarnation start as soon as possible, whatever the history."""
        self.stays_out = False
        if not self.is_up:
            self.crashes = self.out_of_memory = 0
            self.returns_at = now

    def count_death(self) -> None:
        """Count the end of the newest incarnation."""
        self.deaths += 1
        self.crashes = 0 if self.has_committed else self.crashes + 1

    def is_hopeless(self, most_crashes: int) -> bool:
        """Whether another incarnation is likely to end like the latest ones."""
        return self.crashes >= most_crashes or self.out_of_memory >= _MAX_OUT_OF_MEMORY

    @property
    def pause_seconds(self) -> float:
        """Back-off before the next incarnation: none the first time, then 1, 2, 4, … s while none commits a wave."""
        return 0.0 if self.crashes <= 1 else 2.0 ** (self.crashes - 2)


ShardAnswer = EvictAcknowledged | AdmitAcknowledged | DrainAcknowledged | ShardCallFailed

WorkersInput = (
    KeyedStageReport
    | ChildExit
    | MemberGone
    | MemberRegistered
    | AgentDeparts
    | ShardAnswer
    | Replanned
    | MoveAnswered
    | MoveRequested
    | DrainRequested
    | AddRequested
    | DrainedPersisted
    | ClocksReported
    | Tick
)

WorkersOutput = Instruction | Failure
"""An instruction for the shell, or why the job cannot continue."""


class VirtualWorkers:
    """State machine of all virtual workers of one job. Not thread-safe; every call takes the monotonic time."""

    def __init__(
        self,
        assignment: Assignment,
        stages: StageTable,
        *,
        patience: Patience,
        now: float,
        adopted: Mapping[VirtualWorkerIndex, VirtualWorker] | None = None,
    ) -> None:
        """Create the state; `begin` starts the stages.

        Args:
            assignment: the plan and the agents.
            stages: the processes; filled here, or those of the `adopted` incarnations.
            patience: timeouts that are not set by users.
            now: monotonic seconds.
            adopted: the virtual workers as left by an earlier coordinator, before any agent has registered.
        """
        self._assignment = assignment
        self._stages = stages
        self._patience = patience
        self._survive = assignment.job.survive
        self._workers = {
            vw.index: VirtualWorker(vw.index, now) if adopted is None else adopted[vw.index]
            for vw in assignment.plan.virtual_workers
        }
        #: Agents of the plan that are not members, and those about to leave: neither gets new stages.
        self._absent: set[AgentId] = set() if adopted is None else {agent.agent for agent in assignment.agents}
        self._departing: set[AgentId] = set()
        #: Absent agents that left on notice: they are expected to return, at any time.
        self._on_leave: set[AgentId] = set()
        #: No new incarnations: a user has requested a stop.
        self._is_closing = False
        #: Failures are no longer handled.
        self._is_halted = False
        #: Parameter servers are missing: a new incarnation would fail, too.
        self.is_on_hold = False
        #: Since when the run is known to be over.
        self._over_at: float | None = None
        self._out: list[WorkersOutput] = []
        kept = [worker.vw for worker in self if worker.stays_out]
        self._drained = DrainedWorkers(kept, retry_seconds=patience.retry_seconds)
        #: The plan versions in force, as last reported by the clock shard.
        self.versions: Mapping[VirtualWorkerIndex, PlanVersion] = {}
        #: Since when no virtual worker is left and one waits for an agent.
        self._alone_since: float | None = None
        #: Since when nobody is left that trains before the script, or frozen layers, let others train.
        self._turnless_since: float | None = None
        #: The newest clock that is published, and the least that a member has reached.
        self._published = self._reached = Clock(0)
        self._knows_clocks = False
        #: F, and that of those who train.
        self._frozen = self._lineup = 0
        #: Since when all others wait at a barrier for one that the script adds, and whose agents are away.
        self._awaited_since: dict[VirtualWorkerIndex, float] = {}
        self._ticked = now

    def __iter__(self) -> Iterator[VirtualWorker]:
        """In index order."""
        return iter(self._workers.values())

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether a stage has reached the end of the run."""
        return self._stages.is_run_over

    @property
    def assignment(self) -> Assignment:
        """The plan with which all newest or next incarnations start, and the current agents."""
        return self._assignment

    @property
    def plan(self) -> Plan:
        """The plan by which virtual workers compute: layers may have moved since their processes started."""
        plan = self._assignment.plan
        for vw, version in self.versions.items():
            if vw < len(plan.virtual_workers) and plan.virtual_workers[vw].bounds == version.planned:
                plan = plan.with_bounds(vw, version.bounds)
        return plan

    def gone_of(self, vw: VirtualWorkerIndex) -> frozenset[AgentId]:
        """Agents of its next incarnation that are not members."""
        return self._agents_of(self._workers[vw]) & self._absent

    @property
    def is_on_leave(self) -> bool:
        """Whether a virtual worker waits only for agents that left, or are about to leave, on notice."""
        expected = self._on_leave | self._departing
        away = [set(self._away_of(worker)) for worker in self if worker.state is LifeState.AWAITING]
        return any(agents and agents <= expected for agents in away)

    @property
    def is_ending(self) -> bool:
        """Whether restarts have stopped."""
        return self._is_needless or self._is_halted

    @property
    def statuses(self) -> tuple[WorkerStatus, ...]:
        """Statuses of all, for displays."""
        return tuple(worker.status for worker in self)

    @property
    def states(self) -> dict[VirtualWorkerIndex, LifeState]:
        """States of all."""
        return {worker.vw: worker.state for worker in self}

    @property
    def can_run(self) -> bool:
        """Whether training starts: some are ready, and all others are past their first incarnation."""
        late = any(worker.state is LifeState.STARTING and worker.incarnation == 0 for worker in self)
        return not late and any(worker.state is LifeState.READY for worker in self)

    @property
    def all_done(self) -> bool:
        """Whether all that count have reached the end of the run."""
        return self.is_over and all(worker.state is LifeState.DONE or not worker.is_up for worker in self)

    # -- orders ------------------------------------------------------------------------------------------------------

    def begin(self, *, now: float) -> list[SendCommand]:
        """Start the first incarnation of each."""
        return [self._start(command, now=now) for command in stage_commands(self._assignment)]

    def close(self) -> None:
        """Stop restarting: the run continues to its next barrier and ends."""
        self._is_closing = True

    def halt(self) -> None:
        """Expect all processes to end from here on."""
        self._is_halted = True

    def drain(self, vw: VirtualWorkerIndex, then: AfterDrain, now: float) -> list[WorkersOutput]:
        """Drain a virtual worker: it leaves after the next barrier if it computes, else immediately.

        Args:
            vw: its index. No effect when it is out, or has reached the end of the run.
            then: whether it stays out, or restarts as soon as its agents are available. After a request to stay out,
                only `add` restarts it.
            now: monotonic seconds.

        Returns:
            Instructions, in order.
        """
        return self.handle(DrainRequested(vw, then), now=now)

    def replan(self, plan: VirtualWorkerPlan, emulations: tuple[StageEmulation, ...]) -> None:
        """Set another plan of a virtual worker from its next incarnation on.

        Args:
            plan: of that incarnation, on the agents of the last one.
            emulations: emulations of its stages; empty if there are none.
        """
        self._assignment = self._assignment.with_worker(plan, emulations)
        self._workers[plan.index].is_replanned = True

    def enlarge(self, new: NewWorker, *, now: float) -> None:
        """Add a new virtual worker: it starts with incarnation 1, as 0 belongs to the start of the run.

        Its first step is taken with the next fact.
        """
        agents = with_agents(self._assignment.agents, new.agents)
        self._assignment = replace(self._assignment.with_worker(new.plan), agents=agents)
        self._workers[new.plan.index] = VirtualWorker(new.plan.index, now, LifeState.AWAITING, is_replanned=True)

    def handle(self, fact: WorkersInput, *, now: float) -> list[WorkersOutput]:  # noqa: C901 - one case per kind of fact
        """Process one fact.

        Returns:
            Instructions, in order, and failures that the job cannot survive.

        Raises:
            InvalidTransition: a bug of this class.
        """
        match fact:
            case KeyedStageReport():
                self._on_stage_report(fact, now=now)
            case ChildExit():
                self._on_child_exit(fact, now=now)
            case MemberGone() | MemberRegistered() | AgentDeparts():
                self._on_agent(fact, now=now)
            case EvictAcknowledged() | AdmitAcknowledged() | DrainAcknowledged() | ShardCallFailed():
                self._on_shard_answer(fact, now=now)
            case DrainRequested() | AddRequested():
                self._on_request(fact, now=now)
            case ClocksReported(clocks=clocks):
                self.versions = clocks.plans or self.versions
                for worker in self:
                    if worker.state in COMPUTING and worker.vw in clocks.local:
                        worker.on_clock(clocks.local[worker.vw])
                self._published, self._reached = clocks.published, min(clocks.local.values(), default=clocks.published)
                self._lineup, self._frozen = clocks.lineup, clocks.frozen[-1].frozen if clocks.frozen else 0
                self._knows_clocks = True
                self._drop(clocks.published, now=now)
                self._check_turns(now=now)
            case DrainedPersisted():
                self._drained.on_answer(fact, now=now)
            case Tick():
                self._tick(now=now)
        if not self._is_halted:
            for worker in self:
                self._advance(worker, now=now)
            self._out += self._drained.request(self, self._assignment, now=now)
        out, self._out = self._out, []
        return out

    # -- facts ------------------------------------------------------------------------------------------------------

    def _on_stage_report(self, keyed: KeyedStageReport, *, now: float) -> None:
        life = self._stages.get(keyed.key)
        if life is None:
            return
        life.last_report = now
        match keyed.report:
            case StagePhase(phase=phase, seconds=seconds):
                life.phase = f"{phase} ({seconds:.0f} s)"
            case StageReady(pid=pid, link=link):
                life.pid, life.link, life.state = pid, link, StageState.READY
            case StageDone(clock=clock, reason=reason):
                life.state, life.done_reasons = StageState.DONE, BarrierReasons.parse(reason)
                self._workers[life.key.vw].left_at = clock if life.has_left else None
            case StageFailed() as report:
                life.state = StageState.FAILED
                worker = self._workers[life.key.vw]
                worker.out_of_memory += ran_out_of_memory(report)
                self._fails(worker, failure_of_report(life, report, is_lost=not worker.is_up, now=now), now=now)
            case _:
                """Record a sign of life."""

    def _on_child_exit(self, keyed: ChildExit, *, now: float) -> None:
        life = self._stages.get(keyed.key)
        if life is None or life.exited:
            return
        life.exited, life.pid = True, keyed.pid
        worker = self._workers[life.key.vw]
        failure = failure_of_exit(life, keyed, is_lost=not worker.is_up, now=now)
        if failure is not None:
            self._fails(worker, failure, now=now)

    def _on_agent(self, fact: MemberGone | MemberRegistered | AgentDeparts, *, now: float) -> None:
        match fact:
            case MemberGone():
                self._agent_gone(fact, now=now)
            case MemberRegistered(info=info):
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
        """Handle a returning agent: available if it has the planned devices; ends its lost incarnations' processes."""
        agent = AgentId(info.id)
        if agent not in self._absent | self._departing or not _has_devices(info, self._assignment.plan):
            return
        for known in (self._absent, self._departing, self._on_leave):
            known.discard(agent)
        agents = tuple(info.agent_info if known.agent == agent else known for known in self._assignment.agents)
        self._assignment = replace(self._assignment, agents=agents)
        for worker in self:
            if not worker.is_up:
                self._kill(worker)

    def _agent_departs(self, agent: AgentId, *, now: float) -> None:
        """Handle an agent about to leave: its virtual workers leave before it, and return with it."""
        if agent in self._absent:
            return
        for worker in self:
            if agent in self._agents_of(worker):
                self._departing.add(agent)
                self._drain(worker, stays_out=False, now=now)

    def _on_shard_answer(self, answer: ShardAnswer, *, now: float) -> None:
        worker = self._workers[answer.vw]
        awaited = LifeState.ADMITTING if isinstance(answer, AdmitAcknowledged) else worker.state
        if worker.incarnation != answer.incarnation or worker.state is not awaited or self._is_halted:
            return
        match answer:
            case EvictAcknowledged() if worker.state is LifeState.ENDING:
                worker.evicted = True
                worker.request_answered()
            case DrainAcknowledged() if worker.state is LifeState.LEAVING:
                worker.request_answered()
            case AdmitAcknowledged(restore=restore):
                worker.take(LifeStep.ADMITTED, now=now)
                worker.begin_incarnation()
                worker.is_replanned = False
                self._stages.forget(worker.vw)
                for command in later_life(self._assignment, worker.vw, worker.incarnation, restore):
                    self._out.append(self._start(command, now=now))
                for agent in self._agents_of(worker) & self._absent:
                    # It left while the call of the clock shard was pending.
                    self._agent_gone(MemberGone(MemberId(agent), f"agent {agent} is gone"), now=now)
            case ShardCallFailed(error=StaleIncarnation.__name__) if worker.state is LifeState.ADMITTING:
                # It has seen a later incarnation than this coordinator knows of.
                worker.incarnation = Incarnation(worker.incarnation + 1)
                worker.ask_at = now + self._patience.retry_seconds
            case ShardCallFailed():
                worker.request_failed(answer.sentence, again_at=now + self._patience.retry_seconds, now=now)
                if worker.unanswered_seconds(now) >= self._survive.absence.total_seconds():
                    self._out.append(_clock_shard_silent(worker, answer.error, now=now))

    # -- requests of users ------------------------------------------------------------------------------------------

    def _on_request(self, wish: DrainRequested | AddRequested, *, now: float) -> None:
        worker = self._workers[wish.vw]
        match wish:
            case DrainRequested(then=then):
                self._drain(worker, stays_out=then == "out", now=now)
            case AddRequested():
                self._add(worker, now=now)

    def _drain(self, worker: VirtualWorker, *, stays_out: bool, now: float) -> None:
        """Drain it; one without work is removed without a barrier."""
        if self._is_halted or not self._assignment.job.has_shards or worker.state in {LifeState.DONE, LifeState.OUT}:
            return
        worker.stays_out = worker.stays_out or stays_out
        match worker.state:
            case LifeState.READY:
                worker.take(LifeStep.DRAIN_ASKED, now=now)
                worker.ask_at = now
            case LifeState.STARTING | LifeState.ADMITTING as before:
                if before is LifeState.ADMITTING:
                    worker.begin_incarnation()
                worker.take(LifeStep.DRAIN_ASKED, now=now)
                worker.sent_away, worker.ask_at = True, now
                self._kill(worker)
            case _:
                """It is already leaving, or between two incarnations."""

    def _drop(self, published: Clock, *, now: float) -> None:
        """End the virtual workers that are dropped for good, those that were away at that clock too."""
        for vw in outgrown(self._assignment.plan.freeze_lineups, self._lineup):
            if (worker := self._workers.get(vw)) is not None and not worker.stays_out:
                self._drain(worker, stays_out=True, now=now)
        for line in self._assignment.job.elastic.members:
            worker = self._workers.get(VirtualWorkerIndex(line.vw))
            if worker is None or worker.stays_out or line.at.clock > published:
                continue
            if self._assignment.job.elastic.stays_dropped(line.vw):
                self._drain(worker, stays_out=True, now=now)

    def _stays_dropped(self, vw: VirtualWorkerIndex) -> bool:
        """Whether a virtual worker that leaves does not come back."""
        return bool(self._assignment.plan.freeze_lineups) or self._assignment.job.elastic.stays_dropped(vw)

    def _add(self, worker: VirtualWorker, *, now: float) -> None:
        worker.request_restart(now=now)
        if worker.state is LifeState.OUT and not self._is_halted:
            worker.take(LifeStep.ADD_ASKED, now=now)

    # -- failures ---------------------------------------------------------------------------------------------------

    def _fails(self, worker: VirtualWorker, failure: Failure, *, now: float) -> None:
        """Record a failure of the newest incarnation, or of one already lost."""
        if self._is_halted or (worker.sent_away and failure.rank is not Rank.REPORTED):
            return
        if not self._assignment.job.has_shards:
            # Only the stages hold the weights, which are lost with one of them.
            self._out.append(_fatal(failure, self._assignment.job.sync.kind))
            return
        worker.failures.append(failure)
        cause = root_cause(worker.failures)
        # Where the job ends at once, its processes end with it.
        if worker.is_up and (cause.rank is not Rank.REPORTED or cause.ends_at_barrier):
            self._lose(worker, now=now)

    def _lose(self, worker: VirtualWorker, *, now: float) -> None:
        worker.take(LifeStep.LOST, now=now)
        worker.count_death()
        worker.ask_at = now
        self._kill(worker)

    def _kill(self, worker: VirtualWorker) -> None:
        """End its remaining processes on all reachable agents."""
        self._out += _stop_commands(worker, self._assignment, self._stages, absent=self._absent)

    def _decide(self, worker: VirtualWorker, *, now: float) -> None:
        """Identify the cause, once no more direct failure can be reported."""
        if worker.cause is not None or not worker.failures:
            return
        if now < self._patience.decision_time(worker.failures) and not self._has_exited(worker):
            return
        worker.cause = root_cause(worker.failures)
        if worker.cause.rank is Rank.REPORTED:
            self._out.append(worker.cause)
        else:
            self._out.append(Announce(_lost_event(worker, worker.cause)))

    def _has_exited(self, worker: VirtualWorker) -> bool:
        return all(life.exited for life in self._stages.of(worker.vw))

    # -- steps ------------------------------------------------------------------------------------------------------

    def _advance(self, worker: VirtualWorker, *, now: float) -> None:
        """Advance as far as possible."""
        self._decide(worker, now=now)
        before = None
        while worker.state is not before:
            before = worker.state
            self._take_step(worker, now=now)
        if worker.ask_at is not None and now >= worker.ask_at and worker.state in _ASKING:
            worker.ask_at = None
            self._out.append(_clock_shard_request(worker, self._assignment))

    def _take_step(self, worker: VirtualWorker, *, now: float) -> None:
        match worker.state:
            case LifeState.STARTING | LifeState.READY:
                self._get_on(worker, now=now)
            case LifeState.LEAVING:
                self._leave(worker, now=now)
            case LifeState.ENDING:
                self._end(worker, now=now)
            case LifeState.AWAITING:
                self._return(worker, now=now)
            case LifeState.ADMITTING if self._is_needless:
                worker.take(LifeStep.GIVEN_UP, now=now)
                self._check_left(now=now)
            case _:
                """The next fact decides."""

    def _get_on(self, worker: VirtualWorker, *, now: float) -> None:
        if worker.state is LifeState.STARTING and self._stages.all_ready(worker.vw):
            worker.take(LifeStep.GOT_READY, now=now)
            if worker.incarnation:
                self._out.append(Announce(WorkerRejoined(worker.vw, worker.incarnation)))
        if self._stages.all_done(worker.vw):
            worker.take(LifeStep.GOT_DONE, now=now)
        elif worker.state is LifeState.READY and self._stages.all_left(worker.vw):
            # An earlier coordinator has requested its drain, or the script drops it.
            worker.stays_out = worker.stays_out or self._stays_dropped(worker.vw)
            worker.take(LifeStep.DRAIN_ASKED, now=now)
        elif worker.state is LifeState.STARTING and worker.incarnation and self._is_over_for(now):
            # It cannot have joined: stages that have joined report their end at about the same time.
            worker.take(LifeStep.GIVEN_UP, now=now)
            self._kill(worker)

    def _is_over_for(self, now: float) -> bool:
        """Whether the run has been over long enough to have received all reports."""
        if self._over_at is None and self.is_over:
            self._over_at = now
        return self._over_at is not None and now - self._over_at >= self._patience.settle_seconds

    def _leave(self, worker: VirtualWorker, *, now: float) -> None:
        """Leave once all its stages have passed the barrier, and the processes have ended or timed out."""
        if self._stages.all_done(worker.vw):
            worker.take(LifeStep.GOT_DONE, now=now)
            return
        stages = self._stages.of(worker.vw)
        if not self._stages.all_left(worker.vw):
            return
        if not all(life.exited or now - life.last_report >= self._patience.exit_seconds for life in stages):
            return
        if not self._has_exited(worker):
            self._kill(worker)
        worker.take(LifeStep.LEFT, now=now)
        worker.request_answered()
        self._has_left(worker, now=now)

    def _has_left(self, worker: VirtualWorker, *, now: float) -> None:
        """Whether it is between two incarnations because it was drained: then it restarts without a back-off."""
        worker.returns_at = now
        if not worker.stays_out:
            self._out.append(Announce(WorkerLeft(worker.vw, worker.incarnation, returns=True)))

    def _end(self, worker: VirtualWorker, *, now: float) -> None:
        is_gone = self._has_exited(worker) or now - worker.since >= self._patience.exit_seconds
        if not (worker.evicted and is_gone and (worker.sent_away or worker.cause is not None)):
            return
        hopeless = worker.is_hopeless(self._survive.restarts) and not worker.sent_away and not worker.stays_out
        if self._is_needless or hopeless:
            worker.take(LifeStep.GIVEN_UP, now=now)
            if not self._is_needless and worker.cause is not None:
                quarantined = _quarantined_event(worker, worker.cause)
                self._out.append(Announce(quarantined))
                self._cannot_come(worker, quarantined.sentence, now=now)
            self._check_left(now=now)
            return
        worker.take(LifeStep.ENDED, now=now)
        if worker.sent_away:
            self._has_left(worker, now=now)
        else:
            worker.returns_at = now + min(worker.pause_seconds, self._survive.backoff.total_seconds())

    def _return(self, worker: VirtualWorker, *, now: float) -> None:
        if self._is_needless or worker.stays_out:
            worker.take(LifeStep.GIVEN_UP, now=now)
            if worker.stays_out:
                self._out.append(Announce(WorkerLeft(worker.vw, worker.incarnation, returns=False)))
            self._check_left(now=now)
        elif now >= worker.returns_at and not self.is_on_hold and not self._away_of(worker):
            worker.take(LifeStep.RETURNS, now=now)
            worker.incarnation = Incarnation(worker.incarnation + 1)
            worker.ask_at = now

    def _cannot_come(self, worker: VirtualWorker, cause: str, *, now: float) -> None:
        """Fail the run if that virtual worker is to join later."""
        lineups = self._assignment.plan.freeze_lineups
        if any(worker.vw in joining(lineups, self._lineup, lineup.frozen) for lineup in lineups):
            why = (
                f"freeze.compress: virtual worker {worker.vw} trains when more layers are frozen, but it cannot come: "
                f"{cause}; mend that, or remove `compress`"
            )
            self._out.append(Failure(Rank.GONE, ScriptFailed.__name__, why, now))
        added = next_add(self._assignment.job, worker.vw, self._published)
        if added is not None:
            self._out.append(Failure(Rank.GONE, ScriptFailed.__name__, cannot_come(*added, cause), now))

    def _check_left(self, *, now: float) -> None:
        """Fail the job if no virtual worker is left to train, or to reach the barrier of a stop."""
        if self.is_over or any(worker.state is not LifeState.OUT for worker in self):
            return
        causes = [worker.cause for worker in self if worker.cause is not None]
        self._out.append(_nobody_left(root_cause(causes) if causes else None, now=now))

    def _check_turns(self, *, now: float) -> None:
        """Fail the job if those that are left only train later, by the script or once more layers are frozen.

        Called when the clock shard has told of its clocks, which may be out of date otherwise.
        """
        trains = [worker.vw for worker in self if worker.state is not LifeState.OUT and not self._trains_later(worker)]
        if trains or self.is_ending or all(worker.state is LifeState.OUT for worker in self):
            self._turnless_since = None
            return
        if self._turnless_since is None:
            self._turnless_since = now
        if now - self._turnless_since >= self._patience.settle_seconds:
            causes = [worker.cause for worker in self if worker.cause is not None]
            self._out.append(_nobody_left(root_cause(causes) if causes else None, now=now, clock=self._published))

    def _trains_later(self, worker: VirtualWorker) -> bool:
        """Whether a virtual worker takes no part in the run at the newest published clock, nor at the next one."""
        elastic, lineups = self._assignment.job.elastic, self._assignment.plan.freeze_lineups
        by_script = all(elastic.is_absent(worker.vw, clock) for clock in (self._published, self._published + 1))
        members = [lineup_for(lineups, frozen) for frozen in (self._lineup, self._frozen)]
        by_layers = all(lineup is not None and worker.vw not in lineup.members for lineup in members)
        return self._knows_clocks and (by_script or by_layers)

    def _agents_of(self, worker: VirtualWorker) -> frozenset[AgentId]:
        """Agents whose devices are used by its newest or next incarnation."""
        return frozenset(stage.agent for stage in self._assignment.plan.virtual_workers[worker.vw].stages)

    def _away_of(self, worker: VirtualWorker) -> list[AgentId]:
        """The agents among them that currently get no stages."""
        return sorted(self._agents_of(worker) & (self._absent | self._departing))

    def _start(self, command: StartStageCommand, *, now: float) -> SendCommand:
        agent = self._assignment.plan.stage(command.config.vw, command.config.stage).agent
        self._stages.add(command.key, agent, command.config.host, now=now)
        return SendCommand(agent, command)

    @property
    def _is_needless(self) -> bool:
        """Whether no further incarnation is needed."""
        return self._is_closing or self.is_over

    # -- time --------------------------------------------------------------------------------------------------------

    def _tick(self, *, now: float) -> None:
        paused = now - self._ticked
        if paused > self._patience.longest_tick_seconds or self.is_on_hold:
            # This process did not listen for a while; or they may be blocked in a call to a lost server.
            for life in self._stages:
                life.last_report = min(now, life.last_report + paused)
        self._ticked = now
        if self._is_halted:
            return
        stall, ready = self._survive.stall.total_seconds(), self._patience.ready_seconds
        for worker in self:
            for failure in _overdue(worker, self._stages, stall_seconds=stall, ready_seconds=ready, now=now):
                self._fails(worker, failure, now=now)
            self._notice(worker, now=now)
            self._check_added(worker, now=now)
        self._check_agents(now=now)

    def _check_added(self, worker: VirtualWorker, *, now: float) -> None:
        """Limit the wait of all others for one that the script adds, and whose agents are away."""
        added = next_add(self._assignment.job, worker.vw, self._published)
        is_next = added is not None and self._published == added[1].at.clock - 1
        is_next = is_next or worker.vw in joining(self._assignment.plan.freeze_lineups, self._lineup, self._frozen)
        is_awaited = is_next and self._reached > self._published
        away = self._away_of(worker) if worker.state is LifeState.AWAITING and is_awaited else []
        if not away:
            self._awaited_since.pop(worker.vw, None)
            return
        waited = now - self._awaited_since.setdefault(worker.vw, now)
        if waited >= self._survive.absence.total_seconds() and not self._is_needless:
            cause = (
                f"agent {_names(away)} did not return within {waited:.0f} s of all others' waiting (survive.absence)"
            )
            self._cannot_come(worker, cause, now=now)

    def _check_agents(self, *, now: float) -> None:
        """Limit the wait for agents if no virtual worker trains, unless they left on notice."""
        train = [worker for worker in self if not self._trains_later(worker)]
        waits = [worker for worker in train if worker.state is LifeState.AWAITING and self._away_of(worker)]
        if any(worker.is_up for worker in train) or not waits or self.is_on_leave:
            self._alone_since = None
            return
        if self._alone_since is None:
            self._alone_since = now
        alone = now - self._alone_since
        if alone >= self._survive.absence.total_seconds():
            self._out.append(_nobody_back(waits[0], self._away_of(waits[0]), alone, now=now))

    def _notice(self, worker: VirtualWorker, *, now: float) -> None:
        """Report what is waited for."""
        is_well = worker.is_up and not worker.refusal
        if is_well or worker.state is LifeState.OUT or now - worker.noticed < self._patience.notice_seconds:
            return
        worker.noticed = now
        waiting = _waiting_event(worker, self._away_of(worker), now=now)
        if waiting is not None:
            self._out.append(Announce(waiting))


class DrainedWorkers:
    """Persists the set of drained virtual workers on the clock shard, so that later coordinators do not restart them.

    Not thread-safe; every call takes the monotonic time.
    """

    def __init__(self, kept: Iterable[VirtualWorkerIndex], *, retry_seconds: float) -> None:
        """Start from the set `kept`; failed calls are retried after `retry_seconds`."""
        self._kept = frozenset(kept)
        self._retry_seconds = retry_seconds
        self._is_asked = False
        self._ask_at = 0.0

    def request(self, workers: Iterable[VirtualWorker], assignment: Assignment, *, now: float) -> list[PersistDrained]:
        """The next request: one at a time, and none when the set is up to date."""
        wanted = frozenset(worker.vw for worker in workers if worker.stays_out)
        if wanted == self._kept or self._is_asked or now < self._ask_at:
            return []
        self._is_asked = True
        return [PersistDrained(tuple(sorted(wanted)), assignment.plan.term, assignment.shards[0])]

    def on_answer(self, answer: DrainedPersisted, *, now: float) -> None:
        """Process the result of a request."""
        self._is_asked = False
        if answer.is_kept:
            self._kept = frozenset(answer.out)
        else:
            self._ask_at = now + self._retry_seconds


def _clock_shard_request(worker: VirtualWorker, assignment: Assignment) -> Evict | Admit | Drain:
    """The pending request to the clock shard: evict or drain the newest incarnation, or admit the next one."""
    plan, clock_shard = assignment.plan, assignment.shards[0]
    if worker.state is LifeState.ADMITTING:
        by = plan.virtual_workers[worker.vw]
        agents = agents_of(by, assignment.agents)
        until = worker.since + _CHECKPOINT_SECONDS
        new = NewPlan(plan, agents, assignment.emulations, worker.left_at, until) if worker.is_replanned else None
        own = by.minibatches_per_wave
        return Admit(worker.vw, worker.incarnation, len(by.stages), plan.term, clock_shard, new, own, by.bounds)
    kind = Drain if worker.state is LifeState.LEAVING else Evict
    return kind(worker.vw, worker.incarnation, plan.term, clock_shard)


def _stop_commands(
    worker: VirtualWorker, assignment: Assignment, stages: StageTable, *, absent: Collection[AgentId]
) -> list[SendCommand]:
    """End its remaining processes on all agents except absent ones."""
    plan = assignment.plan
    command = StopVirtualWorkerCommand(plan.job_id, worker.vw, worker.incarnation, plan.term)
    agents = {life.agent for life in stages.of(worker.vw)}.difference(absent)
    return [SendCommand(agent, command) for agent in sorted(agents)]


def _has_devices(info: MemberInfo, plan: Plan) -> bool:
    """Whether a member is an agent that has all devices planned for the agent of its name."""
    stages = [stage for vw in plan.virtual_workers for stage in vw.stages if stage.agent == AgentId(info.id)]
    offered = {device.device for device in info.devices}
    return info.role is MemberRole.AGENT and {stage.device for stage in stages} <= offered


def _overdue(
    worker: VirtualWorker, stages: StageTable, *, stall_seconds: float, ready_seconds: float, now: float
) -> Iterator[Failure]:
    """The timeout, if any, that the newest incarnation has exceeded.

    Args:
        worker: the virtual worker.
        stages: the processes of the job.
        stall_seconds: maximum silence of a ready stage.
        ready_seconds: maximum silence of a starting stage of a later incarnation; the job limits that of the first
            ones.
        now: monotonic seconds.
    """
    if worker.state in COMPUTING:
        for life in stages.of(worker.vw):
            silent = now - life.last_report
            if life.state is StageState.READY and not life.exited and silent > stall_seconds:
                sentence = f"{life} hangs: it has reported nothing for {silent:.0f} s"
                yield Failure(Rank.GONE, JobFailed.__name__, sentence, now)
    elif worker.state is LifeState.STARTING and worker.incarnation:
        for life in stages.of(worker.vw):
            if life.state is StageState.STARTING and now - life.last_report >= ready_seconds:
                last = f"; the last was that it is {life.phase}" if life.phase else ""
                sentence = f"{life} is not ready, and has reported nothing for {ready_seconds:.0f} s{last}"
                yield Failure(Rank.GONE, DeadlineExceeded.__name__, sentence, now)


def _lost_event(worker: VirtualWorker, cause: Failure) -> WorkerLost:
    """Event: an incarnation of it has ended."""
    return WorkerLost(worker.vw, worker.incarnation, cause.sentence)


def _quarantined_event(worker: VirtualWorker, cause: Failure) -> WorkerQuarantined:
    """Event: it is not restarted."""
    how_often = "once" if worker.deaths == 1 else f"{worker.deaths} times"
    sentence = f"{worker} died {how_often} and is not restarted; the last time, {cause.sentence}"
    return WorkerQuarantined(worker.vw, sentence)


def _fatal(failure: Failure, kind: str) -> Failure:
    """A failure that a job with this kind of synchronization survives only by a rewind to a checkpoint."""
    if failure.rank is Rank.REPORTED:
        return failure
    why = f"under `{kind}` only the stages hold the weights, which are lost with one of them"
    return replace(failure, sentence=f"{failure.sentence}; {why}", calls_for_rewind=True)


def _nobody_left(cause: Failure | None, *, now: float, clock: Clock | None = None) -> Failure:
    """Failure: all of them are out, mostly because of `cause`; None: all were drained.

    With `clock`: all of those that train from there on, while others wait.
    """
    left = "no virtual worker is left" if clock is None else f"no virtual worker is left that trains at clock {clock}"
    if cause is None:
        sentence = f"{left}: all of them were drained; resume from the newest checkpoint"
        return Failure(Rank.GONE, JobFailed.__name__, sentence, now)
    return replace(cause, sentence=f"{left}; {cause.sentence}", at=now)


def _nobody_back(worker: VirtualWorker, absent: Sequence[AgentId], alone_seconds: float, *, now: float) -> Failure:
    """Failure: no virtual worker trains, and the agents of one that could do not return."""
    sentence = f"no virtual worker is left, and agent {_names(absent)} did not return within {alone_seconds:.0f} s"
    cause = "" if worker.cause is None else f"; {worker.cause.sentence}"
    return Failure(Rank.GONE, JobFailed.__name__, sentence + cause, now)


def _clock_shard_silent(worker: VirtualWorker, error: str, *, now: float) -> Failure:
    """Failure: calls of the clock shard about it have failed for too long."""
    waited = worker.unanswered_seconds(now)
    sentence = f"for {waited:.0f} s the coordinator could not have {worker} {_doing(worker)}: {worker.refusal}"
    return Failure(Rank.GONE, error, sentence, now)


def _waiting_event(worker: VirtualWorker, absent: Sequence[AgentId], *, now: float) -> Waiting | None:
    """Event: what its next incarnation is waiting for, if worth reporting."""
    if worker.refusal:
        awaited = f"the clock shard to have {worker} {_doing(worker)} ({worker.refusal})"
    elif absent:
        awaited = f"agent {_names(absent)} to return with its devices, to restart {worker}"
    else:
        return None
    return Waiting(f"the coordinator waits for {awaited}", now - worker.since)


def _doing(worker: VirtualWorker) -> str:
    return {LifeState.ADMITTING: "admitted", LifeState.LEAVING: "drained"}.get(worker.state, "evicted")


def _names(agents: Sequence[AgentId]) -> str:
    return ", ".join(agents)
