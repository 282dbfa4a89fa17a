"""Waves of different numbers of minibatches (`wsp.md` §10): runtime, reference executor and checker agree."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.checkpoint.manifest import checkpoint_dir
from hetpipe.values.ids import Clock
from hetpipe.values.policies import WEIGHT_POLICIES, policies_where
from tests.numerics.compare import ADAMW, MOMENTUM, Case, assert_same_bits, run, trained
from tests.pairwise import all_pairs
from tests.reference.executor import run_reference

#: N_v of three virtual workers.
WAVES = ((4, 2, 3), (2, 3, 2), (5, 2, 2), (2, 2, 7))

PULLS = ("every_wave", "required")

#: Of the 672 points, which take a second and more each. It shares no factor with an axis: every value is drawn.
EVERY = 13


def _agree(case: Case, folder: Path) -> None:
    run(case, folder)
    assert_same_bits(trained(folder), run_reference(case.reference()))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("weights", "waves", "staleness", "combine", "pull", "optimizer"),
    [
        *all_pairs(
            product(WEIGHT_POLICIES, WAVES[:2], (0, 1), ("sum", "mean"), PULLS, (MOMENTUM, ADAMW)), every=EVERY, step=4
        ),
        *all_pairs(
            product(WEIGHT_POLICIES, WAVES[2:], (4,), ("sum", "mean"), PULLS, (MOMENTUM, ADAMW)),
            by=lambda _weights, waves, _staleness, combine, *_: (waves, combine),
            every=EVERY,
            step=4,
        ),
        *(
            pytest.param(*point, marks=pytest.mark.exhaustive)
            for point in [
                *product(WEIGHT_POLICIES, WAVES[:2], (4,), ("sum", "mean"), PULLS, (MOMENTUM, ADAMW)),
                *product(WEIGHT_POLICIES, WAVES[2:], (0, 1), ("sum", "mean"), PULLS, (MOMENTUM, ADAMW)),
            ][::EVERY]
        ),
    ],
)
def test_every_policy(
    *,
    weights: Any,
    waves: tuple[int, ...],
    staleness: int,
    combine: str,
    pull: str,
    optimizer: dict[str, Any],
    tmp_path: Path,
) -> None:
    case = Case(
        workers=len(waves),
        stages=2,
        waves=waves,
        weights=weights,
        staleness=staleness,
        combine=combine,
        pull=pull,
        optimizer=MOMENTUM if weights == "spectrain" else optimizer,
        every_waves=None if staleness else 2,
        minibatches=11,
    )
    _agree(case, tmp_path)


@pytest.mark.parametrize("weights", policies_where(lambda policy: policy.one_update_per_wave))
def test_gradients_averaged_over_unequal_waves(weights: Any, tmp_path: Path) -> None:
    """`allreduce` counts every sample once, however many minibatches each replica has."""
    _agree(Case(kind="allreduce", workers=2, waves=(4, 2), stages=2, weights=weights, minibatches=14), tmp_path)


def test_accumulated_updates(tmp_path: Path) -> None:
    _agree(Case(workers=2, waves=(6, 2), accumulate=2, stages=2, minibatches=13), tmp_path)


def test_workers_of_other_depths(tmp_path: Path) -> None:
    """A worker of one stage may have waves shorter than the stages of another."""
    case = Case(workers=2, waves=(4, 1), stages=[[2, 1, 2], [5]], weights="stash", minibatches=12)
    _agree(case, tmp_path)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    case = Case(workers=3, waves=(4, 1, 2), stages=2, epochs=2, batch_size=4, every_waves=2)
    run(case, tmp_path / "whole")
    middle = min((tmp_path / "whole" / "checkpoints").iterdir())
    run(case, tmp_path / "resumed", restore=middle)
    whole, resumed = trained(tmp_path / "whole"), trained(tmp_path / "resumed")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert_same_bits(resumed, run_reference(case.reference()))


def test_an_unplanned_barrier_in_a_wave_of_another_length(tmp_path: Path) -> None:
    case = Case(workers=2, waves=(5, 2), stages=2, minibatches=60)
    stopped = run(case, tmp_path / "stopped", stop_when=lambda clocks: clocks.published >= 3)
    assert stopped.snapshot is not None
    barrier = stopped.snapshot.published
    run(case, tmp_path / "resumed", restore=checkpoint_dir(tmp_path / "stopped", Clock(barrier)))
    assert_same_bits(trained(tmp_path / "resumed"), run_reference(case.reference(extra_barriers=(barrier,))))


@pytest.mark.parametrize(
    ("weights", "combine"),
    [
        ("wave", "sum"),
        ("flush", "mean"),
        pytest.param("wave", "mean", marks=pytest.mark.exhaustive),
        pytest.param("flush", "sum", marks=pytest.mark.exhaustive),
    ],
)
def test_equal_numbers_change_no_bit(weights: Any, combine: str, tmp_path: Path) -> None:
    one = Case(workers=3, wave=3, stages=2, weights=weights, combine=combine, minibatches=13)
    run(one, tmp_path / "one")
    run(Case(workers=3, waves=(3, 3, 3), stages=2, weights=weights, combine=combine, minibatches=13), tmp_path / "list")
    expected, found = trained(tmp_path / "one"), trained(tmp_path / "list")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_samples_are_used_in_proportion(tmp_path: Path) -> None:
    """And a run that follows the newest clock keeps every rule."""
    case = Case(workers=2, waves=(6, 2), stages=2, deterministic=False, minibatches=16, staleness=1)
    run(case, tmp_path, delay_seconds=0.002)
