"""The training phase of a job: virtual workers, progress, evaluations, missing members. Pure.

The part of `job_machine` that deals with processes; facts in, instructions out, and failures that the job does not
survive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hetpipe.decide.elastic.repartitions import Repartitions
from hetpipe.decide.elastic.replanning import basis_if_known
from hetpipe.decide.elastic.virtual_workers import VirtualWorker, VirtualWorkers, WorkersInput, WorkersOutput
from hetpipe.decide.lifecycle import adoption
from hetpipe.decide.lifecycle.adoption import Returning
from hetpipe.decide.lifecycle.configs import Assignment
from hetpipe.decide.lifecycle.evaluations import EvaluationHistory, Evaluations
from hetpipe.decide.lifecycle.exchange import (
    Announce,
    ClocksReported,
    MemberGone,
    MemberRegistered,
    MoveAnswered,
    MoveRequested,
    NewWorker,
    Prepared,
    Replanned,
    SendCommand,
    Tick,
)
from hetpipe.decide.lifecycle.patience import Patience
from hetpipe.decide.lifecycle.progress import ProgressBoard
from hetpipe.decide.lifecycle.root_cause import Failure
from hetpipe.decide.lifecycle.shard_watch import ShardWatch
from hetpipe.decide.lifecycle.stage_table import StageTable
from hetpipe.decide.lifecycle.summary import FinishedRun, peak_of, result_object, speed_of
from hetpipe.values.commands import KeyedStageReport
from hetpipe.values.conditions import Condition
from hetpipe.values.events import Evaluated, JobEvent, Waiting
from hetpipe.values.life_state import COMPUTING, LifeState
from hetpipe.values.run import ClockSnapshot, StageEvaluation, StageProgress, StageWaiting
from hetpipe.values.run_document import RunDescription
from hetpipe.values.utilisation import Peak


class JobTraining:
    """One job in training. Not thread-safe; every call takes the monotonic time."""

    def __init__(
        self,
        assignment: Assignment,
        prepared: Prepared,
        stages: StageTable,
        *,
        eval_samples: int | None,
        patience: Patience,
        now: float,
        adopted: RunDescription | None = None,
    ) -> None:
        """Create the state; `begin` starts the stages.

        Args:
            assignment: the plan and its members.
            prepared: the result of the preparation, with the start of the run.
            stages: the processes; filled here.
            eval_samples: samples of a complete evaluation; None: unknown.
            patience: timeouts that are not set by users.
            now: monotonic seconds.
            adopted: the state of the run under an earlier coordinator; `begin` is not called then.
        """
        self._assignment = assignment
        self._prepared = prepared
        self._stages = stages
        self._patience = patience
        self._returning: Returning | None = None
        workers = None
        if adopted is not None:
            workers = adoption.workers_of(adopted, now=now)
            adoption.fill(stages, assignment, workers, now=now)
            self._returning = Returning(assignment, stages, adopted, patience=patience, now=now)
        self._lives = VirtualWorkers(assignment, stages, patience=patience, now=now, adopted=workers)
        if adopted is not None:
            self._lives.versions = adopted.clocks.plans
        self._repartitions = Repartitions(
            self._lives, basis_if_known(prepared.run, assignment.agents), retry_seconds=patience.retry_seconds
        )
        self._shard_watch = ShardWatch(assignment.job.survive.absence.total_seconds(), patience.notice_seconds)
        self._evaluations = Evaluations(eval_samples)
        #: Set from the start of the training.
        self._board: ProgressBoard | None = None
        #: When the last progress table was announced.
        self._pictured = now
        self.clocks: ClockSnapshot | None = None if adopted is None else adopted.clocks

    @property
    def lives(self) -> VirtualWorkers:
        """The virtual workers."""
        return self._lives

    @property
    def repartitions(self) -> Repartitions:
        """The moves of layers."""
        return self._repartitions

    @property
    def is_stopped(self) -> bool:
        """Whether it ended on request, or has not ended."""
        return self._stages.was_stopped or not self._lives.all_done

    def begin(self, *, now: float) -> list[SendCommand]:
        """Start the first incarnation of every virtual worker."""
        return self._lives.begin(now=now)

    def run(self, *, now: float) -> None:
        """Start or take over the training: its time counts from here on."""
        prepared = self._prepared
        staleness = self._assignment.job.staleness
        is_adopted = self._returning is not None
        self._board = ProgressBoard(
            prepared.plan, prepared.data, prepared.start, staleness, now=now, is_adopted=is_adopted
        )

    def enlarge(self, new: NewWorker, prepared: Prepared, *, now: float) -> None:
        """Add a virtual worker to the run; `prepared` is the updated preparation."""
        self._prepared = prepared
        self._lives.enlarge(new, now=now)
        assignment = self._lives.assignment
        self._repartitions.enlarge(new.plan, basis_if_known(prepared.run, assignment.agents))
        if self._board is not None:
            self._board.follow(assignment.plan, now=now)

    def handle(self, fact: WorkersInput, *, now: float) -> list[WorkersOutput]:  # noqa: C901 - one case per kind of fact
        """Process one fact.

        Returns:
            Instructions, in order, and failures that the job does not survive.
        """
        out: list[WorkersOutput] = []
        match fact:
            case KeyedStageReport() if self._stages.get(fact.key) is not None:
                out += map(Announce, self._on_report(fact, now=now))
            case MemberGone(member=member, sentence=sentence):
                for shard in self._assignment.shards:
                    if shard.id == member:
                        self._shard_watch.gone(shard, sentence, now=now)
            case MemberRegistered(info=info):
                self._shard_watch.seen(info)
                out += [] if self._returning is None else self._returning.seen(info, now=now)
            case ClocksReported(clocks=clocks):
                self.clocks = clocks
            case Replanned():
                out += self._repartitions.planned(fact, self._lives, now=now)
            case MoveAnswered():
                out += self._repartitions.move_answered(fact, now=now)
            case MoveRequested(vw=vw, bounds=bounds):
                out += self._repartitions.request(vw, bounds, self._lives, now=now)
            case Tick():
                out += self._tick(now=now)
            case _:
                """it concerns an incarnation"""
        out += self._lives.handle(fact, now=now)
        newest = fact.clocks if isinstance(fact, ClocksReported) else None
        out += self._repartitions.follow(self._lives, newest, now=now)
        computing = [worker.vw for worker in self._lives if _may_compute(worker)]
        out += map(Announce, _if_any(self._evaluations.without(computing)))
        return out

    def result(
        self,
        run_dir: str,
        running_seconds: float,
        *,
        rewinds: int,
        conditions: Sequence[Condition],
        evaluations: EvaluationHistory,
    ) -> dict[str, Any] | None:
        """The result of the run so far, after the given number of rewinds; None before training."""
        if self._board is None:
            return None
        return result_object(
            FinishedRun(
                run_dir=run_dir,
                plan=self._prepared.plan,
                start=self._prepared.start,
                reported_clocks=self.clocks,
                reports=self._board.reports,
                evaluations=evaluations,
                running_seconds=running_seconds,
                staleness=self._assignment.job.staleness,
                deaths={worker.vw: worker.deaths for worker in self._lives},
                rewinds=rewinds,
                conditions=tuple(conditions),
                proof=self._prepared.run.proof,
                peak=self._peak,
            )
        )

    @property
    def _peak(self) -> Peak:
        """Peak of the devices currently in use, including virtual workers that joined later."""
        now = self._lives.assignment
        return peak_of(now.plan, now.agents, now.job, self._prepared.run.proof)

    def running_seconds(self, *, now: float) -> float:
        """Seconds since training began; 0 before."""
        return 0.0 if self._board is None else self._board.running_seconds(now=now)

    def _on_report(self, keyed: KeyedStageReport, *, now: float) -> list[JobEvent]:
        """Event for a stage's report that does not concern its incarnation."""
        match keyed.report:
            case StageProgress() as progress if self._board is not None:
                self._board.add(keyed.key, progress, now=now)
                self._repartitions.on_progress(keyed.key, progress)
            case StageWaiting(sentence=sentence, seconds=seconds):
                return [Waiting(sentence, seconds)]
            case StageEvaluation() as part:
                return [*_if_any(self._evaluations.add(keyed.key.vw, part))]
            case _:
                """its incarnation is reported elsewhere"""
        return []

    def _tick(self, *, now: float) -> list[WorkersOutput]:
        out: list[WorkersOutput] = []
        for fact in () if self._returning is None else self._returning.check(now=now):
            out += self.handle(fact, now=now)
        watched = self._shard_watch.check(now=now)
        out += [found if isinstance(found, Failure) else Announce(found) for found in watched]
        self._lives.is_on_hold = self._shard_watch.is_waiting
        if self._board is not None and now - self._pictured >= self._patience.picture_seconds:
            self._pictured = now
            self._board.follow(self._lives.plan, now=now)
            agents = self._lives.assignment.agents
            memory = {device.device: device.memory_bytes for agent in agents for device in agent.devices}
            table = self._board.table(self.clocks, states=self._lives.states, now=now, device_bytes=memory)
            speed = speed_of(self._prepared.run.proof, table.samples_per_second, self._peak)
            out.append(
                Announce(
                    replace(
                        table,
                        slow=self._repartitions.slow,
                        tokens_per_second=speed.tokens_per_second,
                        model_flops_utilisation=speed.model_flops_utilisation,
                        model_flops_utilisation_reason=speed.model_flops_utilisation_reason,
                    )
                )
            )
            out += self._repartitions.check(self._lives, seconds_left=table.eta_seconds, now=now)
        return out


def _may_compute(worker: VirtualWorker) -> bool:
    """Whether it may send parts of evaluations; even its first one may arrive before the report that it is ready."""
    is_first = worker.state is LifeState.STARTING and worker.incarnation == 0
    return is_first or worker.state in COMPUTING


def _if_any(whole: Evaluated | None) -> list[Evaluated]:
    return [] if whole is None else [whole]
