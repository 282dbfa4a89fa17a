"""Records in files that prove themselves whole: what a shard keeps on its disk is made of them.

A *frame* is a head, a header (small, of whoever writes it) and a payload (large, raw). The head holds the lengths, two
numbers and two CRC-32: one of the payload, one of everything else. A frame that was cut off, or has a zeroed sector or
a flipped bit, is none.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hetpipe.errors import StateLost

#: What frames are written from.
Bytes = bytes | memoryview

_MAGIC = b"hpF1"
#: Magic, bytes of the header, bytes of the payload, sequence number, settled, CRC of the payload.
_HEAD = struct.Struct("<4sIQQQI")
#: CRC of head and header.
_CRC = struct.Struct("<I")
_FIXED_BYTES = _HEAD.size + _CRC.size

#: How much is read at a time: it stays in the cache until it is checked.
_STEP_BYTES = 1 << 20

#: Most buffers of one system call (`IOV_MAX`).
_MAX_BUFFERS = 1_024


class Disk:
    """The calls by which a disk says that it cannot; tests inject others."""

    def write(self, descriptor: int, buffers: Sequence[Bytes]) -> int:
        """Append the buffers, in one call; the number of bytes that were taken."""
        return os.writev(descriptor, buffers)

    def sync(self, descriptor: int) -> None:
        """Return when everything written to a file or a folder is on the disk."""
        os.fsync(descriptor)


DISK = Disk()


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a payload lies."""

    path: Path
    offset: int
    num_bytes: int
    crc: int

    def read_into(self, pieces: Sequence[memoryview]) -> None:
        """Fill `pieces`, one after the other, with the payload.

        Raises:
            StateLost: the file cannot be read, or no longer holds what was written.
        """
        assert sum(piece.nbytes for piece in pieces) == self.num_bytes, "the pieces hold the whole payload"
        crc, offset = 0, self.offset
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                for piece in pieces:
                    for first in range(0, piece.nbytes, _STEP_BYTES):
                        part = piece[first : first + _STEP_BYTES]
                        _read_fully(descriptor, part, offset)
                        crc, offset = zlib.crc32(part, crc), offset + part.nbytes
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StateLost(f"{self.path} cannot be read: {error.strerror}") from error
        if crc != self.crc:
            raise StateLost(f"{self.path} is damaged: {self.num_bytes} bytes from {self.offset} on are not as written")


@dataclass(frozen=True, slots=True)
class Frame:
    """A whole frame of a file."""

    sequence: int
    settled: int
    """Frames with lower numbers were durable, as far as was promised, when this one was written."""
    header: bytes
    payload: Extent

    @property
    def end(self) -> int:
        """Offset of the byte behind it."""
        return self.payload.offset + self.payload.num_bytes


def crc_of(payload: Sequence[Bytes]) -> int:
    """The CRC-32 of a payload in pieces."""
    crc = 0
    for piece in payload:
        crc = zlib.crc32(piece, crc)
    return crc


@dataclass(frozen=True, slots=True)
class NewFrame:
    """What is to be written; the fields are those of `Frame`."""

    sequence: int
    settled: int
    header: bytes
    payload: Sequence[Bytes] = ()
    payload_crc: int | None = None
    """Of the payload where it is known, None: to be computed."""


def write_frame(descriptor: int, frame: NewFrame, *, disk: Disk) -> int:
    """Append a frame; its size.

    Args:
        descriptor: a file to which nothing else is written meanwhile.
        frame: the frame.
        disk: what writes.

    Raises:
        OSError: it could not be written whole; part of it may have been.
    """
    pieces = [memoryview(piece).cast("B") for piece in frame.payload if memoryview(piece).nbytes]
    crc = crc_of(pieces) if frame.payload_crc is None else frame.payload_crc
    num_bytes = sum(piece.nbytes for piece in pieces)
    head = _HEAD.pack(_MAGIC, len(frame.header), num_bytes, frame.sequence, frame.settled, crc)
    fixed = head + _CRC.pack(zlib.crc32(frame.header, zlib.crc32(head)))
    left: list[memoryview] = [memoryview(fixed + frame.header), *pieces]
    total = sum(piece.nbytes for piece in left)
    while left:
        written = disk.write(descriptor, tuple(islice(left, _MAX_BUFFERS)))
        if written <= 0:
            raise OSError(f"a write of {total} bytes took none")
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if written:
            left[0] = left[0][written:]
    return total


def read_frame(descriptor: int, path: Path, offset: int) -> Frame | None:
    """The frame at `offset` of a file, if there is a whole one.

    Raises:
        OSError: the file cannot be read.
    """
    size = os.fstat(descriptor).st_size
    frame = _read_head(descriptor, path, offset, size)
    if frame is None:
        return None
    crc, step = 0, bytearray(min(_STEP_BYTES, frame.payload.num_bytes))
    for first in range(frame.payload.offset, frame.end, _STEP_BYTES):
        part = memoryview(step)[: min(_STEP_BYTES, frame.end - first)]
        _read_fully(descriptor, part, first)
        crc = zlib.crc32(part, crc)
    return frame if crc == frame.payload.crc else None


def is_missed(descriptor: int, path: Path, offset: int, sequence: int) -> bool:
    """Whether a frame at `offset` or later knows the frame `sequence`, which is not whole, as durable.

    Raises:
        OSError: the file cannot be read.
    """
    size = os.fstat(descriptor).st_size
    for first in range(offset, size, _STEP_BYTES):
        block = os.pread(descriptor, _STEP_BYTES + len(_MAGIC) - 1, first)
        place = block.find(_MAGIC)
        while place >= 0:
            frame = _read_head(descriptor, path, first + place, size)
            if frame is not None and frame.settled > sequence:
                return True
            place = block.find(_MAGIC, place + 1)
    return False


def _read_head(descriptor: int, path: Path, offset: int, size: int) -> Frame | None:
    """The frame at `offset`, without a look at its payload."""
    fixed = os.pread(descriptor, _FIXED_BYTES, offset)
    if len(fixed) < _FIXED_BYTES:
        return None
    magic, header_bytes, payload_bytes, sequence, settled, payload_crc = _HEAD.unpack_from(fixed)
    start = offset + _FIXED_BYTES
    if magic != _MAGIC or start + header_bytes + payload_bytes > size:
        return None
    header = os.pread(descriptor, header_bytes, start)
    (crc,) = _CRC.unpack_from(fixed, _HEAD.size)
    if len(header) != header_bytes or zlib.crc32(header, zlib.crc32(fixed[: _HEAD.size])) != crc:
        return None
    return Frame(sequence, settled, header, Extent(path, start + header_bytes, payload_bytes, payload_crc))


def _read_fully(descriptor: int, part: memoryview, offset: int) -> None:
    done = 0
    while done < part.nbytes:
        count = os.preadv(descriptor, [part[done:]], offset + done)
        if not count:
            raise OSError(0, "it is shorter than it was")
        done += count
