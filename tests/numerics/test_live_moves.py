"""Layers move to neighbouring stages while minibatches are in flight: every bit is that of the run without moves."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.pipeline import tally
from hetpipe.pipeline.live_move import LiveMove, Moment
from hetpipe.pipeline.segment_run import SegmentRun
from hetpipe.server.agent import stage_assembly
from hetpipe.server.decisions_file import read_decisions
from hetpipe.values.decisions import MoveDecision
from hetpipe.values.ids import Incarnation, Minibatch, StageIndex, VirtualWorkerIndex
from hetpipe.values.run import StageProgress, StageReport
from hetpipe.values.sync import PlanMove
from tests.models import NUM_WITNESSES
from tests.numerics.compare import ADAMW, MOMENTUM, SGD, Case, assert_same_bits, run, trained
from tests.numerics.test_deaths import BATCH_NORM, death, survive
from tests.numerics.test_leavers import decisions
from tests.numerics.test_witnesses import case as witness_case
from tests.numerics.test_witnesses import counts
from tests.reference.executor import run_reference

pytestmark = pytest.mark.matrix


def announced(folder: Path) -> list[tuple[int, int, list[int]]]:
    """Clock, virtual worker and bounds of what moved without a barrier."""
    return [(line["clock"], line["vw"], line["bounds"]) for line in decisions(folder, "plan") if line.get("live")]


def computed_by(folder: Path, vw: int, stage: int = 0) -> dict[int, int]:
    """Minibatch → the version of the plan by which a stage ran its forward."""
    lines = (folder / "history" / f"vw-{vw}-stage-{stage}.jsonl").read_text().splitlines()
    return {entry["p"]: entry["version"] for entry in map(json.loads, lines) if entry["event"] == "forward"}


def assert_moves_change_nothing(what: Case, folder: Path, **options: Any) -> None:
    """A run of the case has the bits of the reference executor, which knows no moves, and moves layers as it says."""
    run(what, folder, **options)
    ends = [line["clock"] for line in decisions(folder, "barrier")]
    wanted = [((p - 1) // what.wave, vw, [0, *accumulate(counts)]) for p, vw, counts in what.live]
    assert sorted(announced(folder)) == sorted(entry for entry in wanted if entry[0] not in ends)
    for vw in range(what.workers):
        own = [p for p, of, _ in what.live if of == vw]
        for stage in range(len(what.stages[vw])):  # type: ignore[index]
            found = computed_by(folder, vw, stage)
            assert found == {p: sum(first <= p for first in own) for p in found}
    assert_same_bits(trained(folder), run_reference(what.reference()))


def near(draw: random.Random, before: tuple[int, ...]) -> tuple[int, ...]:
    """Another cut, in which every layer is in its stage or next to it."""
    bounds = [0, *accumulate(before)]
    while True:
        inner = [draw.randint(bounds[k - 1] + 1, bounds[k + 1] - 1) for k in range(1, len(before))]
        after = [0, *inner, bounds[-1]]
        if after != bounds and all(first < last for first, last in pairwise(after)):
            near_by = all(bounds[k - 1] <= after[k] <= bounds[k + 1] for k in range(1, len(before)))
            if near_by:
                return tuple(last - first for first, last in pairwise(after))


def random_case(seed: int, weights: str | None = None, kind: str | None = None) -> Case:
    """A random run with one to five live moves."""
    draw = random.Random(seed)
    weights = weights or draw.choice(["wave", "vertical", "flush", "double_buffer"])
    kind = kind or draw.choice(["wsp", "wsp", "none"])
    if kind == "none" and weights == "wave":
        weights = "vertical"
    num_stages = draw.choice([2, 2, 3])
    workers = 1 if kind == "none" else draw.choice([1, 2])
    wave = draw.choice([3, 4]) if weights in ("vertical", "double_buffer") else draw.choice([1, 2, 3, 4])
    num_layers, data = (4, dict(BATCH_NORM)) if draw.random() < 0.4 else (5, {})

    def cut() -> tuple[int, ...]:
        places = [0, *sorted(draw.sample(range(1, num_layers), num_stages - 1)), num_layers]
        return tuple(last - first for first, last in pairwise(places))

    first = [cut() for _ in range(workers)]
    now, live = list(first), []
    for first_wave in sorted(draw.sample(range(1, 7), draw.choice([1, 2, 3, 5]))):
        for vw in sorted(draw.sample(range(workers), draw.randint(1, workers))):
            now[vw] = near(draw, now[vw])
            live.append((first_wave * wave + 1, vw, now[vw]))
    return Case(
        workers=workers,
        stages=[list(counts) for counts in first],
        wave=wave,
        staleness=draw.choice([0, 1, 4]),
        minibatches=8 * wave,
        optimizer=dict(draw.choice([MOMENTUM, ADAMW, SGD])),
        every_waves=draw.choice([None, None, 5]),
        combine=draw.choice(["sum", "mean"]),
        kind=kind,
        weights=weights,  # type: ignore[arg-type]
        pull=draw.choice(["every_wave", "required"]) if kind == "wsp" else "every_wave",
        max_norm=draw.choice([None, None, 0.5]),
        servers=draw.choice([1, 2]),
        live=tuple(live),
        **data,
    )


#: Every policy, with and without parameter servers, both directions, two and three stages, buffers and norms.
CASES = {
    "wave": Case(
        stages=[[2, 2], [1, 3]],
        wave=3,
        minibatches=24,
        optimizer=dict(ADAMW),
        live=((4, 0, (1, 3)), (7, 1, (3, 1)), (10, 0, (3, 1))),
        **BATCH_NORM,
    ),
    "norms": Case(workers=1, stages=[[1, 2, 2]], wave=4, minibatches=24, max_norm=0.5, live=((9, 0, (2, 2, 1)),)),
    "vertical": Case(
        workers=1, stages=[[1, 2, 2]], wave=4, minibatches=24, weights="vertical", live=((9, 0, (2, 2, 1)),)
    ),
    "double_buffer": Case(
        stages=[[2, 3], [2, 3]],
        wave=3,
        minibatches=21,
        weights="double_buffer",
        live=((4, 0, (4, 1)), (4, 1, (1, 4)), (10, 0, (2, 3))),
    ),
    "flush": Case(
        stages=[[2, 3], [2, 3]], wave=2, minibatches=12, weights="flush", live=((3, 0, (4, 1)), (7, 0, (1, 4)))
    ),
    # Layer 2 has the weight that the last layer uses as well: the users of a parameter see it wherever its owner is.
    "tied": Case(
        model="tied_in_between",
        data="tokens",
        workers=1,
        stages=[[2, 3, 4]],
        wave=3,
        minibatches=15,
        optimizer=dict(ADAMW),
        live=((4, 0, (3, 2, 4)), (10, 0, (1, 5, 3))),
    ),
    "no-shards": Case(
        workers=1,
        stages=[[2, 3]],
        wave=3,
        minibatches=18,
        kind="none",
        weights="vertical",
        live=((4, 0, (3, 2)), (10, 0, (1, 4))),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_the_run_without_moves(name: str, tmp_path: Path) -> None:
    assert_moves_change_nothing(CASES[name], tmp_path)


def test_more_frames_with_constants_than_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame has one row of a weight; those that are left after the last forward of the old version go at once."""
    monkeypatch.setattr("hetpipe.pipeline.live_move._PART_BYTES", 1)
    what = Case(
        model="mlp32_with_constants",
        workers=1,
        stages=[[2, 3]],
        wave=2,
        minibatches=12,
        live=((3, 0, (3, 2)), (7, 0, (1, 4))),
    )
    run(what, tmp_path / "moved")
    run(replace(what, live=()), tmp_path / "not moved")
    moved, expected = trained(tmp_path / "moved"), trained(tmp_path / "not moved")
    assert moved.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(moved[name], value)] == []


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"weights": "vertical"}, marks=pytest.mark.exhaustive),
        {"weights": "double_buffer"},
        pytest.param({"kind": "none", "weights": "vertical", "workers": 1}, marks=pytest.mark.exhaustive),
        pytest.param({"deterministic": False, "pull": "required"}, marks=pytest.mark.exhaustive),
    ],
)
def test_the_first_stage_gets_layers_before_the_later_one_has_computed_the_last_minibatch(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward of h on the last stage waits until the first one has begun h + 1, with a layer of the last stage."""
    h, begun, forward = 8, threading.Event(), SegmentRun._forward

    def held(stage: SegmentRun, p: Minibatch) -> None:
        identity = stage._parts.identity
        if identity.vw == 0 and identity.is_first and p == h + 1:
            begun.set()
        if identity.vw == 0 and identity.is_last and p == h:
            while not begun.wait(0.01):
                with stage._inbox.condition:
                    stage._inbox.collect(needs_frames=True)  # raises what the other stages died of
                stage._advance_move()
        forward(stage, p)

    monkeypatch.setattr(SegmentRun, "_forward", held)
    what = replace(Case(wave=4, stages=[[2, 3]] * 2, minibatches=32, live=((h + 1, 0, (3, 2)),)), **changes)
    what = replace(what, stages=[[2, 3]] * what.workers, minibatches=16 * what.workers)
    run(what, tmp_path)
    assert announced(tmp_path) == [(2, 0, [0, 3, 5])]
    if what.deterministic or not what.has_shards:
        assert_same_bits(trained(tmp_path), run_reference(what.reference()))


@pytest.mark.parametrize(
    "changes",
    [
        {"max_norm": 0.5},
        pytest.param({"weights": "double_buffer"}, marks=pytest.mark.exhaustive),
        pytest.param({"kind": "none", "weights": "vertical", "workers": 1}, marks=pytest.mark.exhaustive),
    ],
)
def test_the_later_stage_computes_gradients_before_it_has_the_optimizers_state(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stage keeps the state until the last one has begun the backward of h + 1."""
    h, begun = 8, threading.Event()
    backward, hand_over = SegmentRun._backward, LiveMove._hand_over

    def told(stage: SegmentRun, p: Minibatch) -> None:
        identity = stage._parts.identity
        if identity.vw == 0 and identity.is_last and p == h + 1:
            begun.set()
        backward(stage, p)

    def held(move: LiveMove, at: Moment) -> bool:
        identity = move._old.identity
        is_due = identity.vw or not identity.is_first or begun.is_set()
        return hand_over(move, at) if is_due else False

    monkeypatch.setattr(SegmentRun, "_backward", told)
    monkeypatch.setattr(LiveMove, "_hand_over", held)
    what = replace(Case(wave=4, stages=[[2, 3]] * 2, minibatches=32, live=((h + 1, 0, (1, 4)),)), **changes)
    what = replace(what, stages=[[2, 3]] * what.workers, minibatches=16 * what.workers)
    run(what, tmp_path)
    assert announced(tmp_path) == [(2, 0, [0, 1, 5])]
    assert_same_bits(trained(tmp_path), run_reference(what.reference()))


class Operator:
    """Asks for moves of layers as a job trains, when virtual workers have closed so many waves."""

    def __init__(self, *asked: tuple[int, int, tuple[int, ...]], live: bool = True) -> None:
        """`asked`: waves, virtual worker, layers of its stages."""
        self._asked = [*asked]
        self._live = live
        self._guard = threading.Lock()

    def hear(
        self, vw: VirtualWorkerIndex, stage: StageIndex, report: StageReport
    ) -> tuple[VirtualWorkerIndex, PlanMove] | None:
        with self._guard:
            due = [one for one in self._asked if one[1] == vw]
            if stage or not due or not isinstance(report, StageProgress) or report.clock < due[0][0]:
                return None
            self._asked.remove(due[0])
        bounds = (0, *accumulate(due[0][2]))
        return vw, PlanMove(Incarnation(0), bounds, "operator", "an operator asked for it", live=self._live)


@pytest.mark.parametrize(
    "changes",
    [
        {"deterministic": False},
        pytest.param({"deterministic": False, "staleness": None}, marks=pytest.mark.exhaustive),
        pytest.param({"deterministic": False, "weights": "flush"}, marks=pytest.mark.exhaustive),
        pytest.param({"deterministic": False, "weights": "vertical", "pull": "required"}, marks=pytest.mark.exhaustive),
        pytest.param({"deterministic": True, "weights": "double_buffer"}, marks=pytest.mark.exhaustive),
        pytest.param({"deterministic": True, "weights": "vertical"}, marks=pytest.mark.exhaustive),
        pytest.param({"kind": "none", "weights": "vertical"}, marks=pytest.mark.exhaustive),
    ],
)
def test_moves_that_are_asked_for_while_a_run_trains(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages prepare them, and then they begin with a wave that has not; no barrier is set for it."""
    monkeypatch.setattr(tally, "REPORT_SECONDS", 0.0)
    workers = 1 if changes.get("kind") == "none" else 2
    what = Case(workers=workers, stages=[[2, 3]] * workers, wave=3, minibatches=90 * workers, **changes)
    asked = [(2, 0, (3, 2)), (12, 0, (1, 4)), *([(13, 1, (4, 1))] if workers > 1 else [])]
    run(what, tmp_path, coordinate=Operator(*asked).hear)
    moved = [line for line in read_decisions(tmp_path) if isinstance(line, MoveDecision)]
    assert [line.stages for line in moved if line.vw == 0] == [(3, 2), (1, 4)]
    # One may come to be prepared shortly before the end of an epoch, and is made at that barrier then.
    live = [line for line in moved if line.at.p is not None]
    assert live
    assert [line.at.p for line in live] == [3 * line.at.clock + 1 for line in live]
    assert {(line.at.clock, line.vw, (0, *accumulate(line.stages))) for line in live} <= {
        (clock, vw, tuple(bounds)) for clock, vw, bounds in announced(tmp_path)
    }
    assert "plan" not in [line["reason"] for line in decisions(tmp_path, "barrier")]
    for vw in range(workers):
        firsts = [3 * line.at.clock + 1 for line in moved if line.vw == vw]
        assert all(version == sum(first <= p for first in firsts) for p, version in computed_by(tmp_path, vw).items())
    if what.deterministic or not what.has_shards:
        assert_same_bits(trained(tmp_path), run_reference(what.reference()))


def test_layers_move_at_a_barrier_where_a_stage_cannot_prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has too little memory for both versions, say."""
    monkeypatch.setattr(tally, "REPORT_SECONDS", 0.0)
    what, built = Case(workers=1, stages=[[2, 3]], wave=3, minibatches=60), stage_assembly._built
    failed: list[int] = []

    def too_large(job: Any, config: Any, *rest: Any, **options: Any) -> Any:
        if config.plan.virtual_workers[0].bounds == (0, 3, 5) and not failed:
            failed.append(config.stage)
            raise MemoryError("both versions")
        return built(job, config, *rest, **options)

    monkeypatch.setattr(stage_assembly, "_built", too_large)
    run(what, tmp_path, coordinate=Operator((2, 0, (3, 2))).hear)
    (moved,) = read_decisions(tmp_path)
    assert isinstance(moved, MoveDecision)
    assert (moved.stages, moved.at.p, len(failed)) == ((3, 2), None, 1)
    assert [line["reason"] for line in decisions(tmp_path, "barrier")].count("plan") == 1
    assert announced(tmp_path) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(60))
def test_random_runs_have_the_bits_of_those_without_moves(seed: int, tmp_path: Path) -> None:
    """Policies, kinds of synchronization, K, N, D, optimizers, norms, cuts, directions and waves."""
    assert_moves_change_nothing(random_case(seed), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("weights", ["wave", "vertical", "flush", "double_buffer"])
def test_a_run_with_twenty_moves(weights: Any, tmp_path: Path) -> None:
    draw = random.Random(7)
    cuts = list[tuple[int, int, tuple[int, ...]]]()
    now: tuple[int, ...] = (2, 3)
    for first_wave in range(1, 21):
        now = near(draw, now)
        cuts.append((first_wave * 3 + 1, 0, now))
    what = Case(workers=1, stages=[[2, 3]], wave=3, minibatches=72, weights=weights, live=tuple(cuts))
    assert_moves_change_nothing(what, tmp_path)


@pytest.mark.parametrize("name", ["wave", pytest.param("double_buffer", marks=pytest.mark.exhaustive)])
def test_messages_in_any_order_late_and_twice(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a neighbour sends about a move takes effect by its content alone."""
    draw, collect = random.Random(5), LiveMove._collect

    def disturbed(move: LiveMove) -> None:
        inbox = move._inbox
        with inbox.condition:
            frames = [frame for frame in inbox.about_moves for _ in range(draw.choice([1, 2]))]
            draw.shuffle(frames)
            late = [frames.pop() for _ in range(len(frames) // 2)]
            inbox.about_moves.clear()
            inbox.about_moves.extend(frames)
        collect(move)
        with inbox.condition:
            inbox.about_moves.extend(late)
        if late:
            inbox.ring()

    monkeypatch.setattr(LiveMove, "_collect", disturbed)
    assert_moves_change_nothing(CASES[name], tmp_path)


@pytest.mark.parametrize(
    ("at", "number"),
    [
        ("before forward", 6),
        pytest.param("before forward", 5, marks=pytest.mark.exhaustive),
        pytest.param("before forward", 7, marks=pytest.mark.exhaustive),
        pytest.param("before pull", 2, marks=pytest.mark.exhaustive),
        pytest.param("before staged", 1, marks=pytest.mark.exhaustive),
        pytest.param("after staged", 1, marks=pytest.mark.exhaustive),
        pytest.param("after staged", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_every_sample_counts_once_if_a_life_ends_around_a_move(at: str, number: int | None, tmp_path: Path) -> None:
    """Before the move, in the middle of it and behind it: the next life has the plan of the newest record in force."""
    what = replace(witness_case(workers=2, stages=2, wave=2, live=((5, 0, (1, 3)),)), deterministic=True)
    survive(what, tmp_path, death(at, number))
    assert counts(tmp_path) == [[2] * NUM_WITNESSES] * 4
    last = [line for line in decisions(tmp_path, "plan") if line["vw"] == 0][-1]
    assert (last["version"], last["bounds"]) == (1, [0, 1, 4])
