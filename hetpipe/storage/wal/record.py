"""The self-verifying record: the unit of a write-ahead log and of a snapshot on disk.

A record is a head, checksums, a header (small, opaque) and a payload (large, raw bytes). The checksums are those of the
payload (`hetpipe.checksum`), the same as on the wire. The head holds the lengths, two log sequence numbers and the
CRC-32 of everything before the payload. A record that is truncated, or has a zeroed sector or a flipped bit, is
invalid. `docs/semantics/storage.md` has the byte layout.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hetpipe.checksum import BLOCK_BYTES, SUM_BYTES, Bytes, checksum, checksums, num_checksums
from hetpipe.errors import StateLost

#: The last character is the version of the format; other versions are rejected.
MAGIC = b"hpF3"
#: Magic, bytes of the header, bytes of the payload, LSN, lower bound of durable LSNs.
_HEAD = struct.Struct("<4sIQQQ")
#: CRC of head, checksums and header.
_CRC = struct.Struct("<I")
_FIXED_BYTES = _HEAD.size + _CRC.size

#: Bytes searched at a time.
_STEP_BYTES = 1 << 20

#: Maximum number of buffers of one system call (`IOV_MAX`).
_MAX_BUFFERS = 1_024


class DiskIO:
    """The two system calls that report disk errors; tests inject others."""

    def write(self, descriptor: int, buffers: Sequence[Bytes]) -> int:
        """Append the buffers in one call; returns the number of bytes written."""
        return os.writev(descriptor, buffers)

    def sync(self, descriptor: int) -> None:
        """Return when everything written to a file is on the disk."""
        os.fsync(descriptor)


SYSTEM_DISK = DiskIO()


@dataclass(frozen=True, slots=True)
class Extent:
    """Location of a record's payload."""

    path: Path
    offset: int
    num_bytes: int
    sums: tuple[bytes, ...]
    """As returned by `checksums`."""

    def blocks(self) -> Iterator[tuple[int, memoryview]]:
        """Yield the verified payload as offsets and bytes; each buffer is valid until the next one is requested.

        Raises:
            StateLost: the file cannot be read, or is corrupted.
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
        """Like `blocks`, from an open file.

        Raises:
            StateLost: the payload is corrupted.
            OSError: the file cannot be read.
        """
        step = memoryview(bytearray(min(BLOCK_BYTES, self.num_bytes)))
        for place, expected in zip(range(0, self.num_bytes, BLOCK_BYTES), self.sums, strict=True):
            block = step[: min(BLOCK_BYTES, self.num_bytes - place)]
            _read_fully(descriptor, block, self.offset + place)
            if checksum(block, place=place) != expected:
                at = self.offset + place
                raise StateLost(
                    f"{self.path} is corrupted: the checksum of {block.nbytes} bytes at offset {at} does not match"
                )
            yield place, block

    def read_into(self, target: memoryview) -> None:
        """Read the payload into `target`, which has the same size.

        Raises:
            StateLost: the file cannot be read, or is corrupted.
        """
        assert target.nbytes == self.num_bytes, "the target holds the whole payload"
        for place, block in self.blocks():
            target[place : place + block.nbytes] = block


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A complete record of a file."""

    lsn: int
    """Log sequence number; for a snapshot, its number."""
    durable_below: int
    """Records with lower LSNs were durable, as far as promised, when this one was written."""
    header: bytes
    payload: Extent

    @property
    def end(self) -> int:
        """Offset of the byte after it."""
        return self.payload.offset + self.payload.num_bytes


@dataclass(frozen=True, slots=True)
class NewLogRecord:
    """A record to be written; the fields are those of `LogRecord`."""

    lsn: int
    durable_below: int
    header: bytes
    payload: Sequence[Bytes] = ()
    sums: Sequence[bytes] | None = None
    """Checksums of the payload, if known; None: to be computed."""


def write_record(descriptor: int, record: NewLogRecord, *, disk: DiskIO = SYSTEM_DISK) -> int:
    """Append a record; returns its size.

    Args:
        descriptor: a file that has no other writer.
        record: the record.
        disk: performs the writes.

    Raises:
        OSError: the record may have been written partially.
    """
    pieces = [memoryview(piece).cast("B") for piece in record.payload if memoryview(piece).nbytes]
    num_bytes = sum(piece.nbytes for piece in pieces)
    sums = checksums(pieces) if record.sums is None else record.sums
    assert len(sums) == num_checksums(num_bytes), "the checksums are those of the payload"
    head = _HEAD.pack(MAGIC, len(record.header), num_bytes, record.lsn, record.durable_below)
    small = b"".join([*sums, record.header])
    left: list[memoryview] = [memoryview(head + _CRC.pack(zlib.crc32(small, zlib.crc32(head))) + small), *pieces]
    total = sum(piece.nbytes for piece in left)
    while left:
        written = disk.write(descriptor, tuple(islice(left, _MAX_BUFFERS)))
        if written <= 0:
            raise OSError(f"a write of {total} bytes wrote nothing")
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if written:
            left[0] = left[0][written:]
    return total


def read_record(descriptor: int, path: Path, offset: int) -> LogRecord | None:
    """Read the record at `offset` of a file; None if there is no complete one.

    Raises:
        StateLost: the file begins with a record of another version of the format.
        OSError: the file cannot be read.
    """
    if offset == 0:
        _check_version(os.pread(descriptor, len(MAGIC), 0), path)
    record = _read_head(descriptor, path, offset, os.fstat(descriptor).st_size)
    if record is None:
        return None
    try:
        for _ in record.payload.read_blocks(descriptor):
            pass
    except StateLost:
        return None
    return record


def is_known_durable(descriptor: int, path: Path, offset: int, lsn: int) -> bool:
    """Whether a record at `offset` or later shows that the incomplete record `lsn` was durable.

    Raises:
        OSError: the file cannot be read.
    """
    size = os.fstat(descriptor).st_size
    for first in range(offset, size, _STEP_BYTES):
        block = os.pread(descriptor, _STEP_BYTES + len(MAGIC) - 1, first)
        place = block.find(MAGIC)
        while place >= 0:
            record = _read_head(descriptor, path, first + place, size)
            if record is not None and record.durable_below > lsn:
                return True
            place = block.find(MAGIC, place + 1)
    return False


def _read_head(descriptor: int, path: Path, offset: int, size: int) -> LogRecord | None:
    """Parse the record at `offset`, without reading its payload."""
    fixed = os.pread(descriptor, _FIXED_BYTES, offset)
    if len(fixed) < _FIXED_BYTES:
        return None
    magic, header_bytes, payload_bytes, lsn, durable_below = _HEAD.unpack_from(fixed)
    sums_bytes = SUM_BYTES * num_checksums(payload_bytes)
    start = offset + _FIXED_BYTES
    payload = start + sums_bytes + header_bytes
    if magic != MAGIC or payload + payload_bytes > size:
        return None
    small = os.pread(descriptor, sums_bytes + header_bytes, start)
    (crc,) = _CRC.unpack_from(fixed, _HEAD.size)
    if len(small) != sums_bytes + header_bytes or zlib.crc32(small, zlib.crc32(fixed[: _HEAD.size])) != crc:
        return None
    sums = tuple(small[first : first + SUM_BYTES] for first in range(0, sums_bytes, SUM_BYTES))
    return LogRecord(lsn, durable_below, small[sums_bytes:], Extent(path, payload, payload_bytes, sums))


def _check_version(magic: bytes, path: Path) -> None:
    if magic != MAGIC and magic[:-1] == MAGIC[:-1]:
        raise StateLost(
            f"{path} begins with {magic!r} instead of {MAGIC!r}: it was written by another version of hetpipe; "
            "end the job with that version, or restart it from a checkpoint"
        )


def _read_fully(descriptor: int, part: memoryview, offset: int) -> None:
    done = 0
    while done < part.nbytes:
        count = os.preadv(descriptor, [part[done:]], offset + done)
        if not count:
            raise OSError(0, "the file was truncated")
        done += count
