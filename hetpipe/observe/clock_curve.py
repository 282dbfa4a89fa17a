"""The progress of a run from its history: local clocks and samples over time, by the clock shard's decisions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hetpipe.observe.down_sampled import Point, Reduction, points_of

#: The clock shard's file; see `server.shard.run_history`.
CLOCK_SHARD_FILE = "shard-0.jsonl"

_EVENTS = (b'"event":"commit"', b'"event":"join"', b'"event":"leave"', b'"event":"evict"')


class ClockReduction(Reduction):
    """Reduction of commits and membership. A point has its committed samples, final clocks and largest distance."""

    fields = frozenset({"t", "samples", "clocks", "distance"})

    def point(self, line: bytes, before: Point | None) -> Point | None:
        """Implement `Reduction.point`."""
        if not any(event in line for event in _EVENTS):
            return None  # most lines, and the longest
        try:
            values = json.loads(line)
            clocks = {} if before is None else dict(before["clocks"])
            vw, t, samples = str(int(values["vw"])), float(values["t"]), 0
            if values["event"] == "commit":
                clocks[vw], samples = int(values["wave"]) + 1, int(values["samples"])
            elif values["event"] == "join":
                clocks[vw] = int(values["clock"])
            else:
                clocks.pop(vw, None)
        except (ValueError, RecursionError, KeyError, TypeError, OverflowError):
            return None
        distance = max(clocks.values()) - min(clocks.values()) if clocks else 0
        return {"t": t, "samples": samples, "clocks": clocks, "distance": distance}

    def merged(self, one: Point, other: Point) -> Point:
        """Implement `Reduction.merged`."""
        return {
            "t": other["t"],
            "samples": one["samples"] + other["samples"],
            "clocks": other["clocks"],
            "distance": max(one["distance"], other["distance"]),
        }


@dataclass(frozen=True, slots=True)
class ClockPoint:
    """Consecutive commits."""

    t: float
    """Time of the last one, in monotonic seconds of the clock shard's host."""
    samples: int
    """Samples committed since the beginning of the history, over all virtual workers."""
    distance: int
    """The largest distance between the local clocks of two members that have committed something."""


def read_clock_curve(run_dir: Path) -> list[ClockPoint]:
    """The commits of a run, reduced to at most `down_sampled.MOST_POINTS` points; empty without a history.

    Raises:
        OSError: a file cannot be read.
    """
    return clock_points(points_of(clock_shard_file(run_dir), ClockReduction()))


def clock_shard_file(run_dir: Path) -> Path:
    """The history of the clock shard, by the plain file of its first segment."""
    return run_dir / "history" / CLOCK_SHARD_FILE


def clock_points(points: Iterable[Point]) -> list[ClockPoint]:
    """The commits of a run from the points of its history, in order."""
    samples, found = 0, []
    for point in points:
        samples += point["samples"]
        found.append(ClockPoint(point["t"], samples, point["distance"]))
    return found
