"""The cache of a node: what enters the layers behind frozen ones, in files that its stage processes share.

A folder in shared memory, and behind it one on disk, both owned by the node's agent (caching.md §3). Each unit is one
file, which appears complete or not at all; the name has the border at which it stands and the unit's digest. Bytes in
use are counted in a file under a lock, so that all processes together stay within the limits. What cannot be kept, as
memory or disk are full, is computed again: a cache never fails a run.

    length of the header (u64), header: JSON [[dtype, shape], …], zeros up to a multiple of 64
    each tensor's elements, from a multiple of 64 on
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import math
import mmap
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from hetpipe.decide.elastic.caching import CacheBytes, CacheFolders, Tier, tier_for
from hetpipe.observe.log import get_logger
from hetpipe.pipeline.chain import Values, dtype_name
from hetpipe.values.alignment import ALIGNMENT_BYTES

_log = get_logger(__name__)

#: Bytes of a unit's digest.
DIGEST_BYTES = 16

_LENGTH = struct.Struct("<Q")
_USED = struct.Struct("<qq")
_USED_FILE = "used"

#: Errors by which a folder says that it has no room.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM})


def digest_of(values: Values) -> bytes:
    """Digest of tensors on the CPU: of their elements, shapes and dtypes (128-bit XXH3)."""
    found = xxhash.xxh3_128(json.dumps(_specs(values)).encode())
    for value in values:
        if value.numel():
            found.update(_memory(value.detach().contiguous()))
    return found.digest()


class FrozenCache:
    """One process's view of the cache of its node. For one thread."""

    def __init__(self, folders: CacheFolders, term: int) -> None:
        """Open the cache; after a rewind the same layers may be frozen with other weights, so a term sees its own only.

        Args:
            folders: of the job on this node; they exist.
            term: of the plan.
        """
        self._folders = folders
        self._term = term
        #: Whether it was full before, which is logged once.
        self._is_full = False
        self.name = f"{folders.memory.name}/{term}"

    @property
    def used(self) -> CacheBytes:
        """Bytes that all processes of the node keep."""
        with self._counted() as used:
            return used

    def borders(self) -> frozenset[int]:
        """The borders at which anything has been kept."""
        found = set[int]()
        for folder in self._roots():
            with suppress(FileNotFoundError):
                found.update(int(entry.name) for entry in folder.iterdir())
        return frozenset(found)

    def read(self, border: int, unit: bytes) -> Values | None:
        """What enters layer `border`, of a unit; None if it is not kept. The tensors may be modified."""
        for folder in self._roots():
            with suppress(FileNotFoundError):
                return _read(folder / str(border) / unit.hex())
        return None

    def keep(self, border: int, unit: bytes, values: Values) -> bool:
        """Keep what enters layer `border`, of a unit; returns whether it is kept now."""
        if any((folder / str(border) / unit.hex()).exists() for folder in self._roots()):
            return True
        pieces = _pieces(values)
        size = sum(len(piece) for piece in pieces)
        tier = self._reserve(size)
        while tier is not None:
            try:
                _write(self._root(tier) / str(border) / unit.hex(), pieces)
            except OSError as error:
                self._release(tier, size)
                if error.errno not in _FULL:
                    _log.warning("frozen_cache_not_written", reason=str(error), consequence="its layers compute again")
                    return False
                tier = self._reserve(size, only="disk") if tier == "memory" else None
            else:
                return True
        self._tell_full()
        return False

    def drop(self, border: int, unit: bytes) -> None:
        """Keep a unit at `border` no more."""
        for tier in ("memory", "disk"):
            path = self._root(tier) / str(border) / unit.hex()
            try:
                size = path.stat().st_size
                path.unlink()
            except FileNotFoundError:
                continue
            self._release(tier, size)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _root(self, tier: Tier) -> Path:
        return (self._folders.memory if tier == "memory" else self._folders.disk) / str(self._term)

    def _roots(self) -> tuple[Path, Path]:
        return self._root("memory"), self._root("disk")

    def _reserve(self, size: int, only: Tier | None = None) -> Tier | None:
        """Count `size` bytes as used where there is room for them; None: nowhere."""
        with self._counted() as used:
            seen = used if only is None else replace(used, memory=self._folders.allowed.memory + 1)
            tier = tier_for(size, seen, self._folders.allowed)
            if tier is not None:
                self._count(used, tier, size)
            return tier

    def _release(self, tier: Tier, size: int) -> None:
        with self._counted() as used:
            self._count(used, tier, -size)

    @contextmanager
    def _counted(self) -> Iterator[CacheBytes]:
        """The bytes in use, which no other process changes in this block."""
        descriptor = os.open(self._folders.memory / _USED_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            content = os.pread(descriptor, _USED.size, 0)
            yield CacheBytes(*_USED.unpack(content)) if content else CacheBytes(0, 0)
        finally:
            os.close(descriptor)

    def _count(self, used: CacheBytes, tier: Tier, change: int) -> None:
        """Change the bytes in use; within `_counted`."""
        memory, disk = used.memory, used.disk
        content = _USED.pack(*((memory + change, disk) if tier == "memory" else (memory, disk + change)))
        with (self._folders.memory / _USED_FILE).open("r+b", buffering=0) as file:
            file.write(content)

    def _tell_full(self) -> None:
        if not self._is_full:
            self._is_full = True
            _log.warning(
                "frozen_cache_full",
                memory_bytes=self._folders.allowed.memory,
                disk_bytes=self._folders.allowed.disk,
                consequence="frozen layers compute what is not kept in each pass over the data",
                fix="raise freeze.cache_memory_bytes or freeze.cache_disk_bytes, or free memory or disk of this node",
            )


def _specs(values: Values) -> list[tuple[str, list[int]]]:
    return [(dtype_name(value.dtype), list(value.shape)) for value in values]


def _memory(tensor: Tensor) -> memoryview:
    """The elements of a contiguous tensor on the CPU; the tensor must outlive it."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _padding(size: int) -> int:
    return -size % ALIGNMENT_BYTES


def _pieces(values: Values) -> list[memoryview | bytes]:
    """The content of a unit's file."""
    text = json.dumps(_specs(values)).encode()
    start = _LENGTH.pack(len(text)) + text
    pieces: list[memoryview | bytes] = [start, bytes(_padding(len(start)))]
    for value in values:
        if value.numel():
            pieces += [_memory(value), bytes(_padding(value.nbytes))]
    return [piece for piece in pieces if len(piece)]


def _write(path: Path, pieces: Sequence[memoryview | bytes], suffix: str | None = None) -> None:
    """Write a unit's file, which appears when it is complete; until then it has `suffix`, or one of this thread.

    Raises:
        OSError: it cannot be written; nothing of it remains.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{suffix or threading.get_native_id()}")
    try:
        # `write`, not a mapping: without room that raises, and a mapping would kill the process.
        with partial.open("wb", buffering=0) as file:
            for piece in pieces:
                left = memoryview(piece)
                while left:
                    left = left[file.write(left) :]
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _read(path: Path) -> Values:
    """The tensors of a unit's file, mapped into memory; what is written to them stays in this process."""
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    (length,) = _LENGTH.unpack(memory[: _LENGTH.size])
    specs = json.loads(memory[_LENGTH.size : _LENGTH.size + length])
    position, found = _LENGTH.size + length, []
    for name, shape in specs:
        position += _padding(position)
        dtype = getattr(torch, name)
        size = math.prod(shape) * dtype.itemsize
        flat = data[position : position + size] if size else torch.empty(0, dtype=torch.uint8)
        found.append(flat.view(dtype).view(shape))
        position += size
    return tuple(found)
