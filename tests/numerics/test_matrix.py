"""Every point of the matrix: distributed = reference executor, bit for bit, whatever the timing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.numerics.compare import ADAMW, MOMENTUM, SGD, Case, assert_same_bits, run, trained
from tests.pairwise import all_pairs

pytestmark = pytest.mark.matrix

AXES: tuple[tuple[Any, ...], ...] = (
    ("32", "64"),
    (1, 2, 3),
    (1, 2, 3),
    (1, 2, 4),
    (0, 1, 4),
    (SGD, MOMENTUM, ADAMW),
)
POINTS = list(itertools.product(*AXES))


def _name(dtype: str, workers: int, stages: int, wave: int, staleness: int, optimizer: dict[str, Any]) -> str:
    kind = "momentum" if optimizer.get("momentum") else optimizer["name"]
    return f"float{dtype}-V{workers}-K{stages}-N{wave}-D{staleness}-{kind}"


@pytest.mark.parametrize(
    ("dtype", "workers", "stages", "wave", "staleness", "optimizer"), all_pairs(POINTS, name=_name, step=2)
)
def test_distributed_equals_the_reference(
    dtype: str, workers: int, stages: int, wave: int, staleness: int, optimizer: dict[str, Any], tmp_path: Path
) -> None:
    case = Case(
        model=f"mlp{dtype}",
        data=f"more{dtype}",
        workers=workers,
        stages=stages,
        wave=wave,
        staleness=staleness,
        optimizer=optimizer,
        # Enough waves for the bound to bite, and a short one at the end.
        minibatches=wave * (staleness + 4) + 1,
        every_waves=3 if staleness == 0 else None,
    )
    run(case, tmp_path, delay_seed=POINTS.index((dtype, workers, stages, wave, staleness, optimizer)))
    from tests.reference.executor import run_reference

    assert_same_bits(trained(tmp_path), run_reference(case.reference()))
