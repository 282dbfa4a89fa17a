"""`sync.compress_pushes: bfloat16`: the shards add rounded updates, each virtual worker its own exact ones."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from hetpipe.values.policies import WEIGHT_POLICIES, WeightPolicy
from tests.numerics.compare import Case, assert_same_bits, run, trained
from tests.pairwise import all_pairs
from tests.reference.executor import run_reference


@pytest.mark.parametrize(
    ("weights", "workers", "combine", "servers"), all_pairs(product(WEIGHT_POLICIES, (1, 3), ("sum", "mean"), (1, 2)))
)
def test_every_policy_equals_the_reference(
    weights: WeightPolicy, workers: int, combine: str, servers: int, tmp_path: Path
) -> None:
    case = Case(
        weights=weights,
        workers=workers,
        combine=combine,
        servers=servers,
        staleness=1,
        compress_pushes="bfloat16",
        minibatches=21,
        every_waves=3,
    )
    result = run(case, tmp_path)
    assert_same_bits(trained(tmp_path), run_reference(case.reference()))
    assert result.snapshot is not None


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
