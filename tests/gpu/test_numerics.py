"""On one GPU as on the CPU: the distributed run equals the reference executor, bit for bit."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.pipeline.cuda import use_device
from hetpipe.values.policies import POLICIES, WEIGHT_POLICIES, policies_where
from tests.numerics.compare import ADAMW, MOMENTUM, Case, assert_same_bits, run, trained
from tests.reference.executor import run_reference

GPU = "cuda:0"
KINDS = ("wsp", "none", "allreduce")


@pytest.fixture(autouse=True)
def deterministic_kernels() -> Iterator[None]:
    """As a stage of a deterministic run sets torch up."""
    before = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    use_device(torch.device(GPU), deterministic=True)
    yield
    torch.use_deterministic_algorithms(mode=False)
    assert before is None or os.environ["CUBLAS_WORKSPACE_CONFIG"] == before


def check(case: Case, folder: Path) -> None:
    run(case, folder, device=GPU)
    assert_same_bits(trained(folder), run_reference(case.reference(device=GPU)))


POINTS = [
    (weights, stages, kind)
    for weights, stages, kind in itertools.product(WEIGHT_POLICIES, (1, 2, 4), KINDS)
    if kind != "allreduce" or POLICIES[weights].one_update_per_wave
]


@pytest.mark.parametrize(("weights", "stages", "kind"), POINTS)
def test_every_policy_equals_the_reference(weights: Any, stages: int, kind: str, tmp_path: Path) -> None:
    wave = max(2, stages)
    optimizer = MOMENTUM if stages == 2 or POLICIES[weights].predicts is not None else ADAMW
    workers = 1 if kind == "none" else 2
    check(
        Case(
            weights=weights,
            stages=stages,
            kind=kind,
            wave=wave,
            workers=workers,
            minibatches=3 * wave + 1,
            optimizer=optimizer,
        ),
        tmp_path,
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("weights", policies_where(lambda row: row.one_update_per_wave))
def test_a_short_format_equals_the_reference(weights: Any, precision: Any, tmp_path: Path) -> None:
    check(
        Case(
            weights=weights,
            stages=2,
            wave=2,
            minibatches=13,
            precision=precision,
            model="amplified32" if precision == "fp16" else "mlp32",
        ),
        tmp_path,
    )


@pytest.mark.parametrize("stages", [1, 2])
def test_dropout_and_batch_norm_draw_and_count_alike(stages: int, tmp_path: Path) -> None:
    check(Case(model="dropout_batch_norm", stages=stages, wave=2, minibatches=7), tmp_path)


def test_a_partition_changes_no_bit(tmp_path: Path) -> None:
    found = []
    for stages in (1, 2, 4):
        folder = tmp_path / str(stages)
        run(Case(stages=stages, wave=4, minibatches=13), folder, device=GPU)
        found.append(trained(folder))
    for other in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0].items())
