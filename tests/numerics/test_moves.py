"""Layers move between running stages at barriers: every bit is that of the reference executor with the same plans."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hetpipe import failpoints
from hetpipe.checkpoint.manifest import checkpoint_dir, read_manifest
from hetpipe.decide.elastic.script import script_of
from hetpipe.errors import ScriptFailed
from hetpipe.job.elastic import MoveLine, ScriptMoment
from hetpipe.server.agent import stage_assembly
from hetpipe.server.decisions_file import read_decisions
from hetpipe.values.ids import Clock, VirtualWorkerIndex
from hetpipe.values.sync import PlanVersion
from tests.models import NUM_WITNESSES
from tests.numerics.compare import ADAMW, MOMENTUM, SGD, Case, assert_same_bits, run, trained
from tests.numerics.test_deaths import BATCH_NORM, death, survive
from tests.numerics.test_freezing import assert_frozen
from tests.numerics.test_leavers import barriers, decisions, drain, membership
from tests.numerics.test_witnesses import case as witness_case
from tests.numerics.test_witnesses import counts
from tests.reference.executor import run_reference

pytestmark = pytest.mark.matrix

#: Five layers, eight waves.
THREE: dict[str, Any] = {"stages": [[1, 1, 3]], "workers": 1, "wave": 4, "minibatches": 32}


def plans(folder: Path) -> list[tuple[int, int, int, list[int]]]:
    """Clock, virtual worker, version and bounds of every `plan` line."""
    return [(line["clock"], line["vw"], line["version"], line["bounds"]) for line in decisions(folder, "plan")]


def moved(folder: Path) -> list[MoveLine]:
    """The moves that a run has decided, as lines of a script."""
    return [line for line in script_of(read_decisions(folder)) if isinstance(line, MoveLine)]


def barrier_move(line: MoveLine) -> tuple[int, int, tuple[int, ...]]:
    """A line that moves layers at a barrier, as `Case.moves` has it."""
    assert isinstance(line.at, ScriptMoment), "runs decide no others by themselves"
    return line.at.clock, line.vw, line.stages


def assert_moved(what: Case, folder: Path, **options: Any) -> None:
    """A run of the case, with the moves of its script, has the bits of the reference executor."""
    run(what, folder, **options)
    done = [(clock, vw, bounds) for clock, vw, _, bounds in plans(folder) if clock]
    assert done == [(at, vw, [0, *(sum(counts[: k + 1]) for k in range(len(counts)))]) for at, vw, counts in what.moves]
    assert_same_bits(trained(folder), run_reference(what.reference()))


@pytest.mark.parametrize(
    "what",
    [
        # Buffers, dropout, decoupled decay; both directions, two workers that are cut differently.
        Case(
            stages=[[2, 2], [2, 2]],
            epochs=2,
            optimizer=dict(ADAMW),
            moves=((1, 0, (3, 1)), (3, 1, (1, 3)), (4, 0, (1, 3))),
            **BATCH_NORM,
        ),
        # Versions depend on the stage; layers cross two borders at once.
        Case(**THREE, weights="stash", optimizer=dict(MOMENTUM), moves=((2, 0, (3, 1, 1)), (3, 0, (1, 1, 3)))),
        # Without parameter servers, and the optimizer's last gradient travels.
        Case(
            workers=1,
            stages=[[2, 3]],
            wave=2,
            minibatches=10,
            kind="none",
            weights="spectrain",
            optimizer=dict(MOMENTUM),
            moves=((2, 0, (4, 1)),),
        ),
        Case(
            stages=[[2, 3], [2, 3]],
            minibatches=6,
            kind="allreduce",
            weights="flush",
            max_norm=0.5,
            moves=((1, 0, (4, 1)), (1, 1, (4, 1))),
        ),
    ],
    ids=["buffers", "three-stages", "no-shards", "replicas"],
)
def test_the_bits_of_the_reference(what: Case, tmp_path: Path) -> None:
    assert_moved(what, tmp_path)


def random_case(seed: int) -> Case:
    """A random run with two to four moves."""
    draw = random.Random(seed)
    num_stages = draw.choice([2, 2, 3])
    kind = draw.choice(["wsp", "wsp", "wsp", "none", "allreduce"])
    strict = ["stash", "vertical", "predict", "spectrain", "double_buffer"]
    weights = draw.choice(["flush", "double_buffer"] if kind == "allreduce" else ["wave", "flush", *strict])
    if kind == "none" and weights == "wave":
        weights = "vertical"
    workers = {"none": 1}.get(kind, draw.choice([1, 2, 3]))
    wave = draw.choice([3, 4]) if num_stages == 3 or weights in strict else draw.choice([1, 2, 3])
    predicts = weights in ("predict", "spectrain")
    num_layers, data = (4, dict(BATCH_NORM)) if draw.random() < 0.4 else (5, {})

    def cut() -> tuple[int, ...]:
        places = [0, *sorted(draw.sample(range(1, num_layers), num_stages - 1)), num_layers]
        return tuple(last - first for first, last in pairwise(places))

    first = [list(cut())] * workers if kind == "allreduce" else [list(cut()) for _ in range(workers)]
    moves: list[tuple[int, int, tuple[int, ...]]] = []
    for clock in sorted(draw.sample(range(1, 6), draw.choice([2, 3, 4]))):
        counts, movers = cut(), range(workers)
        movers_now = movers if kind == "allreduce" else sorted(draw.sample(movers, draw.randint(1, workers)))
        moves += [(clock, vw, counts if kind == "allreduce" else cut()) for vw in movers_now]
    return Case(
        workers=workers,
        stages=first,
        wave=wave,
        staleness=draw.choice([0, 1, 4]),
        minibatches=8 * wave,
        optimizer=dict(
            MOMENTUM
            if weights == "spectrain"
            else draw.choice([MOMENTUM, ADAMW] if predicts else [MOMENTUM, ADAMW, SGD])
        ),
        every_waves=draw.choice([None, 2]),
        combine=draw.choice(["sum", "mean"]),
        kind=kind,
        weights=weights,  # type: ignore[arg-type]
        accumulate=1,
        max_norm=draw.choice([None, 0.5]),
        clip="stage" if weights in ("stash", "predict", "spectrain") else draw.choice(["global", "stage"]),
        precision=draw.choice(["fp32", "fp32", "bf16"]) if not predicts else "fp32",
        servers=draw.choice([1, 2]),
        moves=tuple(moves),
        **data,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(60))
def test_random_runs_have_the_bits_of_the_reference(seed: int, tmp_path: Path) -> None:
    """Policies, kinds of synchronization, K, N, D, optimizers, clipping, cuts and directions."""
    assert_moved(random_case(seed), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("weights", ["wave", "flush", "double_buffer"])
def test_moves_change_no_bit_where_versions_do_not_depend_on_stages(weights: Any, tmp_path: Path) -> None:
    """The run without moves, but with barriers at the same clocks, has the same bits."""
    what = Case(stages=[[2, 3]], workers=1, wave=2, epochs=2, weights=weights, moves=((2, 0, (4, 1)), (4, 0, (1, 4))))
    assert_moved(what, tmp_path)
    still = what.reference(plans={}, extra_barriers=(2, 4))
    assert_same_bits(trained(tmp_path), run_reference(still))


def test_a_resumed_run_begins_with_what_has_moved(tmp_path: Path) -> None:
    """At the clock of a move, and later; the versions are those of the manifest."""
    what = Case(**THREE, weights="stash", every_waves=3, moves=((3, 0, (3, 1, 1)), (7, 0, (1, 3, 1))))
    whole = tmp_path / "whole"
    assert_moved(what, whole)
    for clock in (3, 6):
        folder = checkpoint_dir(whole, Clock(clock))
        moved = PlanVersion(1, (0, 3, 4, 5), (0, 1, 2, 5))
        assert read_manifest(folder).progress.plans == {VirtualWorkerIndex(0): moved}
        resumed = tmp_path / f"resumed-{clock}"
        run(what, resumed, restore=folder)
        assert plans(resumed)[0] == (clock, 0, 1, [0, 3, 4, 5])
        assert_same_bits(trained(resumed), run_reference(what.reference()))


@pytest.mark.exhaustive
def test_a_run_that_is_resumed_with_another_cut_has_the_next_version(tmp_path: Path) -> None:
    what = Case(**THREE, every_waves=3, moves=((3, 0, (3, 1, 1)),))
    run(what, tmp_path / "whole")
    other = Case(**{**THREE, "stages": [[2, 2, 1]]}, every_waves=3)
    run(other, tmp_path / "resumed", restore=checkpoint_dir(tmp_path / "whole", Clock(6)))
    assert plans(tmp_path / "resumed") == [(6, 0, 2, [0, 2, 4, 5])]


def test_a_virtual_worker_that_comes_back_has_its_layers_where_they_were(tmp_path: Path) -> None:
    """Its processes start by the plan of the run, and it joins with the version that it left with."""
    what = Case(
        stages=[[2, 2], [2, 2]],
        staleness=0,
        epochs=5,
        optimizer=dict(ADAMW),
        moves=((1, 1, (3, 1)),),
        **BATCH_NORM,
    )
    result = run(what, tmp_path, deaths=(drain(number=7),))
    assert result.num_lives == 3
    (left,) = decisions(tmp_path, "leave")
    joined = [line for line in decisions(tmp_path, "plan") if line["incarnation"] == 1]
    assert [(line["version"], line["bounds"]) for line in joined[:1]] == [(1, [0, 3, 4])]
    assert left["clock"] > 1
    reference = what.reference(membership=membership(tmp_path, 2), extra_barriers=barriers(tmp_path))
    assert_same_bits(trained(tmp_path), run_reference(reference))


@pytest.mark.parametrize(
    ("at", "number"),
    [
        ("before forward", 5),
        pytest.param("before pull", 2, marks=pytest.mark.exhaustive),
        pytest.param("before staged", 1, marks=pytest.mark.exhaustive),
        pytest.param("after staged", 1, marks=pytest.mark.exhaustive),
        pytest.param("after staged", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_every_sample_counts_once_if_a_life_ends_around_a_move(at: str, number: int | None, tmp_path: Path) -> None:
    """Before the barrier, at its work, and behind it: the next life has the plan of the record."""
    what = witness_case(workers=2, stages=2, wave=2, every_waves=3, moves=((2, 0, (1, 3)),))
    survive(what, tmp_path, death(at, number))
    assert counts(tmp_path) == [[2] * NUM_WITNESSES] * 4
    assert plans(tmp_path)[-1][1:] == (0, 1, [0, 1, 4])


@pytest.mark.parametrize(
    "what",
    [
        Case(stages=[[2, 2], [2, 2]], epochs=3, optimizer=dict(ADAMW), **BATCH_NORM),
        pytest.param(
            Case(**{**THREE, "stages": [[1, 1, 3]] * 2, "workers": 2}, weights="stash"), marks=pytest.mark.exhaustive
        ),
        pytest.param(
            Case(**{**THREE, "stages": [[1, 1, 3]] * 2, "workers": 2}, weights="predict"), marks=pytest.mark.exhaustive
        ),
    ],
    ids=["buffers", "stash", "predict"],
)
def test_decisions_of_a_run_are_a_script_with_its_bits(what: Case, tmp_path: Path) -> None:
    """Layers move while the run trains, at barriers that depend on the time; the script repeats them."""
    there, back = ((3, 1), (1, 3)) if what.epochs else ((1, 1, 3), (3, 1, 1))
    asked = ((3, 0, there), (4, 1, back), (9, 0, back))
    moves = [death("before forward", at, vw=vw, how="moved", stages=stages) for at, vw, stages in asked]
    run(what, tmp_path / "run", deaths=tuple(moves))
    script = moved(tmp_path / "run")
    done = [(clock, vw, PlanVersion(0, tuple(bounds), ())) for clock, vw, _, bounds in plans(tmp_path / "run") if clock]
    assert [barrier_move(line) for line in script] == [(clock, vw, version.layer_counts) for clock, vw, version in done]
    assert {line.vw for line in script} == {0, 1}
    again = replace(what, moves=tuple(barrier_move(line) for line in script))
    assert_moved(again, tmp_path / "again")
    assert_same_bits(trained(tmp_path / "run"), run_reference(again.reference()))
    assert read_decisions(tmp_path / "again") == (), "a scripted run decides nothing by itself"


def test_an_operator_moves_layers_without_parameter_servers(tmp_path: Path) -> None:
    what = Case(
        workers=1, stages=[[2, 3]], wave=2, minibatches=20, kind="none", weights="flush", optimizer=dict(MOMENTUM)
    )
    run(what, tmp_path, deaths=(death("before forward", 3, how="moved", stages=(4, 1)),))
    (line,) = moved(tmp_path)
    again = replace(what, moves=(barrier_move(line),))
    assert_same_bits(trained(tmp_path), run_reference(again.reference()))


def test_the_log_of_a_stage_tells_where_its_layers_went(tmp_path: Path) -> None:
    what = Case(workers=1, stages=[[2, 3]], wave=2, minibatches=6, moves=((1, 0, (4, 1)),))
    run(what, tmp_path)
    passes = [json.loads(line) for line in (tmp_path / "history" / "vw-0-stage-0.jsonl").read_text().splitlines()]
    assert [line["version"] for line in passes if line["event"] == "forward"] == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("freezes", "per_stage"),
    [
        ((), [2, 2]),
        pytest.param(((2, 1),), [3, 3], id="frozen-there"),
        pytest.param(((1, 1),), [3, 3], id="frozen-before"),
    ],
)
def test_a_stage_is_built_before_the_barrier_at_which_layers_move(
    freezes: Any, per_stage: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and again if the segment from there on begins otherwise: at first, at the move, and where layers freeze."""
    built: list[int] = []
    build = stage_assembly._built

    def counting(job: Any, config: Any, *arguments: Any, **options: Any) -> Any:
        built.append(config.stage)
        return build(job, config, *arguments, **options)

    monkeypatch.setattr(stage_assembly, "_built", counting)
    what = Case(workers=1, stages=[[2, 3]], wave=2, minibatches=8, moves=((2, 0, (3, 2)),), freezes=freezes)
    assert_frozen(what, tmp_path)
    assert [built.count(stage) for stage in (0, 1)] == per_stage


def test_a_stage_that_cannot_be_built_before_the_barrier_is_built_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = stage_assembly._built
    failed: list[int] = []

    def failing(job: Any, config: Any, *arguments: Any, frozen: int | None = None) -> Any:
        if frozen is None:  # at the start of the run
            return build(job, config, *arguments)
        if config.stage not in failed:
            failed.append(config.stage)
            raise MemoryError("no room yet")
        return build(job, config, *arguments, frozen=frozen)

    monkeypatch.setattr(stage_assembly, "_built", failing)
    assert_moved(Case(workers=1, stages=[[2, 3]], wave=2, minibatches=8, moves=((2, 0, (3, 2)),)), tmp_path)
    assert sorted(failed) == [0, 1]


def test_a_line_that_a_stage_cannot_do_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reach = failpoints.reach

    def full(name: str) -> None:
        if name == "repartition.layers_half_moved":
            raise MemoryError("no room")
        reach(name)

    monkeypatch.setattr(failpoints, "reach", full)
    with pytest.raises(
        ScriptFailed, match=r"elastic.script\[1\]: moves layers of virtual worker 0 to \[3, 2\] at clock 2,"
    ):
        run(Case(workers=1, minibatches=12, wave=4, stages=[[2, 3]], moves=((1, 0, (2, 3)), (2, 0, (3, 2)))), tmp_path)
