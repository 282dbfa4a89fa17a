"""The cache of a node: what enters the layers behind frozen ones, in files that its stage processes share.

A folder in shared memory, and behind it one on disk, both owned by the node's agent (caching.md §3). Each unit, a
minibatch or a sample, is one file, which appears complete or not at all; the name has the border at which it stands and
the unit's digest. Bytes in use are counted in a file under a lock, so that all processes together stay within the
limits. What cannot be kept or read, as memory or disk are full or broken, is computed again: a cache never fails a run.

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
from collections.abc import Iterator, Mapping, Sequence
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
from hetpipe.values.quantities import bytes_text

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


def digests_of_samples(values: Values) -> tuple[bytes, ...] | None:
    """Digest of each sample of a minibatch: of its rows in tensors on the CPU, and of how many samples there are.

    None if the tensors do not all have one row for each sample.
    """
    counts = {value.shape[0] if value.dim() else 0 for value in values}
    count = counts.pop() if len(counts) == 1 else 0
    if not count:
        return None
    of_all = xxhash.xxh3_128(json.dumps(_specs(values)).encode())
    contiguous = [value.detach().contiguous() for value in values if value.numel()]
    found = []
    for place in range(count):
        own = of_all.copy()
        for value in contiguous:
            own.update(_memory(value[place]))
        found.append(own.digest())
    return tuple(found)


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
        #: Why the units that were last to be kept are not; empty if they are.
        self.refused = ""
        self._has_told = False
        self.name = f"{folders.memory.name}/{term}"

    @property
    def used(self) -> CacheBytes:
        """Bytes that all processes of the node keep; 0 if that cannot be read."""
        with suppress(OSError), self._counted() as used:
            return used
        return CacheBytes(0, 0)

    def borders(self) -> frozenset[int]:
        """The borders at which anything has been kept."""
        found = set[int]()
        for folder in self._roots():
            with suppress(OSError):
                found.update(int(entry.name) for entry in folder.iterdir())
        return frozenset(found)

    def read(self, border: int, unit: bytes) -> Values | None:
        """What enters layer `border`, of a unit; None if it is not kept. The tensors may be modified."""
        for folder in self._roots():
            with suppress(OSError):
                return _read(folder / str(border) / unit.hex())
        return None

    def keep(self, border: int, unit: bytes, values: Values) -> bool:
        """Keep what enters layer `border`, of a unit; returns whether it is kept now."""
        return self._keep(border, {unit: _pieces(values, _start(values))})

    def read_samples(self, border: int, units: Sequence[bytes]) -> Values | None:
        """What enters layer `border`, of a minibatch of these samples; None if one of them is not kept."""
        paths = [self._path_of(border, unit) for unit in units]
        present = [path for path in paths if path is not None]
        if len(present) < len(paths):
            return None
        with suppress(OSError):
            read = _read_rows(present)
            if read is None or not read[-1].eq(read[-1][0]).all():
                return None
            *rows, notes = read
            note = notes[0].tolist()
            by_sample = note[DIGEST_BYTES:]
            shared = () if all(by_sample) else self.read(border, bytes(note[:DIGEST_BYTES]))
            if shared is not None:
                left, common = iter(rows), iter(shared)
                return tuple(next(left if is_row else common) for is_row in by_sample)
        return None

    def keep_samples(self, border: int, units: Sequence[bytes], values: Values, by_sample: Sequence[bool]) -> bool:
        """Keep what enters layer `border`, of each sample of a minibatch; returns whether all are kept now.

        Args:
            border: the layer.
            units: of the samples.
            values: what enters the layer, of the minibatch.
            by_sample: for each value, whether it has a row for each sample; else it belongs to all of them, such as the
                angles of rotary embeddings.
        """
        shared = tuple(value for value, is_row in zip(values, by_sample, strict=True) if not is_row)
        rows = [value for value, is_row in zip(values, by_sample, strict=True) if is_row]
        common = digest_of(shared)
        if shared and not self.keep(border, common, shared):
            return False
        note = torch.tensor([*common, *by_sample], dtype=torch.uint8)
        start = _start((*(row[0] for row in rows), note))
        return self._keep(
            border, {unit: _pieces((*(row[k] for row in rows), note), start) for k, unit in enumerate(units)}
        )

    def decline(self, key: str) -> None:
        """Let the stages of this node know that units under `key` are not worth asking for."""
        with suppress(OSError):
            self._declined(key).touch()

    def is_declined(self, key: str) -> bool:
        """Whether a stage of this node has declined `key`."""
        return self._declined(key).exists()

    def drop(self, border: int, units: Sequence[bytes]) -> None:
        """Keep units at `border` no more."""
        for tier in ("memory", "disk"):
            size = 0
            for unit in units:
                path = self._root(tier) / str(border) / unit.hex()
                with suppress(OSError):
                    num_bytes = path.stat().st_size
                    path.unlink()
                    size += num_bytes
            if size:
                with suppress(OSError):
                    self._release(tier, size)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _root(self, tier: Tier) -> Path:
        return (self._folders.memory if tier == "memory" else self._folders.disk) / str(self._term)

    def _roots(self) -> tuple[Path, Path]:
        return self._root("memory"), self._root("disk")

    def _declined(self, key: str) -> Path:
        return self._folders.memory / f"declined-{self._term}-{key}"

    def _path_of(self, border: int, unit: bytes) -> Path | None:
        paths = (folder / str(border) / unit.hex() for folder in self._roots())
        return next((path for path in paths if path.exists()), None)

    def _keep(self, border: int, files: Mapping[bytes, Sequence[memoryview | bytes]]) -> bool:
        """Keep all of these files, or none that was not kept before; returns whether they are kept now."""
        new = {unit: pieces for unit, pieces in files.items() if self._path_of(border, unit) is None}
        self.refused = self._write_where_is_room(border, new) if new else ""
        if self.refused and not self._has_told:
            self._has_told = True
            _log.warning(
                "frozen_cache_full",
                reason=self.refused,
                consequence="frozen layers compute what is not kept in each pass over the data",
                fix="raise freeze.cache_memory_bytes or freeze.cache_disk_bytes, or free memory or disk of this node",
            )
        return not self.refused

    def _write_where_is_room(self, border: int, new: Mapping[bytes, Sequence[memoryview | bytes]]) -> str:
        """Write all of these files, or none; returns why none, or nothing."""
        size = sum(len(piece) for pieces in new.values() for piece in pieces)
        allowed = self._folders.allowed
        reason = f"there is no room in {bytes_text(allowed.memory)} of memory and {bytes_text(allowed.disk)} of disk"
        try:
            tier = self._reserve(size)
            while tier is not None:
                failure = self._write_all(tier, border, new)
                if failure is None:
                    return ""
                self._release(tier, size)
                reason = f"{self._root(tier).parent.parent}: {failure.strerror or failure}"
                tier = self._reserve(size, only="disk") if tier == "memory" and failure.errno in _FULL else None
        except OSError as error:  # of the file that counts
            reason = str(error)
        return reason

    def _write_all(self, tier: Tier, border: int, new: Mapping[bytes, Sequence[memoryview | bytes]]) -> OSError | None:
        """Write all of these files, or none; returns why none."""
        written: list[Path] = []
        try:
            for unit, pieces in new.items():
                written.append(_write(self._root(tier) / str(border) / unit.hex(), pieces))
        except OSError as error:
            for path in written:
                path.unlink(missing_ok=True)
            return error
        return None

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


def _specs(values: Values) -> list[tuple[str, list[int]]]:
    return [(dtype_name(value.dtype), list(value.shape)) for value in values]


def _memory(tensor: Tensor) -> memoryview:
    """The elements of a contiguous tensor on the CPU; the tensor must outlive it."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _padding(size: int) -> int:
    return -size % ALIGNMENT_BYTES


def _start(values: Values) -> bytes:
    """The header of a unit's file."""
    text = json.dumps(_specs(values)).encode()
    length = _LENGTH.size + len(text)
    return _LENGTH.pack(len(text)) + text + bytes(_padding(length))


def _pieces(values: Values, start: bytes) -> list[memoryview | bytes]:
    """The content of a unit's file; the tensors must outlive it."""
    pieces: list[memoryview | bytes] = [start]
    for value in values:
        if value.numel():
            pieces += [_memory(value), bytes(_padding(value.nbytes))]
    return [piece for piece in pieces if len(piece)]


def _write(path: Path, pieces: Sequence[memoryview | bytes], suffix: str | None = None) -> Path:
    """Write a unit's file, which appears when it is complete; until then it has `suffix`, or one of this thread.

    Returns:
        `path`.

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
    return path


def _read(path: Path) -> Values:
    """The tensors of a unit's file, mapped into memory; what is written to them stays in this process."""
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    (length,) = _LENGTH.unpack(memory[: _LENGTH.size])
    position, found = _LENGTH.size + length, []
    for dtype, shape in _specs_in(memory[_LENGTH.size : position]):
        position += _padding(position)
        size = math.prod(shape) * dtype.itemsize
        flat = data[position : position + size] if size else torch.empty(0, dtype=torch.uint8)
        found.append(flat.view(dtype).view(shape))
        position += size
    return tuple(found)


def _specs_in(text: bytes) -> list[tuple[torch.dtype, list[int]]]:
    return [(getattr(torch, name), shape) for name, shape in json.loads(text)]


def _read_rows(paths: Sequence[Path]) -> Values | None:
    """The tensors of files, one row for each file; None if they have different shapes or types."""
    with paths[0].open("rb") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        text = file.read(length)
    rows = tuple(torch.empty((len(paths), *shape), dtype=dtype) for dtype, shape in _specs_in(text))
    one = tuple(row[0] for row in rows)
    start = _start(one)
    size = sum(len(piece) for piece in _pieces(one, start))
    memories = [(_memory(row), value.nbytes) for row, value in zip(rows, one, strict=True) if value.numel()]
    for place, path in enumerate(paths):
        head = bytearray(len(start))
        pieces: list[memoryview | bytearray] = [head]
        for memory, own in memories:
            pieces += [memory[place * own : (place + 1) * own], bytearray(_padding(own))]
        with path.open("rb", buffering=0) as file:
            if os.preadv(file.fileno(), pieces, 0) != size or head != start:
                return None
    return rows
