"""One job from submission to its end, as a machine without I/O: facts in, instructions out.

The shell (`coordinator.Coordinator`) feeds `JobMachine.handle` with what it hears and the time, and carries out what
comes back. A fact that arrives too late, for example the answer of an inspection that was given up, changes nothing.

The table of states is `lifecycle.py`. Three parts of a job are objects of their own, with facts in and outputs out
like this one: `JobPreparation` until the job is planned, `JobTraining` while there are processes, `Rewinds` on the way
back to a checkpoint. Once the job has ended its processes have yet to: `is_settled` tells when nothing of the job is
left, and only then are its devices free again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hetpipe.decide.elastic.virtual_workers import VirtualWorkers, WorkersInput
from hetpipe.decide.lifecycle import adoption
from hetpipe.decide.lifecycle.conditions import ConditionBoard
from hetpipe.decide.lifecycle.configs import Assignment, assignment_of
from hetpipe.decide.lifecycle.evaluations import EvaluationHistory
from hetpipe.decide.lifecycle.exchange import (
    AgentDeparts,
    Announce,
    AskBarrier,
    ClusterSeen,
    ConditionsTold,
    Input,
    Instruction,
    MemberGone,
    MemberSeen,
    NewWorker,
    Prepared,
    Release,
    SendCommand,
    ShardHeard,
    StopAsked,
    TaskFailed,
    Tick,
    WrappedUp,
    WrapUp,
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
    AgentNews,
    InspectionPhase,
    InspectionResult,
    InspectionStep,
    LinkAwaited,
    LinkResult,
    StageKey,
    StageNews,
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
from hetpipe.values.members import MemberId, MemberInfo
from hetpipe.values.plan import ProofReport
from hetpipe.values.run import AgentInfo, ClockSnapshot, StageConditions
from hetpipe.values.run_document import RunDescription

_GOES_BACK = "the whole job goes back to its newest checkpoint"
_GOES_ON = "the whole job goes on from the checkpoint it has just taken"

#: Behind why a job that is to stop has lost what no checkpoint has.
ENDS_AT_CHECKPOINT = "it was to stop, so it ends at its newest checkpoint, without what it trained since"

#: Stages that a sentence names one by one.
_MAX_NAMED = 3


class JobMachine:
    """One job. Not thread-safe; every call gives the monotonic time."""

    def __init__(self, job_id: JobId, job: Job, submission: Submission, *, patience: Patience, now: float) -> None:
        self.job_id = job_id
        self._preparation = JobPreparation(job_id, job, submission)
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
        self._training: JobTraining | None = None
        self._stop_now = False
        #: When to ask for the barrier of a stop; None while nobody wants one, or it was asked for.
        self._ask_barrier_at: float | None = None
        #: Why the job takes a barrier to wait for agents that are about to go; None while it does not.
        self._notice: Failure | None = None
        self._wrapping_up = False
        self._running_seconds = 0.0

    @classmethod
    def adopted(
        cls, description: RunDescription, *, stop: StopMode | None, patience: Patience, now: float
    ) -> JobMachine:
        """A job that an earlier coordinator has led until now.

        Args:
            description: what its clock shard tells of it.
            stop: how a user wants it to stop, if that is known.
            patience: bounds of waits that no user sets.
            now: monotonic seconds.

        Raises:
            JobError: the job that the clock shard has kept cannot be read.
        """
        run = description.run
        assignment = assignment_of(run)
        machine = cls(run.plan.job_id, assignment.job, run.submission, patience=patience, now=now)
        machine._resume(assignment, description, now=now)
        if stop is not None and (stop is StopMode.NOW or machine.state is not JobState.STOPPING):
            machine._stop_asked(stop, now=now)
        return machine

    @classmethod
    def going_back(
        cls, job_id: JobId, job: Job, submission: Submission, *, cause: Failure, patience: Patience, now: float
    ) -> JobMachine:
        """A job that has trained, and of which nobody knows how far: it goes back to its newest checkpoint.

        Args:
            job_id: the job's.
            job: as it was submitted.
            submission: the same, with the folder of the run, which has the checkpoints.
            cause: why nobody knows it.
            patience: bounds of waits that no user sets.
            now: monotonic seconds.
        """
        machine = cls(job_id, job, submission, patience=patience, now=now)
        machine._preparation.goes_back = True
        machine._rewinds.begin_whole(cause, now=now)
        machine._announce(StateChanged(machine.state, f"{cause.sentence}: {_GOES_BACK}"))
        return machine

    def _resume(self, assignment: Assignment, description: RunDescription, *, now: float) -> None:
        """Take the job up where an earlier coordinator left it."""
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
        """The job as it was submitted; once it is prepared, as it is carried out."""
        return self._preparation.job

    @property
    def submission(self) -> Submission:
        """How it was submitted."""
        return self._preparation.submission

    @property
    def agents(self) -> tuple[AgentInfo, ...]:
        """Claimed devices, by agent; none before the cluster was ready."""
        return self._preparation.agents

    @property
    def shards(self) -> tuple[MemberInfo, ...]:
        """Claimed shards, by index; none before the cluster was ready."""
        return self._preparation.shards

    @property
    def state(self) -> JobState:
        """Where the job stands."""
        return self._lifecycle.state

    @property
    def queue_place(self) -> QueuePlace | None:
        """Where it stands in the queue; None unless it is pending."""
        return self._preparation.place if self.state is JobState.PENDING else None

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

    def is_clock_shard(self, member: MemberId) -> bool:
        """Whether a parameter server is the job's clock shard."""
        return bool(self.shards) and self.shards[0].id == member

    def is_settled(self, *, now: float) -> bool:
        """True when the job has ended and its processes have, or have had the time to."""
        over = now - self._entered >= self._patience.exit_seconds
        return self.ended is not None and not self._preparation.is_preparing and (self.stages.all_exited or over)

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
            return self._preparation.is_asked(agent)
        if isinstance(news, LinkAwaited | LinkResult):
            return self._preparation.may_tell_link(agent, news)
        life = self.stages.get(news.key)
        return life is None or life.agent == agent

    def may_be_end(self, agent: AgentId, stage: StageKey) -> bool:
        """Whether the process that `agent` starts to measure a link is to be called that."""
        return self._preparation.may_be_end(agent, stage)

    @property
    def goes_back(self) -> bool:
        """Whether it is on its way back from where nobody knows how far it was."""
        return self._rewinds.is_whole

    # -- facts ------------------------------------------------------------------------------------------------------

    def handle(self, fact: Input, *, now: float) -> list[Instruction]:  # noqa: C901, PLR0912 - one case per kind of fact
        """Take one fact in.

        Returns:
            What to do, in order.

        Raises:
            InvalidTransition: a bug of this class.
        """
        match fact:
            case (
                ClusterSeen() | InspectionStep() | InspectionPhase() | InspectionResult() | LinkAwaited() | LinkResult()
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
            case MemberSeen(info=info):
                self._rewinds.seen(info)
                self._member_seen(info, now=now)
                self._train(fact, now=now)
            case ShardHeard():
                self._shard_heard(fact, now=now)
            case ConditionsTold():
                self._conditions_told(fact, now=now)
            case StageNews(report=StageConditions(conditions=conditions)):
                if self.stages.get(fact.key) is not None:
                    self._conditions_told(ConditionsTold(str(fact.key), conditions), now=now)
            case StopAsked():
                self._stop_asked(fact.mode, now=now)
            case WrappedUp():
                self._wrapped_up(fact.clocks, now=now)
            case Tick():
                self._tick(now=now)
            case _:
                self._train(fact, now=now)
        out, self._out = self._out, []
        return out

    # -- on the way to training ------------------------------------------------------------------------------------

    def _prepare(self, fact: PreparationInput, *, now: float) -> None:
        """Go on towards training."""
        if self._rewinds.is_waiting:
            # Processes of before may have the devices.
            return
        if self.state is JobState.INSPECTING:
            self._heard = now
        self._follow_preparation(self._preparation.handle(fact, state=self.state, now=now), now=now)

    def _follow_preparation(self, outputs: Sequence[PreparationOutput], *, now: float) -> None:
        for output in outputs:
            match output:
                case JobStep.CLUSTER_LACKS:
                    self._told_place = self._preparation.place
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
            # Given up meanwhile: the shards have just been configured for nothing.
            self._wrap_up()
            return
        self._prepared = prepared
        self._preparation.prepared(prepared)
        told = self._rewinds.prepared(prepared, now=now)
        if isinstance(told, Failure):
            self._fail(told, now=now)
            return
        if told is not None:
            # What is lost is what no checkpoint has, whoever has died.
            sentence = consequence(told.sentence, StateLost.__name__, self.conditions.all)
            self.evaluations.rewind(told.to_clock)
            self._announce(replace(told, sentence=sentence))
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
        for fact in self._rewinds.old_news():
            self._train(fact, now=now)

    def _task_failed(self, failed: TaskFailed, *, now: float) -> None:
        if failed.task == "barrier":
            # Whoever is gone may come back; how long a stop may last is bounded.
            if self.state is JobState.STOPPING or self._notice is not None:
                self._ask_barrier_at = now + self._patience.retry_seconds
            return
        self._preparation.is_preparing = False
        if self.state is not JobState.PLANNING:
            # Given up meanwhile: some shards may have been configured for nothing.
            self._wrap_up()
            return
        if not self._rewinds.is_retryable(failed, now=now):
            self._fail(Failure(Rank.REPORTED, failed.error, failed.sentence, now, failed.problems), now=now)

    # -- while it trains -------------------------------------------------------------------------------------------

    def _train(self, fact: WorkersInput, *, now: float) -> None:
        """Let what runs go on, and the job as far as that allows."""
        training = self._training
        if training is None:
            self._rewinds.note_end(fact, self.stages)
            return
        for told in training.handle(fact, now=now):
            if isinstance(told, Failure):
                self._add_failure(told, now=now)
            elif self.ended is None:
                self._tell(told)
        if self._training is training:
            self._advance(training, now=now)

    def _tell(self, told: Instruction) -> None:
        match told:
            case Announce(event=Evaluated() as event):
                evaluated = replace(event, rewinds=self.rewinds)
                if self.evaluations.add(evaluated):
                    self._announce(evaluated)
            case _:
                self._out.append(told)

    def _enlarge(self, new: NewWorker, *, now: float) -> None:
        """Let a virtual worker join that the run has not had yet; whoever prepares the job anew knows of it, too."""
        if self.state is not JobState.RUNNING or self._training is None or self._prepared is None:
            return
        run = self._prepared.run
        plan = replace(run.plan, virtual_workers=(*run.plan.virtual_workers, new.plan))
        self._prepared = replace(self._prepared, run=replace(run, plan=plan))
        self._preparation.enlarge(new.agents)
        self._training.enlarge(new, self._prepared, now=now)
        self._train(Tick(), now=now)

    def _member_seen(self, info: MemberInfo, *, now: float) -> None:
        """Whoever was away when all processes were to end, or those of an earlier term, has not heard of it."""
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
        """Whether a process of the job is of a term that is over."""
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
        """An agent was told to end, which has some seconds left: what was trained is to be in a checkpoint by then.

        Where parameter servers hold the weights its virtual workers are drained. Where the stages do, the whole job
        comes to a barrier with a checkpoint, and goes on from that when all its agents are there again.
        """
        if agent not in {claimed.agent for claimed in self.agents}:
            return
        self._rewinds.departs(agent)
        sentence = f"agent {agent} was told to end"
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
        """Wait once more for a turn: nothing was done yet that would be lost."""
        self._preparation.queue_again(lacks)
        self._told_place = self._preparation.place
        self._step(JobStep.CLUSTER_LACKS, now=now, remark=str(self._preparation.place))

    def _advance(self, training: JobTraining, *, now: float) -> None:
        """Go on as far as the stages allow."""
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
            self._wrap_up(now=now)

    def _conditions_told(self, told: ConditionsTold, *, now: float) -> None:
        if self.ended is None:
            self.conditions.take(told.source, told.conditions)
            self._tell_conditions(now=now)

    def _tell_conditions(self, *, now: float) -> None:
        for event in self.conditions.due(now=now):
            self._announce(event)

    # -- back to a checkpoint --------------------------------------------------------------------------------------

    def _shard_heard(self, heard: ShardHeard, *, now: float) -> None:
        if self._training is None or self._wrapping_up or self._stop_now:
            return
        for shard in self.shards:
            if shard.id == heard.member:
                lost = self._disks.heard(shard, serves=heard.serves, reason=heard.reason)
                if lost:
                    self._rewind(Failure(Rank.GONE, StateLost.__name__, lost, now), now=now)

    def _rewind(self, cause: Failure, *, now: float) -> None:
        """Begin to go back; what processes and parameter servers say from now on changes nothing.

        A job that is to stop is where it would go back to: it ends, and whoever wants more resumes from there.
        """
        if self.state is JobState.STOPPING:
            self._stop_now = True
            state = self._step(JobStep.REWIND, now=now)
            self._break_off(state, replace(cause, sentence=f"{cause.sentence}; {ENDS_AT_CHECKPOINT}"))
            return
        if self._training is None or self._prepared is None or JobStep.REWIND not in TABLE[self.state]:
            self._fail(cause, now=now)
            return
        # Virtual workers may have had other plans since it was prepared.
        newest = self._training.lives.assignment
        run = replace(self._prepared.run, plan=newest.plan, emulations=newest.emulations)
        self._prepared = replace(self._prepared, run=run)
        self._training.lives.halt()
        self._rewinds.begin(cause, self._training, now=now)
        self._training, self._failures, self._notice, self._ask_barrier_at = None, [], None, None
        what = _GOES_ON if cause.is_notice else _GOES_BACK
        self._step(JobStep.REWIND, now=now, remark=f"{cause.sentence}: {what}")
        self._stop_processes()

    def _go_back(self, *, now: float) -> None:
        """Have the job prepared anew as soon as that can be."""
        if not self.state.is_queued and self.state is not JobState.PLANNING:
            return
        self._heard = now
        if self.state.is_queued:
            # Only once no process of before is left the wait for members begins.
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

    def _stop_asked(self, mode: StopMode, *, now: float) -> None:
        if self.state.is_terminal:
            return
        before = self._lifecycle.state
        self._step(JobStep.STOP_ASKED, now=now)
        if mode is StopMode.NOW or before not in {JobState.RUNNING, JobState.STOPPING}:
            # Before training there is nothing to write down.
            self._stop_now = True
            self._stop_processes()
        elif before is JobState.RUNNING:
            self._ask_barrier_at = now
            self._ask_barrier(now=now)
        if self._training is not None:
            self._training.lives.close()
            self._train(Tick(), now=now)
        elif not self._preparation.is_preparing:
            self._wrap_up(now=now)

    def _ask_barrier(self, *, now: float) -> None:
        """Ask for the barrier at which the job stops, if it is time."""
        if self._ask_barrier_at is not None and now >= self._ask_barrier_at and self._prepared is not None:
            self._ask_barrier_at = None
            self._out.append(AskBarrier(self._prepared.plan.term, self.shards[0]))

    def _add_failure(self, failure: Failure, *, now: float) -> None:
        if not self.state.is_terminal and not self._stop_now and not self._wrapping_up:
            self._failures.append(failure)
            self._decide(now=now)

    def _decide(self, *, now: float) -> None:
        """Name the cause of what went wrong, once it is time."""
        if now < self._patience.decision_time(self._failures):
            return
        cause = root_cause(self._failures)
        if cause.calls_for_rewind:
            self._rewind(cause, now=now)
        else:
            self._fail(cause, now=now)

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
        state = self._step(JobStep.STOP_REACHED if is_stopped else JobStep.END_REACHED, now=now)
        self._end(JobEnded(state, result=result, conditions=self.conditions.all))

    def _fail(self, failure: Failure, *, now: float) -> None:
        self._break_off(self._step(JobStep.FAIL, now=now), failure)

    def _break_off(self, state: JobState, cause: Failure) -> None:
        """End without a barrier, in `state`, because of `cause`."""
        conditions = self.conditions.all
        sentence = consequence(cause.sentence, cause.error, conditions)
        error = cause.error if state is JobState.FAILED else ""
        self._end(JobEnded(state, sentence, error, cause.problems, conditions=conditions))
        self._stop_processes()
        if self.shards and not self._preparation.is_preparing:
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

    # -- time ------------------------------------------------------------------------------------------------------

    def _tick(self, *, now: float) -> None:
        if self.state.is_terminal:
            return
        self._tell_conditions(now=now)
        if self._failures and not self._wrapping_up:
            self._decide(now=now)
            return
        if not self._wrapping_up and not self._stop_now:
            self._ask_barrier(now=now)
            self._train(Tick(), now=now)
            if self.state.is_terminal:
                return
        if self.state is JobState.INSPECTING and self._preparation.is_measuring_links:
            self._heard = now
            self._follow_preparation(self._preparation.tick(now=now), now=now)
        if self._rewinds.is_waiting:
            self._go_back(now=now)
        if self.state.is_queued and not self._rewinds.is_waiting:
            self._tell_place(now=now)
        elif not self.state.is_terminal and self.state is not JobState.RUNNING:
            self._wait(now=now)

    def _wait(self, *, now: float) -> None:
        """Say who is waited for, and not for ever."""
        silent = now - self._newest_word(now=now)
        limit, error = self._patience.limit(self.state, is_stopping_now=self._stop_now)
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

    def _newest_word(self, *, now: float) -> float:
        """When whoever is waited for has last said anything; of several, who has been silent for the longest time."""
        if self.state is not JobState.STARTING:
            return self._heard
        if self._training is not None and self._training.lives.is_on_leave:
            self._heard = now
        return min((life.heard for life in self.stages.unready() if not life.exited), default=self._heard)

    def _tell_place(self, *, now: float) -> None:
        """Say again where the job stands in the queue: soon when that has changed, else now and then."""
        place = self._preparation.place
        pause = self._patience.notice_seconds if place != self._told_place else self._patience.queue_notice_seconds
        if place is not None and now - self._noticed >= pause:
            self._noticed, self._told_place = now, place
            self._announce(Waiting(f"pending: {place}", now - self._entered))

    def _awaited(self) -> str:
        """For whom the coordinator waits, and for what."""
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

    # -- small things ----------------------------------------------------------------------------------------------

    def _step(self, step: JobStep, *, now: float, remark: str = "") -> JobState:
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
    phases = [f", which is {life.phase}" if life.phase else "" for life in named]
    told = "; ".join(f"{life}{phase}" for life, phase in zip(named, phases, strict=True))
    return told + (f" and {rest} more" if rest > 0 else "")
