"""A stage gets slow: it is named, and layers move between the running stages of its virtual worker."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.decide.elastic import repartitions
from hetpipe.decide.elastic.repartitions import replanned, why_at_a_barrier
from hetpipe.decide.elastic.script import script_of
from hetpipe.decide.lifecycle.exchange import (
    Admit,
    ClocksReported,
    EvictAcknowledged,
    FileJudgement,
    FileStay,
    MoveAnswered,
    MoveLayers,
    MoveRequested,
    Replan,
    Replanned,
    Stay,
    StopRequested,
)
from hetpipe.decide.planner.costs import Costs
from hetpipe.errors import InfeasiblePlan
from hetpipe.job.file import Job
from hetpipe.server.coordinator import replan_tasks
from hetpipe.server.coordinator.replan_tasks import ReplanTasks
from hetpipe.server.decisions_file import append_decision, read_decisions
from hetpipe.values.cluster import DeviceType
from hetpipe.values.commands import StartStageCommand
from hetpipe.values.decisions import MoveDecision, StayDecision
from hetpipe.values.events import JobState, ProgressTable, ReplanJudged, StopMode, WorkerReplanned
from hetpipe.values.ids import Clock, Incarnation, LayerIndex
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.life_state import LifeState
from hetpipe.values.plan import VirtualWorkerPlan
from hetpipe.values.run import StageDone
from hetpipe.values.sync import DecidedMove, PlanMove, PlanVersion
from tests.server.coordinator.builders import JOB_ID, STAGES, clocks, job, progress
from tests.server.coordinator.machine_driver import SHARDS, Driver

#: What each stage takes for a minibatch.
Seconds = dict[tuple[int, int], float]

EVEN: Seconds = {(int(vw), int(stage)): 0.1 for vw, stage in STAGES}
SLOW: Seconds = {**EVEN, (1, 1): 1.0}


class Run(Driver):
    """A job that runs, whose stages report once a second."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        super().__init__(job("epochs=1000", *overrides))
        self.folder = folder
        self.replans = ReplanTasks(JOB_ID)
        self.lives = {0: 0, 1: 0}
        self.seconds: Seconds = dict.fromkeys(EVEN, 0.0)
        self.waves = dict.fromkeys(EVEN, 0)
        self.version = 0
        self.to(JobState.RUNNING)

    def go_on(self, seconds: Seconds, *, windows: int = 1) -> None:
        """So many windows, in each of which every stage computes one minibatch in its `seconds`."""
        for _ in range(windows):
            self.wait(1.0)
            for vw, stage in STAGES:
                if not self.worker(vw).is_up:
                    continue
                self.waves[vw, stage] += 1
                self.seconds[vw, stage] += seconds[vw, stage]
                waves = self.waves[vw, stage]
                told = progress(
                    clock=waves, minibatches=waves, samples=4 * waves, compute_seconds=self.seconds[vw, stage]
                )
                self.report(vw, stage, told, life=self.lives[vw])

    def answer(self) -> Replanned:
        """Carry out what was asked for last."""
        answer = self.replans.replan(self.tasks(Replan)[-1], str(self.folder), wall=1.0)
        self.feed(answer)
        return answer

    def accept(self, vw: int = 1) -> MoveLayers:
        """The clock shard takes the move that was asked for last."""
        task = self.tasks(MoveLayers)[-1]
        self.feed(MoveAnswered(Vw(vw), task.move.incarnation, "accepted"))
        return task

    def cross(self, bounds: tuple[int, ...], *, vw: int = 1) -> None:
        """A barrier is passed, behind which it has the next version of its plan."""
        self.version += 1
        clock = max(self.waves.values())
        versions = {Vw(vw): PlanVersion(self.version, bounds, (0, 2, 4))}
        self.feed(ClocksReported(replace(clocks(clock, clock), plans=versions)))

    def moved(self) -> None:
        """Up to the moment when the new plan is in force."""
        self.go_on(SLOW, windows=7)
        self.answer()
        self.cross(self.accept().move.bounds)

    def layers(self, vw: int = 1) -> list[list[tuple[int, int]]]:
        """What each life of it was told to compute."""
        found = [item.command for item in self.start_commands]
        lives: dict[int, list[tuple[int, int]]] = {}
        for command in found:
            assert isinstance(command, StartStageCommand)
            config = command.config
            if config.vw == vw:
                stage = config.plan.stage(config.vw, config.stage)
                lives.setdefault(config.incarnation, []).append((stage.first_layer, stage.last_layer))
        return list(lives.values())

    @property
    def table(self) -> ProgressTable:
        return self.events(ProgressTable)[-1]

    @property
    def slow(self) -> list[tuple[int, int, float]]:
        return [(one.vw, one.stage, round(one.factor, 6)) for one in self.table.slow]

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "plans").glob("*"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_the_way_of_a_move(run: Run) -> None:
    run.go_on(SLOW, windows=5)
    assert run.slow == []
    run.go_on(SLOW, windows=2)
    assert run.slow == [(1, 1, 10.0)]
    answer = run.answer()
    assert answer.gain == pytest.approx(1.0, rel=0.01)
    assert run.files == [], "no process is started by the new plan"

    task = run.accept()
    assert (task.vw, task.term, task.clock_shard) == (1, 1, SHARDS[0])
    assert task.move == PlanMove(
        Incarnation(0),
        (0, 3, 4),
        "straggler",
        "compared with the plan, virtual worker 1 takes: stage 1 10.0 times",
        answer.gain,
        live=True,
    )
    run.go_on(SLOW, windows=3)
    assert run.events(WorkerReplanned) == []
    run.cross((0, 3, 4))

    assert run.worker(1).state is LifeState.READY
    assert run.layers() == [[(0, 2), (2, 4)]]
    assert run.events(WorkerReplanned) == [WorkerReplanned(Vw(1), Incarnation(0), (2, 2), (3, 1), answer.gain, 1)]
    run.go_on({**EVEN, (1, 0): 0.15, (1, 1): 0.5}, windows=7)
    [judged] = run.events(ReplanJudged)
    assert judged.gained == pytest.approx(1.0)
    assert "takes 500.0 ms per minibatch under its new plan, 1000.0 ms before" in judged.sentence
    assert run.tasks(FileJudgement) == [FileJudgement(Vw(1), 1, judged.gained, judged.sentence)]
    assert [(row.stages[0].last_layer, row.version) for row in run.table.rows] == [(2, 0), (3, 1)]
    assert run.slow == []
    assert len(run.tasks(MoveLayers)) == 1


def test_a_clock_shard_that_is_away_is_asked_again(run: Run) -> None:
    run.go_on(SLOW, windows=7)
    run.answer()
    run.feed(MoveAnswered(Vw(1), Incarnation(0), "unreachable"))
    run.go_on(SLOW, windows=5)
    first, second = run.tasks(MoveLayers)
    assert first == second
    # It had heard of it after all.
    run.cross((0, 3, 4))
    run.go_on(SLOW, windows=5)

    assert len(run.tasks(MoveLayers)) == 2
    assert len(run.events(WorkerReplanned)) == 1


def test_one_that_its_stages_do_not_prepare_in_time_has_a_barrier(run: Run) -> None:
    run.go_on(SLOW, windows=7)
    run.answer()
    first = run.accept()
    stall = run.job.survive.stall.total_seconds()
    run.wait(stall / 2)
    assert len(run.tasks(MoveLayers)) == 1
    run.wait(stall)
    reason = f"{first.move.reason}; at a barrier, as its stages were not prepared in time"
    assert run.accept().move == replace(first.move, reason=reason, live=False)
    run.wait(2 * stall)
    assert len(run.tasks(MoveLayers)) == 2, "it is asked for once"


@pytest.mark.parametrize(
    ("overrides", "after", "why"),
    [
        ((), (0, 2, 3, 5), None),
        (("weights=stash",), (0, 2, 3, 5), "under weights: stash versions depend on the stage"),
        (
            ("sync.kind=allreduce", "weights=flush"),
            (0, 2, 3, 5),
            "under allreduce all virtual workers are cut alike",
        ),
        ((), (0, 3, 4, 5), "some layers go beyond the next stage"),
        ((), (0, 1, 4, 5), "stage 1 has too little memory"),
    ],
)
def test_where_layers_move_at_a_barrier_only(
    run: Run, overrides: Sequence[str], after: tuple[int, ...], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(_job: Job, _costs: Costs, _before: VirtualWorkerPlan, plan: VirtualWorkerPlan, _kinds: list[str]) -> None:
        if plan.bounds == (0, 1, 4, 5):
            raise InfeasiblePlan("stage 1 has too little memory; give a `clock`")

    monkeypatch.setattr(repartitions, "check_memory_of_both", check)
    run.go_on(SLOW, windows=7)
    (task,) = run.tasks(Replan)
    known = task.plan.virtual_workers[1].stages

    def cut(bounds: tuple[int, ...]) -> VirtualWorkerPlan:
        layers = [(LayerIndex(first), LayerIndex(last)) for first, last in pairwise(bounds)]
        stages = [replace(known[0], first_layer=first, last_layer=last) for first, last in layers]
        return VirtualWorkerPlan(Vw(1), tuple(stages))

    found = why_at_a_barrier(job(*overrides), task.basis, cut((0, 1, 2, 5)), cut(after))
    assert found is None if why is None else found is not None and found.startswith(why)


def test_a_move_that_is_refused_is_none(run: Run) -> None:
    run.go_on(SLOW, windows=7)
    run.answer()
    run.feed(MoveAnswered(Vw(1), Incarnation(0), "refused"))
    run.go_on(SLOW, windows=40)

    assert len(run.tasks(MoveLayers)) == 1
    assert run.events(WorkerReplanned) == []
    (given_up,) = run.tasks(FileStay)
    assert (given_up.by, given_up.stay.stages, given_up.was_requested) == ("straggler", (3, 1), True)
    assert given_up.stay.reason == "the clock shard refused to move them"


def test_what_an_operator_has_asked_for_and_never_happens_is_recorded(run: Run) -> None:
    """Its virtual worker is lost before; or it has moved, and the clock shard alone has heard of that."""
    run.go_on(EVEN, windows=8)
    run.feed(MoveRequested(Vw(1), (0, 3, 4)))
    run.accept()
    run.end_life(1)
    (given_up,) = run.tasks(FileStay)
    assert given_up.stay == Stay((3, 1), None, "virtual worker 1 ended before they had moved")
    run.replans.stay(given_up, str(run.folder), wall=1.0)
    (line,) = stays(run)
    assert (line.vw, line.stages, line.by, line.reason) == (1, (3, 1), "operator", given_up.stay.reason)
    moved = DecidedMove(Clock(9), 1, PlanMove(Incarnation(0), (0, 2, 4), "operator", "an operator asked for it"))
    append_decision(run.folder, MoveDecision.of(Vw(1), moved, wall=1.0))
    unheard = replace(given_up, clock=Clock(9), stay=replace(given_up.stay, stages=(2, 2)))
    run.replans.stay(unheard, str(run.folder), wall=1.0)
    assert stays(run) == [line]
    assert script_of(stays(run)) == ()


def test_what_was_computed_before_the_move_is_not_its_gain(run: Run) -> None:
    run.moved()
    for _ in range(10):
        # Late reports of waves before the barrier.
        run.report(1, 1, progress(clock=7, minibatches=7, compute_seconds=run.seconds[1, 1]))
    assert run.events(ReplanJudged) == []


def test_a_script_moves_what_is_measured(run: Run) -> None:
    """Stages are compared with what is expected of the layers that they have now."""
    run.go_on(EVEN, windows=8)
    run.cross((0, 3, 4))
    run.go_on({**EVEN, (1, 0): 0.15, (1, 1): 0.05}, windows=10)

    assert run.slow == []
    assert run.events(WorkerReplanned) == []


def test_what_an_operator_asks_for_is_judged_and_not_undone_at_once(run: Run) -> None:
    run.go_on(EVEN, windows=8)
    run.feed(MoveRequested(Vw(1), (0, 3, 4)))
    asked = PlanMove(Incarnation(0), (0, 3, 4), "operator", "an operator asked for it", live=True)
    assert run.accept().move == asked
    run.cross((0, 3, 4))
    run.go_on({**EVEN, (1, 0): 0.2}, windows=8)
    (judged,) = run.tasks(FileJudgement)
    assert judged.version == 1
    assert judged.measured_gain == pytest.approx(-0.5)

    run.go_on(SLOW, windows=25)
    assert run.slow == [(1, 1, 10.0)]
    assert run.tasks(Replan) == []
    run.go_on(SLOW, windows=30)
    assert len(run.tasks(Replan)) == 1


def test_nothing_moves_while_all_take_as_long_as_each_other(run: Run) -> None:
    run.go_on(EVEN, windows=20)

    assert run.tasks(Replan) == []


@pytest.mark.parametrize(
    "overrides",
    [
        ("survive.straggler=0",),
        ("survive.patience_waves=30",),
        # With the new cut it is twice as fast.
        ("survive.least_gain=1.5",),
        # 1000 epochs of 40 samples are hours of work, 2 are not worth the while.
        ("epochs=1",),
    ],
)
def test_who_is_not_moved(tmp_path: Path, overrides: Sequence[str]) -> None:
    run = Run(tmp_path, *overrides)
    run.go_on(SLOW, windows=12)
    for _ in run.tasks(Replan):
        run.answer()

    assert run.tasks(MoveLayers) == []
    named = overrides[0] not in {"survive.straggler=0", "survive.patience_waves=30"}
    assert bool(run.slow) is named


def stays(run: Run) -> list[StayDecision]:
    return [line for line in read_decisions(run.folder) if isinstance(line, StayDecision)]


def test_a_cut_that_gains_too_little_is_recorded_with_its_gain(tmp_path: Path) -> None:
    run = Run(tmp_path, "survive.least_gain=1.5")
    run.feed(ClocksReported(clocks(9, 9)))
    run.go_on(SLOW, windows=12)
    run.answer()
    (stay,) = stays(run)
    assert (stay.at.clock, stay.vw, stay.stages, stay.by) == (9, 1, (3, 1), "straggler")
    assert stay.predicted_gain == pytest.approx(1.0, rel=0.01)
    assert stay.reason == "the best cut speeds the job up by 100.0 %; a move has to by 150.0 %"
    run.answer()
    assert stays(run) == [stay], "a coordinator that repeats itself records it once"
    assert script_of(stays(run)) == ()


def test_the_best_cut_is_recorded_as_such_and_one_that_fits_nowhere(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.go_on(SLOW, windows=7)
    (task,) = run.tasks(Replan)
    fast = replace(task, seconds=task.healthy)
    assert replanned(fast).stay == Stay((2, 2), 0.0, "it is cut best already, for stages as slow as these")
    tiny = {name: replace_memory(kind) for name, kind in task.basis.cluster.device_types.items()}
    basis = replace(task.basis, cluster=task.basis.cluster.model_copy(update={"device_types": tiny}))
    assert replanned(replace(task, basis=basis)).stay == Stay((), None, "no cut fits in the memory of its devices")


def replace_memory(kind: DeviceType) -> DeviceType:
    return kind.model_copy(update={"memory_bytes": 1})


def test_one_that_holds_nobody_up_stays(run: Run) -> None:
    """The other one is slower still: both its stages are, so nothing can be moved there."""
    run.go_on(EVEN, windows=4)
    run.go_on({(0, 0): 3.0, (0, 1): 3.0, (1, 0): 0.1, (1, 1): 1.0}, windows=8)
    for _ in run.tasks(Replan):
        run.answer()

    assert run.tasks(MoveLayers) == []
    assert {line.predicted_gain for line in stays(run)} == {0.0}


def test_a_deterministic_run_moves_as_well(tmp_path: Path) -> None:
    run = Run(tmp_path, "sync.deterministic=true")
    run.moved()

    assert len(run.events(WorkerReplanned)) == 1


def test_it_is_not_asked_for_again_and_again(tmp_path: Path) -> None:
    run = Run(tmp_path, "survive.least_gain=1.5")
    run.go_on(SLOW, windows=40)
    assert len(run.tasks(Replan)) == 1
    run.answer()
    run.go_on(SLOW, windows=40)
    assert len(run.tasks(Replan)) == 1
    run.go_on(SLOW, windows=15)

    assert len(run.tasks(Replan)) == 2


def test_after_a_move_there_is_none_for_twice_as_long(run: Run) -> None:
    run.moved()
    # The device is well again: by the new plan the other stage has too much.
    well: Seconds = {**EVEN, (1, 0): 0.15, (1, 1): 0.05}
    run.go_on(well, windows=40)
    assert len(run.tasks(Replan)) == 1
    run.go_on(well, windows=20)
    assert len(run.tasks(Replan)) == 2
    run.answer()
    assert run.accept().move.bounds == (0, 2, 4)
    run.cross((0, 2, 4))
    run.go_on(SLOW, windows=90)
    assert len(run.tasks(Replan)) == 2


def test_one_that_dies_before_the_barrier_keeps_its_plan(run: Run) -> None:
    run.go_on(SLOW, windows=7)
    run.answer()
    run.accept()
    run.end_life(1)
    run.wait(0.5)

    assert run.tasks(Admit)[-1].replan is None
    run.begin_life(1, 1)
    run.lives[1] = 1
    run.go_on(EVEN, windows=10)
    assert run.events(WorkerReplanned) == []
    assert len(run.tasks(MoveLayers)) == 1


def test_one_that_dies_in_the_move_has_the_new_plan(run: Run) -> None:
    """Its processes start by the plan of the run and move when they join; there is nothing to compare."""
    run.go_on(SLOW, windows=7)
    run.answer()
    run.accept()
    run.exit(1, 1, -9)
    run.cross((0, 3, 4))
    assert [(told.after, told.version) for told in run.events(WorkerReplanned)] == [((3, 1), 1)]
    run.exit(1, 0, -9, ordered=True)
    run.feed(EvictAcknowledged(Vw(1), Incarnation(0)))
    run.wait(0.5)
    admit = run.tasks(Admit)[-1]
    assert (admit.replan, admit.bounds) == (None, (0, 2, 4))
    run.begin_life(1, 1)
    run.lives[1] = 1
    run.go_on({**EVEN, (1, 0): 0.15, (1, 1): 0.5}, windows=10)

    assert run.events(ReplanJudged) == []


def test_one_that_died_while_it_was_planned_anew_keeps_its_plan(run: Run) -> None:
    run.go_on(SLOW, windows=7)
    run.exit(1, 1, -9)
    run.answer()

    assert run.tasks(MoveLayers) == []


def test_a_stop_ends_a_move(run: Run) -> None:
    run.go_on(SLOW, windows=7)
    run.answer()
    run.feed(StopRequested(StopMode.CHECKPOINT))
    for vw, stage in STAGES:
        run.report(vw, stage, StageDone(Clock(40), "stop+drain"))
        run.exit(vw, stage, 0)
    run.wait(1.0)
    run.wrap_up()

    assert run.machine.state is JobState.STOPPED
    assert run.events(WorkerReplanned) == []
    (given_up,) = run.tasks(FileStay)
    assert given_up.stay.reason == "virtual worker 1 ended before they had moved"


def test_nobody_is_planned_anew_while_another_one_is_not_there(run: Run) -> None:
    run.go_on(SLOW, windows=4)
    run.exit(0, 1, -9)
    run.go_on(SLOW, windows=8)

    assert run.tasks(Replan) == []


def test_trouble_with_the_plan_leaves_everything_as_it_is(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replan_tasks, "replanned", lambda _task: 1 / 0)
    run.go_on(SLOW, windows=7)

    assert run.answer().plan is None
    assert run.tasks(MoveLayers) == []


@settings(max_examples=6)
@given(st.lists(st.sampled_from([EVEN, SLOW, {**EVEN, (1, 0): 1.0}, {**EVEN, (1, 1): 0.01}]), min_size=30, max_size=30))
def test_however_a_device_flickers_it_is_moved_ever_more_rarely(phases: list[Seconds]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder))
        asked, moves, windows = 0, [], 0
        for phase in phases:
            run.go_on(phase, windows=6)
            windows += 6
            if len(run.tasks(Replan)) > asked:
                asked += 1
                if run.answer().plan is not None:
                    moves.append(windows)
                    run.cross(run.accept().move.bounds)

    pause = 10 * 5
    for position, (earlier, later) in enumerate(pairwise(moves)):
        assert later - earlier >= pause * 2**position
