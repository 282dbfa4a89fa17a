"""Streams by position: every reader gets the same samples, and whatever goes wrong is told with the position."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from hetpipe.errors import CallableError
from hetpipe.pipeline.callables import CollatedDataset
from hetpipe.pipeline.data import read_batch
from hetpipe.pipeline.proof import prove_jump
from hetpipe.pipeline.reading import InlineReader, Request
from hetpipe.pipeline.seeds import generator_states
from hetpipe.pipeline.streams import StreamDataset, is_stream
from tests.pipeline.test_data import Samples
from tests.pipeline.test_reading import REQUESTS, inline, plain, source_of, workers


class Stream:
    """What `make` gives at each position, and how often it was begun and read."""

    def __init__(self, make: Callable[[int], Any] = lambda position: (float(position), position)) -> None:
        self._make = make
        self.begun: list[int] = []
        self.num_read = 0

    def __iter__(self) -> Iterator[Any]:
        return self._from(0)

    def _from(self, position: int) -> Iterator[Any]:
        self.begun.append(position)
        for each in count(position):
            self.num_read += 1
            yield self._make(each)


class Seekable(Stream):
    def iterate_from(self, position: int) -> Iterator[Any]:
        return self._from(position)


class OfEpochs(Stream):
    """Another order in each epoch."""

    def __init__(self) -> None:
        super().__init__(lambda position: (100.0 * self.epoch + position, 0))
        self.epoch = 7

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class OfSharedEpochs(Stream):
    """The epoch lies in shared memory, as Hugging Face's streams have it, and is looked at late."""

    def __init__(self, epoch: Tensor) -> None:
        super().__init__(lambda position: (100.0 * int(self.epoch) + position, 0))
        self.epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch += epoch - self.epoch


class Wrapping(Stream):
    """Around another stream."""

    def __init__(self, inner: OfSharedEpochs) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)

    def set_epoch(self, epoch: int) -> None:
        self.inner.set_epoch(epoch)


def dataset_of(stream: Any, length: int = 8) -> StreamDataset:
    return StreamDataset(stream, length, key="data.train", length_key="data.length", seed=7)


def drawn(position: int) -> tuple[float, int]:
    """A sample with draws from all three generators."""
    value = random.random() + float(np.random.rand()) + float(torch.rand(()))  # noqa: NPY002 - what users draw from
    return value, position


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (Stream(), True),
        (type("Torch", (Stream, IterableDataset), {})(), True),
        (type("OfColumns", (Stream,), {"__getitem__": lambda _, column: column})(), True),
        (Samples(str), False),
        ([1], False),
        ({"a": 1}, False),
        (3, False),
    ],
)
def test_what_is_a_stream(dataset: Any, *, expected: bool) -> None:
    assert is_stream(dataset) is expected


@pytest.mark.parametrize("around", [lambda stream: stream, Wrapping])
def test_the_epoch_of_another_process_changes_nothing(around: Callable[[OfSharedEpochs], Stream]) -> None:
    """Two streams with one tensor are what a stream and that in a forked data worker are."""
    epoch: Tensor = torch.tensor(0).share_memory_()  # type: ignore[no-untyped-call]
    ours, theirs = (dataset_of(around(OfSharedEpochs(epoch))) for _ in range(2))
    theirs.begin_epoch(1)
    assert [ours[0][0], theirs[0][0], ours[1][0], theirs[1][0]] == [0.0, 100.0, 1.0, 101.0]


def test_positions_in_order_are_read_once() -> None:
    stream = Stream()
    dataset = dataset_of(stream)
    assert [dataset[0][1], *(sample[1] for sample in dataset.__getitems__([1, 4])), dataset[5][1]] == [0, 1, 4, 5]
    assert (stream.begun, stream.num_read) == ([0], 6)
    assert (dataset[3][1], stream.begun) == (3, [0, 0])


def test_a_stream_that_can_jump_reads_only_what_is_dealt() -> None:
    stream = Seekable()
    dataset = dataset_of(stream)
    assert [sample[1] for sample in dataset.__getitems__([0, 1, 4, 5, 2])] == [0, 1, 4, 5, 2]
    assert (stream.begun, stream.num_read) == ([0, 4, 2], 5)


def test_draws_depend_on_epoch_and_position_alone_and_disturb_nobody() -> None:
    before = generator_states()
    whole = list(dataset_of(Stream(drawn)).__getitems__(range(8)))
    assert generator_states() == before
    assert len({value for value, _ in whole}) == 8
    assert [dataset_of(kind(drawn))[5] for kind in (Stream, Seekable)] == [whole[5]] * 2
    later = dataset_of(Stream(drawn))
    later.begin_epoch(1)
    assert later[5][0] != whole[5][0]


@pytest.mark.parametrize("collated", [False, True])
def test_an_epoch_begins_anew_under_its_number(*, collated: bool) -> None:
    dataset: Any = dataset_of(OfEpochs())
    if collated:
        dataset = CollatedDataset(dataset, lambda samples: (torch.tensor([each[0] for each in samples]), None))
    reader = InlineReader(source_of(dataset))
    found = [
        reader.take(Request(p, (p, p + 1), epoch=epoch, is_evaluation=False)).inputs[0].tolist()
        for p, epoch in ((1, 0), (3, 0), (1, 2), (4, 2))
    ]
    assert found == [[1, 2], [3, 4], [201, 202], [204, 205]]


class InParts(Stream):
    """Leaves out the share of other data workers, if it is in one."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return super().__iter__() if info is None else islice(super().__iter__(), info.id, None, info.num_workers)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_read_the_whole_stream(num_workers: int) -> None:
    source = source_of(dataset_of(InParts(lambda position: (torch.tensor(drawn(position)), position))))
    with workers(source, num_workers=num_workers) as (reader, watched):
        reader.begin(REQUESTS)
        found = [plain(batch) for batch in watched.take(REQUESTS)]
    assert found == inline(source, REQUESTS)
    assert [target for _, target in found] == [[0, 1], [2, 3], [4, 5], [6, 7]]


# -- what goes wrong -------------------------------------------------------------------------------------------------


def broken(position: int) -> Any:
    if position == 3:
        raise OSError("connection lost")
    return 0.0, position


class Raising:
    def __iter__(self) -> Iterator[Any]:
        raise OSError("no such bucket")


class Unseekable(Stream):
    def iterate_from(self, position: int) -> Iterator[Any]:
        raise ValueError(f"no {position}")


class NoIterator:
    def __iter__(self) -> Any:
        return 3


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (Stream(broken), "data.train: reading sample 3 of epoch 1 of the stream raised OSError: connection lost ("),
        (Raising(), "data.train: reading the stream by `__iter__` in epoch 1 raised OSError: no such bucket ("),
        (Unseekable(), "data.train: reading the stream by `iterate_from(2)` in epoch 1 raised ValueError: no 2 ("),
        (NoIterator(), "data.train: reading the stream by `__iter__` in epoch 1 raised TypeError: iter() returned non"),
        (iter([1, 2, 3, 4]), "data.train: is an iterator, which can be read only once, and each stage, worker and"),
        (
            type("Short", (), {"__iter__": lambda _: iter([1, 2, 3])})(),
            (
                "data.train: the stream ends in epoch 1 after 3 samples, at position 3, but an epoch has 8 "
                "(data.length); set data.length to 3 or less, or let the stream go on"
            ),
        ),
        (
            type("Empty", (), {"__iter__": lambda _: iter([])})(),
            (
                "data.train: the stream ends in epoch 1 after 0 samples, at position 0, but an epoch has 8 "
                "(data.length); check what it reads from, or let the stream go on"
            ),
        ),
    ],
    ids=["raises", "cannot begin", "cannot jump", "no iterator", "read once", "ends early", "empty"],
)
def test_it_is_told_with_the_position(stream: Any, message: str) -> None:
    dataset = dataset_of(stream)
    for _ in range(2):  # the same when it is read again
        with pytest.raises(CallableError) as caught:
            read_batch(dataset, [2, 3])
        assert str(caught.value).startswith(message)


def test_an_iterate_from_that_counts_otherwise_is_refused() -> None:
    class FromOne(Seekable):
        def iterate_from(self, position: int) -> Iterator[Any]:
            return super().iterate_from(position - 1)

    def read(dataset: Any) -> Any:
        return read_batch(dataset, range(1, 3))

    prove_jump("data.train", dataset_of(Stream()), read)
    prove_jump("data.train", dataset_of(Seekable()), read)
    prove_jump("data.train", Samples(lambda index: (0.0, index)), read)
    with pytest.raises(CallableError, match=r"data\.train: the inputs of a minibatch that begins at position 1 differ"):
        prove_jump("data.train", dataset_of(FromOne()), read)
