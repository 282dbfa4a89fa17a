"""One job from submission to its end, as a machine without I/O: facts in, instructions out.

The shell (`coordinator.Coordinator`) feeds `JobMachine.handle` with what it hears and the time, and carries out what
comes back. A fact that arrives too late, for example the answer of an inspection that was given up, changes nothing.

Once the job has ended the machine still listens for the end of its processes: `is_settled` tells when nothing of the
job is left, and only then are its devices free again.
"""

from __future__ import annotations

from hetpipe.coordinator.configs import Assignment
from hetpipe.coordinator.exchange import (
    Announce,
    AskBarrier,
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
from hetpipe.coordinator.inspections import Inspections, inspect_command, is_to_measure
from hetpipe.coordinator.lifecycle import Lifecycle, Step
from hetpipe.coordinator.patience import Patience
from hetpipe.coordinator.planning import num_devices_wanted
from hetpipe.coordinator.requirements import ClusterView, claim_devices, missing
from hetpipe.coordinator.root_cause import Failure, Rank, root_cause
from hetpipe.coordinator.stage_table import StageLife, StageTable
from hetpipe.coordinator.training import Training
from hetpipe.coordinator.worker_lives import LivesInput
from hetpipe.errors import JobFailed, PlanError
from hetpipe.spec.commands import InspectionResult, InspectionStep, StopJobCommand
from hetpipe.spec.events import JobEnded, JobEvent, JobState, StateChanged, StopMode, Submission, Waiting, WorkerStatus
from hetpipe.spec.ids import JobId
from hetpipe.spec.job import Job
from hetpipe.spec.members import MemberInfo
from hetpipe.spec.run import AgentInfo, ClockSnapshot

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
        self._out: list[Instruction] = []
        #: What the cluster lacks, while it does.
        self._lacks = ""
        #: Claimed devices, by agent, and claimed shards, by index. Empty before the cluster was ready.
        self.agents: tuple[AgentInfo, ...] = ()
        self.shards: tuple[MemberInfo, ...] = ()
        self.stages = StageTable()
        #: How the job ended; None before.
        self.ended: JobEnded | None = None
        self._failures: list[Failure] = []
        self._inspections: Inspections | None = None
        self._prepared: Prepared | None = None
        #: From the moment the stages were told to start.
        self._training: Training | None = None
        #: A task that configures shards is under way: they must not be released before it is over.
        self._preparing = False
        self._stop_now = False
        #: When to ask for the barrier of a stop; None while nobody wants one, or it was asked for.
        self._ask_barrier_at: float | None = None
        self._wrapping_up = False
        self._running_seconds = 0.0

    @property
    def state(self) -> JobState:
        """Where the job stands."""
        return self._lifecycle.state

    @property
    def clocks(self) -> ClockSnapshot | None:
        """The newest clocks; None before the clock shard told any."""
        return None if self._training is None else self._training.clocks

    @property
    def workers(self) -> tuple[WorkerStatus, ...]:
        """The virtual workers; none before they were told to start."""
        return () if self._training is None else self._training.lives.statuses

    def is_settled(self, *, now: float) -> bool:
        """True when the job has ended and its processes have, or have had the time to."""
        over = now - self._entered >= self._patience.exit_seconds
        return self.ended is not None and not self._preparing and (self.stages.all_exited or over)

    def may_have_processes(self, *, now: float) -> bool:
        """False when an agent that still has processes of the job should end them."""
        if self.ended is None:
            return True
        return self.state is not JobState.FAILED and now - self._entered < self._patience.exit_seconds

    def handle(self, fact: Input, *, now: float) -> list[Instruction]:
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
            case MemberGone():
                self._member_gone(fact, now=now)
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
            command = inspect_command(asked, self.job, self.job_id, self.submission)
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
        self._step(Step.PREPARED, now=now)
        assignment = Assignment(
            job=self.job,
            submission=self.submission,
            plan=prepared.plan,
            agents=self.agents,
            shards=self.shards,
            emulations=prepared.run.emulations,
        )
        assert self._inspections is not None
        self._training = Training(
            assignment,
            prepared,
            self.stages,
            eval_samples=self._inspections.inspected.model.eval_samples,
            patience=self._patience,
            now=now,
        )
        self._out += self._training.begin(now=now)

    def _task_failed(self, failed: TaskFailed, *, now: float) -> None:
        if failed.task == "barrier":
            # Whoever is gone may come back; how long a stop may last is bounded.
            self._ask_barrier_at = now + self._patience.retry_seconds
            return
        self._preparing = False
        if self.state is not JobState.PLANNING:
            # Given up meanwhile: some shards may have been configured for nothing.
            self._wrap_up()
            return
        self._fail(Failure(Rank.REPORTED, failed.error, failed.sentence, now, failed.problems), now=now)

    # -- while it trains -------------------------------------------------------------------------------------------

    def _train(self, fact: LivesInput, *, now: float) -> None:
        """Let what runs go on, and the job as far as that allows."""
        if self._training is None:
            return
        for told in self._training.handle(fact, now=now):
            if isinstance(told, Failure):
                self._add_failure(told, now=now)
            elif self.ended is None:
                self._out.append(told)
        self._advance(self._training, now=now)

    def _member_gone(self, gone: MemberGone, *, now: float) -> None:
        is_claimed = gone.member in {*(shard.id for shard in self.shards), *(agent.agent for agent in self.agents)}
        if self._training is None and is_claimed:
            self._add_failure(Failure(Rank.GONE, JobFailed.__name__, gone.sentence, now), now=now)
        self._train(gone, now=now)

    def _advance(self, training: Training, *, now: float) -> None:
        """Go on as far as the stages allow."""
        if self.state is JobState.STARTING and training.lives.can_run:
            training.run(now=now)
            self._step(Step.ALL_READY, now=now, remark=self.stages.links)
        if self.state not in {JobState.RUNNING, JobState.STOPPING}:
            return
        if training.lives.all_done or (self._stop_now and self.stages.all_exited):
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
        elif before is JobState.RUNNING:
            self._ask_barrier_at = now
            self._ask_barrier(now=now)
        if self._training is not None:
            self._training.lives.close()
            self._train(Tick(), now=now)
        elif not self._preparing:
            self._wrap_up(now=now)

    def _ask_barrier(self, *, now: float) -> None:
        """Ask for the barrier at which the job stops, if it is time."""
        if self._ask_barrier_at is not None and now >= self._ask_barrier_at and self._prepared is not None:
            self._ask_barrier_at = None
            self._out.append(AskBarrier(self._prepared.plan.term, self.shards[0]))

    def _wrap_up(self, *, now: float | None = None) -> None:
        """Release the shards, once; the answer ends the job if it has not ended yet."""
        if self._wrapping_up:
            return
        self._wrapping_up = True
        if self._training is not None and now is not None:
            self._running_seconds = self._training.running_seconds(now=now)
        self._out.append(WrapUp(self.shards))

    def _wrapped_up(self, clocks: ClockSnapshot | None, *, now: float) -> None:
        if self.state not in {JobState.RUNNING, JobState.STOPPING}:
            return
        result = None
        if self._training is not None:
            self._training.clocks = clocks or self._training.clocks
            result = self._training.result(self.submission.run_dir, self._running_seconds)
        is_stopped = self._training is None or self._training.is_stopped
        state = self._step(Step.STOP_REACHED if is_stopped else Step.END_REACHED, now=now)
        self._end(JobEnded(state, result=result))

    def _add_failure(self, failure: Failure, *, now: float) -> None:
        if not self.state.is_terminal and not self._stop_now and not self._wrapping_up:
            self._failures.append(failure)
            self._decide(now=now)

    def _decide(self, *, now: float) -> None:
        """Name the cause of what went wrong, once it is time."""
        if now >= self._patience.decision_time(self._failures):
            self._fail(root_cause(self._failures), now=now)

    def _fail(self, failure: Failure, *, now: float) -> None:
        self._step(Step.FAIL, now=now)
        self._end(JobEnded(JobState.FAILED, failure.sentence, failure.error, failure.problems))
        self._stop_processes()
        if self.shards and not self._preparing:
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
        if self._failures and not self._wrapping_up:
            self._decide(now=now)
            return
        if not self._wrapping_up and not self._stop_now:
            self._ask_barrier(now=now)
            self._train(Tick(), now=now)
            if self.state.is_terminal:
                return
        if self.state is JobState.RUNNING:
            return
        silent = now - self._heard
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
