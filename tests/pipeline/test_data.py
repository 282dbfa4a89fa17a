"""What reading a minibatch says of a data set that cannot be read: key, index, line, log, and the fix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.errors import CallableError
from hetpipe.observe.log import configure_logging
from hetpipe.pipeline.callables import CollatedDataset
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
        "of the other of shape [3, 25]; bring all samples to one shape in __getitem__ (pad or crop them), name a "
        "`data.collate_fn` that pads a minibatch or makes lists, or set `batch_size: 1`"
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


def pad(samples: list[Any]) -> Any:
    """Ragged texts to one length."""
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True), torch.tensor([len(each) for each in samples])


def test_a_collate_function_gets_whatever_the_samples_are() -> None:
    texts = CollatedDataset(Samples(lambda index: torch.ones(index + 1)), pad)
    batch = read_batch(texts, [0, 2])
    assert [value.tolist() for value in batch.inputs] == [[[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]]
    assert (batch.target.tolist(), batch.num_samples, batch.keys) == ([1, 3], 2, None)
    mapped = CollatedDataset(Samples(str), lambda samples: {"ids": torch.tensor([int(each) for each in samples])})
    batch = read_batch(mapped, [4, 7])
    assert (batch.keys, batch.inputs[0].tolist(), batch.target["ids"].tolist()) == (("ids",), [4, 7], [4, 7])


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([1], "returned [1]; return a pair (inputs, target), or a mapping of the model's arguments"),
        (("text", 0), "returned inputs of type str; return a tensor, or a tuple of tensors"),
        (
            {"ids": [object()]},
            "returned a mapping whose entry ids is of type list and has an object other than a dense",
        ),
    ],
)
def test_what_a_collate_function_may_not_return(returned: object, expected: str) -> None:
    with pytest.raises(CallableError) as caught:
        read_batch(CollatedDataset(Samples(str), lambda _: returned), [3, 1])
    assert str(caught.value).startswith(f"data.collate_fn: given samples 3, 1 of data.train, it {expected}")


def test_what_a_collate_function_raises_is_told_with_the_samples() -> None:
    with pytest.raises(CallableError) as caught:
        read_batch(CollatedDataset(Samples(str), pad), range(8), key="data.eval")
    assert str(caught.value).startswith(
        "data.collate_fn: given samples 0, 1, 2, 3, 4, 5, … of data.eval, it raised TypeError: "
    )


class Rows(Samples):
    """A map-style data set as Hugging Face makes them: rows are mappings, and many are read in one call."""

    def __init__(self, lacks: int = 0) -> None:
        super().__init__(lambda index: {"x": [index, index], "labels": index})
        self._lacks = lacks
        self.asked: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append(indices)
        if 7 in indices:
            raise KeyError("no row 7")
        return [self[index] for index in indices[self._lacks :]]


def test_many_rows_are_read_in_one_call() -> None:
    rows = Rows()
    by_column = CollatedDataset(rows, lambda each: {key: torch.tensor([row[key] for row in each]) for key in each[0]})
    batch = read_batch(by_column, [5, 2])
    assert (rows.asked, batch.target["x"].tolist(), batch.keys) == ([[5, 2]], [[5, 5], [2, 2]], ("x", "labels"))
    with pytest.raises(CallableError, match=r"data\.train: reading samples 1, 7 raised KeyError"):
        read_batch(by_column, [1, 7])
    with pytest.raises(CallableError, match=r"returned 1 samples when asked for 2 \(5, 2\); return one per index"):
        read_batch(CollatedDataset(Rows(lacks=1), lambda each: each), [5, 2])
