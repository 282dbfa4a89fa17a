"""Adoption of a running job by a new coordinator, based on the state at its clock shard. Pure.

The decision log determines which incarnations count, the agents which processes exist. An incarnation that counts is
assumed ready; `Returning` then compares it with the registration of each agent, and detects what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hetpipe.decide.elastic.virtual_workers import VirtualWorker
from hetpipe.decide.lifecycle.configs import Assignment, stage_commands
from hetpipe.decide.lifecycle.exchange import MemberGone, Prepared, SendCommand
from hetpipe.decide.lifecycle.patience import Patience
from hetpipe.decide.lifecycle.planning import PlannedRun
from hetpipe.decide.lifecycle.root_cause import Failure, Rank
from hetpipe.decide.lifecycle.stage_table import StageLife, StageState, StageTable
from hetpipe.decide.sync.segment import STOP
from hetpipe.errors import JobFailed
from hetpipe.values.commands import ChildExit, KeyedStageReport, StageKey, StopVirtualWorkerCommand
from hetpipe.values.events import JobState
from hetpipe.values.ids import AgentId, Incarnation, VirtualWorkerIndex
from hetpipe.values.life_state import COMPUTING, LifeState
from hetpipe.values.members import MemberId, MemberInfo, MemberRole
from hetpipe.values.run import StageDone, StageFailed
from hetpipe.values.run_document import LifeSeen, RunDescription

#: Announcement to followers.
ADOPTED = "a new coordinator leads the job, which went on without one"


def state_of(description: RunDescription) -> JobState:
    """State of the job: it runs from the publication of the initial weights on."""
    if STOP in description.reasons:
        return JobState.STOPPING
    clocks, start = description.clocks, description.run.start
    return JobState.RUNNING if clocks.published >= start.clock else JobState.STARTING


def prepared_of(assignment: Assignment, description: RunDescription) -> Prepared:
    """The result of the task that prepared the run."""
    run = description.run
    planned = PlannedRun(assignment.job, run.plan, emulations=run.emulations, known_proof=run.proof)
    return Prepared(planned, run.data, run.start)


def workers_of(description: RunDescription, *, now: float) -> dict[VirtualWorkerIndex, VirtualWorker]:
    """Every virtual worker of the plan according to the decision log, in index order."""
    seen = {life.vw: life for life in description.lives}
    run = description.run
    return {
        vw.index: worker_of(vw.index, seen.get(vw.index), stays_out=vw.index in run.out, now=now)
        for vw in run.plan.virtual_workers
    }


def worker_of(vw: VirtualWorkerIndex, seen: LifeSeen | None, *, stays_out: bool, now: float) -> VirtualWorker:
    """One virtual worker; one that is not in the log was about to join the run, and must still be admitted.

    Each earlier incarnation counts as a death, but not as an early one. A virtual worker that was drained on request
    but is active is drained again if necessary.
    """
    if seen is None:
        state = LifeState.OUT if stays_out else LifeState.AWAITING
        return VirtualWorker(vw, now, state, stays_out=stays_out)
    if seen.standing == "gone" and not stays_out:
        return _gone(vw, seen.incarnation, now=now)
    state = _state_of(seen, stays_out=stays_out)
    is_to_ask = stays_out and state in {LifeState.LEAVING, LifeState.ENDING} and not seen.leaving
    return VirtualWorker(
        vw,
        now,
        state,
        seen.incarnation,
        deaths=seen.incarnation,
        stays_out=stays_out,
        sent_away=state is LifeState.ENDING,
        ask_at=now if is_to_ask else None,
    )


def _state_of(seen: LifeSeen, *, stays_out: bool) -> LifeState:
    """State of an incarnation that needs no successor."""
    match seen.standing:
        case "member":
            return LifeState.LEAVING if seen.leaving or stays_out else LifeState.READY
        case "newcomer":
            return LifeState.ENDING if stays_out else LifeState.STARTING
        case "gone":
            return LifeState.OUT


def _gone(vw: VirtualWorkerIndex, incarnation: Incarnation, *, now: float) -> VirtualWorker:
    """A virtual worker whose newest incarnation no longer counts; its remaining processes must be ended."""
    sentence = f"virtual worker {vw} was lost while an earlier coordinator led"
    cause = Failure(Rank.GONE, JobFailed.__name__, sentence, now)
    return VirtualWorker(
        vw, now, LifeState.ENDING, incarnation, deaths=incarnation + 1, failures=[cause], cause=cause, evicted=True
    )


def fill(
    stages: StageTable,
    assignment: Assignment,
    workers: Mapping[VirtualWorkerIndex, VirtualWorker],
    *,
    now: float,
) -> None:
    """Add the processes of the newest incarnations, running or ended."""
    for command in stage_commands(assignment):
        config = command.config
        worker = workers[config.vw]
        key = StageKey(command.job_id, config.vw, config.stage, worker.incarnation, config.plan.term)
        stages.add(key, assignment.plan.stage(config.vw, config.stage).agent, config.host, now=now)
        life = stages.get(key)
        assert life is not None
        life.exited = worker.state in {LifeState.AWAITING, LifeState.OUT}
        life.state = StageState.READY if worker.state in COMPUTING else StageState.STARTING


def not_registered(assignment: Assignment) -> dict[MemberId, MemberGone]:
    """The message for each member of a job that has not registered with a new coordinator, by name."""
    members = [shard.id for shard in assignment.shards] + [MemberId(agent.agent) for agent in assignment.agents]
    return {member: MemberGone(member, f"{member} did not register with the new coordinator") for member in members}


MissingFact = MemberGone | KeyedStageReport | ChildExit
"""A fact that no other process will report."""


class Returning:
    """Members of an adopted job that have not registered yet, and what registered ones lack. Not thread-safe."""

    def __init__(
        self,
        assignment: Assignment,
        stages: StageTable,
        description: RunDescription,
        *,
        patience: Patience,
        now: float,
    ) -> None:
        """Start without registrations.

        Args:
            assignment: the plan and its members.
            stages: the processes; not modified.
            description: determines whether the run is over, and why.
            patience: timeouts for registrations, and for reports of the end of a process.
            now: monotonic seconds.
        """
        self._job_id = assignment.plan.job_id
        self._stages = stages
        self._over = description.clocks if description.is_over else None
        self._return_at = now + patience.echo_seconds
        self._settle_seconds = patience.settle_seconds
        self._awaited = not_registered(assignment)
        #: Processes missing at their agents, and until when their end may be reported.
        self._missing: dict[StageKey, float] = {}

    def seen(self, info: MemberInfo, *, now: float) -> list[SendCommand]:
        """Process a registration; returns the resulting facts. Only the first one of a process counts."""
        if info.id not in self._awaited:
            return []
        del self._awaited[info.id]
        if info.role is not MemberRole.AGENT:
            return []
        agent = AgentId(info.id)
        for life in self._stages:
            if life.agent == agent and not life.exited and life.key not in info.stages:
                self._missing[life.key] = now + self._settle_seconds
        older = {(key.vw, key.term, key.incarnation) for key in info.stages if self._is_older(key)}
        return [
            SendCommand(agent, StopVirtualWorkerCommand(self._job_id, vw, incarnation, term))
            for vw, term, incarnation in sorted(older)
        ]

    def check(self, *, now: float) -> Iterator[MissingFact]:
        """The facts that are certain at this time."""
        for key, until in list(self._missing.items()):
            if now >= until:
                del self._missing[key]
                life = self._stages.get(key)
                if life is not None and not life.exited:
                    yield from self._end_of(life)
        if self._awaited and now >= self._return_at:
            missing, self._awaited = self._awaited, {}
            yield from missing.values()

    def _is_older(self, key: StageKey) -> bool:
        newest = next((life.key for life in self._stages.of(key.vw)), key)
        return key.job_id == self._job_id and (key.term, key.incarnation) < (newest.term, newest.incarnation)

    def _end_of(self, life: StageLife) -> Iterator[KeyedStageReport | ChildExit]:
        """The fact that a process has ended, when no report of it can come any more."""
        if life.state in {StageState.STARTING, StageState.READY}:
            yield KeyedStageReport(life.key, self._last_report(life))
        yield ChildExit(life.key, life.pid, 0, ordered=True)

    def _last_report(self, life: StageLife) -> StageDone | StageFailed:
        if self._over is not None:
            return StageDone(self._over.published, self._over.barrier_reason)
        sentence = f"{life} was gone when a new coordinator adopted the job"
        return StageFailed(JobFailed.__name__, sentence, secondary=True)
