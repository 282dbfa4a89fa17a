"""Every point of the matrix: distributed = reference executor, bit for bit, whatever the timing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.numerics.compare import ADAMW, MOMENTUM, SGD, Case, assert_same_bits, run, trained

pytestmark = pytest.mark.matrix

POINTS = list(itertools.product(("32", "64"), (1, 2, 3), (1, 2, 3), (1, 2, 4), (0, 1, 4), (SGD, MOMENTUM, ADAMW)))


def _name(point: tuple[Any, ...]) -> str:
    dtype, workers, stages, wave, staleness, optimizer = point
    kind = "momentum" if optimizer.get("momentum") else optimizer["name"]
    return f"float{dtype}-V{workers}-K{stages}-N{wave}-D{staleness}-{kind}"


def _thinned() -> list[Any]:
    """Any two values of any two axes meet in a third of the points; the others take longer than a person waits."""
    axes = [list(dict.fromkeys(repr(point[axis]) for point in POINTS)) for axis in range(len(POINTS[0]))]
    places = [sum(axes[axis].index(repr(value)) for axis, value in enumerate(point)) for point in POINTS]
    return [
        pytest.param(point, marks=() if place % 3 == 0 else pytest.mark.exhaustive)
        for point, place in zip(POINTS, places, strict=True)
    ]


@pytest.mark.parametrize("point", _thinned(), ids=_name)
def test_distributed_equals_the_reference(point: tuple[Any, ...], tmp_path: Path) -> None:
    dtype, workers, stages, wave, staleness, optimizer = point
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
    run(case, tmp_path, delay_seed=POINTS.index(point))
    from hetpipe.pipeline.reference import run_reference

    assert_same_bits(trained(tmp_path), run_reference(case.reference()))
