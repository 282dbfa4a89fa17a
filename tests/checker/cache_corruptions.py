"""What can be wrong in the history of a run with a cache behind frozen layers (`caching.md`).

They change the lines of a real run, by file: a simulated history has no cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetpipe.checker import Kind

Lines = dict[Path, list[dict[str, Any]]]


def line_of(lines: Lines, **fields: Any) -> dict[str, Any]:
    """The last line `crossed` with these fields."""
    found = [line for file in sorted(lines) for line in lines[file] if line["event"] == "crossed"]
    return [line for line in found if all(line[key] == value for key, value in fields.items())][-1]


def computed_though_cached(lines: Lines) -> None:
    """The first stage computes what it has read in fact; the second stage, too."""
    line = line_of(lines, vw=0, stage=0, read=4)
    other = line_of(lines, vw=0, stage=1, p=line["p"])
    line.update(read=0, computed=[0, 1])
    other.update(computed=[1, 4])


def half_computed_though_cached(lines: Lines) -> None:
    line = line_of(lines, vw=1, stage=0, read=4)
    line.update(read=2)
    line_of(lines, vw=1, stage=1, p=line["p"]).update(computed=[2, 4])


def read_but_never_kept(lines: Lines) -> None:
    units = line_of(lines, vw=0, stage=0, read=4)["units"]
    line_of(lines, stage=1, units=units, kept=1).update(kept=0)


def read_before_it_was_kept(lines: Lines) -> None:
    line = line_of(lines, vw=0, stage=0, read=4)
    keeper = line_of(lines, stage=1, units=line["units"], kept=1)
    keeper.update(t=line["t"] + 2.0, since=line["t"] + 1.0)


def read_from_another_nodes_cache(lines: Lines) -> None:
    line_of(lines, vw=0, stage=0, read=4).update(cache="another/1")


def read_beyond_the_frozen_layers(lines: Lines) -> None:
    line_of(lines, vw=0, stage=0, read=2).update(read=4)


def a_frozen_layer_left_out(lines: Lines) -> None:
    line_of(lines, vw=1, stage=1, computed=[2, 4]).update(computed=[3, 4])


def a_frozen_layer_twice(lines: Lines) -> None:
    line_of(lines, vw=1, stage=1, computed=[1, 2]).update(computed=[0, 2])


def a_second_line(lines: Lines) -> None:
    line = line_of(lines, vw=0, stage=0)
    own = next(file for file in lines if line in lines[file])
    lines[own].append(dict(line))


#: Corruption, and the kind that it is reported as.
CACHE_CORRUPTIONS: list[tuple[Callable[[Lines], None], Kind]] = [
    (computed_though_cached, Kind.CACHED_TWICE),
    (half_computed_though_cached, Kind.CACHED_TWICE),
    (read_but_never_kept, Kind.CACHE_READ),
    (read_before_it_was_kept, Kind.CACHE_READ),
    (read_from_another_nodes_cache, Kind.CACHE_READ),
    (read_beyond_the_frozen_layers, Kind.CACHE_READ),
    (a_frozen_layer_left_out, Kind.FROZEN_CROSSED),
    (a_frozen_layer_twice, Kind.FROZEN_CROSSED),
    (a_second_line, Kind.FROZEN_CROSSED),
]


def one_sample_never_kept(lines: Lines) -> None:
    """One sample of a minibatch that is read, in the line that keeps it."""
    line = line_of(lines, stage=0, read=4)
    for keeper in (one for own in lines.values() for one in own if one.get("kept")):
        keeper["units"] = [unit for unit in keeper["units"] if unit != line["units"][0]]


#: The same for a cache of samples.
SAMPLE_CORRUPTIONS: list[tuple[Callable[[Lines], None], Kind]] = [
    (one_sample_never_kept, Kind.CACHE_READ),
    (computed_though_cached, Kind.CACHED_TWICE),
]
