"""Records in files that prove themselves whole: what a shard keeps on its disk is made of them.

A *frame* is a head, checksums, a header (small, of whoever writes it) and a payload (large, raw). The checksums are
those of the payload (`server.shard.checksum`), the same as on the wire. The head holds the lengths, two numbers and the
CRC-32 of all that lies before the payload. A frame that was cut off, or has a zeroed sector or a flipped bit, is none.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hetpipe.errors import StateLost
from hetpipe.server.shard.checksum import BLOCK_BYTES, SUM_BYTES, Bytes, checksum, checksums, num_checksums

#: The last character is the version of the format; what another version wrote is refused.
_MAGIC = b"hpF3"
#: Magic, bytes of the header, bytes of the payload, sequence number, settled.
_HEAD = struct.Struct("<4sIQQQ")
#: CRC of head, checksums and header.
_CRC = struct.Struct("<I")
_FIXED_BYTES = _HEAD.size + _CRC.size

#: How much is searched at a time.
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
    sums: tuple[bytes, ...]
    """As `checksums` gives them."""

    def blocks(self) -> Iterator[tuple[int, memoryview]]:
        """The payload, checked, as offsets and bytes, which are there until the next ones are asked for.

        Raises:
            StateLost: the file cannot be read, or no longer holds what was written.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                yield from self.read_blocks(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StateLost(f"{self.path} cannot be read: {error.strerror}") from error

    def read_blocks(self, descriptor: int) -> Iterator[tuple[int, memoryview]]:
        """The same from the open file.

        Raises:
            StateLost: it is not as written.
            OSError: the file cannot be read.
        """
        step = memoryview(bytearray(min(BLOCK_BYTES, self.num_bytes)))
        for place, expected in zip(range(0, self.num_bytes, BLOCK_BYTES), self.sums, strict=True):
            block = step[: min(BLOCK_BYTES, self.num_bytes - place)]
            _read_fully(descriptor, block, self.offset + place)
            if checksum(block, place=place) != expected:
                at = self.offset + place
                raise StateLost(f"{self.path} is damaged: {block.nbytes} bytes from {at} on are not as written")
            yield place, block

    def read_into(self, target: memoryview) -> None:
        """Fill `target`, which has as many bytes, with the payload.

        Raises:
            StateLost: the file cannot be read, or no longer holds what was written.
        """
        assert target.nbytes == self.num_bytes, "the target holds the whole payload"
        for place, block in self.blocks():
            target[place : place + block.nbytes] = block


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


@dataclass(frozen=True, slots=True)
class NewFrame:
    """What is to be written; the fields are those of `Frame`."""

    sequence: int
    settled: int
    header: bytes
    payload: Sequence[Bytes] = ()
    sums: Sequence[bytes] | None = None
    """Checksums of the payload where they are known; None: to be computed."""


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
    num_bytes = sum(piece.nbytes for piece in pieces)
    sums = checksums(pieces) if frame.sums is None else frame.sums
    assert len(sums) == num_checksums(num_bytes), "the checksums are those of the payload"
    head = _HEAD.pack(_MAGIC, len(frame.header), num_bytes, frame.sequence, frame.settled)
    small = b"".join([*sums, frame.header])
    left: list[memoryview] = [memoryview(head + _CRC.pack(zlib.crc32(small, zlib.crc32(head))) + small), *pieces]
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
        StateLost: the file begins with a frame of another version of hetpipe.
        OSError: the file cannot be read.
    """
    if offset == 0:
        _check_version(os.pread(descriptor, len(_MAGIC), 0), path)
    frame = _read_head(descriptor, path, offset, os.fstat(descriptor).st_size)
    if frame is None:
        return None
    try:
        for _ in frame.payload.read_blocks(descriptor):
            pass
    except StateLost:
        return None
    return frame


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
    magic, header_bytes, payload_bytes, sequence, settled = _HEAD.unpack_from(fixed)
    sums_bytes = SUM_BYTES * num_checksums(payload_bytes)
    start = offset + _FIXED_BYTES
    payload = start + sums_bytes + header_bytes
    if magic != _MAGIC or payload + payload_bytes > size:
        return None
    small = os.pread(descriptor, sums_bytes + header_bytes, start)
    (crc,) = _CRC.unpack_from(fixed, _HEAD.size)
    if len(small) != sums_bytes + header_bytes or zlib.crc32(small, zlib.crc32(fixed[: _HEAD.size])) != crc:
        return None
    sums = tuple(small[first : first + SUM_BYTES] for first in range(0, sums_bytes, SUM_BYTES))
    return Frame(sequence, settled, small[sums_bytes:], Extent(path, payload, payload_bytes, sums))


def _check_version(magic: bytes, path: Path) -> None:
    if magic != _MAGIC and magic[:-1] == _MAGIC[:-1]:
        raise StateLost(
            f"{path} begins with {magic!r}, not with {_MAGIC!r}: another version of hetpipe wrote it; "
            "end the job with that version, or start it anew from a checkpoint"
        )


def _read_fully(descriptor: int, part: memoryview, offset: int) -> None:
    done = 0
    while done < part.nbytes:
        count = os.preadv(descriptor, [part[done:]], offset + done)
        if not count:
            raise OSError(0, "it is shorter than it was")
        done += count
