"""The calls of earlier stages, as far as a later stage's Python reads them: shapes and numbers, entry by entry.

The log crosses a cut as one vector of integers. Per entry: a check of its name, the index of its skeleton, and its
leaves: a tensor as (2 · dtype + requires_grad, rank, sizes…), an integer as itself, a float as its bit pattern.
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

#: Dtypes that cross cuts, and those that occur in logs only.
_DTYPES: tuple[torch.dtype, ...] = tuple(
    getattr(torch, name)
    for name in (*DTYPE_BYTES, "complex32", "complex64", "complex128", "uint16", "uint32", "uint64")
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_MAX_RANK = 16


@dataclass(frozen=True, slots=True)
class TensorNote:
    """Metadata of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """The result of one call."""

    key: str
    skeleton: Skeleton
    leaves: tuple[TensorNote | Number, ...]


def noted(leaf: Tensor | Number) -> TensorNote | Number:
    """Metadata of a tensor; a number as it is."""
    if isinstance(leaf, Tensor):
        return TensorNote(leaf.dtype, tuple(leaf.shape), leaf.requires_grad)
    return leaf


class LogCodec:
    """Encodes logs with the skeletons known to both ends. Thread-safe after construction."""

    def __init__(self, skeletons: Mapping[str, Skeleton]) -> None:
        """Use the skeletons of one recording: the same on every stage, in the same order."""
        table: list[Skeleton] = []
        for skeleton in skeletons.values():
            if skeleton not in table:
                table.append(skeleton)
        self._table = table
        self._kinds = [tuple(kinds_of(skeleton)) for skeleton in table]
        self._skeletons = skeletons
        self._index = {key: table.index(skeleton) for key, skeleton in skeletons.items()}

    def skeleton(self, key: str) -> Skeleton | None:
        """Structure of the entry's result in the recording; None if there was no such entry."""
        return self._skeletons.get(key)

    def encode(self, entries: Sequence[LoggedCall]) -> Tensor:
        """Encode entries as one vector of integers.

        Raises:
            CallableError: the structure of a result differs from that in the recording.
        """
        numbers: list[int] = [len(entries)]
        for entry in entries:
            index = self._index.get(entry.key, -1)
            if index < 0 or self._table[index] != entry.skeleton:
                if entry.skeleton not in self._table:
                    raise CallableError(
                        f"model: {entry.key.lstrip('/')} returns another structure than in the minibatch on which the "
                        "model was cut; train the model with `workers: {stages: 1}`"
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
        """Decode a vector: per entry the check of its name, its skeleton, its leaves.

        Raises:
            MalformedFrame: the vector is not a valid log.
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
            raise MalformedFrame("a log of earlier stages is truncated, or refers to an unknown skeleton") from error
        return found


def check_of(key: str) -> int:
    """Integer that represents an entry's name in the vector."""
    return crc32(key.encode())
