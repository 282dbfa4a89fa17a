"""`precision`: distributed = reference executor, bit for bit, under every policy."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from hetpipe.values.policies import POLICIES, policies_where
from hetpipe.values.precision import Precision
from tests.numerics.compare import ADAMW, MOMENTUM, Case, assert_same_bits, run, trained
from tests.pairwise import all_pairs
from tests.reference.executor import run_reference

KINDS = ("wsp", "none", "allreduce")
PRECISIONS: tuple[Precision, ...] = ("bf16",)


def case_of(weights: Any, stages: int, kind: str, precision: Precision, **values: Any) -> Case:
    wave = max(2, stages)
    defaults: dict[str, Any] = {
        "workers": 1 if kind == "none" else 2,
        "minibatches": 3 * wave + 1,
        "optimizer": ADAMW if stages == 2 else MOMENTUM,
        "max_norm": 0.5 if POLICIES[weights].clips_globally and kind == "wsp" else None,
    }
    return Case(weights=weights, stages=stages, kind=kind, wave=wave, precision=precision, **(defaults | values))


def _can(weights: str, _stages: int, kind: str, precision: Precision) -> bool:
    policy = POLICIES[weights]
    return kind != "allreduce" or policy.one_update_per_wave


POINTS = [
    point
    for point in itertools.product(policies_where(lambda row: row.predicts is None), (1, 2, 4), KINDS, PRECISIONS)
    if _can(*point)
]


@pytest.mark.parametrize(("weights", "stages", "kind", "precision"), all_pairs(POINTS))
def test_every_policy_equals_the_reference(
    weights: Any, stages: int, kind: str, precision: Precision, tmp_path: Path
) -> None:
    case = case_of(weights, stages, kind, precision)
    run(case, tmp_path)
    assert_same_bits(trained(tmp_path), run_reference(case.reference()))
