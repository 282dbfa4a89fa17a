"""Wire format of tensors: a stream of slices, split into chunks of raw little-endian bytes.

The slices of a request form one *stream* in which each starts at a multiple of 64 bytes. Sender and receiver keep the
same slices in buffers of their own layout; a `RunMap` maps runs of the stream to offsets in the buffer. Chunks arrive
in order and without gaps. A chunk is a header of 24 bytes and the payload; the header is `hpC4`, its form (4 bytes,
little-endian), the offset in the stream (8 bytes) and the checksum (`hetpipe.checksum`) of these two and the payload.
The magic `hpC4` names the format version; chunks of other versions of hetpipe are rejected.

The payload has one of two forms. 0: the bytes of the stream. 1: the upper 16 bits of each 32-bit word of the stream,
where the lower ones are all zero, as they are in `float32` rounded to `bfloat16`; no bit is lost.
"""

from __future__ import annotations

import ctypes
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetpipe.checksum import BLOCK_BYTES, SUM_BYTES, checksum_of, num_checksums
from hetpipe.errors import DamagedChunk, MalformedChunk
from hetpipe.values.alignment import ALIGNMENT_BYTES
from hetpipe.values.plan import DTYPE_BYTES
from hetpipe.values.requests import SliceHeader
from hetpipe.weights.flat import FlatBuffer, aligned
from hetpipe.wire.call import Chunk
from hetpipe.wire.segment import Parts, address_of

#: Bytes of payload per chunk, equal to the block of a checksum on disk, so that a log can reuse those of the wire;
#: copying overlaps with sending (benchmarks/wire.py: 1 MiB moves about as fast as 4 MiB).
CHUNK_BYTES = BLOCK_BYTES

_MAGIC = b"hpC4"
#: Magic, form, offset, checksum. Its size preserves the alignment of the payload.
_HEAD = struct.Struct(f"<4sIQ{SUM_BYTES}s")

#: Forms of a payload.
_WHOLE, _HALVES = 0, 1


@dataclass(frozen=True, slots=True)
class ByteRun:
    """`num_bytes` that are contiguous in both the stream and the buffer."""

    stream: int
    buffer: int
    num_bytes: int


def slice_bytes(header: SliceHeader) -> int:
    """Bytes of one slice, without padding."""
    return (header.stop - header.start) * DTYPE_BYTES[header.dtype]


class RunMap:
    """Map from a stream of slices to offsets in one buffer. Immutable."""

    def __init__(
        self, slices: Sequence[SliceHeader], buffer_offsets: Sequence[int], *, ends_slot: Sequence[bool] | None = None
    ) -> None:
        """Map `slices`, in stream order, to the given byte offsets in the buffer.

        Args:
            slices: contents of the stream.
            buffer_offsets: byte offset of each slice.
            ends_slot: whether only padding follows each slice up to the next multiple of 64 bytes; adjacent slices are
                merged into one run across padding only. None: true for all.
        """
        runs: list[ByteRun] = []
        position = 0
        joins = False
        for index, (header, offset) in enumerate(zip(slices, buffer_offsets, strict=True)):
            length = slice_bytes(header)
            last = runs[-1] if joins else None
            if last is not None and last.buffer + aligned(last.num_bytes) == offset:
                runs[-1] = ByteRun(last.stream, last.buffer, position + length - last.stream)
            else:
                runs.append(ByteRun(position, offset, length))
            joins = length % ALIGNMENT_BYTES == 0 or ends_slot is None or ends_slot[index]
            position = aligned(position + length)
        self.runs: tuple[ByteRun, ...] = tuple(runs)
        self._starts = [run.stream for run in runs]
        #: Length of the stream, gaps included.
        self.num_bytes = position

    def pieces(self, offset: int, num_bytes: int) -> Iterator[ByteRun]:
        """Parts of the runs within [offset, offset + num_bytes) of the stream."""
        end = offset + num_bytes
        index = max(0, bisect_right(self._starts, offset) - 1)
        for run in self.runs[index:]:
            if run.stream >= end:
                return
            first, last = max(run.stream, offset), min(run.stream + run.num_bytes, end)
            if first < last:
                yield ByteRun(first, run.buffer + first - run.stream, last - first)


def stream_parts(memory: memoryview, runs: RunMap, offset: int, num_bytes: int) -> Iterator[bytes | memoryview]:
    """Views of [offset, offset + num_bytes) of the stream of slices in `memory`, with zeros for the padding."""
    position, end = offset, offset + num_bytes
    for piece in runs.pieces(offset, num_bytes):
        if piece.stream > position:
            yield bytes(piece.stream - position)
        yield memory[piece.buffer : piece.buffer + piece.num_bytes]
        position = piece.stream + piece.num_bytes
    if position < end:
        yield bytes(end - position)


def chunks(buffer: FlatBuffer, runs: RunMap, *, in_halves: bool = False) -> Iterator[Parts]:
    """Split the slices in `buffer` into chunks: heads, and views of the buffer. The transport makes the only copy.

    Args:
        buffer: contains the slices.
        runs: map from the stream to the buffer.
        in_halves: send upper halves of words alone where that loses nothing.
    """
    memory = buffer.memory()
    for offset in range(0, runs.num_bytes, CHUNK_BYTES):
        payload = tuple(stream_parts(memory, runs, offset, min(CHUNK_BYTES, runs.num_bytes - offset)))
        halves = _upper_halves(payload) if in_halves else None
        form, payload = (_WHOLE, payload) if halves is None else (_HALVES, (halves,))
        yield _HEAD.pack(_MAGIC, form, offset, checksum_of(payload, place=_place(offset, form))), *payload


def _upper_halves(payload: Sequence[bytes | memoryview]) -> bytes | None:
    """The upper halves of the 32-bit words of a payload; None unless all lower ones are zero."""
    words = np.frombuffer(payload[0] if len(payload) == 1 else b"".join(payload), "<u2")
    return None if words[0::2].any() else words[1::2].tobytes()


def _words_of(halves: bytes) -> memoryview:
    """The 32-bit words whose upper halves these are."""
    words = np.zeros(len(halves), "<u2")  # two per half
    words[1::2] = np.frombuffer(halves, "<u2")
    return words.data.cast("B")


def fill(buffer: FlatBuffer, runs: RunMap, blocks: Iterable[tuple[int, memoryview]]) -> None:
    """Copy parts of the stream, given by offset, into `buffer`."""
    memory = buffer.memory()
    for offset, block in blocks:
        for piece in runs.pieces(offset, block.nbytes):
            start = piece.stream - offset
            memory[piece.buffer : piece.buffer + piece.num_bytes] = block[start : start + piece.num_bytes]


@dataclass(slots=True)
class Chunks:
    """A repeatable iterable of `chunks` with these arguments, for a transfer that may be retried."""

    buffer: FlatBuffer
    runs: RunMap
    in_halves: bool = False
    payload_bytes: int = 0
    """Those of the latest iteration so far."""

    def __iter__(self) -> Iterator[Parts]:
        self.payload_bytes = 0
        for head, *payload in chunks(self.buffer, self.runs, in_halves=self.in_halves):
            self.payload_bytes += sum(map(len, payload))
            yield head, *payload


class ChunkReceiver:
    """Copies the chunks of one stream into a buffer, and validates that copy, so a chunk may be in shared memory.

    Order and bounds are checked before a byte is copied. No byte of a chunk is read twice.
    """

    def __init__(self, buffer: FlatBuffer, runs: RunMap, *, restarts: bool = False) -> None:
        """Receive into `buffer`.

        Args:
            buffer: destination.
            runs: map from the stream to the buffer.
            restarts: whether the stream may start over before its end, as after a broken connection.
        """
        self._buffer = buffer
        self._memory = buffer.memory()
        self._address = buffer.data.data_ptr()
        self._runs = runs
        self._restarts = restarts
        self._received = 0
        self._sums: list[bytes] = []

    def write(self, chunk: Chunk) -> tuple[ByteRun, ...]:
        """Process the next chunk; return the ranges of the buffer it filled.

        Raises:
            MalformedChunk: too short, of another version of hetpipe, out of order, or beyond the stream's end.
            DamagedChunk: checksum mismatch; the ranges are zero.
        """
        if not isinstance(chunk, bytes | memoryview):
            chunk = b"".join(chunk)
        head, length = bytes(chunk[: _HEAD.size]), len(chunk) - _HEAD.size
        if length <= 0:
            raise MalformedChunk(f"a chunk of {len(chunk)} bytes is too short for its head and payload")
        magic, form, offset, total = _HEAD.unpack(head)
        if form == _HALVES:
            length *= 2
        restarts = offset == 0 and self._restarts
        misplaced = self._misplaced(offset, length, 0 if restarts else self._received)
        if magic != _MAGIC or form not in {_WHOLE, _HALVES} or misplaced:
            # Damage of the head itself is told apart from a wrong chunk, of which nothing is kept.
            is_intact = checksum_of((bytes(chunk[_HEAD.size :]),), place=_place(offset, form)) == total
            raise _wrong_head(len(chunk), magic, form, is_intact=is_intact) or MalformedChunk(misplaced)
        pieces = tuple(self._runs.pieces(offset, length))
        if restarts:
            self._sums = []
        if form == _HALVES:
            self._widen(bytes(chunk[_HEAD.size :]), offset, total, pieces)
        else:
            self._take(chunk, offset, total, pieces)
        self._received = offset + length
        return pieces

    @property
    def sums(self) -> tuple[bytes, ...] | None:
        """`checksums` of the stream, with zero padding, if all chunks arrived split that way; otherwise None."""
        return tuple(self._sums) if len(self._sums) == num_checksums(self._runs.num_bytes) else None

    def finish(self) -> None:
        """Check that the stream is complete.

        Raises:
            MalformedChunk: bytes are missing.
        """
        if self._received != self._runs.num_bytes:
            raise MalformedChunk(f"the stream ended after {self._received} of {self._runs.num_bytes} bytes")

    # -- internals ----------------------------------------------------------------------------------------------------

    def _misplaced(self, offset: int, length: int, received: int) -> str:
        """Why a chunk does not come next; empty if it does."""
        if offset != received or offset + length > self._runs.num_bytes:
            return (
                f"a chunk covers bytes [{offset}, {offset + length}) of {self._runs.num_bytes}; "
                f"the next one must start at {received}"
            )
        if length % ALIGNMENT_BYTES and offset + length != self._runs.num_bytes:
            return f"a chunk of {length} bytes ends inside an alignment unit"
        return ""

    def _take(self, chunk: bytes | memoryview, offset: int, total: bytes, pieces: Sequence[ByteRun]) -> None:
        """Copy a chunk of the stream's bytes into the buffer, and verify the copy."""
        padding = self._copy(chunk, offset, pieces)
        if checksum_of(self._payload(pieces, padding), place=_place(offset, _WHOLE)) != total:
            for piece in pieces:  # the padding within a run is zero in every buffer
                ctypes.memset(self._address + piece.buffer, 0, piece.num_bytes)
            raise _damaged(len(chunk))
        is_block = len(chunk) - _HEAD.size == min(CHUNK_BYTES, self._runs.num_bytes - offset)
        if is_block and offset == len(self._sums) * CHUNK_BYTES and not any(map(any, padding)):
            self._sums.append(total)

    def _copy(self, chunk: bytes | memoryview, offset: int, pieces: Sequence[ByteRun]) -> tuple[bytes, ...]:
        """Copy the payload at `offset` of the stream into the buffer; returns what is before, between and after."""
        address, position, padding = address_of(chunk) + _HEAD.size, _HEAD.size, []
        for piece in pieces:
            start = _HEAD.size + piece.stream - offset
            padding.append(bytes(chunk[position:start]))
            ctypes.memmove(self._address + piece.buffer, address + piece.stream - offset, piece.num_bytes)
            position = start + piece.num_bytes
        return *padding, bytes(chunk[position:])

    def _widen(self, halves: bytes, offset: int, total: bytes, pieces: Sequence[ByteRun]) -> None:
        """Write the words of these upper halves into the buffer."""
        if checksum_of((halves,), place=_place(offset, _HALVES)) != total:
            raise _damaged(_HEAD.size + len(halves))
        words = _words_of(halves)
        for piece in pieces:
            start = piece.stream - offset
            self._memory[piece.buffer : piece.buffer + piece.num_bytes] = words[start : start + piece.num_bytes]

    def _payload(self, pieces: Sequence[ByteRun], padding: Sequence[bytes]) -> Iterator[bytes | memoryview]:
        """The copy of a payload."""
        for piece, before in zip(pieces, padding, strict=False):
            if before:
                yield before
            yield self._memory[piece.buffer : piece.buffer + piece.num_bytes]
        if padding[-1]:
            yield padding[-1]


def _place(offset: int, form: int) -> int:
    """What the checksum of a chunk covers besides its payload: offsets are multiples of 64."""
    return offset | form


def _wrong_head(num_bytes: int, magic: bytes, form: int, *, is_intact: bool) -> MalformedChunk | DamagedChunk | None:
    """The error of a chunk whose head is not of this version, or damaged; None: it is in order."""
    if not is_intact and magic != _MAGIC:
        return MalformedChunk(
            f"a chunk begins with {magic!r}, not with {_MAGIC!r}: another version of hetpipe sent it; "
            "run the same version on all machines"
        )
    is_of_this_version = magic == _MAGIC and form in {_WHOLE, _HALVES}
    return None if is_intact and is_of_this_version else _damaged(num_bytes)


def _damaged(num_bytes: int) -> DamagedChunk:
    return DamagedChunk(f"a chunk of {num_bytes} bytes was damaged in transit: its checksum is wrong")
