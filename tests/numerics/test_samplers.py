"""Jobs that state the order of their samples: every barrier keeps it, and every sample counts once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.decide.sync.division import in_order
from hetpipe.pipeline.seeds import preserved_generators, sampler_seed
from tests import models
from tests.numerics.compare import Case, assert_same_bits, run, trained
from tests.reference.executor import run_reference
from tests.support.lives import Death


def case_of(**changes: Any) -> Case:
    """46 samples in minibatches of 2; barriers in the middle of epochs."""
    return Case(**{"data": "data32", "epochs": 2, "every_waves": 3, "workers": 2, "stages": 2, **changes})


def bucketed(epoch: int) -> Sequence[int]:
    """What `tests.models.by_first_input` gives, seeded by hand."""
    with preserved_generators():
        torch.manual_seed(sampler_seed(3, epoch))
        return list(models.by_first_input(models.data32(), epoch))


@pytest.mark.parametrize(
    ("reads", "order"),
    [
        ({"shuffle": False}, lambda _: range(46)),
        pytest.param({"sampler": "tests.models:by_first_input"}, bucketed, marks=pytest.mark.exhaustive),
        ({"sampler": "tests.models:by_first_input", "num_workers": 2}, bucketed),
        pytest.param(
            {"sampler": {"call": "torch.utils.data:SequentialSampler"}},
            lambda _: range(46),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["in_order", "bucketed", "bucketed, read ahead", "of torch"],
)
def test_a_job_has_the_order_that_it_states(reads: dict[str, Any], order: Any, tmp_path: Path) -> None:
    case = case_of(reads=reads)
    run(case, tmp_path)
    reference = run_reference(case.reference(order=order))
    assert_same_bits(trained(tmp_path), reference)
    first = [record.samples for record in reference.minibatches.values() if record.p == 1]
    assert first[:2] == [tuple(order(0)[:2]), tuple(order(0)[2:4])]


@pytest.mark.parametrize("how", ["killed", "drained"])
@pytest.mark.exhaustive
def test_every_sample_of_a_bucketed_epoch_counts_once_whoever_dies(how: Any, tmp_path: Path) -> None:
    """The history checker judges the ledger; what is left keeps its order."""
    case = case_of(reads={"sampler": "tests.models:by_first_input"})
    result = run(case, tmp_path, deaths=(Death(vw=1, at="after push", number=2, how=how),))
    assert result.num_lives == 3


def test_what_is_left_keeps_its_order() -> None:
    order = bucketed(0)
    left = sorted(order[7:])
    assert in_order(left, order) == order[7:]
