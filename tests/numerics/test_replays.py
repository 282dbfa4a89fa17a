"""Whatever a run has decided by itself can be replayed as a script with equal bits: moves, frozen layers, leavers."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.checkpoint.manifest import checkpoint_dir
from hetpipe.decide.elastic.repeating import unrepeatable
from hetpipe.decide.elastic.script import script_of
from hetpipe.decide.lifecycle.exchange import MoveAnswered, MoveLayers, Replan
from hetpipe.job.elastic import AddLine, BarrierLine, DropLine, FreezeLine, MinibatchMoment, MoveLine
from hetpipe.pipeline import tally
from hetpipe.server.coordinator.replan_tasks import ReplanTasks
from hetpipe.server.decisions_file import decisions_of_run, pasts_of_run, read_decisions
from hetpipe.values.decisions import MoveDecision
from hetpipe.values.events import JobState
from hetpipe.values.ids import Clock, StageIndex, VirtualWorkerIndex
from hetpipe.values.run import StageProgress, StageReport
from hetpipe.values.sync import PlanMove
from tests.numerics.compare import ADAMW, MOMENTUM, SGD, Case, assert_same_bits, run, trained
from tests.numerics.test_deaths import BATCH_NORM, death
from tests.numerics.test_freezing import assert_frozen
from tests.numerics.test_leavers import decisions, drain
from tests.numerics.test_live_moves import Operator
from tests.numerics.test_moves import barrier_move
from tests.reference.executor import run_reference
from tests.server.coordinator.builders import JOB_ID
from tests.server.coordinator.machine_driver import Driver

pytestmark = pytest.mark.matrix

#: Of a model of five layers.
_CUTS = ((1, 4), (2, 3), (3, 2), (4, 1))


def replayed(what: Case, folder: Path) -> Case:
    """The case as it is by the script that the decisions of its run make."""
    script = script_of(decisions_of_run(folder))
    freeze = what.job().freeze
    assert unrepeatable(script, pasts_of_run(folder), compresses=freeze.compress, recuts=False) is None
    members = [line for line in script if isinstance(line, DropLine | AddLine)]
    added = [line for line in members if isinstance(line, AddLine) and line.devices]
    kept = {key: value for key, value in what.freeze.items() if key not in ("every", "waves", "alpha")}
    return replace(
        what,
        freeze=kept,
        moves=tuple(barrier_move(line) for line in script if isinstance(line, MoveLine) and not line.is_live),
        live=tuple(
            (line.at.p, line.vw, line.stages)
            for line in script
            if isinstance(line, MoveLine) and isinstance(line.at, MinibatchMoment)
        ),
        freezes=tuple((line.at.clock, line.layers) for line in script if isinstance(line, FreezeLine)),
        extra_barriers=tuple(line.at.clock for line in script if isinstance(line, BarrierLine)),
        members=tuple((line.at.clock, line.do, line.vw) for line in members if line not in added),
        added=tuple((line.at.clock, line.vw, line.stages or (), line.devices or ()) for line in added),
    )


def random_run(seed: int) -> tuple[Case, list[Any]]:
    """A run in which norms decide what freezes while layers move at random minibatches."""
    draw = random.Random(seed)
    workers, wave = draw.choice([1, 2]), draw.choice([2, 3])
    weights = draw.choice(["wave", "vertical", "flush", "stash", "predict"])
    by_epochs = bool(seed % 2)
    amount: dict[str, Any] = {"epochs": 4} if by_epochs else {"minibatches": 10 * wave}
    where: dict[str, Any] = {"every": "epoch"} if by_epochs else {"waves": draw.choice([2, 3])}
    what = Case(
        workers=workers,
        stages=[list(draw.choice(_CUTS)) for _ in range(workers)],
        wave=wave,
        staleness=draw.choice([0, 1]),
        weights=weights,  # type: ignore[arg-type]
        optimizer=dict(draw.choice([MOMENTUM, ADAMW] if weights == "predict" else [MOMENTUM, ADAMW, SGD])),
        freeze={**where, "alpha": draw.choice(["1/3", "1/2", "3/4"])},
        **amount,
    )
    moves = [
        death("before forward", draw.randint(2, 6 * wave), vw=draw.randrange(workers), how="moved", stages=cut)
        for cut in draw.sample(_CUTS, draw.choice([1, 2]))
    ]
    return what, moves


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 20))])
def test_decisions_are_a_script_with_the_bits_of_the_run(seed: int, tmp_path: Path) -> None:
    what, moves = random_run(seed)
    run(what, tmp_path / "run", deaths=tuple(moves))
    again = replayed(what, tmp_path / "run")
    assert_frozen(again, tmp_path / "again")
    found, expected = trained(tmp_path / "run"), trained(tmp_path / "again")
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
    assert read_decisions(tmp_path / "again") == (), "a scripted run decides nothing by itself"


@pytest.mark.parametrize(
    ("changes", "drained"),
    [
        ({"optimizer": dict(ADAMW), "combine": "mean"}, [drain(number=5)]),
        pytest.param(
            {"weights": "flush", "optimizer": dict(MOMENTUM)},
            [drain(number=3, vw=2), drain(number=7, vw=0, comes_back=False)],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_who_is_drained_and_comes_back_is_dropped_and_added_by_the_script(
    changes: dict[str, Any], drained: list[Any], tmp_path: Path
) -> None:
    """While layers move; buffers and the optimizers' states are those with which it left."""
    what = Case(workers=3, stages=[[2, 2]] * 3, wave=2, epochs=8, staleness=0, **changes, **BATCH_NORM)
    moves = [death("before forward", 4, vw=1, how="moved", stages=(1, 3))] if len(drained) == 1 else []
    run(what, tmp_path / "run", deaths=(*drained, *moves))
    again = replayed(what, tmp_path / "run")
    assert [verb for _, verb, _ in again.members].count("drop") == len(drained)
    run(again, tmp_path / "again")
    assert_same_bits(trained(tmp_path / "run"), run_reference(again.reference()))
    assert_same_bits(trained(tmp_path / "again"), run_reference(again.reference()))
    assert read_decisions(tmp_path / "again") == (), "a scripted run decides nothing by itself"


@pytest.mark.parametrize(
    ("what", "events"),
    [
        (
            Case(workers=1, stages=[[2, 3]], wave=2, minibatches=24, staleness=1, weights="stash", combine="mean"),
            [
                death("before forward", 3, how="enlarged", stages=(3, 2)),
                death("before forward", 9, how="enlarged", stages=(5,)),
            ],
        ),
        # The one that is new leaves, and comes back, while layers move.
        pytest.param(
            Case(workers=2, stages=[[2, 2]] * 2, wave=2, epochs=8, staleness=0, optimizer=dict(ADAMW), **BATCH_NORM),
            [
                death("before forward", 3, how="enlarged", stages=(4,)),
                death("before forward", 9, vw=2, incarnation=1, how="drained"),
                death("before forward", 12, vw=1, how="moved", stages=(1, 3)),
            ],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_who_is_added_by_an_operator_is_added_by_the_script(what: Case, events: list[Any], tmp_path: Path) -> None:
    """On devices beyond those of the job."""
    run(what, tmp_path / "run", deaths=tuple(events))
    again = replayed(what, tmp_path / "run")
    assert len(again.added) == sum(event.how == "enlarged" for event in events)
    num_devices = what.job().num_devices
    assert next(devices[0] for *_, devices in again.added) == num_devices
    assert again.job().num_devices == num_devices + sum(len(devices) for *_, devices in again.added)
    run(again, tmp_path / "again")
    assert_same_bits(trained(tmp_path / "run"), run_reference(again.reference()))
    assert_same_bits(trained(tmp_path / "again"), run_reference(again.reference()))
    assert read_decisions(tmp_path / "again") == (), "a scripted run decides nothing by itself"


def test_what_was_decided_beyond_the_checkpoint_of_a_rewind_did_not_happen(tmp_path: Path) -> None:
    """Layers move, norms freeze others and one is drained; then the run goes on from an earlier checkpoint."""
    what = Case(
        workers=3,
        stages=[[2, 3]] * 3,
        wave=2,
        minibatches=24,
        every_waves=2,
        staleness=0,
        freeze={"waves": 4, "alpha": "1/2"},
    )
    first, beyond = (
        death("before forward", 2, how="moved", stages=(3, 2)),
        death("before forward", 14, vw=2, how="moved", stages=(1, 4)),
    )
    run(
        what,
        tmp_path,
        deaths=(first, beyond, drain(number=14, vw=1)),
        stop_when=lambda clocks: clocks.published >= 9,
    )
    restored = checkpoint_dir(tmp_path, Clock(6))
    later = death("before forward", 18, vw=0, how="moved", stages=(2, 3))
    run(what, tmp_path / "rewind-1", restore=restored, deaths=(later, drain(number=14, vw=2)))
    again = replayed(what, tmp_path)
    assert [(vw, counts) for _, vw, counts in again.moves] == [(0, (3, 2)), (0, (2, 3))]
    assert [(verb, vw) for _, verb, vw in again.members] == [("drop", 2), ("add", 2)]
    assert again.extra_barriers == (4, 6, 8, 12), "norms decide at 4, 8 and 12"
    assert_frozen(again, tmp_path / "again")
    found, expected = trained(tmp_path / "rewind-1"), trained(tmp_path / "again")
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@pytest.mark.exhaustive
def test_layers_that_move_without_a_barrier_while_others_are_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tally, "REPORT_SECONDS", 0.0)
    what = Case(workers=3, stages=[[2, 2]] * 3, wave=2, epochs=8, staleness=0, **BATCH_NORM)
    asked = Operator((1, 0, (1, 3)), (6, 2, (3, 1)), (12, 0, (2, 2)))
    run(what, tmp_path / "run", deaths=(drain(number=5),), coordinate=asked.hear)
    again = replayed(what, tmp_path / "run")
    assert again.members
    assert len(again.live) + len(again.moves) == 3
    run(again, tmp_path / "again")
    assert_same_bits(trained(tmp_path / "run"), run_reference(again.reference()))
    assert_same_bits(trained(tmp_path / "again"), run_reference(again.reference()))


class Coordinator:
    """The coordinator's decisions about a run, from what its stages report, with the times that a test gives them."""

    def __init__(self, what: Case, folder: Path, seconds: dict[tuple[int, int], float]) -> None:
        self._machine = Driver(what.job())
        self._machine.to(JobState.RUNNING)
        self._folder = folder
        self._seconds = seconds
        self._clocks = Counter[tuple[int, int]]()
        self._guard = threading.Lock()

    def hear(
        self, vw: VirtualWorkerIndex, stage: StageIndex, report: StageReport
    ) -> tuple[VirtualWorkerIndex, PlanMove] | None:
        """Process a report of a stage that has closed a wave; returns a move of layers, if one is due."""
        with self._guard:
            if not isinstance(report, StageProgress) or report.clock <= self._clocks[vw, stage]:
                return None
            self._clocks[vw, stage] = report.clock
            took = self._seconds[vw, stage] * report.minibatches
            self._machine.said.clear()
            self._machine.wait(5.0)
            self._machine.report(vw, stage, replace(report, compute_seconds=took))
            for task in self._machine.tasks(Replan):
                self._machine.feed(ReplanTasks(JOB_ID).replan(task, str(self._folder), wall=1.0))
            for asked in self._machine.tasks(MoveLayers):
                self._machine.feed(MoveAnswered(asked.vw, asked.move.incarnation, "accepted"))
                return asked.vw, asked.move
        return None


_AT_A_BARRIER = "at a barrier, as under weights: predict versions depend on the stage"


@pytest.mark.parametrize(
    ("changes", "why_at_a_barrier"),
    [
        ({"staleness": 1}, ""),
        pytest.param({"staleness": 0, "weights": "flush"}, "", marks=pytest.mark.exhaustive),
        pytest.param({"staleness": 1, "weights": "double_buffer"}, "", marks=pytest.mark.exhaustive),
        pytest.param(
            {"staleness": 1, "weights": "predict", "optimizer": dict(ADAMW)},
            f"; {_AT_A_BARRIER}",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_layers_that_move_away_from_a_straggler_are_moved_by_the_script(
    changes: dict[str, Any], why_at_a_barrier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stage of four takes ten times as long, in what is reported: the machine need not be slow for that.

    Without a barrier, where the weights of a minibatch do not depend on the cut.
    """
    monkeypatch.setattr(tally, "REPORT_SECONDS", 0.0)
    what = Case(workers=2, stages=[[2, 2]] * 2, wave=2, epochs=8, **changes, **BATCH_NORM)
    seconds = {(vw, stage): 0.1 for vw in (0, 1) for stage in (0, 1)} | {(1, 1): 1.0}
    run(what, tmp_path / "run", coordinate=Coordinator(what, tmp_path, seconds).hear)
    (decided,) = read_decisions(tmp_path / "run")
    assert isinstance(decided, MoveDecision)
    assert (decided.vw, decided.stages, decided.by) == (1, (3, 1), "straggler")
    reason = "compared with the plan, virtual worker 1 takes: stage 1 10.0 times"
    assert decided.reason == f"{reason}{why_at_a_barrier}"
    again = replayed(what, tmp_path / "run")
    if why_at_a_barrier:
        assert again.moves == ((decided.at.clock, 1, (3, 1)),)
    else:
        # It may come to be prepared shortly before the end of an epoch, and is made at that barrier then.
        assert again.live == ((decided.at.p, 1, (3, 1)),) or decided.at.p is None
        assert "plan" not in [line["reason"] for line in decisions(tmp_path / "run", "barrier")]
    run(again, tmp_path / "again")
    assert_same_bits(trained(tmp_path / "run"), run_reference(again.reference()))
    assert_same_bits(trained(tmp_path / "again"), run_reference(again.reference()))
    assert read_decisions(tmp_path / "again") == (), "a scripted run decides nothing by itself"
