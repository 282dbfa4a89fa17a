"""Whatever a run has decided by itself can be replayed as a script with equal bits: moves, and frozen layers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.decide.elastic.script import script_of
from hetpipe.job.elastic import BarrierLine, FreezeLine, MoveLine
from hetpipe.server.decisions_file import read_decisions
from tests.numerics.compare import ADAMW, MOMENTUM, SGD, Case, run, trained
from tests.numerics.test_deaths import death
from tests.numerics.test_freezing import assert_frozen
from tests.numerics.test_moves import barrier_move

pytestmark = pytest.mark.matrix

#: Of a model of five layers.
_CUTS = ((1, 4), (2, 3), (3, 2), (4, 1))


def replayed(what: Case, folder: Path) -> Case:
    """The case as it is by the script that the decisions of its run make."""
    script = script_of(read_decisions(folder))
    kept = {key: value for key, value in what.freeze.items() if key not in ("every", "waves", "alpha")}
    return replace(
        what,
        freeze=kept,
        moves=tuple(barrier_move(line) for line in script if isinstance(line, MoveLine)),
        freezes=tuple((line.at.clock, line.layers) for line in script if isinstance(line, FreezeLine)),
        extra_barriers=tuple(line.at.clock for line in script if isinstance(line, BarrierLine)),
    )


def random_run(seed: int) -> tuple[Case, list[Any]]:
    """A run in which norms decide what freezes while layers move at random minibatches."""
    draw = random.Random(seed)
    workers, wave = draw.choice([1, 2]), draw.choice([2, 3])
    weights = draw.choice(["wave", "vertical", "flush", "stash", "predict"])
    by_epochs = bool(seed % 2)
    amount: dict[str, Any] = {"epochs": 4} if by_epochs else {"minibatches": 10 * wave}
    where: dict[str, Any] = {"every": "epoch"} if by_epochs else {"waves": draw.choice([2, 3])}
    what = Case(
        workers=workers,
        stages=[list(draw.choice(_CUTS)) for _ in range(workers)],
        wave=wave,
        staleness=draw.choice([0, 1]),
        weights=weights,  # type: ignore[arg-type]
        optimizer=dict(draw.choice([MOMENTUM, ADAMW] if weights == "predict" else [MOMENTUM, ADAMW, SGD])),
        freeze={**where, "alpha": draw.choice(["1/3", "1/2", "3/4"])},
        **amount,
    )
    moves = [
        death("before forward", draw.randint(2, 6 * wave), vw=draw.randrange(workers), how="moved", stages=cut)
        for cut in draw.sample(_CUTS, draw.choice([1, 2]))
    ]
    return what, moves


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(2, 20))]
)
def test_decisions_are_a_script_with_the_bits_of_the_run(seed: int, tmp_path: Path) -> None:
    what, moves = random_run(seed)
    run(what, tmp_path / "run", deaths=tuple(moves))
    again = replayed(what, tmp_path / "run")
    assert_frozen(again, tmp_path / "again")
    found, expected = trained(tmp_path / "run"), trained(tmp_path / "again")
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
    assert read_decisions(tmp_path / "again") == (), "a scripted run decides nothing by itself"
