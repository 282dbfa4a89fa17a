"""The segments of a write-ahead log, and recovery from them: all that was appended but for a torn tail, or an error.

A segment is a file named by its first LSN. That record's header is the identity of the log; records follow without a
gap in their LSNs.
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
    """Bytes at the end of a segment that are no whole record: a write that the end of process or machine cut short."""

    path: Path
    offset: int
    num_bytes: int

    def __str__(self) -> str:
        """As one sentence."""
        return f"the last {self.num_bytes} bytes of {self.path} are no whole record and are cut off"


@dataclass(frozen=True, slots=True)
class LogContents:
    """The records of a log."""

    records: tuple[LogRecord, ...]
    torn: tuple[TornTail, ...]
    next_lsn: int


def read_log(folder: Path, *, identity: bytes, since: int) -> LogContents:
    """The records from LSN `since` on; nothing is changed.

    Args:
        folder: the log's.
        identity: whose log it must be.
        since: what `WriteAheadLog.rotate` returned for the snapshot in use; 0 without one.

    Raises:
        StateLost: a record is missing or damaged though there are later ones, the log is another's, or cannot be read.
    """
    records: list[LogRecord] = []
    torn: list[TornTail] = []
    firsts = sorted(map(first_lsn, segment_paths(folder)))
    needed = [first for first, following in zip(firsts, [*firsts[1:], since + 1], strict=False) if following > since]
    expected = needed[0] if needed and needed[0] <= since else since
    for first in needed:
        path = segment_path(folder, first)
        if first != expected:
            raise StateLost(f"{folder} lacks the records {expected} to {first - 1}, which {path.name} follows")
        found, tail = _read_segment(path, first)
        torn += [] if tail is None else [tail]
        if found and found[0].header != identity:
            raise StateLost(f"{path} is the log of {found[0].header!r:.200}, not of {identity!r:.200}")
        records += [record for record in found[1:] if record.lsn >= since]
        expected = first + len(found)
    if expected <= since:
        raise StateLost(f"{folder} has no record {since}, with which its log must begin or go on")
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
        raise StateLost(f"{path} is damaged at byte {offset}, before records that are whole")
    return records, None if offset == size else TornTail(path, offset, size - offset)


def segment_paths(folder: Path) -> Iterator[Path]:
    """The segments of the log in `folder`, in any order."""
    return folder.glob(f"*{_SUFFIX}")


def segment_path(folder: Path, first: int) -> Path:
    """The segment that begins with LSN `first`."""
    return folder / f"{first:016d}{_SUFFIX}"


def first_lsn(path: Path) -> int:
    """The LSN with which a segment begins."""
    return int(path.stem)
