"""Tensors on the wire: a stream of slices, cut into chunks of raw little-endian bytes.

The slices of a request form one *stream* in which each starts at a multiple of 64 bytes. Sender and receiver keep the
same slices in buffers of their own layout; a `RunMap` says which run of the stream lies where in the buffer. A chunk is
its offset in the stream (8 bytes, little-endian), the CRC-32 of offset and bytes (4 bytes), and the bytes. Chunks come
in order and without gaps.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetpipe.errors import DamagedChunk, MalformedChunk
from hetpipe.spec.plan import DTYPE_BYTES
from hetpipe.spec.requests import SliceHeader
from hetpipe.weights.flat import ALIGNMENT_BYTES, FlatBuffer, aligned

#: Bytes of payload per chunk: large enough to amortise a message, small enough that it is still in the cache when it is
#: checked, and that copying overlaps with sending (benchmarks/wire.py: 1 MiB moves about as fast as 4 MiB).
CHUNK_BYTES = 1024 * 1024

_OFFSET = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_HEAD_BYTES = _OFFSET.size + _CRC.size


@dataclass(frozen=True, slots=True)
class Run:
    """`num_bytes` that are contiguous in the stream and in the buffer."""

    stream: int
    buffer: int
    num_bytes: int


def slice_bytes(header: SliceHeader) -> int:
    """Bytes of one slice, without the gap behind it."""
    return (header.stop - header.start) * DTYPE_BYTES[header.dtype]


class RunMap:
    """Where the bytes of a stream of slices lie in one buffer. Immutable."""

    def __init__(
        self, slices: Sequence[SliceHeader], buffer_offsets: Sequence[int], *, ends_slot: Sequence[bool] | None = None
    ) -> None:
        """Map `slices`, in stream order, to the given byte offsets in the buffer.

        Args:
            slices: what the stream holds.
            buffer_offsets: where each slice lies.
            ends_slot: whether nothing but a gap follows each slice up to the next multiple of 64 bytes; neighbours are
                one run across a gap only. None: always so.
        """
        runs: list[Run] = []
        position = 0
        joins = False
        for index, (header, offset) in enumerate(zip(slices, buffer_offsets, strict=True)):
            length = slice_bytes(header)
            last = runs[-1] if joins else None
            if last is not None and last.buffer + aligned(last.num_bytes) == offset:
                runs[-1] = Run(last.stream, last.buffer, position + length - last.stream)
            else:
                runs.append(Run(position, offset, length))
            joins = length % ALIGNMENT_BYTES == 0 or ends_slot is None or ends_slot[index]
            position = aligned(position + length)
        self.runs: tuple[Run, ...] = tuple(runs)
        self._starts = [run.stream for run in runs]
        #: Length of the stream, gaps included.
        self.num_bytes = position

    def pieces(self, offset: int, num_bytes: int) -> Iterator[Run]:
        """The parts of the runs within [offset, offset + num_bytes) of the stream."""
        end = offset + num_bytes
        index = max(0, bisect_right(self._starts, offset) - 1)
        for run in self.runs[index:]:
            if run.stream >= end:
                return
            first, last = max(run.stream, offset), min(run.stream + run.num_bytes, end)
            if first < last:
                yield Run(first, run.buffer + first - run.stream, last - first)


def chunks(buffer: FlatBuffer, runs: RunMap) -> Iterator[bytes]:
    """The slices in `buffer` as chunks; every chunk is one copy of its bytes."""
    memory = buffer.memory()
    for offset in range(0, runs.num_bytes, CHUNK_BYTES):
        length = min(CHUNK_BYTES, runs.num_bytes - offset)
        parts: list[bytes | memoryview] = []
        position = offset
        for piece in runs.pieces(offset, length):
            if piece.stream > position:
                parts.append(bytes(piece.stream - position))
            parts.append(memory[piece.buffer : piece.buffer + piece.num_bytes])
            position = piece.stream + piece.num_bytes
        if position < offset + length:
            parts.append(bytes(offset + length - position))
        start = _OFFSET.pack(offset)
        crc = zlib.crc32(start)
        for part in parts:
            crc = zlib.crc32(part, crc)
        yield b"".join([start, _CRC.pack(crc), *parts])


@dataclass(frozen=True, slots=True)
class Chunks:
    """What `chunks` yields, from its beginning each time it is iterated: for a transfer that may be repeated."""

    buffer: FlatBuffer
    runs: RunMap

    def __iter__(self) -> Iterator[bytes]:
        return chunks(self.buffer, self.runs)


class ChunkReceiver:
    """Writes the chunks of one stream into a buffer, checking order and bounds before a byte is copied."""

    def __init__(self, buffer: FlatBuffer, runs: RunMap, *, restarts: bool = False) -> None:
        """Receive into `buffer`.

        Args:
            buffer: is filled.
            runs: where the stream's bytes lie in it.
            restarts: the stream may begin anew in the middle, as one does whose connection broke.
        """
        self._buffer = buffer
        self._address = buffer.data.data_ptr()
        self._runs = runs
        self._restarts = restarts
        self._received = 0

    def write(self, chunk: bytes) -> tuple[Run, ...]:
        """Take the next chunk; returns the parts of the buffer it filled.

        Raises:
            MalformedChunk: too short, out of order, or beyond the stream's end.
            DamagedChunk: its bytes are not those that were sent.
        """
        offset, length = _checked(chunk)
        if offset == 0 and self._restarts:
            self._received = 0
        if offset != self._received or offset + length > self._runs.num_bytes:
            raise MalformedChunk(
                f"a chunk covers bytes [{offset}, {offset + length}) of {self._runs.num_bytes}; "
                f"the next one must start at {self._received}"
            )
        if length % ALIGNMENT_BYTES and offset + length != self._runs.num_bytes:
            raise MalformedChunk(f"a chunk of {length} bytes ends inside an alignment unit")
        source = ctypes.cast(ctypes.c_char_p(chunk), ctypes.c_void_p).value or 0
        pieces = tuple(self._runs.pieces(offset, length))
        for piece in pieces:
            ctypes.memmove(self._address + piece.buffer, source + _HEAD_BYTES + piece.stream - offset, piece.num_bytes)
        self._received += length
        return pieces

    def finish(self) -> None:
        """The stream has ended.

        Raises:
            MalformedChunk: before all bytes were there.
        """
        if self._received != self._runs.num_bytes:
            raise MalformedChunk(f"the stream ended after {self._received} of {self._runs.num_bytes} bytes")


def _checked(chunk: bytes) -> tuple[int, int]:
    """Offset and length of an undamaged chunk.

    Raises:
        MalformedChunk: too short.
        DamagedChunk: its bytes are not those that were sent.
    """
    if len(chunk) <= _HEAD_BYTES:
        raise MalformedChunk(f"a chunk of {len(chunk)} bytes is too short for its head and payload")
    (crc,) = _CRC.unpack_from(chunk, _OFFSET.size)
    if zlib.crc32(memoryview(chunk)[_HEAD_BYTES:], zlib.crc32(chunk[: _OFFSET.size])) != crc:
        raise DamagedChunk(f"a chunk of {len(chunk)} bytes was damaged on its way: its checksum is wrong")
    return _OFFSET.unpack_from(chunk)[0], len(chunk) - _HEAD_BYTES
