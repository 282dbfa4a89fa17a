"""How a virtual worker goes on from state to state, as far as it goes by itself. The half of `worker_lives` that acts.

Nothing here hears anything: `worker_lives` notes the facts and then lets every virtual worker go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hetpipe.decide.elastic import worker_orders, worker_words
from hetpipe.decide.elastic.worker_life import LifeStep, WorkerLife
from hetpipe.decide.lifecycle.configs import Assignment
from hetpipe.decide.lifecycle.exchange import Announce, Instruction, SendCommand
from hetpipe.decide.lifecycle.patience import Patience
from hetpipe.decide.lifecycle.root_cause import Failure, Rank, root_cause
from hetpipe.decide.lifecycle.stage_table import StageTable
from hetpipe.values.commands import StartStageCommand
from hetpipe.values.events import WorkerLeft, WorkerRejoined
from hetpipe.values.ids import AgentId, Incarnation, VirtualWorkerIndex
from hetpipe.values.life_state import LifeState

#: States in which the clock shard is asked for something.
_ASKING = frozenset({LifeState.LEAVING, LifeState.ENDING, LifeState.ADMITTING})

Told = Instruction | Failure
"""What comes out: an instruction for the shell, or why the job cannot go on."""


class WorkerSteps:
    """All virtual workers of one job, and what each does next. Not thread-safe; every call gives the monotonic time."""

    def __init__(
        self,
        assignment: Assignment,
        stages: StageTable,
        *,
        patience: Patience,
        now: float,
        adopted: Mapping[VirtualWorkerIndex, WorkerLife] | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            assignment: the plan and who carries it out.
            stages: the processes; filled here, or of the `adopted` lives.
            patience: bounds of waits that no user sets.
            now: monotonic seconds.
            adopted: the virtual workers as an earlier coordinator has left them, when no agent has registered yet.
        """
        self._assignment = assignment
        self._stages = stages
        self._patience = patience
        self._survive = assignment.job.survive
        self._workers = {
            vw.index: WorkerLife(vw.index, now) if adopted is None else adopted[vw.index]
            for vw in assignment.plan.virtual_workers
        }
        #: Agents of the plan that are no members now, and those that are about to go: neither gets new stages.
        self._absent: set[AgentId] = set() if adopted is None else {agent.agent for agent in assignment.agents}
        self._departing: set[AgentId] = set()
        #: Those of the absent that went on notice: they are expected back, whenever that is.
        self._on_leave: set[AgentId] = set()
        #: No new lives: a user wants the job to stop.
        self._is_closing = False
        #: Nothing is done about failures any more.
        self._is_halted = False
        #: Parameter servers are missing: a new life would only fail, too.
        self.is_on_hold = False
        #: Since when the run is known to be over.
        self._over_at: float | None = None
        self._out: list[Told] = []

    def __iter__(self) -> Iterator[WorkerLife]:
        """In index order."""
        return iter(self._workers.values())

    @property
    def is_over(self) -> bool:
        """Whether a stage came to the end of the run."""
        return self._stages.is_run_over

    @property
    def _is_needless(self) -> bool:
        """Whether nobody needs another life."""
        return self._is_closing or self.is_over

    # -- a life goes wrong -------------------------------------------------------------------------------------------

    def _fails(self, worker: WorkerLife, failure: Failure, *, now: float) -> None:
        """Something of the newest life went wrong, or of one that is lost already."""
        if self._is_halted or (worker.sent_away and failure.rank is not Rank.REPORTED):
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

    def _get_on(self, worker: WorkerLife, *, now: float) -> None:
        if worker.state is LifeState.STARTING and self._stages.all_ready(worker.vw):
            worker.take(LifeStep.GOT_READY, now=now)
            if worker.incarnation:
                self._out.append(Announce(WorkerRejoined(worker.vw, worker.incarnation)))
        if self._stages.all_done(worker.vw):
            worker.take(LifeStep.GOT_DONE, now=now)
        elif worker.state is LifeState.READY and self._stages.all_left(worker.vw):
            # An earlier coordinator has asked it to go.
            worker.take(LifeStep.DRAIN_ASKED, now=now)
        elif worker.state is LifeState.STARTING and worker.incarnation and self._is_over_for(now):
            # It cannot have joined: who has tells of its end at about the same time.
            worker.take(LifeStep.GIVEN_UP, now=now)
            self._kill(worker)

    def _is_over_for(self, now: float) -> bool:
        """Whether the run has been over for long enough to have heard it from everybody."""
        if self._over_at is None and self.is_over:
            self._over_at = now
        return self._over_at is not None and now - self._over_at >= self._patience.settle_seconds

    def _leave(self, worker: WorkerLife, *, now: float) -> None:
        """Go once the barrier is behind all its stages, and the processes have ended or had the time to."""
        if self._stages.all_done(worker.vw):
            worker.take(LifeStep.GOT_DONE, now=now)
            return
        stages = self._stages.of(worker.vw)
        if not self._stages.all_left(worker.vw):
            return
        if not all(life.exited or now - life.heard >= self._patience.exit_seconds for life in stages):
            return
        if not self._has_exited(worker):
            self._kill(worker)
        worker.take(LifeStep.LEFT, now=now)
        worker.heard_from_shard()
        self._has_left(worker, now=now)

    def _has_left(self, worker: WorkerLife, *, now: float) -> None:
        """It is between two lives because it was asked to go: if it comes back, then without a pause."""
        worker.returns_at = now
        if not worker.stays_out:
            self._out.append(Announce(WorkerLeft(worker.vw, worker.incarnation, returns=True)))

    def _end(self, worker: WorkerLife, *, now: float) -> None:
        is_gone = self._has_exited(worker) or now - worker.since >= self._patience.exit_seconds
        if not (worker.evicted and is_gone and (worker.sent_away or worker.cause is not None)):
            return
        hopeless = worker.is_hopeless(self._survive.restarts) and not worker.sent_away and not worker.stays_out
        if self._is_needless or hopeless:
            worker.take(LifeStep.GIVEN_UP, now=now)
            if not self._is_needless and worker.cause is not None:
                self._out.append(Announce(worker_words.quarantined(worker, worker.cause)))
            self._check_left(now=now)
            return
        worker.take(LifeStep.ENDED, now=now)
        if worker.sent_away:
            self._has_left(worker, now=now)
        else:
            worker.returns_at = now + min(worker.pause_seconds, self._survive.backoff.total_seconds())

    def _return(self, worker: WorkerLife, *, now: float) -> None:
        if self._is_needless or worker.stays_out:
            worker.take(LifeStep.GIVEN_UP, now=now)
            if worker.stays_out:
                self._out.append(Announce(WorkerLeft(worker.vw, worker.incarnation, returns=False)))
            self._check_left(now=now)
        elif now >= worker.returns_at and not self.is_on_hold and not self._away_of(worker):
            worker.take(LifeStep.RETURNS, now=now)
            worker.incarnation = Incarnation(worker.incarnation + 1)
            worker.ask_at = now

    def _check_left(self, *, now: float) -> None:
        """Without anybody left to train, or to come to the barrier of a stop, the job has failed."""
        if self.is_over or any(worker.state is not LifeState.OUT for worker in self):
            return
        causes = [worker.cause for worker in self if worker.cause is not None]
        self._out.append(worker_words.nobody_left(root_cause(causes) if causes else None, now=now))

    def _agents_of(self, worker: WorkerLife) -> frozenset[AgentId]:
        """The agents on whose devices its newest life is, or its next one will be."""
        return frozenset(stage.agent for stage in self._assignment.plan.virtual_workers[worker.vw].stages)

    def _away_of(self, worker: WorkerLife) -> list[AgentId]:
        """Of these, the ones that get no stages now."""
        return sorted(self._agents_of(worker) & (self._absent | self._departing))

    def _start(self, command: StartStageCommand, *, now: float) -> SendCommand:
        agent = self._assignment.plan.stage(command.config.vw, command.config.stage).agent
        self._stages.add(command.key, agent, command.config.host, now=now)
        return SendCommand(agent, command)
