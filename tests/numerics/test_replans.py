"""A virtual worker comes back by another plan: layers are elsewhere, and every bit is as if nothing had been moved."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from hetpipe.values.ids import AgentId, DeviceId, LayerIndex, VirtualWorkerIndex
from hetpipe.values.plan import StagePlan, VirtualWorkerPlan
from tests.numerics.compare import ADAMW, Case, assert_same_bits, run, trained
from tests.numerics.test_deaths import BATCH_NORM
from tests.numerics.test_leavers import barriers, drain, membership
from tests.reference.executor import run_reference

pytestmark = pytest.mark.matrix


def cut(vw: int, counts: Sequence[int]) -> VirtualWorkerPlan:
    """A virtual worker with so many layers in each stage."""
    stages = [
        StagePlan(AgentId("n0"), DeviceId(f"n0/{at}"), LayerIndex(last - count), LayerIndex(last))
        for at, (count, last) in enumerate(zip(counts, accumulate(counts), strict=True))
    ]
    return VirtualWorkerPlan(VirtualWorkerIndex(vw), tuple(stages))


@pytest.mark.parametrize(
    ("counts", "changes"),
    [
        ((3, 1), {"optimizer": dict(ADAMW), "combine": "mean", **BATCH_NORM}),
        pytest.param(
            (1, 3),
            {"weights": "flush", "lr_schedule": {"name": "StepLR", "step_size": 2}, **BATCH_NORM},
            marks=pytest.mark.exhaustive,
        ),
        ((1, 4), {"optimizer": dict(ADAMW), "max_norm": 0.5, "staleness": 1, "epochs": 1}),
        # Other numbers of stages.
        ((2, 1, 1), {"optimizer": dict(ADAMW), **BATCH_NORM}),
        pytest.param((4,), {"optimizer": dict(ADAMW), **BATCH_NORM}, marks=pytest.mark.exhaustive),
    ],
)
def test_the_bits_do_not_depend_on_where_layers_are(
    counts: tuple[int, ...], changes: dict[str, Any], tmp_path: Path
) -> None:
    """Weights, buffers and the optimizer's state go with the layers."""
    what = Case(**{"workers": 2, "stages": 2, "wave": 2, "epochs": 5, "staleness": 0, **changes})
    result = run(what, tmp_path, deaths=(drain(number=5),), replans={1: cut(1, counts)})
    changed = membership(tmp_path, 2)
    assert [len(members) for members in changed.values()] == [1, 2]
    assert result.num_lives == 3
    reference = what.reference(membership=changed, extra_barriers=barriers(tmp_path))

    assert_same_bits(trained(tmp_path), run_reference(reference))
