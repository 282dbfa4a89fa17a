"""N changes at barriers: every bit is that of the reference executor with piecewise N (`wsp.md` §11)."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetpipe.api import _block
from hetpipe.checker import check_run
from hetpipe.checkpoint.manifest import checkpoint_dir, read_manifest
from hetpipe.values.ids import Clock, VirtualWorkerIndex
from hetpipe.values.policies import POLICIES, WEIGHT_POLICIES
from hetpipe.values.sync import WaveNumbers
from tests.models import NUM_WITNESSES, more32
from tests.numerics.compare import ADAMW, MOMENTUM, SGD, Case, assert_same_bits, run, trained
from tests.numerics.test_deaths import BATCH_NORM, death, survive
from tests.numerics.test_leavers import decisions
from tests.numerics.test_witnesses import case as witness_case
from tests.numerics.test_witnesses import counts
from tests.pairwise import every_nth
from tests.reference.executor import run_reference

pytestmark = pytest.mark.matrix


def waves(folder: Path) -> list[tuple[int, int, int, int]]:
    """Clock, virtual worker, N and origin of every `waves` line."""
    return [
        (line["clock"], line["vw"], line["minibatches_per_wave"], line["origin"]) for line in decisions(folder, "waves")
    ]


def assert_equal(what: Case, folder: Path, **options: Any) -> None:
    """A run of the case has the bits of the reference executor."""
    run(what, folder, **options)
    assert_same_bits(trained(folder), run_reference(what.reference()))


@pytest.mark.parametrize("weights", every_nth(4, WEIGHT_POLICIES))
def test_every_policy_has_the_bits_of_the_reference(weights: Any, tmp_path: Path) -> None:
    """Dropout and random data draw by the numbers of minibatches, which go on."""
    what = Case(
        workers=2,
        stages=2,
        wave=2,
        weights=weights,
        model="dropout_batch_norm",
        minibatches=21,
        resized=((2, 5), (4, 3)),
    )
    assert_equal(what, tmp_path)
    assert waves(tmp_path)[:2] == [(2, 0, 5, 4), (2, 1, 5, 4)]
    assert (4, 1, 3, 14) in waves(tmp_path)
    passes = [json.loads(line) for line in (tmp_path / "history" / "vw-1-stage-0.jsonl").read_text().splitlines()]
    assert [line["p"] for line in passes if line["event"] == "forward"] == list(range(1, 22))


@pytest.mark.parametrize(
    "what",
    [
        Case(
            stages=[[2, 2], [2, 2]],
            epochs=2,
            waves=(2, 3),
            resized=((1, (4, 1)), (3, (1, 2))),
            combine="mean",
            **BATCH_NORM,
        ),
        Case(stages=[[2, 3]] * 2, minibatches=11, kind="allreduce", weights="flush", max_norm=0.5, resized=((2, 4),)),
        Case(
            workers=1,
            stages=[[2, 3]],
            wave=2,
            minibatches=14,
            kind="none",
            weights="predict",
            optimizer=dict(ADAMW),
            resized=((2, 3),),
            moves=((2, 0, (4, 1)), (3, 0, (1, 4))),
        ),
        Case(stages=3, wave=4, minibatches=22, accumulate=2, staleness=2, pull="required", resized=((1, 6), (2, 4))),
        Case(precision="fp16", minibatches=12, model="dropout_batch_norm", weights="wave", resized=((2, 4),)),
    ],
    ids=["each-its-own", "replicas", "no-shards-moves", "accumulated-pulls-required", "loss-scale"],
)
def test_with_other_features(what: Case, tmp_path: Path) -> None:
    assert_equal(what, tmp_path)


def random_case(seed: int) -> Case:
    """A random run in which N changes one to three times."""
    draw = random.Random(seed)
    weights = draw.choice(WEIGHT_POLICIES)
    stages = draw.choice([1, 2, 3])
    least = POLICIES[weights].least_minibatches_per_wave(stages)
    accumulate = 1 if POLICIES[weights].one_update_per_wave else draw.choice([1, 1, 2])
    workers = draw.choice([1, 2, 3])

    def size() -> int:
        return draw.randint(-(-least // accumulate), 4) * accumulate

    def sizes() -> Any:
        return size() if draw.random() < 0.5 else tuple(size() for _ in range(workers))

    return Case(
        workers=workers,
        stages=stages,
        wave=size(),
        staleness=draw.choice([0, 1, 4]),
        minibatches=draw.randint(28, 34),
        optimizer=dict(
            MOMENTUM
            if weights == "spectrain"
            else draw.choice([MOMENTUM, ADAMW, SGD if "pre" not in weights else ADAMW])
        ),
        every_waves=draw.choice([None, 2]),
        combine=draw.choice(["sum", "mean"]),
        weights=weights,
        accumulate=accumulate,
        pull=draw.choice(["every_wave", "required"]),
        servers=draw.choice([1, 2]),
        model=draw.choice(["mlp32", "dropout_batch_norm"]),
        resized=tuple((clock, sizes()) for clock in sorted(draw.sample(range(1, 4), draw.choice([1, 2, 3])))),
    )


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.exhaustive) for s in range(1, 60))])
def test_random_runs(seed: int, tmp_path: Path) -> None:
    """Policies, V, K, D, optimizers, accumulation, pulls; one N for all or one for each."""
    assert_equal(random_case(seed), tmp_path)


def test_a_resumed_run_goes_on_with_the_numbers_of_its_checkpoint(tmp_path: Path) -> None:
    """Behind the change, and at its clock; the model draws by the numbers of minibatches."""
    what = Case(
        workers=2, stages=2, wave=2, model="dropout_batch_norm", minibatches=29, every_waves=3, resized=((3, 4),)
    )
    whole = tmp_path / "whole"
    assert_equal(what, whole)
    for clock, origin in ((3, 6), (6, 18)):
        folder = checkpoint_dir(whole, Clock(clock))
        numbers = {VirtualWorkerIndex(vw): WaveNumbers(4, origin) for vw in (0, 1)}
        assert read_manifest(folder).progress.waves == numbers
        resumed = tmp_path / f"resumed-{clock}"
        run(what, resumed, restore=folder)
        assert_same_bits(trained(resumed), run_reference(what.reference()))
        assert waves(resumed)[0] == (clock, 0, 4, origin)


@pytest.mark.parametrize(
    ("at", "number"),
    [
        ("before forward", 6),
        pytest.param("after staged", 1, marks=pytest.mark.exhaustive),
        pytest.param("before pull", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_every_sample_counts_once_if_a_life_ends_around_a_change(at: str, number: int, tmp_path: Path) -> None:
    what = witness_case(workers=2, stages=2, wave=2, every_waves=3, resized=((2, 4),))
    survive(what, tmp_path, death(at, number))
    assert counts(tmp_path) == [[2] * NUM_WITNESSES] * 4
    assert (2, 1, 4, 4) in waves(tmp_path)


def lines_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "history" / name).read_text().splitlines()]


def without_lines(line: dict[str, Any]) -> dict[str, Any] | None:
    return None if line["event"] == "waves" and line["clock"] == 2 else line


def another_n(line: dict[str, Any]) -> dict[str, Any] | None:
    return {**line, "minibatches_per_wave": 2} if line["event"] == "waves" and line["clock"] == 2 else line


def numbers_that_repeat(line: dict[str, Any]) -> dict[str, Any] | None:
    return {**line, "origin": line["origin"] - 1} if line["event"] == "waves" else line


def between_barriers(line: dict[str, Any]) -> dict[str, Any] | None:
    return {**line, "clock": 1} if line["event"] == "waves" and line["clock"] == 2 else line


def test_corrupted_numbers_are_reported(tmp_path: Path) -> None:
    """A change that is left out, a wrong one, one that uses numbers twice, and one between barriers."""
    what = Case(workers=2, stages=2, wave=2, minibatches=14, resized=((2, 4),))
    run(what, tmp_path)
    path = tmp_path / "history" / "shard-0.jsonl"
    clean = lines_of(tmp_path, "shard-0.jsonl")
    for corrupt in (without_lines, another_n, numbers_that_repeat, between_barriers):
        edited = [changed for line in clean if (changed := corrupt(line)) is not None]
        path.write_text("".join(json.dumps(line) + "\n" for line in edited))
        report = check_run(tmp_path)
        assert set(report.kinds()) == {"wave_size"}, (corrupt.__name__, report.lines())
    path.write_text("".join(json.dumps(line) + "\n" for line in clean))
    own = tmp_path / "history" / "vw-0-stage-0.jsonl"
    passes = lines_of(tmp_path, own.name)
    own.write_text("".join(json.dumps({**line, "p": line["p"] + 2}) + "\n" for line in passes if line.get("p", 0) > 4))
    assert "minibatch_missing" in check_run(tmp_path).kinds(), "numbers of 4 from the start, as if N had never been 2"


@pytest.mark.parametrize("seed", range(2))
def test_minibatches_have_the_samples_that_the_api_returns(seed: int) -> None:
    """`hetpipe.minibatch` counts the waves of the script."""
    what = replace(random_case(seed), model="mlp32")
    records = run_reference(what.reference()).minibatches
    for (vw, p), record in records.items():
        assert _block(what.job(), more32(), vw, p, code=Path())[0] == record.samples
