"""Every weight policy: distributed = reference executor, bit for bit, whatever the timing."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetpipe.pipeline.reference import run_reference
from hetpipe.spec.policies import WEIGHT_POLICIES
from tests.numerics.compare import ADAMW, MOMENTUM, SGD, Case, assert_same_bits, run, trained

ADAM: dict[str, Any] = {"name": "Adam", "lr": 0.01, "weight_decay": 0.02}
NESTEROV: dict[str, Any] = {"name": "SGD", "lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
RMSPROP: dict[str, Any] = {"name": "RMSprop", "lr": 0.005, "weight_decay": 0.01}
OPTIMIZERS = {
    "sgd": SGD,
    "momentum": MOMENTUM,
    "nesterov": NESTEROV,
    "adam": ADAM,
    "adamw": ADAMW,
    "rmsprop": RMSPROP,
}


def settled(case: Case) -> Case:
    """Enough waves for every version to be in use, and a short one at the end."""
    return replace(case, minibatches=case.wave * (case.staleness + 5) + 1)


def same(case: Case, folder: Path, **options: Any) -> None:
    run(case, folder, **options)
    assert_same_bits(trained(folder), run_reference(case.reference()))


def case_of(weights: Any, stages: int, optimizer: str, dtype: str = "32", **values: Any) -> Case:
    return settled(
        Case(
            weights=weights,
            stages=stages,
            wave=max(stages, 2),
            optimizer=OPTIMIZERS[optimizer],
            model=f"mlp{dtype}",
            data=f"more{dtype}",
            **values,
        )
    )


def _optimizers_of(weights: str) -> list[str]:
    return ["momentum"] if weights == "spectrain" else list(OPTIMIZERS)


POINTS = [
    (weights, optimizer, stages, dtype)
    for weights in WEIGHT_POLICIES
    for optimizer, stages, dtype in itertools.product(_optimizers_of(weights), (1, 2, 3, 4), ("32", "64"))
]


@pytest.mark.matrix
@pytest.mark.parametrize("point", POINTS, ids=lambda p: "-".join(map(str, p)))
def test_alone_equals_the_reference(point: tuple[Any, ...], tmp_path: Path) -> None:
    weights, optimizer, stages, dtype = point
    case = case_of(weights, stages, optimizer, dtype, kind="none", workers=1, every_waves=4)
    same(case, tmp_path, delay_seed=POINTS.index(point))


@pytest.mark.matrix
@pytest.mark.parametrize("point", POINTS, ids=lambda p: "-".join(map(str, p)))
def test_with_shards_equals_the_reference(point: tuple[Any, ...], tmp_path: Path) -> None:
    weights, optimizer, stages, dtype = point
    case = case_of(weights, stages, optimizer, dtype, workers=2, staleness=POINTS.index(point) % 3, every_waves=5)
    same(case, tmp_path, delay_seed=POINTS.index(point))
