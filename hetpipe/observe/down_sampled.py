"""A bounded index beside a file in segments, from which curves are drawn without reading the whole file.

    vw-0.jsonl.gz, vw-0.0001.jsonl.gz, vw-0.0002.jsonl   the file (`observe.segments`)
    vw-0.index.json                                      its compressed segments, as at most `MOST_POINTS` points

A point stands for `width` consecutive lines, the last one possibly for fewer; when there are too many points, pairs are
merged, and the width doubles. An index covers compressed segments only, as these never change: it is updated when
another one has been compressed, replaced atomically, and can be rebuilt from the segments. A reader adds the missing
segments: the one being written, and those that could not be compressed.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from hetpipe.durable import write_durably
from hetpipe.observe.log import get_logger
from hetpipe.observe.segments import open_segment, packed_path, segments_of

_log = get_logger(__name__)

#: Maximum number of points in an index; even.
MOST_POINTS = 512

_VERSION = 1

#: The aggregate of consecutive lines, as JSON.
Point = dict[str, Any]

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class Reduction(Protocol):
    """The reduction of lines to points."""

    fields: frozenset[str]
    """The keys of a point."""

    def point(self, line: bytes, before: Point | None) -> Point | None:
        """The point of a line after the point `before`; None for a torn line, or one that is not part of a curve."""
        ...

    def merged(self, one: Point, other: Point) -> Point:
        """Merge two consecutive points."""
        ...


@dataclass(slots=True)
class DownSampling:
    """At most `MOST_POINTS` points of lines, in order."""

    reduction: Reduction
    points: list[Point] = field(default_factory=list)
    width: int = 1
    """Lines per point."""
    count: int = 0
    """Lines in the last point."""
    segments: int = 0
    """Complete segments included: those below this number."""

    def add(self, lines: Iterable[bytes]) -> None:
        """Add lines."""
        points, reduction = self.points, self.reduction
        for line in lines:
            point = reduction.point(line, points[-1] if points else None)
            if point is None:
                continue
            if self.count < self.width and points:
                points[-1] = reduction.merged(points[-1], point)
                self.count += 1
                continue
            points.append(point)
            self.count = 1
            if len(points) > MOST_POINTS:
                pairs = zip(points[:-1:2], points[1:-1:2], strict=True)
                points[:-1] = [reduction.merged(one, other) for one, other in pairs]
                self.width *= 2


def index_path(path: Path) -> Path:
    """The index of the stream `path`."""
    return path.with_name(f"{path.stem}.index.json")


class FollowedCurve:
    """A stream that is read again and again while it grows. Each reading takes the new lines only. Not thread-safe."""

    def __init__(self, path: Path, reduction: Reduction) -> None:
        """Refer to the stream `path`, without access to it."""
        self._path = path
        self._reduction = reduction
        self._found: DownSampling | None = None
        #: The first line that was not read: its segment, and its offset there.
        self._segment = self._offset = 0

    def points(self) -> list[Point]:
        """The stream as at most `MOST_POINTS` points; empty if it does not exist. A line without its end is left out.

        Raises:
            OSError: a segment that the index lacks cannot be read.
        """
        if self._found is None:
            self._found = _read(self._path, self._reduction)
            self._segment = self._found.segments
        for number in segments_of(self._path):
            if number >= self._segment:
                if number > self._segment:
                    self._segment, self._offset = number, 0
                with _reading(self._path, number) as lines:
                    lines.seek(self._offset)
                    self._found.add(self._whole(lines))
        return list(self._found.points)

    def _whole(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        for line in lines:
            if not line.endswith(b"\n"):
                return
            self._offset += len(line)
            yield line


def points_of(path: Path, reduction: Reduction) -> list[Point]:
    """The stream `path` as at most `MOST_POINTS` points; empty if it does not exist.

    Raises:
        OSError: a segment that the index lacks cannot be read.
    """
    return FollowedCurve(path, reduction).points()


def update_index(path: Path, reduction: Reduction) -> None:
    """Update the index of the stream `path` by its compressed segments. A failure leaves it unchanged."""
    found = _read(path, reduction)
    known = found.segments
    try:
        while packed_path(path, found.segments).exists():
            _add(found, path, found.segments)
            found.segments += 1
        if found.segments > known:
            write_durably(index_path(path), _as_json(found))
    except OSError as error:
        _log.info("index_not_written", path=str(index_path(path)), reason=error.strerror or str(error))


def _add(found: DownSampling, path: Path, number: int) -> None:
    with _reading(path, number) as lines:
        found.add(lines)


@contextmanager
def _reading(path: Path, number: int) -> Iterator[IO[bytes] | gzip.GzipFile]:
    try:
        with open_segment(path, number) as lines:
            yield lines
    except (EOFError, zlib.error) as error:
        raise OSError(f"segment {number} of {path} is damaged: {error}") from error


def _as_json(found: DownSampling) -> bytes:
    rest = {"segments": found.segments, "width": found.width, "count": found.count, "points": found.points}
    return f"{_encode({'version': _VERSION, **rest})}\n".encode()


def _read(path: Path, reduction: Reduction) -> DownSampling:
    """The index on disk; an empty one if it is missing or unusable."""
    try:
        values = json.loads(index_path(path).read_bytes())
        points, numbers = values["points"], [values[name] for name in ("width", "count", "segments")]
        is_usable = (
            values["version"] == _VERSION
            and len(points) <= MOST_POINTS
            and all(type(number) is int and number >= 0 for number in numbers)
            and all(point.keys() == reduction.fields for point in points)
        )
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        is_usable = False
    if not is_usable:
        return DownSampling(reduction)
    width, count, segments = numbers
    return DownSampling(reduction, points, width, count, segments)
