"""The state machine of one job from submission to its end, without I/O: facts in, instructions out.

The shell (`coordinator.Coordinator`) passes facts and the time to `JobMachine.handle`, and executes the instructions
returned. Late facts, for example the answer of an abandoned inspection, have no effect.

The table of states is `lifecycle.py`. Three parts of a job are objects of their own, with facts in and outputs out like
this one: `JobPreparation` until the job is planned, `JobTraining` while there are processes, `Rewinds` during a rewind
to a checkpoint. After the end of the job its processes still have to end: only when `is_settled` is true are its
devices free again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hetpipe.decide.elastic.repartitions import Repartitions
from hetpipe.decide.elastic.virtual_workers import VirtualWorkers, WorkersInput
from hetpipe.decide.lifecycle import adoption
from hetpipe.decide.lifecycle.conditions import ConditionBoard
from hetpipe.decide.lifecycle.configs import Assignment, assignment_of
from hetpipe.decide.lifecycle.endings import early_end
from hetpipe.decide.lifecycle.evaluations import EvaluationHistory
from hetpipe.decide.lifecycle.exchange import (
    AgentDeparts,
    Announce,
    ConditionsReported,
    FetchClocks,
    FinalClocks,
    Input,
    Instruction,
    MemberGone,
    MemberRegistered,
    NewWorker,
    Prepared,
    Release,
    RequestBarrier,
    ResourcesOffered,
    SendCommand,
    ShardHeartbeat,
    StopRequested,
    TaskFailed,
    Tick,
)
from hetpipe.decide.lifecycle.lifecycle import TABLE, JobStep, Lifecycle
from hetpipe.decide.lifecycle.patience import Patience
from hetpipe.decide.lifecycle.planning import PlannedRun, num_devices_wanted
from hetpipe.decide.lifecycle.preparation import JobPreparation, PreparationInput, PreparationOutput
from hetpipe.decide.lifecycle.rewinds import Rewinds
from hetpipe.decide.lifecycle.root_cause import Failure, Rank, root_cause
from hetpipe.decide.lifecycle.shard_watch import LostDisks
from hetpipe.decide.lifecycle.stage_table import StageLife, StageTable
from hetpipe.decide.lifecycle.training import JobTraining
from hetpipe.errors import JobFailed, StateLost
from hetpipe.job.file import Job
from hetpipe.values.commands import (
    AgentReport,
    InspectionPhase,
    InspectionResult,
    InspectionStep,
    KeyedStageReport,
    LinkAwaited,
    LinkResult,
    StageKey,
    StopJobCommand,
    StopVirtualWorkerCommand,
)
from hetpipe.values.conditions import consequence
from hetpipe.values.events import (
    Evaluated,
    JobEnded,
    JobEvent,
    JobState,
    NumberedEvent,
    QueuePlace,
    StateChanged,
    StopMode,
    Submission,
    Waiting,
    WorkerStatus,
)
from hetpipe.values.ids import AgentId, JobId
from hetpipe.values.life_state import COMPUTING
from hetpipe.values.members import MemberId, MemberInfo
from hetpipe.values.plan import ProofReport
from hetpipe.values.run import AgentInfo, ClockSnapshot, StageConditions
from hetpipe.values.run_document import RunDescription

_REWOUND = "the whole job is rewound to its newest checkpoint"
_CONTINUED = "the whole job continues from the checkpoint it has just taken"

#: Suffix of the failure of a job with a pending stop whose progress since the newest checkpoint is lost.
ENDS_AT_CHECKPOINT = "it was to stop, so it ends at its newest checkpoint, without what it trained since"

#: Maximum number of stages listed in a message.
_MAX_NAMED = 3


class JobMachine:
    """One job. Not thread-safe; every call takes the monotonic time."""

    def __init__(self, job_id: JobId, job: Job, submission: Submission, *, patience: Patience, now: float) -> None:
        self.job_id = job_id
        self._preparation = JobPreparation(job_id, job, submission)
        self._patience = patience = patience.of(job)
        self._lifecycle = Lifecycle(job_id)
        #: Time of the last transition, of the last progress, and of the last report of the current wait.
        self._entered = self._last_report = self._noticed = now
        self._out: list[Instruction] = []
        #: The last reported position in the queue.
        self._announced_place: QueuePlace | None = None
        self.stages = StageTable()
        #: The result of the job; None before its end.
        self.ended: JobEnded | None = None
        self._failures: list[Failure] = []
        #: Conditions of the job, active and cleared.
        self.conditions = ConditionBoard()
        #: Evaluations of the job.
        self.evaluations = EvaluationHistory()
        self._rewinds = Rewinds(job, submission, patience)
        #: Reports of the parameter servers about the job since their configuration.
        self._disks = LostDisks()
        self._prepared: Prepared | None = None
        #: Set when the stages are started.
        self._training: JobTraining | None = None
        self._stop_now = False
        #: When to request the barrier of a stop; None without a stop, or once requested.
        self._ask_barrier_at: float | None = None
        #: Why the job takes a barrier before agents leave; None if there is no such reason.
        self._notice: Failure | None = None
        #: Why the job ends at the next barrier as failed; None if there is no such reason.
        self._ending: Failure | None = None
        self._wrapping_up = False
        self._running_seconds = 0.0

    @classmethod
    def adopted(
        cls, description: RunDescription, *, stop: StopMode | None, patience: Patience, now: float
    ) -> JobMachine:
        """Create the machine of a job led by an earlier coordinator.

        Args:
            description: its description from the clock shard.
            stop: the requested way to stop, if known.
            patience: timeouts that are not set by users.
            now: monotonic seconds.

        Raises:
            JobError: the job stored by the clock shard cannot be parsed.
        """
        run = description.run
        assignment = assignment_of(run)
        machine = cls(run.plan.job_id, assignment.job, run.submission, patience=patience, now=now)
        machine._resume(assignment, description, now=now)
        if stop is not None and (stop is StopMode.NOW or machine.state is not JobState.STOPPING):
            machine._stop_requested(stop, now=now)
        return machine

    @classmethod
    def going_back(
        cls, job_id: JobId, job: Job, submission: Submission, *, cause: Failure, patience: Patience, now: float
    ) -> JobMachine:
        """Create the machine of a job with unknown progress: it is rewound to its newest checkpoint.

        Args:
            job_id: id of the job.
            job: the job as submitted.
            submission: the submission, with the folder of the run and its checkpoints.
            cause: why the progress is unknown.
            patience: timeouts that are not set by users.
            now: monotonic seconds.
        """
        machine = cls(job_id, job, submission, patience=patience, now=now)
        machine._preparation.goes_back = True
        machine._rewinds.begin_whole(cause, now=now)
        machine._announce(StateChanged(machine.state, f"{cause.sentence}: {_REWOUND}"))
        return machine

    def _resume(self, assignment: Assignment, description: RunDescription, *, now: float) -> None:
        """Continue the job in the state left by an earlier coordinator."""
        run, state = description.run, adoption.state_of(description)
        self._preparation.take_over(assignment, eval_samples=run.eval_samples)
        self._lifecycle = Lifecycle(self.job_id, state)
        self._announce(StateChanged(state, adoption.ADOPTED))
        self._prepared = adoption.prepared_of(assignment, description)
        self._rewinds.prepared(self._prepared, now=now)
        for absent in adoption.not_registered(assignment).values():
            self._rewinds.gone(absent)
        self._training = JobTraining(
            assignment,
            self._prepared,
            self.stages,
            eval_samples=run.eval_samples,
            patience=self._patience,
            now=now,
            adopted=description,
        )
        if state is not JobState.STARTING:
            self._training.run(now=now)
        if state is JobState.STOPPING:
            self._training.lives.close()

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def job(self) -> Job:
        """The job as submitted; once prepared, as executed."""
        return self._preparation.job

    @property
    def submission(self) -> Submission:
        """Its submission."""
        return self._preparation.submission

    @property
    def agents(self) -> tuple[AgentInfo, ...]:
        """Claimed devices, by agent; none before resources are claimed."""
        return self._preparation.agents

    @property
    def shards(self) -> tuple[MemberInfo, ...]:
        """Claimed shards, by index; none before resources are claimed."""
        return self._preparation.shards

    @property
    def state(self) -> JobState:
        """Current state."""
        return self._lifecycle.state

    @property
    def queue_place(self) -> QueuePlace | None:
        """Position in the queue; None unless it is pending."""
        return self._preparation.place if self.state is JobState.PENDING else None

    @property
    def rewinds(self) -> int:
        """Number of rewinds."""
        return self._rewinds.count

    @property
    def run(self) -> PlannedRun | None:
        """The planned run; None before planning."""
        return None if self._prepared is None else self._prepared.run

    @property
    def proof(self) -> ProofReport | None:
        """Result of the proof of the model; None before the proof, and if unknown."""
        return None if self.run is None else self.run.proof

    @property
    def clocks(self) -> ClockSnapshot | None:
        """The newest clocks; None until the clock shard has reported."""
        return None if self._training is None else self._training.clocks

    @property
    def lives(self) -> VirtualWorkers | None:
        """The virtual workers; None before they are started."""
        return None if self._training is None else self._training.lives

    @property
    def repartitions(self) -> Repartitions | None:
        """The moves of layers; None before the virtual workers are started."""
        return None if self._training is None else self._training.repartitions

    @property
    def workers(self) -> tuple[WorkerStatus, ...]:
        """The virtual workers; none before they are started."""
        return () if self._training is None else self._training.lives.statuses

    def is_clock_shard(self, member: MemberId) -> bool:
        """Whether a parameter server is the job's clock shard."""
        return bool(self.shards) and self.shards[0].id == member

    def is_settled(self, *, now: float) -> bool:
        """Whether the job and its processes have ended, or the latter have had the time to."""
        over = now - self._entered >= self._patience.exit_seconds
        return self.ended is not None and not self._preparation.is_preparing and (self.stages.all_exited or over)

    def recall(self, events: Iterable[NumberedEvent]) -> None:
        """Start from the events sent by earlier coordinators, in order."""
        self.conditions.recall(events)
        self.evaluations.recall(events)

    def may_have_processes(self, *, now: float) -> bool:
        """Whether processes of the job may exist; if not, an agent that still has some should end them."""
        if self.ended is None:
            return True
        return self.state is not JobState.FAILED and now - self._entered < self._patience.exit_seconds

    def may_report(self, agent: AgentId, report: AgentReport) -> bool:
        """Whether `agent` may report `report`: about a process planned on its node, or in reply to a request.

        Reports about unknown or past entities have no effect, regardless of the sender.
        """
        if isinstance(report, InspectionPhase | InspectionStep | InspectionResult):
            return self._preparation.is_asked(agent)
        if isinstance(report, LinkAwaited | LinkResult):
            return self._preparation.may_report_link(agent, report)
        life = self.stages.get(report.key)
        return life is None or life.agent == agent

    def may_be_end(self, agent: AgentId, stage: StageKey) -> bool:
        """Whether this is the key of the process that `agent` starts to measure a link."""
        return self._preparation.may_be_end(agent, stage)

    @property
    def goes_back(self) -> bool:
        """Whether it is being rewound because its progress is unknown."""
        return self._rewinds.is_whole

    # -- facts ------------------------------------------------------------------------------------------------------

    def handle(self, fact: Input, *, now: float) -> list[Instruction]:  # noqa: C901, PLR0912 - one case per kind of fact
        """Process one fact.

        Returns:
            Instructions, in order.

        Raises:
            InvalidTransition: a bug of this class.
        """
        match fact:
            case (
                ResourcesOffered()
                | InspectionStep()
                | InspectionPhase()
                | InspectionResult()
                | LinkAwaited()
                | LinkResult()
            ):
                self._prepare(fact, now=now)
            case Prepared():
                self._shards_prepared(fact, now=now)
            case TaskFailed():
                self._task_failed(fact, now=now)
            case NewWorker():
                self._enlarge(fact, now=now)
            case MemberGone():
                self._member_gone(fact, now=now)
            case AgentDeparts(agent=agent):
                self._agent_departs(agent, now=now)
                self._train(fact, now=now)
            case MemberRegistered(info=info):
                self._rewinds.seen(info)
                self._member_registered(info, now=now)
                self._train(fact, now=now)
            case ShardHeartbeat():
                self._on_heartbeat(fact, now=now)
            case ConditionsReported():
                self._on_conditions(fact, now=now)
            case KeyedStageReport(report=StageConditions(conditions=conditions)):
                if self.stages.get(fact.key) is not None:
                    self._on_conditions(ConditionsReported(str(fact.key), conditions), now=now)
            case StopRequested():
                self._stop_requested(fact.mode, now=now)
            case FinalClocks():
                self._on_final_clocks(fact.clocks, now=now)
            case Tick():
                self._tick(now=now)
            case _:
                self._train(fact, now=now)
        out, self._out = self._out, []
        return out

    # -- on the way to training ------------------------------------------------------------------------------------

    def _prepare(self, fact: PreparationInput, *, now: float) -> None:
        """Continue the preparation."""
        if self._rewinds.is_waiting:
            # Processes of an earlier incarnation may still use the devices.
            return
        if self.state is JobState.INSPECTING:
            self._last_report = now
        self._follow_preparation(self._preparation.handle(fact, state=self.state, now=now), now=now)

    def _follow_preparation(self, outputs: Sequence[PreparationOutput], *, now: float) -> None:
        for output in outputs:
            match output:
                case JobStep.CLUSTER_LACKS:
                    self._announced_place = self._preparation.place
                    self._step(output, now=now, remark=str(self._preparation.place))
                case JobStep():
                    self._step(output, now=now, remark=self._preparation.remark(output))
                case Failure():
                    self._fail(output, now=now)
                case _:
                    self._out.append(output)

    def _shards_prepared(self, prepared: Prepared, *, now: float) -> None:
        self._preparation.is_preparing = False
        if self.state is not JobState.PLANNING:
            # The job was abandoned meanwhile: the shards have been configured unnecessarily.
            self._fetch_clocks()
            return
        self._prepared = prepared
        self._preparation.prepared(prepared)
        rewound = self._rewinds.prepared(prepared, now=now)
        if isinstance(rewound, Failure):
            self._fail(rewound, now=now)
            return
        if rewound is not None:
            # Progress since the last checkpoint is lost, whichever process died.
            sentence = consequence(rewound.sentence, StateLost.__name__, self.conditions.all)
            self.evaluations.rewind(rewound.to_clock)
            self._announce(replace(rewound, sentence=sentence))
        self._step(JobStep.PREPARED, now=now, remark=prepared.run.links_sentence)
        self.stages, self._disks = StageTable(), LostDisks()
        self._training = JobTraining(
            self._preparation.assignment(prepared),
            prepared,
            self.stages,
            eval_samples=self._preparation.eval_samples,
            patience=self._patience,
            now=now,
        )
        self._out += self._training.begin(now=now)
        for fact in self._rewinds.pending_facts():
            self._train(fact, now=now)

    def _task_failed(self, failed: TaskFailed, *, now: float) -> None:
        if failed.task == "barrier":
            # Missing processes may return; the duration of a stop is bounded.
            if self.state is JobState.STOPPING or self._notice is not None:
                self._ask_barrier_at = now + self._patience.retry_seconds
            return
        self._preparation.is_preparing = False
        if self.state is not JobState.PLANNING:
            # The job was abandoned meanwhile: some shards may have been configured.
            self._fetch_clocks()
            return
        if not self._rewinds.is_retryable(failed, now=now):
            self._fail(Failure(Rank.REPORTED, failed.error, failed.sentence, now, failed.problems), now=now)

    # -- while it trains -------------------------------------------------------------------------------------------

    def _train(self, fact: WorkersInput, *, now: float) -> None:
        """Process the outputs of training and advance the job as far as they allow."""
        training = self._training
        if training is None:
            self._rewinds.note_end(fact, self.stages)
            return
        for output in training.handle(fact, now=now):
            if isinstance(output, Failure):
                self._add_training_failure(output, training, now=now)
            elif self.ended is None:
                self._emit(output)
        if self._training is training:
            self._advance(training, now=now)

    def _emit(self, instruction: Instruction) -> None:
        match instruction:
            case Announce(event=Evaluated() as event):
                evaluated = replace(event, rewinds=self.rewinds)
                if self.evaluations.add(evaluated):
                    self._announce(evaluated)
            case _:
                self._out.append(instruction)

    def _enlarge(self, new: NewWorker, *, now: float) -> None:
        """Add a virtual worker to the run, and to any later preparation."""
        if self.state is not JobState.RUNNING or self._training is None or self._prepared is None:
            return
        run = self._prepared.run
        plan = replace(run.plan, virtual_workers=(*run.plan.virtual_workers, new.plan))
        self._prepared = replace(self._prepared, run=replace(run, plan=plan))
        self._preparation.enlarge(new.agents)
        self._training.enlarge(new, self._prepared, now=now)
        self._train(Tick(), now=now)

    def _member_registered(self, info: MemberInfo, *, now: float) -> None:
        """Handle a registration: a process that missed the order to end, or one of an earlier term, must still end."""
        agent = AgentId(info.id)
        if self._stop_now and agent in {agent.agent for agent in self.agents}:
            self._out.append(SendCommand(agent, StopJobCommand(self.job_id)))
            return
        old = [key for key in info.stages if key.job_id == self.job_id and self._is_over(key)]
        if self._rewinds.is_whole:
            new = [key for key in old if self.stages.get(key) is None]
            for key in new:
                self.stages.add(key, agent, info.host, now=now)
                self._preparation.above = max(self._preparation.above, key.term)
            if new and self.state.is_queued:
                self._rewinds.wait_again(now=now)
        for vw, term, incarnation in sorted({(key.vw, key.term, key.incarnation) for key in old}):
            self._out.append(SendCommand(agent, StopVirtualWorkerCommand(self.job_id, vw, incarnation, term)))

    def _is_over(self, key: StageKey) -> bool:
        """Whether a process of the job belongs to an earlier term."""
        if self._rewinds.is_under_way:
            return True
        return self._prepared is not None and key.term < self._prepared.plan.term

    def _member_gone(self, gone: MemberGone, *, now: float) -> None:
        is_claimed = gone.member in {*(shard.id for shard in self.shards), *(agent.agent for agent in self.agents)}
        self._rewinds.gone(gone)
        if is_claimed and self._rewinds.is_whole and self.state is JobState.INSPECTING:
            self._queue_again(gone.sentence, now=now)
        if self._training is None and is_claimed and not self._rewinds.is_under_way:
            self._add_failure(Failure(Rank.GONE, JobFailed.__name__, gone.sentence, now), now=now)
        self._train(gone, now=now)

    def _agent_departs(self, agent: AgentId, *, now: float) -> None:
        """Handle an agent that is shutting down within seconds: progress must be in a checkpoint by then.

        If parameter servers hold the weights, its virtual workers are drained. If the stages hold them, the whole job
        takes a barrier with a checkpoint, and continues from it when all its agents are back.
        """
        if agent not in {claimed.agent for claimed in self.agents}:
            return
        self._rewinds.departs(agent)
        sentence = f"agent {agent} is shutting down"
        if self.state is JobState.INSPECTING:
            self._queue_again(f"{sentence}, and the job has not begun", now=now)
        elif not self.job.has_shards and self._notice is None:
            notice = Failure(Rank.GONE, JobFailed.__name__, sentence, now, calls_for_rewind=True, is_notice=True)
            if self.state is JobState.STARTING:
                self._rewind(notice, now=now)
            elif self.state is JobState.RUNNING and self._training is not None:
                self._notice = notice
                self._training.lives.close()
                self._ask_barrier_at = now
                self._ask_barrier(now=now)

    def _queue_again(self, lacks: str, *, now: float) -> None:
        """Return to the queue: there is no work yet that would be lost."""
        self._preparation.queue_again(lacks)
        self._announced_place = self._preparation.place
        self._step(JobStep.CLUSTER_LACKS, now=now, remark=str(self._preparation.place))

    def _advance(self, training: JobTraining, *, now: float) -> None:
        """Advance as far as the stages allow."""
        if self.state is JobState.STARTING and training.lives.can_run:
            training.run(now=now)
            self._step(JobStep.ALL_READY, now=now, remark=self.stages.links)
        if self.state not in {JobState.RUNNING, JobState.STOPPING}:
            return
        if (
            training.lives.all_done
            and training.is_stopped
            and self._notice is not None
            and self.state is JobState.RUNNING
        ):
            self._rewind(self._notice, now=now)
        elif training.lives.all_done or (self._stop_now and self.stages.all_exited):
            self._fetch_clocks(now=now)

    def _on_conditions(self, report: ConditionsReported, *, now: float) -> None:
        if self.ended is None:
            self.conditions.take(report.source, report.conditions)
            self._announce_conditions(now=now)

    def _announce_conditions(self, *, now: float) -> None:
        for event in self.conditions.due(now=now):
            self._announce(event)

    # -- back to a checkpoint --------------------------------------------------------------------------------------

    def _on_heartbeat(self, beat: ShardHeartbeat, *, now: float) -> None:
        if self._training is None or self._wrapping_up or self._stop_now:
            return
        for shard in self.shards:
            if shard.id == beat.member:
                lost = self._disks.on_heartbeat(shard, serves=beat.serves, reason=beat.reason)
                if lost:
                    self._rewind(Failure(Rank.GONE, StateLost.__name__, lost, now), now=now)

    def _rewind(self, cause: Failure, *, now: float) -> None:
        """Start a rewind; reports of processes and parameter servers are ignored from now on.

        A job with a pending stop ends instead: the user can resume it from the same checkpoint.
        """
        if self.state is JobState.STOPPING:
            self._stop_now = True
            state = self._step(JobStep.REWIND, now=now)
            self._break_off(state, replace(cause, sentence=f"{cause.sentence}; {ENDS_AT_CHECKPOINT}"))
            return
        if self._training is None or self._prepared is None or JobStep.REWIND not in TABLE[self.state]:
            self._fail(cause, now=now)
            return
        # The plans of virtual workers may have changed since the preparation.
        newest = self._training.lives.assignment
        run = replace(self._prepared.run, plan=newest.plan, emulations=newest.emulations)
        self._prepared = replace(self._prepared, run=run)
        self._training.lives.halt()
        self._rewinds.begin(cause, self._training, now=now)
        self._training, self._failures, self._notice, self._ask_barrier_at = None, [], None, None
        what = _CONTINUED if cause.is_notice else _REWOUND
        self._step(JobStep.REWIND, now=now, remark=f"{cause.sentence}: {what}")
        self._stop_processes()

    def _go_back(self, *, now: float) -> None:
        """Prepare the job again as soon as possible."""
        if not self.state.is_queued and self.state is not JobState.PLANNING:
            return
        self._last_report = now
        if self.state.is_queued:
            # The wait for members starts only when no earlier process is left.
            self._rewinds.clear(self.stages, everybody=num_devices_wanted(self.job) is None, now=now)
            return
        found: Instruction | Failure | None
        if self._rewinds.is_whole:
            may = self._rewinds.may_prepare(self._preparation, now=now)
            found = may if isinstance(may, Failure) else (self._preparation.prepare() if may else None)
        else:
            assert self._prepared is not None
            found = self._rewinds.check(self.stages, self._preparation, self._prepared, now=now)
        if isinstance(found, Failure):
            self._fail(found, now=now)
        elif found is not None:
            self._preparation.is_preparing = True
            self._out.append(found)

    # -- towards the end -------------------------------------------------------------------------------------------

    def _stop_requested(self, mode: StopMode, *, now: float) -> None:
        if self.state.is_terminal:
            return
        before = self._lifecycle.state
        self._step(JobStep.STOP_ASKED, now=now)
        if mode is StopMode.NOW or before not in {JobState.RUNNING, JobState.STOPPING}:
            # Before training there is nothing to save.
            self._stop_now = True
            self._stop_processes()
        elif before is JobState.RUNNING:
            self._ask_barrier_at = now
            self._ask_barrier(now=now)
        if self._training is not None:
            self._training.lives.close()
            self._train(Tick(), now=now)
        elif not self._preparation.is_preparing:
            self._fetch_clocks(now=now)

    def _early_end(self, *, now: float) -> str:
        """The reason by which the job's own keys end the run early; empty: none."""
        seconds = self._running_seconds
        if self._training is not None and not self._wrapping_up:
            seconds = self._training.running_seconds(now=now)
        return early_end(self.job, self.evaluations.all, running_seconds=seconds)

    def _end_early(self, *, now: float) -> None:
        """End the run at the next barrier if the job's own keys say so."""
        if self.state is not JobState.RUNNING or self._notice is not None or self._training is None:
            return
        reason = self._early_end(now=now)
        if reason:
            self._step(JobStep.STOP_ASKED, now=now, remark=f"the run ends early: {reason}")
            self._ask_barrier_at = now
            self._training.lives.close()

    def _ask_barrier(self, *, now: float) -> None:
        """Request the barrier at which the job stops, if it is due."""
        if self._ask_barrier_at is not None and now >= self._ask_barrier_at and self._prepared is not None:
            self._ask_barrier_at = None
            self._out.append(RequestBarrier(self._prepared.plan.term, self.shards[0]))

    def _add_training_failure(self, failure: Failure, training: JobTraining, *, now: float) -> None:
        """End the job at the next barrier, if that is enough and a virtual worker can reach it; else at once."""
        can_reach = any(worker.state in COMPUTING for worker in training.lives)
        if not (failure.ends_at_barrier and can_reach and self.job.has_shards):
            self._add_failure(failure, now=now)
        elif self.state is JobState.RUNNING:
            self._ending = failure
            self._step(JobStep.STOP_ASKED, now=now, remark=f"the run ends at the next barrier: {failure.sentence}")
            self._ask_barrier_at = now
            training.lives.close()

    def _add_failure(self, failure: Failure, *, now: float) -> None:
        if not self.state.is_terminal and not self._stop_now and not self._wrapping_up:
            self._failures.append(failure)
            self._decide(now=now)

    def _decide(self, *, now: float) -> None:
        """Determine the root cause of a failure, if it is due."""
        if now < self._patience.decision_time(self._failures):
            return
        cause = root_cause(self._failures)
        if cause.calls_for_rewind:
            self._rewind(cause, now=now)
        else:
            self._fail(cause, now=now)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _fetch_clocks(self, *, now: float | None = None) -> None:
        """Request the final clocks, once; the reply ends the job if it has not ended yet, and releases the shards."""
        if self._wrapping_up:
            return
        self._wrapping_up = True
        if self._training is not None and now is not None:
            self._running_seconds = self._training.running_seconds(now=now)
        self._out.append(FetchClocks(self.shards))

    def _on_final_clocks(self, clocks: ClockSnapshot | None, *, now: float) -> None:
        if self.state in {JobState.RUNNING, JobState.STOPPING}:
            self._end_well(clocks, now=now)
        # Not before the end is stored: if this coordinator dies in between, the next one finds the job again.
        self._out.append(Release(self.shards))

    def _end_well(self, clocks: ClockSnapshot | None, *, now: float) -> None:
        """End the job: the run is complete, was stopped, or failed beside those that reached a barrier."""
        if self._ending is not None:
            self._fail(self._ending, now=now)
            return
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
        if self._training is not None and self._training.lives.all_done and not self._stop_now:
            # Without memory of it: the coordinator may be another one than that which ended the run.
            is_stopped = is_stopped and not self._early_end(now=now)
        state = self._step(JobStep.STOP_REACHED if is_stopped else JobStep.END_REACHED, now=now)
        self._end(JobEnded(state, result=result, conditions=self.conditions.all))

    def _fail(self, failure: Failure, *, now: float) -> None:
        self._break_off(self._step(JobStep.FAIL, now=now), failure)

    def _break_off(self, state: JobState, cause: Failure) -> None:
        """End the job without a barrier, in `state`, because of `cause`."""
        conditions = self.conditions.all
        sentence = consequence(cause.sentence, cause.error, conditions)
        error = cause.error if state is JobState.FAILED else ""
        self._end(JobEnded(state, sentence, error, cause.problems, conditions=conditions))
        self._stop_processes()
        if self.shards and not self._preparation.is_preparing:
            self._fetch_clocks()

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

    # -- time ------------------------------------------------------------------------------------------------------

    def _tick(self, *, now: float) -> None:
        if self.state.is_terminal:
            return
        self._announce_conditions(now=now)
        if self._failures and not self._wrapping_up:
            self._decide(now=now)
            return
        if not self._wrapping_up and not self._stop_now:
            self._end_early(now=now)
            self._ask_barrier(now=now)
            self._train(Tick(), now=now)
            if self.state.is_terminal:
                return
        if self.state is JobState.INSPECTING and self._preparation.is_measuring_links:
            self._last_report = now
            self._follow_preparation(self._preparation.tick(now=now), now=now)
        if self._rewinds.is_waiting:
            self._go_back(now=now)
        if self.state.is_queued and not self._rewinds.is_waiting:
            self._announce_place(now=now)
        elif not self.state.is_terminal and self.state is not JobState.RUNNING:
            self._wait(now=now)

    def _wait(self, *, now: float) -> None:
        """Report the current wait, and enforce its timeout."""
        silent = now - self._last_report_at(now=now)
        limit, error = self._patience.limit(self.state, is_stopping_now=self._stop_now)
        if self.state is JobState.STOPPING and self._stop_now and silent >= limit:
            self._fetch_clocks(now=now)
        elif silent >= limit:
            sentence = (
                f"the coordinator gave up job {self.job_id} after {silent:.0f} s of waiting for {self._awaited()}"
            )
            self._fail(Failure(Rank.REPORTED, error, sentence, now), now=now)
        elif now - self._noticed >= self._patience.notice_seconds:
            self._noticed = now
            waited = now - self._entered
            sentence = f"the coordinator waits for {self._awaited()} (job {self.job_id})"
            self._announce(self._preparation.measuring(self.state) or Waiting(sentence, waited))

    def _last_report_at(self, *, now: float) -> float:
        """Time of the last report of the awaited process; of several, the earliest."""
        if self.state is not JobState.STARTING:
            return self._last_report
        if self._training is not None and self._training.lives.is_on_leave:
            self._last_report = now
        return min((life.last_report for life in self.stages.unready() if not life.exited), default=self._last_report)

    def _announce_place(self, *, now: float) -> None:
        """Report the position in the queue: soon after a change, else periodically."""
        place = self._preparation.place
        pause = self._patience.notice_seconds if place != self._announced_place else self._patience.queue_notice_seconds
        if place is not None and now - self._noticed >= pause:
            self._noticed, self._announced_place = now, place
            self._announce(Waiting(f"pending: {place}", now - self._entered))

    def _awaited(self) -> str:
        """Description of the current wait."""
        match self.state:
            case JobState.SUBMITTED | JobState.PENDING | JobState.PLANNING if self._rewinds.is_waiting:
                return self._rewinds.awaited(self.stages, self._preparation)
            case JobState.INSPECTING | JobState.PLANNING:
                return self._preparation.awaited(self.state)
            case JobState.STARTING:
                return f"these to become ready: {_some(self.stages.unready())}"
            case _ if self._stop_now:
                return "all stages to end"
            case _:
                return "all stages to reach the barrier of the stop"

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _step(self, step: JobStep, *, now: float, remark: str = "") -> JobState:
        before = self.state
        state = self._lifecycle.take(step, now=now)
        self._entered = self._last_report = self._noticed = now
        if state is not before:
            self._announce(StateChanged(state, remark))
        return state

    def _announce(self, event: JobEvent) -> None:
        self._out.append(Announce(event))


def _some(lives: list[StageLife]) -> str:
    """The first few of them, as text."""
    named, rest = lives[:_MAX_NAMED], len(lives) - _MAX_NAMED
    phases = [f", which is {life.phase}" if life.phase else "" for life in named]
    text = "; ".join(f"{life}{phase}" for life, phase in zip(named, phases, strict=True))
    return text + (f" and {rest} more" if rest > 0 else "")
