"""Data sets of Hugging Face's `datasets` train unchanged: tables and streams, with any readers, whatever dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import hugging_face_data
from tests.numerics.compare import Case, assert_same_bits, run, trained
from tests.reference.executor import run_reference
from tests.support.lives import Death


def own_loss(output: dict[str, Tensor], _: object) -> Tensor:
    """The model's."""
    return output["loss"]


def case_of(data: str, *, num_workers: int, **changes: Any) -> Case:
    """46 rows in minibatches of 2, which the model takes as its arguments; barriers in the middle of epochs."""
    reads: dict[str, Any] = {"train": f"tests.hugging_face_data:{data}", "num_workers": num_workers}
    if "stream" in data:
        reads |= {"shuffle": False, "length": 46}
    return Case(model="own_loss", loss=None, epochs=2, every_waves=3, reads=reads, **changes)


@pytest.mark.parametrize("num_workers", [2, pytest.param(0, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("data", ["rows", pytest.param("stream", marks=pytest.mark.exhaustive)])
def test_rows_are_stacked_and_train_as_the_same_samples_of_any_data_set(
    data: str, num_workers: int, tmp_path: Path
) -> None:
    case = case_of(data, num_workers=num_workers)
    run(case, tmp_path)
    order = {"order": lambda _: range(46)} if data == "stream" else {}
    assert_same_bits(
        trained(tmp_path), run_reference(case.reference(train=hugging_face_data.samples(), loss=own_loss, **order))
    )


@pytest.mark.parametrize("num_workers", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("data", ["shuffled_stream", pytest.param("augmented_rows", marks=pytest.mark.exhaustive)])
def test_bits_do_not_depend_on_who_reads_and_a_run_goes_on_in_mid_epoch(
    data: str, num_workers: int, tmp_path: Path
) -> None:
    """The history checker finds each sample once in the run that is resumed, too."""
    run(case_of(data, num_workers=0), tmp_path / "inline")
    middle = min((tmp_path / "inline" / "checkpoints").iterdir())
    run(case_of(data, num_workers=num_workers), tmp_path / "ahead")
    run(case_of(data, num_workers=num_workers), tmp_path / "resumed", restore=middle)
    inline, ahead, resumed = (trained(tmp_path / name) for name in ("inline", "ahead", "resumed"))
    assert all(torch.equal(ahead[name], value) and torch.equal(resumed[name], value) for name, value in inline.items())


@pytest.mark.exhaustive
@pytest.mark.parametrize("data", ["augmented_rows", "shuffled_stream"])
def test_every_row_counts_once_whoever_dies(data: str, tmp_path: Path) -> None:
    """The history checker judges the ledger."""
    result = run(case_of(data, num_workers=1), tmp_path, deaths=(Death(vw=1, at="after push", number=2),))
    assert result.num_lives == 3
