"""Data sets that can only be iterated, as map-style ones of positions (`docs/semantics/data.md`, "Streams").

Sample p of an epoch is the result of the p-th `next` of a new iterator. Samples of streams are thus assigned, counted
and resumed like those of any data set; each reader skips those of others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.utils.data._utils.worker as torch_worker
from torch import Tensor
from torch.utils.data import IterableDataset

from hetpipe.errors import CallableError
from hetpipe.pipeline.seeds import preserved_generators, seed_generators, stream_seed
from hetpipe.pipeline.user_data import read_user_data

_END = object()


def is_stream(dataset: object) -> bool:
    """Whether a data set can be iterated, and has no samples by index.

    The lack of `__getitem__` is not sufficient: Hugging Face's streams have one, which returns columns.
    """
    if isinstance(dataset, IterableDataset):
        return True
    has_index = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return hasattr(dataset, "__iter__") and not has_index


class StreamDataset:
    """The samples of a stream by their positions in the current epoch. For one thread.

    Positions are cheap in ascending order. If the stream has `iterate_from(position)`, skipped positions start a
    new iterator there; otherwise they are read and dropped, and going back starts over. If it has `set_epoch(epoch)`,
    that is called with each epoch, from 0.
    """

    def __init__(self, stream: Any, length: int, *, key: str, length_key: str, seed: int) -> None:
        """Create it without reading.

        Args:
            stream: the user's data set.
            length: samples of an epoch, at least 1.
            key: job key of the data set.
            length_key: job key of `length`, for messages.
            seed: of the job.
        """
        self._stream = stream
        self._length = length
        self._key = key
        self._length_key = length_key
        self._seed = seed
        self._epoch = 0
        self._iterator: Iterator[Any] | None = None
        #: Position of the iterator's next sample.
        self._next = 0
        self._jumps = callable(getattr(stream, "iterate_from", None))

    @property
    def jumps(self) -> bool:
        """Whether the stream can be iterated from any position."""
        return self._jumps

    def without_jumps(self) -> StreamDataset:
        """The same stream, read from the start only."""
        other = StreamDataset(self._stream, self._length, key=self._key, length_key=self._length_key, seed=self._seed)
        other._jumps = False
        return other

    def begin_epoch(self, epoch: int) -> None:
        """Start `epoch` (from 0); positions are those of that epoch."""
        if epoch != self._epoch:
            self._epoch = epoch
            self.rewind()

    def rewind(self) -> None:
        """Drop the iterator, which a forked process must not share."""
        self._iterator = None

    def __len__(self) -> int:
        """Samples of an epoch."""
        return self._length

    def __getitem__(self, position: int, /) -> Any:
        """The sample at one position."""
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """The samples at `positions`. The generators are left as they were.

        Raises:
            CallableError: the stream raised or ended; with key, position and fix.
        """
        with preserved_generators(), _only_reader():
            return [self._sample(position) for position in positions]

    def _sample(self, position: int) -> Any:
        if self._iterator is None or position < self._next or (self._jumps and position != self._next):
            self._iterator, self._next = self._opened(position), position if self._jumps else 0
        while self._next < position:
            self._read(self._iterator)
        return self._read(self._iterator)

    def _opened(self, position: int) -> Iterator[Any]:
        """A new iterator, from `position` on if the stream supports that."""

        def opened() -> Iterator[Any]:
            set_epoch = getattr(self._stream, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self._epoch)
            return iter(self._stream.iterate_from(position) if self._jumps else self._stream)

        self._iterator = None
        _keep_epoch_private(self._stream)
        seed_generators(stream_seed(self._seed, self._key, self._epoch, None))
        where = f"`iterate_from({position})`" if self._jumps else "`__iter__`"
        iterator = read_user_data(opened, self._key, f"the stream by {where} in epoch {self._epoch + 1}")
        if iterator is self._stream:
            raise CallableError(
                f"{self._key}: is an iterator, which can be read only once, and each stage, worker and epoch reads "
                "anew; return an object whose `__iter__` begins at the first sample each time"
            )
        return iterator

    def _read(self, iterator: Iterator[Any]) -> Any:
        """The next sample. Its random draws depend on its position alone, not on skipped ones."""
        position, epoch = self._next, self._epoch + 1
        seed_generators(stream_seed(self._seed, self._key, self._epoch, position))
        try:
            sample = read_user_data(
                lambda: next(iterator, _END), self._key, f"sample {position} of epoch {epoch} of the stream"
            )
        except CallableError:
            self.rewind()
            raise
        if sample is _END:
            self.rewind()
            raise CallableError(
                f"{self._key}: the stream ends in epoch {epoch} after {position} samples, at position {position}, but "
                f"an epoch has {self._length} ({self._length_key}); "
                f"{f'set {self._length_key} to {position} or less' if position else 'check what it reads from'}, or "
                "let the stream go on"
            )
        self._next += 1
        return sample


def _keep_epoch_private(stream: object) -> None:
    """Give a stream with `set_epoch`, and those that it wraps, their own copies of tensors in shared memory.

    Hugging Face's streams store the epoch in one, through which a forked process that reads ahead would change the
    epoch of this one.
    """
    seen: set[int] = set()

    def visit(one: object) -> None:
        if id(one) in seen or not callable(getattr(one, "set_epoch", None)):
            return
        seen.add(id(one))
        attributes = getattr(one, "__dict__", {})
        for name, value in list(attributes.items()):
            if isinstance(value, Tensor):
                if value.is_shared() and not value.is_cuda:  # type: ignore[no-untyped-call]
                    attributes[name] = value.clone()
            else:
                visit(value)

    visit(stream)


@contextmanager
def _only_reader() -> Iterator[None]:
    """Inside, torch's `get_worker_info()` is None.

    In a worker, streams like Hugging Face's would skip the shares of the other workers, but positions are those of the
    whole stream.
    """
    kept = torch_worker._worker_info  # noqa: SLF001 - the only way
    torch_worker._worker_info = None  # noqa: SLF001
    try:
        yield
    finally:
        torch_worker._worker_info = kept  # noqa: SLF001
