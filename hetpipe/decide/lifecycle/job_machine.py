"""One job from submission to its end, as a machine without I/O: facts in, instructions out.

The shell (`coordinator.Coordinator`) feeds `JobMachine.handle` with what it hears and the time, and carries out what
comes back. A fact that arrives too late, for example the answer of an inspection that was given up, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetpipe.decide.elastic.virtual_workers import WorkersInput
from hetpipe.decide.lifecycle import adoption
from hetpipe.decide.lifecycle.configs import Assignment, assignment_of
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
    SendCommand,
    ShardHeard,
    StopAsked,
    TaskFailed,
    Tick,
    WrappedUp,
)
from hetpipe.decide.lifecycle.job_course import JobCourse
from hetpipe.decide.lifecycle.lifecycle import TABLE, Lifecycle, Step
from hetpipe.decide.lifecycle.lost_disks import LostDisks
from hetpipe.decide.lifecycle.patience import Patience
from hetpipe.decide.lifecycle.planning import num_devices_wanted
from hetpipe.decide.lifecycle.root_cause import Failure, Rank, root_cause
from hetpipe.decide.lifecycle.setting_out import Taken, WayInput
from hetpipe.decide.lifecycle.stage_table import StageLife, StageTable
from hetpipe.decide.lifecycle.training import Training
from hetpipe.errors import JobFailed, StateLost
from hetpipe.job.file import Job
from hetpipe.values.commands import (
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
from hetpipe.values.events import Evaluated, JobState, StateChanged, StopMode, Submission, Waiting
from hetpipe.values.ids import AgentId, JobId
from hetpipe.values.members import MemberInfo
from hetpipe.values.run import StageConditions
from hetpipe.values.run_document import RunDescription

_GOES_BACK = "the whole job goes back to its newest checkpoint"
_GOES_ON = "the whole job goes on from the checkpoint it has just taken"

#: Stages that a sentence names one by one.
_MAX_NAMED = 3


class JobMachine(JobCourse):
    """One job. Not thread-safe; every call gives the monotonic time."""

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
        machine._go_on(assignment, description, now=now)
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
        machine._way.goes_back = True
        machine._rewinds.begin_whole(cause, now=now)
        machine._announce(StateChanged(machine.state, f"{cause.sentence}: {_GOES_BACK}"))
        return machine

    @property
    def goes_back(self) -> bool:
        """Whether it is on its way back from where nobody knows how far it was."""
        return self._rewinds.is_whole

    def _go_on(self, assignment: Assignment, description: RunDescription, *, now: float) -> None:
        """Be where the job is."""
        run, state = description.run, adoption.state_of(description)
        self._way.take_over(assignment, eval_samples=run.eval_samples)
        self._lifecycle = Lifecycle(self.job_id, state)
        self._announce(StateChanged(state, adoption.ADOPTED))
        self._prepared = adoption.prepared_of(assignment, description)
        self._rewinds.prepared(self._prepared, now=now)
        for absent in adoption.not_registered(assignment).values():
            self._rewinds.gone(absent)
        self._training = Training(
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
                self._set_out(fact, now=now)
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

    def _set_out(self, fact: WayInput, *, now: float) -> None:
        """Go on towards training."""
        if self._rewinds.is_waiting:
            # Processes of before may have the devices.
            return
        if self.state is JobState.INSPECTING:
            self._heard = now
        self._set_out_further(self._way.handle(fact, state=self.state, now=now), now=now)

    def _set_out_further(self, steps: Sequence[Taken], *, now: float) -> None:
        for taken in steps:
            match taken:
                case Step.CLUSTER_LACKS:
                    self._told_place = self._way.place
                    self._step(taken, now=now, remark=str(self._way.place))
                case Step():
                    self._step(taken, now=now, remark=self._way.remark(taken))
                case Failure():
                    self._fail(taken, now=now)
                case _:
                    self._out.append(taken)

    def _shards_prepared(self, prepared: Prepared, *, now: float) -> None:
        self._way.is_preparing = False
        if self.state is not JobState.PLANNING:
            # Given up meanwhile: the shards have just been configured for nothing.
            self._wrap_up()
            return
        self._prepared = prepared
        self._way.prepared(prepared)
        told = self._rewinds.prepared(prepared, now=now)
        if isinstance(told, Failure):
            self._fail(told, now=now)
            return
        if told is not None:
            # What is lost is what no checkpoint has, whoever has died.
            sentence = consequence(told.sentence, StateLost.__name__, self.conditions.all)
            self.evaluations.rewind(told.to_clock)
            self._announce(replace(told, sentence=sentence))
        self._step(Step.PREPARED, now=now, remark=prepared.run.links_sentence)
        self.stages, self._disks = StageTable(), LostDisks()
        self._training = Training(
            self._way.assignment(prepared),
            prepared,
            self.stages,
            eval_samples=self._way.eval_samples,
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
        self._way.is_preparing = False
        if self.state is not JobState.PLANNING:
            # Given up meanwhile: some shards may have been configured for nothing.
            self._wrap_up()
            return
        if not self._rewinds.puts_up_with(failed, now=now):
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
        self._way.enlarge(new.agents)
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
                self._way.above = max(self._way.above, key.term)
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
        self._way.queue_again(lacks)
        self._told_place = self._way.place
        self._step(Step.CLUSTER_LACKS, now=now, remark=str(self._way.place))

    def _advance(self, training: Training, *, now: float) -> None:
        """Go on as far as the stages allow."""
        if self.state is JobState.STARTING and training.lives.can_run:
            training.run(now=now)
            self._step(Step.ALL_READY, now=now, remark=self.stages.links)
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
        """Begin to go back; what processes and parameter servers say from now on changes nothing."""
        if self._training is None or self._prepared is None or Step.REWIND not in TABLE[self.state]:
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
        self._step(Step.REWIND, now=now, remark=f"{cause.sentence}: {what}")
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
            may = self._rewinds.may_prepare(self._way, now=now)
            found = may if isinstance(may, Failure) else (self._way.prepare() if may else None)
        else:
            assert self._prepared is not None
            found = self._rewinds.check(self.stages, self._way, self._prepared, now=now)
        if isinstance(found, Failure):
            self._fail(found, now=now)
        elif found is not None:
            self._way.is_preparing = True
            self._out.append(found)

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
        elif not self._way.is_preparing:
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
        if self.state is JobState.INSPECTING and self._way.is_measuring_links:
            self._heard = now
            self._set_out_further(self._way.tick(now=now), now=now)
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
        place = self._way.place
        pause = self._patience.notice_seconds if place != self._told_place else self._patience.queue_notice_seconds
        if place is not None and now - self._noticed >= pause:
            self._noticed, self._told_place = now, place
            self._announce(Waiting(f"pending: {place}", now - self._entered))

    def _awaited(self) -> str:
        """For whom the coordinator waits, and for what."""
        match self.state:
            case JobState.SUBMITTED | JobState.PENDING | JobState.PLANNING if self._rewinds.is_waiting:
                return self._rewinds.awaited(self.stages, self._way)
            case JobState.INSPECTING | JobState.PLANNING:
                return self._way.awaited(self.state)
            case JobState.STARTING:
                return f"these to become ready: {_some(self.stages.unready())}"
            case _ if self._stop_now:
                return "all stages to end"
            case _:
                return "all stages to reach the barrier of the stop"


def _some(lives: list[StageLife]) -> str:
    """The first few of them."""
    named, rest = lives[:_MAX_NAMED], len(lives) - _MAX_NAMED
    phases = [f", which is {life.phase}" if life.phase else "" for life in named]
    told = "; ".join(f"{life}{phase}" for life, phase in zip(named, phases, strict=True))
    return told + (f" and {rest} more" if rest > 0 else "")
