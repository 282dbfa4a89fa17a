"""What reading a minibatch says of a data set that cannot be read: key, index, line, log, and the fix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.errors import CallableError
from hetpipe.observe.log import configure_logging
from hetpipe.pipeline.data import read_batch, read_evaluation_minibatch, read_minibatch
from hetpipe.values.ids import Minibatch, VirtualWorkerIndex


class Samples:
    """Samples made by a function."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self._make(index)


def refused(make: Callable[[int], Any], indices: tuple[int, ...] = (0, 5, 2)) -> str:
    with pytest.raises(CallableError) as caught:
        read_batch(Samples(make), indices)
    return str(caught.value)


def broken(index: int) -> Any:
    if index == 5:
        raise OSError("no such image")
    return torch.zeros(2), 0


def test_what_a_data_set_raises_is_told_with_key_index_line_and_log(tmp_path: Path) -> None:
    configure_logging(None, role="test")
    line = broken.__code__.co_firstlineno + 2
    assert refused(broken) == f"data.train: reading sample 5 raised OSError: no such image ({__file__} line {line})"
    configure_logging(tmp_path / "stage.log", role="stage")
    try:
        said = refused(broken)
        assert said.endswith(f"; the traceback is in {tmp_path / 'stage.log'}")
        assert "in broken" in (tmp_path / "stage.log").read_text()
    finally:
        configure_logging(None, role="test")


def test_the_key_says_which_data_set() -> None:
    with pytest.raises(CallableError, match=r"data\.eval: reading sample 5 raised"):
        read_evaluation_minibatch(Samples(broken), [5], seed=0, vw=VirtualWorkerIndex(0), number=1)
    with pytest.raises(CallableError, match=r"data\.train: reading sample 5 raised"):
        read_minibatch(Samples(broken), [5], seed=0, vw=VirtualWorkerIndex(0), p=Minibatch(1))


def test_ragged_samples_are_named_with_their_shapes() -> None:
    assert refused(lambda index: (torch.zeros(3, 20 + index), 0)) == (
        "data.train: samples 0 and 5 cannot be stacked into one minibatch: the input of one is of shape [3, 20], "
        "of the other of shape [3, 25]; bring all samples to one shape in __getitem__ (pad or crop them), or set "
        "`batch_size: 1`"
    )
    assert "the target of one is of shape [0], of the other of shape [5]" in refused(
        lambda index: (torch.zeros(3), torch.zeros(index))
    )
    assert "the input of one is (of shape [2], of shape [1])" in refused(
        lambda index: ((torch.zeros(2), torch.zeros(index + 1)), 0)
    )


def test_an_input_that_is_a_dict_says_what_to_return() -> None:
    said = refused(lambda _: ({"input_ids": torch.zeros(2), "attention_mask": torch.zeros(2)}, 0))
    assert said.startswith(
        "data.train: sample 0: its input is a dict (input_ids, attention_mask), and layers take tensors"
    )
    assert "return ((tensor, tensor, …), target)" in said


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (("text", 0), "data.train: sample 0: its input is of type str; return a tensor"),
        ((object(), 0), "data.train: samples 0 to 2 cannot be stacked into one minibatch (TypeError"),
        ((1, 2, 3), "data.train: sample 0 must be a pair (input, target)"),
        (torch.zeros(2), "data.train: sample 0 must be a pair (input, target)"),
    ],
)
def test_other_samples_that_cannot_be_used(sample: object, expected: str) -> None:
    assert refused(lambda _: sample).startswith(expected)


def test_a_dict_as_target_is_all_right() -> None:
    batch = read_batch(Samples(lambda index: (torch.zeros(2), {"label": index})), [1, 4])
    assert batch.target["label"].tolist() == [1, 4]
