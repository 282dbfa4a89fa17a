"""One job from submission to its end, as a machine without I/O: facts in, instructions out.

The shell (`coordinator.Coordinator`) feeds `JobMachine.handle` with what it hears and the time, and carries out what
comes back. A fact that arrives too late, for example the answer of an inspection that was given up, changes nothing.

Once the job has ended the machine still listens for the end of its processes: `is_settled` tells when nothing of the
job is left, and only then are its devices free again.
"""

from __future__ import annotations

import json
from typing import Any

from hetpipe.coordinator.configs import Assignment, stage_commands
from hetpipe.coordinator.evaluations import Evaluations
from hetpipe.coordinator.exchange import (
    Announce,
    AskBarrier,
    ClocksTold,
    ClusterSeen,
    Input,
    Instruction,
    MemberGone,
    Prepare,
    Prepared,
    SendCommand,
    StopAsked,
    TaskFailed,
    Tick,
    WrappedUp,
    WrapUp,
)
from hetpipe.coordinator.inspections import Inspections, is_to_measure
from hetpipe.coordinator.lifecycle import Lifecycle, Step
from hetpipe.coordinator.patience import Patience
from hetpipe.coordinator.planning import num_devices_wanted
from hetpipe.coordinator.progress import ProgressBoard
from hetpipe.coordinator.requirements import ClusterView, claim_devices, missing
from hetpipe.coordinator.root_cause import Failure, Rank, decision_time, root_cause
from hetpipe.coordinator.stage_table import StageLife, StageState, StageTable, failure_of_exit, failure_of_report
from hetpipe.coordinator.summary import RunRecord, clocks_from_reports, result_object
from hetpipe.errors import DeadlineExceeded, JobFailed, PlanError
from hetpipe.spec.commands import ChildExit, InspectCommand, InspectionResult, InspectionStep, StageNews, StopJobCommand
from hetpipe.spec.events import JobEnded, JobEvent, JobState, StateChanged, StopMode, Submission, Waiting
from hetpipe.spec.ids import JobId
from hetpipe.spec.job import Job
from hetpipe.spec.members import MemberId, MemberInfo
from hetpipe.spec.run import (
    AgentInfo,
    ClockSnapshot,
    StageDone,
    StageEvaluation,
    StageFailed,
    StageProgress,
    StageReady,
    StageWaiting,
)

#: Stages that a sentence names one by one.
_MAX_NAMED = 3


class JobMachine:
    """One job. Not thread-safe; every call gives the monotonic time."""

    def __init__(self, job_id: JobId, job: Job, submission: Submission, *, patience: Patience, now: float) -> None:
        self.job_id = job_id
        self.job = job
        self.submission = submission
        self._patience = patience
        self._lifecycle = Lifecycle(job_id)
        #: When the current state was entered, when it last showed progress, and when its wait was last told.
        self._entered = self._heard = self._noticed = now
        #: When the last progress table was announced.
        self._pictured = now
        self._out: list[Instruction] = []
        #: What the cluster lacks, while it does.
        self._lacks = ""
        #: Claimed devices, by agent, and claimed shards, by index. Empty before the cluster was ready.
        self.agents: tuple[AgentInfo, ...] = ()
        self.shards: tuple[MemberInfo, ...] = ()
        self.stages = StageTable()
        self.clocks: ClockSnapshot | None = None
        #: How the job ended; None before.
        self.ended: JobEnded | None = None
        self._failures: list[Failure] = []
        self._inspections: Inspections | None = None
        self._prepared: Prepared | None = None
        self._board: ProgressBoard | None = None
        self._evaluations: Evaluations | None = None
        #: A task that configures shards is under way: they must not be released before it is over.
        self._preparing = False
        self._stop_now = False
        self._wrapping_up = False
        self._running_seconds = 0.0

    @property
    def state(self) -> JobState:
        """Where the job stands."""
        return self._lifecycle.state

    def is_settled(self, *, now: float) -> bool:
        """True when the job has ended and its processes have, or have had the time to."""
        over = now - self._entered >= self._patience.exit_seconds
        return self.ended is not None and not self._preparing and (self.stages.all_exited or over)

    def may_have_processes(self, *, now: float) -> bool:
        """False when an agent that still has processes of the job should end them."""
        if self.ended is None:
            return True
        return self.state is not JobState.FAILED and now - self._entered < self._patience.exit_seconds

    def handle(self, fact: Input, *, now: float) -> list[Instruction]:  # noqa: C901 - one case per kind of fact
        """Take one fact in.

        Returns:
            What to do, in order.

        Raises:
            InvalidTransition: a bug of this class.
        """
        match fact:
            case ClusterSeen():
                self._cluster_seen(fact.cluster, now=now)
            case InspectionStep() | InspectionResult():
                self._inspection_told(fact, now=now)
            case Prepared():
                self._shards_prepared(fact, now=now)
            case TaskFailed():
                self._task_failed(fact, now=now)
            case StageNews():
                self._stage_reported(fact, now=now)
            case ChildExit():
                self._child_exited(fact, now=now)
            case MemberGone():
                self._member_gone(fact, now=now)
            case StopAsked():
                self._stop_asked(fact.mode, now=now)
            case ClocksTold():
                self.clocks = fact.clocks
            case WrappedUp():
                self._wrapped_up(fact.clocks, now=now)
            case Tick():
                self._tick(now=now)
        out, self._out = self._out, []
        return out

    # -- on the way to training ------------------------------------------------------------------------------------

    def _cluster_seen(self, cluster: ClusterView, *, now: float) -> None:
        if self.state is not JobState.SUBMITTED:
            return
        self._lacks = missing(self.job, cluster)
        if self._lacks:
            return
        self.agents = claim_devices(num_devices_wanted(self.job), cluster.agents)
        self.shards = cluster.shards[: self.job.parameter_servers.count]
        self._step(Step.CLUSTER_READY, now=now)
        self._inspections = Inspections(self.agents, to_measure=is_to_measure(self.job))
        self._inspect(self._inspections, now=now)

    def _inspect(self, inspections: Inspections, *, now: float) -> None:
        """Ask the next agent, or go on when there is none."""
        self._heard = now
        try:
            asked = inspections.next()
        except PlanError as error:
            self._fail(Failure(Rank.REPORTED, PlanError.__name__, str(error), now), now=now)
            return
        if asked is not None:
            job_json = json.dumps(self.job.model_dump(mode="json"))
            command = InspectCommand(
                job_id=self.job_id,
                job_json=job_json,
                import_path=self.submission.import_path,
                run_dir=self.submission.run_dir,
                with_model=asked.with_model,
                measure=asked.measure,
            )
            self._out.append(SendCommand(asked.agent.agent, command))
            return
        self._step(Step.INSPECTED, now=now)
        self._preparing = True
        self._out.append(Prepare(inspections.inspected, self.agents, self.shards))

    def _inspection_told(self, told: InspectionStep | InspectionResult, *, now: float) -> None:
        inspections = self._inspections
        if self.state is not JobState.INSPECTING or inspections is None:
            return
        match told:
            case InspectionStep(step=step):
                self._heard = now
                inspections.heard(step)
            case InspectionResult(error="") as result:
                inspections.add(result)
                self._inspect(inspections, now=now)
            case InspectionResult(error=error, problems=problems):
                self._fail(Failure(Rank.REPORTED, error, "; ".join(problems), now, problems), now=now)

    def _shards_prepared(self, prepared: Prepared, *, now: float) -> None:
        self._preparing = False
        if self.state is not JobState.PLANNING:
            # Given up meanwhile: the shards have just been configured for nothing.
            self._wrap_up()
            return
        self._prepared = prepared
        self.job = prepared.run.job
        self._evaluations = Evaluations([vw.index for vw in prepared.plan.virtual_workers])
        self._step(Step.PREPARED, now=now)
        assignment = Assignment(
            job=self.job,
            submission=self.submission,
            plan=prepared.plan,
            agents=self.agents,
            shards=self.shards,
            emulations=prepared.run.emulations,
        )
        for command in stage_commands(assignment):
            stage = prepared.plan.stage(command.config.vw, command.config.stage)
            self.stages.add(command.key, stage.agent, command.config.host)
            self._out.append(SendCommand(stage.agent, command))

    def _task_failed(self, failed: TaskFailed, *, now: float) -> None:
        if failed.task == "prepare":
            self._preparing = False
            if self.state is not JobState.PLANNING:
                # Given up meanwhile: some shards may have been configured for nothing.
                self._wrap_up()
                return
        else:
            # The clock shard did not take the barrier. If it is gone, its lease will tell.
            self._add_failure(Failure(Rank.ECHO, failed.error, failed.sentence, now, failed.problems), now=now)
            return
        self._fail(Failure(Rank.REPORTED, failed.error, failed.sentence, now, failed.problems), now=now)

    # -- while it trains -------------------------------------------------------------------------------------------

    def _stage_reported(self, news: StageNews, *, now: float) -> None:
        life = self.stages.get(news.key)
        if life is None or self._prepared is None:
            return
        match news.report:
            case StageReady(pid=pid, link=link):
                life.pid = pid
                life.link = link
                life.state = StageState.READY
            case StageProgress() as progress:
                if self._board is not None:
                    self._board.add(news.key.vw, news.key.stage, progress, now=now)
            case StageWaiting(sentence=sentence, seconds=seconds):
                self._announce(Waiting(sentence, seconds))
            case StageEvaluation() as part:
                whole = None if self._evaluations is None else self._evaluations.add(news.key.vw, part)
                if whole is not None:
                    self._announce(whole)
            case StageFailed() as report:
                life.state = StageState.FAILED
                self._add_failure(failure_of_report(life, report, now=now), now=now)
            case StageDone(reason=reason):
                life.state = StageState.DONE
                life.done_reason = reason
        self._advance(now=now)

    def _child_exited(self, news: ChildExit, *, now: float) -> None:
        life = self.stages.get(news.key)
        if life is None or life.exited:
            return
        life.exited = True
        life.pid = news.pid
        failure = failure_of_exit(life, news, now=now)
        if failure is not None:
            self._add_failure(failure, now=now)
        self._advance(now=now)

    def _member_gone(self, gone: MemberGone, *, now: float) -> None:
        agents = [agent.agent for agent in self.agents if MemberId(agent.agent) == gone.member]
        for agent in agents:
            self.stages.lose_agent(agent)
        if agents or any(shard.id == gone.member for shard in self.shards):
            self._add_failure(Failure(Rank.GONE, JobFailed.__name__, gone.sentence, now), now=now)
        self._advance(now=now)

    def _advance(self, *, now: float) -> None:
        """Go on as far as the stages allow."""
        prepared = self._prepared
        if self.state is JobState.STARTING and prepared is not None and self.stages.all_ready:
            self._board = ProgressBoard(prepared.plan, prepared.data, prepared.start, self.job.sync.D, now=now)
            self._step(Step.ALL_READY, now=now, remark=self.stages.links)
        if self.state not in {JobState.RUNNING, JobState.STOPPING}:
            return
        at_end = prepared is not None and self.stages.all_done
        stopped = self._stop_now and not self._preparing and self.stages.all_exited
        if at_end or stopped:
            self._wrap_up(now=now)

    # -- towards the end -------------------------------------------------------------------------------------------

    def _stop_asked(self, mode: StopMode, *, now: float) -> None:
        if self.state.is_terminal:
            return
        before = self._lifecycle.state
        self._step(Step.STOP_ASKED, now=now)
        if mode is StopMode.NOW or before not in {JobState.RUNNING, JobState.STOPPING}:
            # Before training there is nothing to write down.
            self._stop_now = True
            self._stop_processes()
        elif before is JobState.RUNNING and self._prepared is not None:
            self._out.append(AskBarrier(self._prepared.plan.term, self.shards[0]))
        self._advance(now=now)

    def _wrap_up(self, *, now: float | None = None) -> None:
        """Release the shards, once; the answer ends the job if it has not ended yet."""
        if self._wrapping_up:
            return
        self._wrapping_up = True
        if self._board is not None and now is not None:
            self._running_seconds = self._board.running_seconds(now=now)
        self._out.append(WrapUp(self.shards))

    def _wrapped_up(self, clocks: ClockSnapshot | None, *, now: float) -> None:
        if self.state not in {JobState.RUNNING, JobState.STOPPING}:
            return
        self.clocks = clocks or self.clocks
        at_end = self._prepared is not None and self.stages.all_done and not self.stages.was_stopped
        state = self._step(Step.END_REACHED if at_end else Step.STOP_REACHED, now=now)
        self._end(JobEnded(state, result=self._result()))

    def _result(self) -> dict[str, Any] | None:
        if self._prepared is None or self._board is None:
            return None
        prepared, reports = self._prepared, self._board.reports
        clocks = self.clocks or clocks_from_reports(prepared.plan, prepared.start, reports.values())
        record = RunRecord(
            run_dir=self.submission.run_dir,
            plan=prepared.plan,
            start=prepared.start,
            clocks=clocks,
            reports=reports,
            evaluation=self._evaluations.latest if self._evaluations else None,
            running_seconds=self._running_seconds,
            staleness=self.job.sync.D,
        )
        return result_object(record)

    def _add_failure(self, failure: Failure, *, now: float) -> None:
        if not self.state.is_terminal and not self._stop_now and not self._wrapping_up:
            self._failures.append(failure)
            self._decide(now=now)

    def _decide(self, *, now: float) -> None:
        """Name the cause of what went wrong, once it is time."""
        patience = self._patience
        when = decision_time(self._failures, settle_seconds=patience.settle_seconds, echo_seconds=patience.echo_seconds)
        if now >= when:
            self._fail(root_cause(self._failures), now=now)

    def _fail(self, failure: Failure, *, now: float) -> None:
        self._step(Step.FAIL, now=now)
        self._end(JobEnded(JobState.FAILED, failure.sentence, failure.error, failure.problems))
        self._stop_processes()
        if self.shards and not self._preparing:
            self._wrap_up()

    def _end(self, ended: JobEnded) -> None:
        self.ended = ended
        self._announce(ended)

    def _stop_processes(self) -> None:
        for agent in self.agents:
            self._out.append(SendCommand(agent.agent, StopJobCommand(self.job_id)))

    # -- time ------------------------------------------------------------------------------------------------------

    def _tick(self, *, now: float) -> None:
        if self.state.is_terminal:
            return
        if self._failures and not self._wrapping_up:
            self._decide(now=now)
            return
        if self._board is not None and now - self._pictured >= self._patience.picture_seconds:
            self._pictured = now
            self._announce(self._board.table(self.clocks, now=now))
        if self.state is JobState.RUNNING:
            return
        silent = now - self._heard
        limit, error = self._limit()
        if self.state is JobState.STOPPING and self._stop_now and silent >= limit:
            self._wrap_up(now=now)
        elif silent >= limit:
            sentence = (
                f"the coordinator gave up job {self.job_id} after {silent:.0f} s of waiting for {self._awaited()}"
            )
            self._fail(Failure(Rank.REPORTED, error, sentence, now), now=now)
        elif now - self._noticed >= self._patience.notice_seconds:
            self._noticed = now
            waited = now - self._entered
            self._announce(Waiting(f"the coordinator waits for {self._awaited()} (job {self.job_id})", waited))

    def _limit(self) -> tuple[float, str]:
        """How long the current state may last without progress, and the error after that."""
        patience, late = self._patience, DeadlineExceeded.__name__
        match self.state:
            case JobState.SUBMITTED:
                return patience.members_seconds, PlanError.__name__
            case JobState.INSPECTING:
                return patience.inspection_seconds, late
            case JobState.PLANNING:
                return patience.preparation_seconds, late
            case JobState.STARTING:
                return patience.ready_seconds, late
            case _:
                return patience.exit_seconds if self._stop_now else patience.stop_seconds, late

    def _awaited(self) -> str:
        """For whom the coordinator waits, and for what."""
        match self.state:
            case JobState.SUBMITTED:
                return self._lacks or "a look at the cluster"
            case JobState.INSPECTING:
                return "the inspection of the model" if self._inspections is None else self._inspections.awaited
            case JobState.PLANNING:
                return f"the parameter servers at {', '.join(shard.address for shard in self.shards)} to take the plan"
            case JobState.STARTING:
                return f"these to become ready: {_some(self.stages.unready())}"
            case _ if self._stop_now:
                return "all stages to end"
            case _:
                return "all stages to reach the barrier of the stop"

    # -- small things ----------------------------------------------------------------------------------------------

    def _step(self, step: Step, *, now: float, remark: str = "") -> JobState:
        before = self.state
        state = self._lifecycle.take(step, now=now)
        self._entered = self._heard = self._noticed = now
        if state is not before:
            self._announce(StateChanged(state, remark))
        return state

    def _announce(self, event: JobEvent) -> None:
        self._out.append(Announce(event))


def _some(lives: list[StageLife]) -> str:
    """The first few of them."""
    named, rest = lives[:_MAX_NAMED], len(lives) - _MAX_NAMED
    return ", ".join(str(life) for life in named) + (f" and {rest} more" if rest > 0 else "")
