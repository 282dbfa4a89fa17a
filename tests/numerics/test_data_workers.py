"""Data workers do not change a bit: of training, of evaluations, and whatever happens to a virtual worker meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetpipe.values.run import StageEvaluation
from tests import models
from tests.numerics.compare import Case, assert_same_bits, run, trained
from tests.pairwise import every_nth
from tests.reference.executor import run_reference
from tests.support.lives import Death


def case_of(num_workers: int, **changes: Any) -> Case:
    """Data with random augmentation, evaluated within epochs and at their ends, with barriers in between."""
    values: dict[str, Any] = {"data": "flipped32", "epochs": 2, "every_waves": 3, "workers": 2, "stages": 2}
    values["evaluate"] = {"every_waves": 2, "max_batches": 3}
    return Case(reads={"num_workers": num_workers}, **(values | changes))


@pytest.mark.parametrize(
    ("num_workers", "stages"),
    [(2, 2), pytest.param(1, 1, marks=pytest.mark.exhaustive), pytest.param(3, 3, marks=pytest.mark.exhaustive)],
)
def test_training_and_evaluations_keep_their_bits(num_workers: int, stages: int, tmp_path: Path) -> None:
    case = case_of(num_workers, stages=stages)
    found = {}
    for name, each in (("ahead", case), ("inline", case_of(0, stages=stages))):
        result = run(each, tmp_path / name)
        told = [report for _, _, report in result.reports if isinstance(report, StageEvaluation)]
        found[name] = sorted(map(repr, told))
    assert found["ahead"] == found["inline"]
    assert len(found["ahead"]) > 4
    assert_same_bits(trained(tmp_path / "ahead"), run_reference(case.reference()))


@pytest.mark.parametrize("num_workers", every_nth(2, [1, 0]))
def test_a_table_of_rows_trains_as_the_pairs_in_it(num_workers: int, tmp_path: Path) -> None:
    """Rows are read a minibatch at a time, as those of Hugging Face's `datasets`."""
    case = Case(
        data="table32", epochs=1, reads={"collate_fn": "tests.models:pairs_of_rows", "num_workers": num_workers}
    )
    run(case, tmp_path)
    assert_same_bits(trained(tmp_path), run_reference(case.reference(train=models.data32())))


@pytest.mark.exhaustive
def test_a_virtual_worker_that_dies_reads_again(tmp_path: Path) -> None:
    """The history checker finds every sample once."""
    result = run(case_of(2), tmp_path, deaths=(Death(vw=1, at="after push", number=2),))
    assert result.num_lives == 3
