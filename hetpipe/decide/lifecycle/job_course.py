"""What a job's machine knows of the job, and how it ends. The half of `job_machine` that hears nothing.

Once the job has ended its processes have yet to: `is_settled` tells when nothing of the job is left, and only then are
its devices free again.
"""

from __future__ import annotations

from collections.abc import Iterable

from hetpipe.decide.elastic.virtual_workers import VirtualWorkers
from hetpipe.decide.lifecycle.conditions import ConditionBoard
from hetpipe.decide.lifecycle.evaluations import EvaluationHistory
from hetpipe.decide.lifecycle.exchange import Announce, Instruction, Prepared, Release, SendCommand, WrapUp
from hetpipe.decide.lifecycle.lifecycle import Lifecycle, Step
from hetpipe.decide.lifecycle.lost_disks import LostDisks
from hetpipe.decide.lifecycle.patience import Patience
from hetpipe.decide.lifecycle.planning import PlannedRun
from hetpipe.decide.lifecycle.rewinds import Rewinds
from hetpipe.decide.lifecycle.root_cause import Failure
from hetpipe.decide.lifecycle.setting_out import SettingOut
from hetpipe.decide.lifecycle.stage_table import StageTable
from hetpipe.decide.lifecycle.training import Training
from hetpipe.job.file import Job
from hetpipe.values.commands import (
    AgentNews,
    InspectionPhase,
    InspectionResult,
    InspectionStep,
    LinkAwaited,
    LinkResult,
    StageKey,
    StopJobCommand,
)
from hetpipe.values.conditions import consequence
from hetpipe.values.events import (
    JobEnded,
    JobEvent,
    JobState,
    NumberedEvent,
    QueuePlace,
    StateChanged,
    Submission,
    WorkerStatus,
)
from hetpipe.values.ids import AgentId, JobId
from hetpipe.values.members import MemberInfo
from hetpipe.values.plan import ProofReport
from hetpipe.values.run import AgentInfo, ClockSnapshot


class JobCourse:
    """One job. Not thread-safe; every call gives the monotonic time."""

    def __init__(self, job_id: JobId, job: Job, submission: Submission, *, patience: Patience, now: float) -> None:
        self.job_id = job_id
        self._way = SettingOut(job_id, job, submission)
        self._patience = patience = patience.of(job)
        self._lifecycle = Lifecycle(job_id)
        #: When the current state was entered, when it last showed progress, and when its wait was last told.
        self._entered = self._heard = self._noticed = now
        self._out: list[Instruction] = []
        #: Where it stood in the queue when that was last told.
        self._told_place: QueuePlace | None = None
        self.stages = StageTable()
        #: How the job ended; None before.
        self.ended: JobEnded | None = None
        self._failures: list[Failure] = []
        #: What endangers the job, or has.
        self.conditions = ConditionBoard()
        #: What came of the evaluations.
        self.evaluations = EvaluationHistory()
        self._rewinds = Rewinds(job, submission, patience)
        #: What the parameter servers say of the job since they were told of it.
        self._disks = LostDisks()
        self._prepared: Prepared | None = None
        #: From the moment the stages were told to start.
        self._training: Training | None = None
        self._stop_now = False
        #: When to ask for the barrier of a stop; None while nobody wants one, or it was asked for.
        self._ask_barrier_at: float | None = None
        #: Why the job takes a barrier to wait for agents that are about to go; None while it does not.
        self._notice: Failure | None = None
        self._wrapping_up = False
        self._running_seconds = 0.0

    @property
    def job(self) -> Job:
        """The job as it was submitted; once it is prepared, as it is carried out."""
        return self._way.job

    @property
    def submission(self) -> Submission:
        """How it was submitted."""
        return self._way.submission

    @property
    def agents(self) -> tuple[AgentInfo, ...]:
        """Claimed devices, by agent; none before the cluster was ready."""
        return self._way.agents

    @property
    def shards(self) -> tuple[MemberInfo, ...]:
        """Claimed shards, by index; none before the cluster was ready."""
        return self._way.shards

    @property
    def state(self) -> JobState:
        """Where the job stands."""
        return self._lifecycle.state

    @property
    def queue_place(self) -> QueuePlace | None:
        """Where it stands in the queue; None unless it is pending."""
        return self._way.place if self.state is JobState.PENDING else None

    @property
    def rewinds(self) -> int:
        """How often it went back to a checkpoint."""
        return self._rewinds.count

    @property
    def run(self) -> PlannedRun | None:
        """How it was planned; None before it was."""
        return None if self._prepared is None else self._prepared.run

    @property
    def proof(self) -> ProofReport | None:
        """What was proven of the model; None before that, and where nobody knows."""
        return None if self.run is None else self.run.proof

    @property
    def clocks(self) -> ClockSnapshot | None:
        """The newest clocks; None before the clock shard told any."""
        return None if self._training is None else self._training.clocks

    @property
    def lives(self) -> VirtualWorkers | None:
        """The virtual workers; None before they were told to start."""
        return None if self._training is None else self._training.lives

    @property
    def workers(self) -> tuple[WorkerStatus, ...]:
        """The virtual workers; none before they were told to start."""
        return () if self._training is None else self._training.lives.statuses

    def is_settled(self, *, now: float) -> bool:
        """True when the job has ended and its processes have, or have had the time to."""
        over = now - self._entered >= self._patience.exit_seconds
        return self.ended is not None and not self._way.is_preparing and (self.stages.all_exited or over)

    def recall(self, events: Iterable[NumberedEvent]) -> None:
        """Begin with what followers were told by earlier coordinators, in order."""
        self.conditions.recall(events)
        self.evaluations.recall(events)

    def may_have_processes(self, *, now: float) -> bool:
        """False when an agent that still has processes of the job should end them."""
        if self.ended is None:
            return True
        return self.state is not JobState.FAILED and now - self._entered < self._patience.exit_seconds

    def may_tell(self, agent: AgentId, news: AgentNews) -> bool:
        """Whether it is for `agent` to tell `news`: of a process that the plan puts on its node, or as it was asked.

        News of what the job does not have, or not any more, have no effect, whoever tells them.
        """
        if isinstance(news, InspectionPhase | InspectionStep | InspectionResult):
            return self._way.is_asked(agent)
        if isinstance(news, LinkAwaited | LinkResult):
            return self._way.may_tell_link(agent, news)
        life = self.stages.get(news.key)
        return life is None or life.agent == agent

    def may_be_end(self, agent: AgentId, stage: StageKey) -> bool:
        """Whether the process that `agent` starts to measure a link is to be called that."""
        return self._way.may_be_end(agent, stage)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _wrap_up(self, *, now: float | None = None) -> None:
        """Ask for the last clocks, once; the answer ends the job if it has not ended yet, and releases the shards."""
        if self._wrapping_up:
            return
        self._wrapping_up = True
        if self._training is not None and now is not None:
            self._running_seconds = self._training.running_seconds(now=now)
        self._out.append(WrapUp(self.shards))

    def _wrapped_up(self, clocks: ClockSnapshot | None, *, now: float) -> None:
        if self.state in {JobState.RUNNING, JobState.STOPPING}:
            self._end_well(clocks, now=now)
        # Not before the end is told: a coordinator that dies in between finds the job again.
        self._out.append(Release(self.shards))

    def _end_well(self, clocks: ClockSnapshot | None, *, now: float) -> None:
        """The run is over, or was stopped."""
        result = None
        if self._training is not None:
            self._training.clocks = clocks or self._training.clocks
            result = self._training.result(
                self.submission.first_run_dir,
                self._running_seconds,
                rewinds=self._rewinds.count,
                conditions=self.conditions.all,
                evaluations=self.evaluations,
            )
        is_stopped = self._training is None or self._training.is_stopped
        state = self._step(Step.STOP_REACHED if is_stopped else Step.END_REACHED, now=now)
        self._end(JobEnded(state, result=result, conditions=self.conditions.all))

    def _fail(self, failure: Failure, *, now: float) -> None:
        self._step(Step.FAIL, now=now)
        conditions = self.conditions.all
        sentence = consequence(failure.sentence, failure.error, conditions)
        self._end(JobEnded(JobState.FAILED, sentence, failure.error, failure.problems, conditions=conditions))
        self._stop_processes()
        if self.shards and not self._way.is_preparing:
            self._wrap_up()

    def _end(self, ended: JobEnded) -> None:
        self.ended = ended
        if self._training is not None:
            self._training.lives.halt()
        self._announce(ended)

    def _stop_processes(self) -> None:
        if self._training is not None:
            self._training.lives.halt()
        for agent in self.agents:
            self._out.append(SendCommand(agent.agent, StopJobCommand(self.job_id)))

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
