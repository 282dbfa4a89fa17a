"""Do the files of a checkpoint go together? Judged by what their headers say of the tensors, not by these.

Files can be whole, of the right job and clock, and still be of two models, dtypes or cuts: if somebody has put them
into one folder, or two plans have written there. Such a set is refused as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from hetpipe.errors import CheckpointError, ProtocolViolation
from hetpipe.values import wire
from hetpipe.values.checkpoint import FACTS, SLICES, StoredSlice


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file."""

    key: str
    """Of the whole tensor."""
    file: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: str
    start: int
    stop: int
    """The elements [start, stop) of the flattened tensor are here."""


def check_content(paths: Sequence[Path]) -> None:
    """Refuse files that are not one checkpoint.

    Raises:
        CheckpointError: a tensor has two shapes or dtypes, its slices do not make a whole, or two stages of a virtual
            worker have state for one parameter.
    """
    stored = sorted((entry for path in paths for entry in _entries(path)), key=lambda entry: (entry.key, entry.start))
    for _, group in groupby(stored, key=lambda entry: entry.key):
        _check_copies(list(group))
    _check_owners(stored)


def _entries(path: Path) -> Iterator[_Stored]:
    try:
        with safe_open(path, framework="numpy") as file:
            facts = json.loads((file.metadata() or {}).get(FACTS, "{}"))
            slices: dict[str, StoredSlice] = {
                key: wire.revive(StoredSlice, value) for key, value in facts.get(SLICES, {}).items()
            }
            for key in file.keys():  # noqa: SIM118 - not a mapping
                header = file.get_slice(key)
                yield _entry(key, path.name, tuple(header.get_shape()), header.get_dtype(), slices.get(key))
    except (SafetensorError, ProtocolViolation, OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _entry(key: str, file: str, shape: tuple[int, ...], dtype: str, part: StoredSlice | None) -> _Stored:
    owner = f"{file.partition('-stage-')[0]}/" if key.startswith("optimizer/") else ""
    if part is None:
        return _Stored(f"{owner}{key}", file, shape, dtype, 0, prod(shape))
    if shape != (part.stop - part.start,):
        raise CheckpointError(f"{file} has {key} with {prod(shape)} elements")
    return _Stored(part.whole, file, part.shape, dtype, part.start, part.stop)


def _check_copies(copies: Sequence[_Stored]) -> None:
    """Whole copies are alike; slices follow each other."""
    first = copies[0]
    for other in copies[1:]:
        if (other.shape, other.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{other.file} has {first.key} as {list(other.shape)} {other.dtype}, and {first.file} as "
                f"{list(first.shape)} {first.dtype}: they are of two models"
            )
    size = prod(first.shape)
    if all((entry.start, entry.stop) == (0, size) for entry in copies):
        return
    end = 0
    for entry in copies:
        if entry.start != end:
            break
        end = entry.stop
    if end != size:
        raise CheckpointError(f"{first.file} and others have {first.key} only up to element {end} of {size}")


def _check_owners(stored: Sequence[_Stored]) -> None:
    """A parameter's optimizer state is in one file of each virtual worker."""
    owner: dict[str, str] = {}
    for entry in stored:
        if "/optimizer/" in entry.key:
            parameter = entry.key.rpartition("/")[0]
            if owner.setdefault(parameter, entry.file) != entry.file:
                raise CheckpointError(
                    f"{entry.file} and {owner[parameter]} both have {parameter}: they are of two cuts"
                )
