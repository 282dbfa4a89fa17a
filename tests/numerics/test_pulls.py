"""`pull: required`: a virtual worker keeps its weights until D forbids them, adds its own updates, and pulls less."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from hetpipe.observe.segments import read_lines
from hetpipe.values.policies import WEIGHT_POLICIES, WeightPolicy
from tests.numerics.compare import Case, assert_same_bits, run, trained
from tests.pairwise import all_pairs, every_nth
from tests.reference.executor import run_reference


def pulls(folder: Path) -> Counter[tuple[int, int]]:
    """(Virtual worker, stage) → transfers of published weights from shard 0."""
    found: Counter[tuple[int, int]] = Counter()
    for path in sorted((folder / "history").glob("*.jsonl")):
        for line in map(json.loads, read_lines(path)):
            if line["event"] == "pull" and line["shard"] == 0:
                found[line["vw"], line["stage"]] += 1
    return found


@pytest.mark.parametrize(
    ("weights", "workers", "staleness"),
    all_pairs(product(("wave", "flush", "double_buffer"), (1, 2), (0, 1, 3)), step=4),
)
def test_a_deterministic_run_that_pulls_when_required_has_the_bits_of_the_reference(
    weights: WeightPolicy, workers: int, staleness: int, tmp_path: Path
) -> None:
    case = Case(weights=weights, workers=workers, staleness=staleness, pull="required", minibatches=21, every_waves=7)
    run(case, tmp_path)
    assert_same_bits(trained(tmp_path), run_reference(case.reference()))


@pytest.mark.parametrize(
    "weights", every_nth(2, (each for each in WEIGHT_POLICIES if each not in ("wave", "flush", "double_buffer")))
)
def test_every_policy_with_shards_can_pull_when_required(weights: WeightPolicy, tmp_path: Path) -> None:
    case = Case(weights=weights, stages=3, wave=4, staleness=1, pull="required", minibatches=39)
    run(case, tmp_path)
    assert_same_bits(trained(tmp_path), run_reference(case.reference()))


def test_own_updates_between_two_pulls_are_seen(tmp_path: Path) -> None:
    """With one virtual worker nothing is ever missing: only the order of the sums differs, and no loss falls behind."""
    required = run_reference(Case(workers=1, staleness=3, pull="required", minibatches=40).reference())
    every = run_reference(Case(workers=1, staleness=0, minibatches=40).reference())
    for name, weights in every.weights.items():
        assert (weights - required.weights[name]).abs().max() < 1e-5 * weights.abs().max()


def test_a_larger_d_saves_pulls(tmp_path: Path) -> None:
    """24 waves with D = 2: clock 0, one in three instead of each, and that of the last barrier."""
    counted = {}
    for pull in ("every_wave", "required"):
        case = Case(pull=pull, staleness=2, minibatches=48, servers=1)
        result = run(case, tmp_path / pull)
        assert result.snapshot is not None
        assert result.snapshot.minibatches == 96
        counted[pull] = pulls(tmp_path / pull)
    assert min(counted["every_wave"].values()) >= 1 + 21 + 1, "1 … 21 of minibatches 8 … 48"
    assert max(counted["required"].values()) <= 1 + 7 + 2, "3, 6 … 21; that of the barrier perhaps twice"


@pytest.mark.parametrize("staleness", every_nth(2, [4, 1]))
def test_where_timing_decides_a_stage_fetches_little_that_it_does_not_use(staleness: int, tmp_path: Path) -> None:
    """A later stage may fetch the newest clock ahead when the first one has just chosen an older one: no more."""
    case = Case(pull="required", staleness=staleness, minibatches=48, deterministic=False, every_waves=12)
    run(case, tmp_path, delay_seconds=0.002)
    used: set[tuple[int, int, int]] = set()
    pulled: Counter[tuple[int, int, int]] = Counter()
    for path in sorted((tmp_path / "history").glob("*.jsonl")):
        for line in map(json.loads, read_lines(path)):
            if line["event"] == "forward":
                used.add((line["vw"], line["stage"], line["clock"]))
            elif line["event"] == "pull" and line["shard"] == 0:
                pulled[line["vw"], line["stage"], line["clock"]] += 1
    lanes = {(vw, stage) for vw, stage, _ in used}
    assert len(lanes) == 4
    for lane in lanes:
        needed = len([each for each in used if each[:2] == lane])
        assert sum(count for each, count in pulled.items() if each[:2] == lane) <= 2 * needed + 2
