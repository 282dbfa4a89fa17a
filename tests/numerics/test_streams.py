"""Streams train as the map-style set of their samples does: with any readers, after a resume and after a death."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.checkpoint.manifest import newest_checkpoint
from hetpipe.errors import CallableError
from hetpipe.values.run import StageEvaluation
from tests import models
from tests.numerics.compare import Case, assert_same_bits, run, trained
from tests.pairwise import every_nth
from tests.reference.executor import run_reference
from tests.support.lives import Death

LENGTHS = {"shuffle": False, "length": 46}


def case_of(data: str = "stream32", *, num_workers: int = 0, **changes: Any) -> Case:
    """46 samples in minibatches of 2; barriers in the middle of epochs."""
    reads = LENGTHS | {"num_workers": num_workers}
    return Case(**{"data": data, "epochs": 2, "every_waves": 3, "workers": 2, "stages": 2, "reads": reads, **changes})


@pytest.mark.parametrize(
    ("data", "num_workers"),
    every_nth(2, [("stream32", 0), ("stream32", 2), ("seekable32", 2)]),
    ids=["inline", "ahead", "jumps"],
)
def test_a_stream_trains_as_the_map_style_set_of_its_samples(data: str, num_workers: int, tmp_path: Path) -> None:
    case = case_of(data, num_workers=num_workers)
    run(case, tmp_path)
    assert_same_bits(trained(tmp_path), run_reference(case.reference(train=models.data32(), order=lambda _: range(46))))


@pytest.mark.parametrize("num_workers", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_draws_epochs_and_evaluations_do_not_depend_on_the_readers(num_workers: int, tmp_path: Path) -> None:
    """An evaluation within an epoch sends the data workers back."""
    found = {}
    for name, workers in (("ahead", num_workers), ("inline", 0)):
        reads = LENGTHS | {"eval_length": 46, "num_workers": workers}
        case = case_of("flipped_stream32", loss="distance", reads=reads, evaluate={"every_waves": 2, "max_batches": 3})
        result = run(case, tmp_path / name)
        told = [report for _, _, report in result.reports if isinstance(report, StageEvaluation)]
        found[name] = sorted(map(repr, told))
    assert found["ahead"] == found["inline"]
    assert len(found["ahead"]) > 4
    ahead, inline = trained(tmp_path / "ahead"), trained(tmp_path / "inline")
    assert all(torch.equal(ahead[name], inline[name]) for name in inline)


def test_a_run_that_is_resumed_in_mid_epoch_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    case = case_of("flipped_stream32", loss="distance", epochs=1)
    run(case, tmp_path / "whole")
    middle = min((tmp_path / "whole" / "checkpoints").iterdir())
    run(case, tmp_path / "resumed", restore=middle)
    whole, resumed = trained(tmp_path / "whole"), trained(tmp_path / "resumed")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_stream_that_ends_early_is_told_when_it_is_its_turn(tmp_path: Path) -> None:
    """The checkpoint before it stays."""
    case = case_of("flipped_stream32", loss="distance", reads=LENGTHS | {"length": 60, "num_workers": 1})
    with pytest.raises(
        CallableError, match=r"data\.train: the stream ends in epoch 1 after 46 samples, at position 46"
    ):
        run(case, tmp_path)
    assert newest_checkpoint(tmp_path)


@pytest.mark.parametrize("how", ["killed", "drained"])
@pytest.mark.exhaustive
def test_every_sample_of_a_stream_counts_once_whoever_dies(how: Any, tmp_path: Path) -> None:
    """The history checker judges the ledger."""
    result = run(case_of(num_workers=1), tmp_path, deaths=(Death(vw=1, at="after push", number=2, how=how),))
    assert result.num_lives == 3
