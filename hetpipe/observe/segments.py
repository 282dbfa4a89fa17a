"""A file of lines in segments, so that old segments are compressed while new lines are written.

    shard-0.jsonl        segment 0
    shard-0.0001.jsonl   segment 1, begun when segment 0 was long enough; the last one is the one that is written
    shard-0.jsonl.gz     segment 0 once it is compressed: a whole gzip file of its own

The compressed file is written beside the segment, synced and renamed before the segment is deleted, so at any time each
line is in one of the two files; if both exist, they are equal. A writer holds a shared lock on its segment, so that no
process compresses a segment that another one still writes.
"""

from __future__ import annotations

import fcntl
import gzip
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from hetpipe.durable import replacing
from hetpipe.observe.log import get_logger

_log = get_logger(__name__)

_NAME = re.compile(r"(?P<stem>[^.]+)(?:\.(?P<number>\d{4,}))?\.jsonl(?:\.gz)?")
_PACKED = ".gz"

#: Size above which a segment is closed and compressed.
SEGMENT_BYTES = 4 << 20

#: Offsets within a segment are below this; a position in all of them is segment · `_SPAN` + offset.
_SPAN = 1 << 40

#: Limit of retries when another process has compressed the segment to open.
_ATTEMPTS = 20


def segment_path(path: Path, number: int) -> Path:
    """The plain file of segment `number` of the stream `path`."""
    return path if number == 0 else path.with_name(f"{path.stem}.{number:04d}{path.suffix}")


def packed_path(path: Path, number: int) -> Path:
    """The compressed file of segment `number` of the stream `path`."""
    plain = segment_path(path, number)
    return plain.with_name(plain.name + _PACKED)


def segments_of(path: Path) -> list[int]:
    """The existing segments of the stream `path`, plain or compressed, ascending."""
    found = (_NAME.fullmatch(each.name) for each in path.parent.glob(f"{path.stem}.*"))
    return sorted({int(name["number"] or 0) for name in found if name is not None and name["stem"] == path.stem})


def streams_in(folder: Path, stem: str) -> list[Path]:
    """The streams of a folder whose names begin with `stem`, by the plain file of their segment 0, in order."""
    found = (_NAME.fullmatch(each.name) for each in folder.glob(f"{stem}*.jsonl*"))
    return sorted({folder / f"{name['stem']}.jsonl" for name in found if name is not None})


def open_segment(path: Path, number: int) -> IO[bytes] | gzip.GzipFile:
    """Open a segment for reading, compressed or not, also while it is being compressed.

    Raises:
        FileNotFoundError: it does not exist.
        OSError: it cannot be read.
    """
    packed, plain = packed_path(path, number), segment_path(path, number)
    with suppress(FileNotFoundError):
        return gzip.open(packed)
    with suppress(FileNotFoundError):
        return plain.open("rb")
    return gzip.open(packed)


def read_lines(path: Path, position: int = 0) -> Iterator[bytes]:
    """The lines of the stream `path` from a position on; empty if it does not exist.

    Raises:
        OSError: a segment cannot be read.
    """
    first, offset = divmod(position, _SPAN)
    for number in segments_of(path):
        if number >= first:
            with open_segment(path, number) as lines:
                lines.seek(offset if number == first else 0)
                yield from lines


def position_of(number: int, offset: int) -> int:
    """A position, which increases with the lines and is independent of compression."""
    return number * _SPAN + offset


def open_last(path: Path) -> tuple[int, int]:
    """Open the last segment of the stream `path` for appending, or create its first; returns number and descriptor.

    Raises:
        OSError: it cannot be opened.
    """
    for _ in range(_ATTEMPTS):
        number = max(segments_of(path), default=0)
        if packed_path(path, number).exists():
            number += 1
        descriptor = open_for_writing(path, number)
        is_last = max(segments_of(path), default=0) == number and not packed_path(path, number).exists()
        if is_last and os.fstat(descriptor).st_nlink:
            return number, descriptor
        os.close(descriptor)
    raise OSError(f"{path} is repeatedly rotated by other processes")


def open_for_writing(path: Path, number: int) -> int:
    """Open a segment for appending, with the writers' lock.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = os.open(segment_path(path, number), os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    with suppress(OSError):  # a file system without locks: then no process can compress it, either
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def compress_before(path: Path, last: int) -> None:
    """Compress the plain segments of the stream `path` below `last` without a writer; the others stay plain."""
    for number in segments_of(path):
        plain = segment_path(path, number)
        if number < last and plain.exists():
            try:
                _compress(plain)
            except OSError as error:
                _log.info("segment_not_compressed", path=str(plain), reason=error.strerror or str(error))


def _compress(plain: Path) -> None:
    with plain.open("rb+") as source:
        fcntl.flock(source, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with (
            replacing(plain.with_name(plain.name + _PACKED)) as temporary,
            temporary.open("wb") as raw,
            # Without name and time, equal lines give equal bytes.
            gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=6, mtime=0) as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
        plain.unlink()
