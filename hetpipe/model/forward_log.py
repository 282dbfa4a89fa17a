"""What earlier stages have done, as far as the Python of a later one asks: entry after entry, shapes and numbers.

It crosses a cut as one vector of integers. Per entry: a check of its name, the index of its skeleton, and its leaves: a
tensor as (2 · type + needs gradient, rank, sizes…), a number as itself, a float by its bits.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from hetpipe.errors import CallableError, MalformedFrame
from hetpipe.model.structure import Number, Skeleton, kinds_of
from hetpipe.values.plan import DTYPE_BYTES

#: Those that cross cuts, and those that only the log tells of.
_DTYPES: tuple[torch.dtype, ...] = tuple(
    getattr(torch, name)
    for name in (*DTYPE_BYTES, "complex32", "complex64", "complex128", "uint16", "uint32", "uint64")
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_MAX_RANK = 16


@dataclass(frozen=True, slots=True)
class TensorNote:
    """A tensor without its elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """What one call made."""

    key: str
    skeleton: Skeleton
    leaves: tuple[TensorNote | Number, ...]


def noted(leaf: Tensor | Number) -> TensorNote | Number:
    """The leaf without its elements."""
    if isinstance(leaf, Tensor):
        return TensorNote(leaf.dtype, tuple(leaf.shape), leaf.requires_grad)
    return leaf


class LogCodec:
    """Knows the skeletons that both sides have. Thread-safe after construction."""

    def __init__(self, skeletons: Mapping[str, Skeleton]) -> None:
        """Take those of one recording: the same on every stage, in the same order."""
        table: list[Skeleton] = []
        for skeleton in skeletons.values():
            if skeleton not in table:
                table.append(skeleton)
        self._table = table
        self._kinds = [tuple(kinds_of(skeleton)) for skeleton in table]
        self._skeletons = skeletons
        self._index = {key: table.index(skeleton) for key, skeleton in skeletons.items()}

    def skeleton(self, key: str) -> Skeleton | None:
        """What the entry returned in the recording; None: there was no such entry."""
        return self._skeletons.get(key)

    def encode(self, entries: Sequence[LoggedCall]) -> Tensor:
        """The vector.

        Raises:
            CallableError: the model returned something of another structure than when it was cut.
        """
        numbers: list[int] = [len(entries)]
        for entry in entries:
            index = self._index.get(entry.key, -1)
            if index < 0 or self._table[index] != entry.skeleton:
                if entry.skeleton not in self._table:
                    raise CallableError(
                        f"model: {entry.key.lstrip('/')} returns something of another structure than in the minibatch "
                        "on which the model was cut; let it train with `workers: {stages: 1}`"
                    )
                index = self._table.index(entry.skeleton)
            numbers += (crc32(entry.key.encode()), index)
            for leaf in entry.leaves:
                if isinstance(leaf, TensorNote):
                    numbers += (2 * _CODES[leaf.dtype] + leaf.requires_grad, len(leaf.shape), *leaf.shape)
                elif isinstance(leaf, float):
                    numbers.append(struct.unpack("<q", struct.pack("<d", leaf))[0])
                else:
                    numbers.append(int(leaf))
        return torch.tensor(numbers, dtype=torch.int64)

    def decode(self, vector: Tensor) -> list[tuple[int, Skeleton, tuple[TensorNote | Number, ...]]]:
        """Per entry: the check of its name, its skeleton, its leaves.

        Raises:
            MalformedFrame: it is no such vector.
        """
        numbers = iter(vector.tolist())
        found: list[tuple[int, Skeleton, tuple[TensorNote | Number, ...]]] = []
        try:
            for _ in range(next(numbers)):
                check, index = next(numbers), next(numbers)
                leaves: list[TensorNote | Number] = []
                for kind in self._kinds[index]:
                    first = next(numbers)
                    if kind is None:
                        rank = next(numbers)
                        if not 0 <= rank <= _MAX_RANK:
                            raise MalformedFrame(f"a log of earlier stages has a tensor of {rank} dimensions")
                        shape = tuple(next(numbers) for _ in range(rank))
                        leaves.append(TensorNote(_DTYPES[first // 2], shape, bool(first % 2)))
                    elif kind is float:
                        leaves.append(struct.unpack("<d", struct.pack("<q", first))[0])
                    else:
                        leaves.append(kind(first))
                found.append((check, self._table[index], tuple(leaves)))
        except (StopIteration, IndexError) as error:
            raise MalformedFrame("a log of earlier stages ends too early, or names what nobody has recorded") from error
        return found


def check_of(key: str) -> int:
    """What stands for an entry's name in the vector."""
    return crc32(key.encode())
