"""A stage gets slow: it is named, its virtual worker leaves with a checkpoint and comes back by a new plan."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.decide.lifecycle.exchange import (
    Admit,
    AdmitAcknowledged,
    Drain,
    DrainAcknowledged,
    EvictAcknowledged,
    Replan,
    Replanned,
    SettleReplan,
    StopRequested,
)
from hetpipe.server.coordinator.replan_tasks import ReplanTasks
from hetpipe.values.commands import StartStageCommand
from hetpipe.values.events import JobState, ProgressTable, ReplanJudged, StopMode, WorkerLeft, WorkerReplanned
from hetpipe.values.ids import Clock, Incarnation
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.life_state import LifeState
from hetpipe.values.plan import Plan
from hetpipe.values.run import StageDone, StageReady
from hetpipe.values.wire import to_json
from tests.server.coordinator.builders import JOB_ID, STAGES, job, progress
from tests.server.coordinator.machine_driver import Driver

FOLDER = "/run/checkpoints/clock-00000040"

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
        answer = self.replans.replan(self.tasks(Replan)[-1], str(self.folder))
        self.feed(answer)
        return answer

    def leave(self, vw: int = 1) -> None:
        """It passes the barrier and ends."""
        life = self.lives[vw]
        self.feed(DrainAcknowledged(Vw(vw), Incarnation(life)))
        for stage in (0, 1):
            self.report(vw, stage, StageDone(Clock(40), "drain"), life=life)
            self.exit(vw, stage, 0, life=life)
        self.wait(0.25)

    def come_back(self, vw: int = 1) -> None:
        life = self.lives[vw] = self.lives[vw] + 1
        self.feed(AdmitAcknowledged(Vw(vw), Incarnation(life), FOLDER))
        for stage in (0, 1):
            self.waves[vw, stage], self.seconds[vw, stage] = 0, 0.0
            self.report(vw, stage, StageReady(pid=2000 + 10 * vw + stage), life=life)

    def moved(self) -> None:
        """Up to the moment when the new plan is in force."""
        self.go_on(SLOW, windows=7)
        self.answer()
        self.leave()
        self.come_back()

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

    def settle(self) -> list[str]:
        for task in self.tasks(SettleReplan):
            self.replans.settle(task, str(self.folder))
        return self.files


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
    assert run.files == ["proposed.json"]

    [drain] = run.tasks(Drain)
    assert (drain.vw, drain.incarnation) == (1, 0)
    assert run.worker(1).state is LifeState.LEAVING
    run.leave()
    assert run.events(WorkerLeft) == [WorkerLeft(Vw(1), Incarnation(0), returns=True)]
    [admit] = run.tasks(Admit)
    assert admit.replan is not None
    assert (admit.vw, admit.incarnation, admit.num_stages, admit.replan.left_at) == (1, 1, 2, 40)
    assert admit.replan.plan.virtual_workers[1] == answer.recut.worker  # type: ignore[union-attr]
    run.come_back()

    assert run.layers() == [[(0, 2), (2, 4)], [(0, 3), (3, 4)]]
    assert run.layers(0) == [[(0, 2), (2, 4)]]
    assert run.events(WorkerReplanned) == [WorkerReplanned(Vw(1), Incarnation(1), (2, 2), (3, 1), answer.gain)]
    assert run.settle() == ["vw-1-life-1.json"]
    assert (run.folder / "plans" / "vw-1-life-1.json").read_text() == to_json(Plan, admit.replan.plan) + "\n"
    assert run.worker(1).deaths == 0
    run.go_on({**EVEN, (1, 0): 0.15, (1, 1): 0.5}, windows=6)
    [judged] = run.events(ReplanJudged)
    assert judged.gained == pytest.approx(1.0)
    assert "takes 500.0 ms per minibatch under its new plan, 1000.0 ms before" in judged.sentence
    assert [(row.stages[0].last_layer) for row in run.table.rows] == [2, 3]
    assert run.slow == []


def test_nothing_moves_while_all_take_as_long_as_each_other(run: Run) -> None:
    run.go_on(EVEN, windows=20)

    assert run.tasks(Replan) == []


@pytest.mark.parametrize(
    "overrides",
    [
        ("survive.straggler=0",),
        ("sync.deterministic=true",),
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

    assert run.tasks(Drain) == []
    named = overrides[0] not in {"survive.straggler=0", "survive.patience_waves=30"}
    assert bool(run.slow) is named


def test_one_that_holds_nobody_up_stays(run: Run) -> None:
    """The other one is slower still: both its stages are, so nothing can be moved there."""
    run.go_on(EVEN, windows=4)
    run.go_on({(0, 0): 3.0, (0, 1): 3.0, (1, 0): 0.1, (1, 1): 1.0}, windows=8)
    for _ in run.tasks(Replan):
        run.answer()

    assert run.tasks(Drain) == []


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
    run.leave()
    run.come_back()

    assert run.layers()[-1] == [(0, 2), (2, 4)]
    run.go_on(SLOW, windows=90)
    assert len(run.tasks(Replan)) == 2


def test_a_new_plan_whose_first_life_does_not_get_ready_is_given_up(run: Run) -> None:
    run.go_on(SLOW, windows=7)
    run.answer()
    run.leave()
    run.feed(AdmitAcknowledged(Vw(1), Incarnation(1), FOLDER))
    run.end_life(1, life=1)
    run.wait(0.5)

    [judged] = run.events(ReplanJudged)
    assert judged.gained is None
    assert judged.sentence == "virtual worker 1 did not become ready under its new plan; the previous plan is restored"
    assert run.settle() == []
    admit = run.tasks(Admit)[-1]
    assert admit.replan is not None
    assert (admit.incarnation, admit.replan.left_at) == (2, None)
    assert admit.replan.plan.virtual_workers[1].stages[0].last_layer == 2
    run.feed(AdmitAcknowledged(Vw(1), Incarnation(2), FOLDER))
    assert run.layers() == [[(0, 2), (2, 4)], [(0, 3), (3, 4)], [(0, 2), (2, 4)]]
    assert run.events(WorkerReplanned) == []


def test_one_that_dies_on_its_way_out_comes_back_by_the_new_plan(run: Run) -> None:
    run.go_on(SLOW, windows=7)
    run.answer()
    run.end_life(1)
    run.wait(0.5)

    admit = run.tasks(Admit)[-1]
    assert admit.replan is not None
    assert admit.replan.left_at is None
    run.come_back()
    assert run.layers()[-1] == [(0, 3), (3, 4)]


def test_one_that_died_while_it_was_planned_anew_keeps_its_plan(run: Run) -> None:
    run.go_on(SLOW, windows=7)
    run.exit(1, 1, -9)
    run.answer()
    assert run.settle() == []
    run.exit(1, 0, -9, ordered=True)
    run.feed(EvictAcknowledged(Vw(1), Incarnation(0)))
    run.wait(0.5)

    assert run.tasks(Drain) == []
    assert run.tasks(Admit)[-1].replan is None


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
    assert run.settle() == []


def test_nobody_is_planned_anew_while_another_one_is_not_there(run: Run) -> None:
    run.go_on(SLOW, windows=4)
    run.exit(0, 1, -9)
    run.go_on(SLOW, windows=8)

    assert run.tasks(Replan) == []


def test_trouble_with_the_plan_leaves_everything_as_it_is(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("not a folder")
    run.go_on(SLOW, windows=7)

    assert run.answer().plan is None
    assert run.tasks(Drain) == []


@settings(max_examples=6, deadline=None)
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
                    run.leave()
                    run.come_back()

    pause = 10 * 5
    for position, (earlier, later) in enumerate(pairwise(moves)):
        assert later - earlier >= pause * 2**position
