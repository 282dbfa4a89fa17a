"""What a write-ahead log holds: all that was appended, but for a torn tail, or an error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hetpipe.errors import StateLost
from hetpipe.server.shard.frames import Frame, is_missed, read_frame

_SUFFIX = ".log"


@dataclass(frozen=True, slots=True)
class TornTail:
    """Bytes of a file that are no whole record: what was being written when the process or the machine died."""

    path: Path
    offset: int
    num_bytes: int

    def __str__(self) -> str:
        """As one sentence."""
        return f"the last {self.num_bytes} bytes of {self.path} are no whole record and are cut off"


@dataclass(frozen=True, slots=True)
class OldLog:
    """What a log holds."""

    records: tuple[Frame, ...]
    torn: tuple[TornTail, ...]
    next_sequence: int


def read_log(folder: Path, *, identity: bytes, since: int) -> OldLog:
    """What was appended, from record `since` on; nothing is changed.

    Args:
        folder: the log's.
        identity: whose log it must be.
        since: what `rotate` returned for the snapshot in use; 0 without one.

    Raises:
        StateLost: a record is missing or damaged though there are later ones, the log is another's, or cannot be read.
    """
    records: list[Frame] = []
    torn: list[TornTail] = []
    firsts = sorted(map(first_of, log_files(folder)))
    needed = [first for first, following in zip(firsts, [*firsts[1:], since + 1], strict=True) if following > since]
    expected = needed[0] if needed and needed[0] <= since else since
    for first in needed:
        path = log_path(folder, first)
        if first != expected:
            raise StateLost(f"{folder} lacks the records {expected} to {first - 1}, which {path.name} follows")
        frames, tail = _read_file(path, first)
        torn += [] if tail is None else [tail]
        if frames and frames[0].header != identity:
            raise StateLost(f"{path} is the log of {frames[0].header!r:.200}, not of {identity!r:.200}")
        records += [frame for frame in frames[1:] if frame.sequence >= since]
        expected = first + len(frames)
    if expected <= since:
        raise StateLost(f"{folder} has no record {since}, with which its log must begin or go on")
    return OldLog(tuple(records), tuple(torn), expected)


def _read_file(path: Path, first: int) -> tuple[list[Frame], TornTail | None]:
    frames: list[Frame] = []
    offset = 0
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            while (frame := read_frame(descriptor, path, offset)) is not None and frame.sequence == first + len(frames):
                frames.append(frame)
                offset = frame.end
            is_damaged = is_missed(descriptor, path, offset, first + len(frames))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StateLost(f"{path} cannot be read: {error.strerror}") from error
    if is_damaged:
        raise StateLost(f"{path} is damaged at byte {offset}, before records that are whole")
    return frames, None if offset == size else TornTail(path, offset, size - offset)


def log_files(folder: Path) -> Iterator[Path]:
    """The files of the log in `folder`, in any order."""
    return folder.glob(f"*{_SUFFIX}")


def log_path(folder: Path, first: int) -> Path:
    """The file that begins with record `first`."""
    return folder / f"{first:016d}{_SUFFIX}"


def first_of(path: Path) -> int:
    """The number of the record with which a file begins."""
    return int(path.stem)
