"""The calls of earlier stages, as far as a later stage's Python reads them: shapes and numbers, entry by entry.

The log crosses a cut as one vector of integers. Per entry: a check of its name, the index of its skeleton (one past the
last, followed by the skeleton as JSON, for one that no recording has), and its leaves: a tensor as (2 · dtype +
requires_grad, rank, sizes…), an integer as itself, a float as its bit pattern.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from hetpipe.errors import CallableError, MalformedFrame
from hetpipe.model.structure import Number, Skeleton, kinds_of
from hetpipe.model.structure_text import NotDescribable, plain_skeleton, skeleton_of
from hetpipe.values.plan import DTYPE_BYTES

#: Dtypes that cross cuts, and those that occur in logs only.
_DTYPES: tuple[torch.dtype, ...] = tuple(
    getattr(torch, name)
    for name in (*DTYPE_BYTES, "complex32", "complex64", "complex128", "uint16", "uint32", "uint64")
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_MAX_RANK = 16

#: Limit on the bytes of a structure that is part of a log.
_MAX_TEXT = 1 << 20


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

        A structure that no recording has, as of a tuple that is shorter when layers are skipped, is part of the vector.

        Raises:
            CallableError: another process cannot rebuild the structure of a result.
        """
        numbers: list[int] = [len(entries)]
        for entry in entries:
            index = self._index.get(entry.key, -1)
            if index < 0 or self._table[index] != entry.skeleton:
                is_known = entry.skeleton in self._table
                index = self._table.index(entry.skeleton) if is_known else len(self._table)
            numbers += (crc32(entry.key.encode()), index)
            if index == len(self._table):
                numbers += _text_of(entry)
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
                is_known = index != len(self._table)
                skeleton = self._table[index] if is_known else _read_text(numbers)
                for kind in self._kinds[index] if is_known else kinds_of(skeleton):
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
                found.append((check, skeleton, tuple(leaves)))
        except (StopIteration, IndexError) as error:
            raise MalformedFrame("a log of earlier stages is truncated, or refers to an unknown skeleton") from error
        return found


def _text_of(entry: LoggedCall) -> list[int]:
    """The structure of a result as JSON: its number of bytes, and the bytes."""
    try:
        text = json.dumps(plain_skeleton(entry.skeleton)).encode()
    except NotDescribable as error:
        raise CallableError(
            f"model: {entry.key.lstrip('/')} returns another structure than in the minibatch on which the model was "
            f"cut, with {error}; train the model with `workers: {{stages: 1}}`"
        ) from error
    return [len(text), *text]


def _read_text(numbers: Iterator[int]) -> Skeleton:
    count = next(numbers)
    if not 0 <= count <= _MAX_TEXT:
        raise MalformedFrame(f"a log of earlier stages has a structure of {count} bytes")
    try:
        return skeleton_of(json.loads(bytes(next(numbers) for _ in range(count))))
    except (NotDescribable, KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise MalformedFrame(f"a log of earlier stages has no valid structure: {error}") from error


def check_of(key: str) -> int:
    """Integer that represents an entry's name in the vector."""
    return crc32(key.encode())
