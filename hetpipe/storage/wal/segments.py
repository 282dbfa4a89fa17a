"""The segments of a write-ahead log, and recovery: everything appended except for a torn tail, or an error.

A segment is a file named by its first LSN. That record's header is the identity of the log; records follow without gaps
in their LSNs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hetpipe.errors import StateLost
from hetpipe.storage.wal.record import LogRecord, is_known_durable, read_record

_SUFFIX = ".log"


@dataclass(frozen=True, slots=True)
class TornTail:
    """Bytes at the end of a segment that are not a complete record: a write interrupted by a crash."""

    path: Path
    offset: int
    num_bytes: int

    def __str__(self) -> str:
        """Describe as one sentence."""
        return f"the last {self.num_bytes} bytes of {self.path} are not a complete record and are ignored"


@dataclass(frozen=True, slots=True)
class LogContents:
    """The records of a log."""

    records: tuple[LogRecord, ...]
    torn: tuple[TornTail, ...]
    next_lsn: int


def read_log(folder: Path, *, identity: bytes, since: int) -> LogContents:
    """Read the records from LSN `since` on, without modifying the log.

    Args:
        folder: of the log.
        identity: the expected owner of the log.
        since: the LSN returned by `WriteAheadLog.rotate` for the snapshot in use; 0 without one.

    Raises:
        StateLost: a record with later ones is missing or corrupted, or the log has another owner or cannot be read.
    """
    records: list[LogRecord] = []
    torn: list[TornTail] = []
    firsts = sorted(map(first_lsn, segment_paths(folder)))
    needed = [first for first, following in zip(firsts, [*firsts[1:], since + 1], strict=False) if following > since]
    expected = needed[0] if needed and needed[0] <= since else since
    for first in needed:
        path = segment_path(folder, first)
        if first != expected:
            raise StateLost(f"{folder} lacks the records {expected} to {first - 1}, before {path.name}")
        found, tail = _read_segment(path, first)
        torn += [] if tail is None else [tail]
        if found and found[0].header != identity:
            raise StateLost(f"{path} belongs to the log of {found[0].header!r:.200}, not of {identity!r:.200}")
        records += [record for record in found[1:] if record.lsn >= since]
        expected = first + len(found)
    if expected <= since:
        raise StateLost(f"{folder} lacks record {since}, at which its log must begin or continue")
    return LogContents(tuple(records), tuple(torn), expected)


def _read_segment(path: Path, first: int) -> tuple[list[LogRecord], TornTail | None]:
    records: list[LogRecord] = []
    offset = 0
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            while (record := read_record(descriptor, path, offset)) is not None and record.lsn == first + len(records):
                records.append(record)
                offset = record.end
            is_damaged = is_known_durable(descriptor, path, offset, first + len(records))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StateLost(f"{path} cannot be read: {error.strerror}") from error
    if is_damaged:
        raise StateLost(f"{path} is corrupted at byte {offset}, before valid records")
    return records, None if offset == size else TornTail(path, offset, size - offset)


def segment_paths(folder: Path) -> Iterator[Path]:
    """The segments of the log in `folder`, in any order."""
    return folder.glob(f"*{_SUFFIX}")


def segment_path(folder: Path, first: int) -> Path:
    """The path of the segment that begins with LSN `first`."""
    return folder / f"{first:016d}{_SUFFIX}"


def first_lsn(path: Path) -> int:
    """The first LSN of a segment."""
    return int(path.stem)
