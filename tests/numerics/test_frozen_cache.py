"""What enters the layers behind frozen ones, read from a cache: every bit is that of the reference executor."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hetpipe.values.policies import POLICIES
from tests import models
from tests.histories import whole_lines
from tests.numerics.compare import Case, assert_same_bits, run, trained
from tests.numerics.test_freezing import OPTIMIZERS, SCHEDULE, frozen_clocks
from tests.pairwise import all_pairs
from tests.reference.executor import run_reference

pytestmark = pytest.mark.matrix

IN_ORDER: dict[str, Any] = {"shuffle": False}
ON: dict[str, Any] = {**SCHEDULE, "cache": "on"}

POINTS = [
    (weights, kind, optimizer, cut)
    for (weights, policy), kind, cut in itertools.product(
        POLICIES.items(), ("wsp", "bsp", "none", "allreduce"), ((1, 4), (2, 1, 2), (5,))
    )
    if kind != "allreduce" or policy.one_update_per_wave
    for optimizer in (["momentum"] if weights == "spectrain" else OPTIMIZERS)
]


def crossings(folder: Path) -> list[dict[str, Any]]:
    """The lines of stages about minibatches behind their frozen layers."""
    files = sorted((folder / "history").glob("vw-*.jsonl"))
    return [line for file in files for line in whole_lines(file) if line["event"] == "crossed"]


def assert_cached(what: Case, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """A run of the case has the bits of the reference executor, which computes everything; returns its crossings."""
    order = range(len(getattr(models, what.data)()))
    run(what, folder, **options)
    reference = what.reference(frozen=frozen_clocks(what, folder), order=lambda _: order)
    assert_same_bits(trained(folder), run_reference(reference))
    return crossings(folder)


@pytest.mark.parametrize(("weights", "kind", "optimizer", "cut"), all_pairs(POINTS))
def test_every_policy_equals_the_reference(
    weights: Any, kind: str, optimizer: str, cut: tuple[int, ...], tmp_path: Path
) -> None:
    """In the epochs with F = 1, 2, 2, 2 a minibatch is computed, computed from layer 2 on, and read twice."""
    workers = 1 if kind == "none" else 2
    what = Case(
        workers=workers,
        stages=[list(cut)] * workers,
        wave=3,
        data="data32",
        batch_size=6,
        staleness=0 if kind == "bsp" else 1,
        epochs=5,
        kind=kind,
        weights=weights,
        optimizer=dict(OPTIMIZERS[optimizer]),
        freeze=ON,
        reads=IN_ORDER,
    )
    found = assert_cached(what, tmp_path)
    computed = Counter(tuple(line["computed"]) for line in found if line["computed"][0] < line["computed"][1])
    per_epoch = 8
    assert sum((last - first) * count for (first, last), count in computed.items()) == per_epoch * 4, computed
    first_stages = [line for line in found if line["stage"] == 0]
    assert Counter(line["read"] for line in first_stages) == {0: per_epoch, 2: per_epoch, 4: 2 * per_epoch}
