"""Drives a job's machine through its life, with a clock that moves only when told."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from hetpipe.decide.elastic.virtual_workers import VirtualWorker
from hetpipe.decide.lifecycle.configs import data_of, fresh_progress
from hetpipe.decide.lifecycle.exchange import (
    AdmitAcknowledged,
    Announce,
    ClocksReported,
    EvictAcknowledged,
    FetchClocks,
    FinalClocks,
    Input,
    Instruction,
    Prepare,
    Prepared,
    ResourcesOffered,
    SendCommand,
    Tick,
)
from hetpipe.decide.lifecycle.job_machine import JobMachine
from hetpipe.decide.lifecycle.job_queue import ClusterView
from hetpipe.decide.lifecycle.patience import Patience
from hetpipe.decide.lifecycle.planning import PlannedRun
from hetpipe.decide.planner.partition import plan_job
from hetpipe.job.file import Job
from hetpipe.values.commands import (
    ChildExit,
    Command,
    InspectionResult,
    KeyedStageReport,
    StageKey,
    StartStageCommand,
    StopJobCommand,
    StopVirtualWorkerCommand,
)
from hetpipe.values.events import JobEnded, JobEvent, JobState, StateChanged, Waiting, WorkerLost
from hetpipe.values.freezing import FreezeLineup
from hetpipe.values.ids import Clock, Incarnation, StageIndex, Term
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.run import ClockSnapshot, StageDone, StageFailed, StageReady, StageReport
from tests.server.coordinator.builders import (
    JOB_ID,
    STAGES,
    agent_info,
    clocks,
    job,
    model,
    shard_member,
    submission,
)

T = TypeVar("T")

AGENTS = (agent_info("n0", devices=2), agent_info("n1", devices=2))
SHARDS = (shard_member(0), shard_member(1))


class Driver:
    """One machine, its clock, and everything it has said."""

    TERM = Term(1)

    def __init__(
        self, of: Job | None = None, patience: Patience | None = None, *, lineups: tuple[FreezeLineup, ...] = ()
    ) -> None:
        self.now = 0.0
        self.lineups = lineups
        self.job = of or job()
        self.machine = JobMachine(JOB_ID, self.job, submission(self.job), patience=patience or Patience(), now=self.now)
        self.said: list[Instruction] = []

    def feed(self, fact: Input) -> list[Instruction]:
        out = self.machine.handle(fact, now=self.now)
        self.said += out
        return out

    def wait(self, seconds: float) -> list[Instruction]:
        """Let time pass in ticks, as the coordinator does."""
        end = self.now + seconds
        out: list[Instruction] = []
        while self.now < end:
            self.now = min(end, self.now + 0.25)
            out += self.feed(Tick())
        return out

    # -- the way to training

    def see_cluster(self) -> list[Instruction]:
        return self.feed(ResourcesOffered(ClusterView(AGENTS, 0, SHARDS)))

    def inspect(self) -> list[Instruction]:
        return self.feed(InspectionResult(JOB_ID, model()))

    def prepare(self) -> list[Instruction]:
        plan = plan_job(self.job, model(), self.machine.agents, self.TERM, JOB_ID)
        plan = replace(plan, freeze_lineups=self.lineups)
        return self.feed(Prepared(PlannedRun(self.job, plan), data_of(self.job, model()), fresh_progress(40)))

    def report(self, vw: int, stage: int, report: StageReport, *, life: int = 0) -> list[Instruction]:
        return self.feed(KeyedStageReport(self.key(vw, stage, life), report))

    def exit(
        self, vw: int, stage: int, code: int, words: str = "", *, life: int = 0, ordered: bool = False
    ) -> list[Instruction]:
        return self.feed(ChildExit(self.key(vw, stage, life), 1000 + 10 * vw + stage, code, words, ordered=ordered))

    def ready(self) -> None:
        for vw, stage in STAGES:
            self.report(vw, stage, StageReady(pid=1000 + 10 * vw + stage))

    def to(self, state: JobState) -> Driver:
        """Go the usual way up to `state`."""
        for reached, step in (
            (JobState.SUBMITTED, self.see_cluster),
            (JobState.INSPECTING, self.inspect),
            (JobState.PLANNING, self.prepare),
            (JobState.STARTING, self.ready),
        ):
            if self.machine.state is state:
                break
            assert self.machine.state is reached
            step()
        assert self.machine.state is state
        return self

    def all_done(self, reason: str = "end") -> None:
        for vw, stage in STAGES:
            self.report(vw, stage, StageDone(Clock(6), reason))

    def wrap_up(self, last: ClockSnapshot | None = None) -> list[Instruction]:
        return self.feed(FinalClocks(last or clocks(6, 6, samples=80, minibatches=20)))

    def fail(self, vw: int, stage: int, sentence: str, *, secondary: bool = False) -> None:
        error = "LinkClosed" if secondary else "NonFiniteUpdate"
        self.report(vw, stage, StageFailed(error, sentence, secondary))

    # -- lives

    def end_life(self, vw: int, *, life: int = 0) -> None:
        """Stage 1 of a virtual worker is killed, and all that was asked for because of it is done."""
        self.exit(vw, 1, -9, life=life)
        self.exit(vw, 0, -9, life=life, ordered=True)
        self.feed(EvictAcknowledged(Vw(vw), Incarnation(life)))

    def begin_life(self, vw: int, life: int, *, restore: str | None = None) -> None:
        """The clock shard expects a virtual worker, and its stages get ready."""
        self.feed(AdmitAcknowledged(Vw(vw), Incarnation(life), restore))
        for stage in (0, 1):
            self.report(vw, stage, StageReady(pid=2000 + 10 * vw + stage), life=life)

    def commit(self, vw: int) -> None:
        """The clock shard tells that a virtual worker has committed two waves, one after the other."""
        for clock in (8, 9):
            told = clocks(9, 9)
            self.feed(ClocksReported(replace(told, local={Vw(vw): Clock(clock)})))

    def worker(self, vw: int) -> VirtualWorker:
        assert self.machine._training is not None
        return next(worker for worker in self.machine._training.lives if worker.vw == vw)

    # -- what was said

    def key(self, vw: int, stage: int, life: int = 0) -> StageKey:
        term = next((life.key.term for life in self.machine.stages), Term(1))
        return StageKey(JOB_ID, Vw(vw), StageIndex(stage), Incarnation(life), term)

    def tasks(self, kind: type[T]) -> list[T]:
        return [item for item in self.said if isinstance(item, kind)]

    def events(self, kind: type[T]) -> list[T]:
        return [event for event in self.announced() if isinstance(event, kind)]

    def announced(self) -> list[JobEvent]:
        return [item.event for item in self.said if isinstance(item, Announce)]

    @property
    def lost(self) -> list[WorkerLost]:
        return self.events(WorkerLost)

    def states(self) -> list[str]:
        return [event.state.value for event in self.events(StateChanged)]

    def sentences(self) -> list[str]:
        return [event.sentence for event in self.events(Waiting)]

    def commands(self, kind: type[Command]) -> list[SendCommand]:
        return [item for item in self.said if isinstance(item, SendCommand) and isinstance(item.command, kind)]

    def ended(self) -> JobEnded:
        assert self.machine.ended is not None
        assert self.announced()[-1] == self.machine.ended
        return self.machine.ended

    @property
    def kill_commands(self) -> list[tuple[str, int, int]]:
        found = [(item.agent, item.command) for item in self.commands(StopVirtualWorkerCommand)]
        return [(a, c.vw, c.incarnation) for a, c in found if isinstance(c, StopVirtualWorkerCommand)]

    @property
    def stop_commands(self) -> list[str]:
        return [item.agent for item in self.commands(StopJobCommand)]

    @property
    def start_commands(self) -> list[SendCommand]:
        return self.commands(StartStageCommand)

    @property
    def prepare_tasks(self) -> list[Prepare]:
        return self.tasks(Prepare)

    @property
    def wrap_up_tasks(self) -> list[FetchClocks]:
        return self.tasks(FetchClocks)
