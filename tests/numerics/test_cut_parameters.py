"""A parameter in slices on several shards computes the same bits as a whole one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.numerics.compare import ADAMW, MOMENTUM, Case, assert_same_bits, run, trained
from tests.reference.executor import run_reference

pytestmark = pytest.mark.matrix

CASES: dict[str, dict[str, Any]] = {
    "a norm over all stages": {"max_norm": 0.05, "weights": "double_buffer"},
    "a norm of each parameter's stage, and groups": {
        "max_norm": 0.05,
        "clip": "stage",
        "optimizer": ADAMW,
        "groups": ({"parameters": ("*.bias",), "weight_decay": 0.0},),
    },
    "prediction": {"weights": "predict", "combine": "mean"},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_a_parameter_on_three_shards_has_the_bits_of_the_reference(changes: dict[str, Any], tmp_path: Path) -> None:
    case = Case(**{"model": "wide32", "servers": 3, "minibatches": 9, "optimizer": MOMENTUM, **changes})

    result = run(case, tmp_path)

    slices = Counter(piece.parameter.name for piece in result.plan.slices)
    assert slices == {"0.weight": 1, "0.bias": 1, "2.weight": 3, "2.bias": 1, "4.weight": 1, "4.bias": 1}
    assert_same_bits(trained(tmp_path), run_reference(case.reference()))
