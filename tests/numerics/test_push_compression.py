"""`sync.compress_pushes: bfloat16`: the shards add rounded updates, each virtual worker its own exact ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetpipe.values.policies import WEIGHT_POLICIES, WeightPolicy
from tests.numerics.compare import Case, assert_same_bits, run, trained
from tests.pairwise import every_nth
from tests.reference.executor import run_reference


@pytest.mark.parametrize("weights", every_nth(3, WEIGHT_POLICIES))
def test_every_policy_equals_the_reference(weights: WeightPolicy, tmp_path: Path) -> None:
    """Of unequal shares of a shard, with the factor of `mean` and over barriers."""
    case = Case(weights=weights, workers=3, combine="mean", compress_pushes="bfloat16", minibatches=21, every_waves=3)
    run(case, tmp_path)
    assert_same_bits(trained(tmp_path), run_reference(case.reference()))


def test_it_rounds() -> None:
    """The same run without compression has other weights, close by."""
    exact = run_reference(Case(minibatches=21).reference()).weights
    rounded = run_reference(Case(minibatches=21, compress_pushes="bfloat16").reference()).weights
    assert any(not torch.equal(exact[name], rounded[name]) for name in exact)
    assert all((exact[name] - rounded[name]).abs().max() < 2**-6 * exact[name].abs().max() for name in exact)


def test_other_types_are_pushed_as_they_are(tmp_path: Path) -> None:
    case = Case(model="mlp64", data="more64", compress_pushes="bfloat16", minibatches=9)
    run(case, tmp_path)
    assert_same_bits(trained(tmp_path), run_reference(Case(model="mlp64", data="more64", minibatches=9).reference()))
