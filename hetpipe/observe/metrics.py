"""The metrics of training per wave: `RUN_DIR/metrics/vw-V.jsonl`, one JSON object per line.

The last stage of a virtual worker writes them, because it has the losses. A line covers one wave; curves add up
minibatches and samples. Numbers that are not finite, which JSON does not have, become null. Files are divided into
segments like those of a history, with an index for curves of long runs (`observe.down_sampled`).

This is the permanent record of a run. For the metrics of a cluster's processes, scraped by Prometheus, see
`observe.metric_names`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Protocol

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import HistoryIncomplete
from hetpipe.observe.down_sampled import FollowedCurve, Point, Reduction, points_of
from hetpipe.observe.line_file import LineFile
from hetpipe.observe.segments import SEGMENT_BYTES, streams_in

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveMetrics:
    """One wave of one virtual worker."""

    wave: int
    p: int
    """Its last minibatch."""
    minibatches: int
    """Minibatches in this wave."""
    samples: int
    weight: int
    """Total weight of the mean loss: the samples, or according to the job key `mean_over`."""
    loss: float | None
    """Mean over the samples, or according to `mean_over`; None if it is not finite."""
    learning_rate: float | None
    """Learning rate of the next update; None on a stage without parameters."""
    gradient_norm: float | None
    """Norm of the last gradient stepped, before clipping; None without clipping."""
    max_norm: float | None
    """The limit of that norm; None without clipping."""
    losses: dict[str, float | None] = field(default_factory=dict)
    """Name → mean, of a job with several losses."""


@dataclass(frozen=True, slots=True)
class TimedWave:
    """A line of the file."""

    t: float
    """Monotonic seconds at the end of the wave on the last stage; comparable between processes of one host only."""
    wave: WaveMetrics


class MetricsWriter(Protocol):
    """Writer of the waves of one virtual worker, in order. Not thread-safe."""

    def write(self, wave: WaveMetrics) -> None:
        """Record one wave."""
        ...

    def close(self) -> None:
        """Close the file. Idempotent."""
        ...


class NullMetrics(MetricsWriter):
    """Writes nothing."""

    def write(self, wave: WaveMetrics) -> None:
        """Without effect."""

    def on_alarm(self, listener: Callable[[HistoryIncomplete], None]) -> None:
        """No-op: no wave is written."""

    def close(self) -> None:
        """Nothing is open."""


class Metrics(MetricsWriter):
    """Appends to a file, one unbuffered write per wave, so that a killed process leaves whole lines only."""

    def __init__(self, path: Path, *, clock: Clock = SYSTEM_CLOCK, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Open or create `path` and its folder.

        Args:
            path: of its first segment; the others are beside it.
            clock: gives the times.
            segment_bytes: size above which a segment is closed and compressed.

        Raises:
            OSError: the file cannot be opened, for another reason than a failing disk.
        """
        self._clock = clock
        self._file = LineFile(path, segment_bytes=segment_bytes, reduction=WaveReduction())

    def write(self, wave: WaveMetrics) -> None:
        """Append one wave as a line; numbers that are not finite become null. No effect once the disk failed."""
        values = {"t": round(self._clock.monotonic(), 6), **asdict(wave)}
        values |= {key: _finite(values[key]) for key in _MEASURED}
        values["losses"] = {name: _finite(value) for name, value in wave.losses.items()}
        self._file.write(f"{_encode(values)}\n".encode())

    def on_alarm(self, listener: Callable[[HistoryIncomplete], None]) -> None:
        """Call `listener` once, when the first wave is lost: from the writing thread, or now."""
        self._file.on_alarm(listener)

    def close(self) -> None:
        """Implement `MetricsWriter.close`."""
        self._file.close()


_FOLDER = "metrics"


def metrics_path(run_dir: Path, vw: int) -> Path:
    """The file of one virtual worker."""
    return run_dir / _FOLDER / f"vw-{vw}.jsonl"


class WaveReduction(Reduction):
    """Reduction of consecutive waves: sums, mean loss, and the state at the end."""

    fields = frozenset({"t", *(each.name for each in fields(WaveMetrics))})

    def point(self, line: bytes, before: Point | None) -> Point | None:
        """Implement `Reduction.point`."""
        del before
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(values, dict):
            return None
        values = {"weight": values.get("samples"), "losses": {}, **values}  # missing in lines of older runs
        if not values.keys() >= self.fields:
            return None
        counts = all(
            type(values[name]) is int and 0 <= values[name] <= _MOST
            for name in ("wave", "p", "minibatches", "samples", "weight")
        )
        found = _measures({name: values[name] for name in ("t", *_MEASURED)})
        losses = _measures(values["losses"])
        if not counts or found is None or losses is None or found["t"] is None:
            return None
        return {**{name: values[name] for name in self.fields}, **found, "losses": losses}

    def merged(self, one: Point, other: Point) -> Point:
        """Implement `Reduction.merged`. Norms are merged by their maximum, which shows outliers."""
        names = dict.fromkeys((*one["losses"], *other["losses"]))
        norms = [each["gradient_norm"] for each in (one, other) if each["gradient_norm"] is not None]
        return {
            **other,
            "minibatches": one["minibatches"] + other["minibatches"],
            "samples": one["samples"] + other["samples"],
            "weight": one["weight"] + other["weight"],
            "loss": _weighted_mean((each["loss"], each["weight"]) for each in (one, other)),
            "losses": {
                name: _weighted_mean((each["losses"].get(name), each["weight"]) for each in (one, other))
                for name in names
            },
            "gradient_norm": max(norms, default=None),
        }


def _measures(values: object) -> dict[str, float | None] | None:
    """Names and numbers as such, or None where they are none."""
    if not isinstance(values, dict) or any(type(one) not in _MEASURES for one in values.values()):
        return None
    try:
        return {name: None if one is None else _finite(float(one)) for name, one in values.items()}
    except OverflowError:
        return None


def _weighted_mean(pairs: Iterable[tuple[float | None, int]]) -> float | None:
    known = [(value, weight) for value, weight in pairs if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


#: The keys of measurements in a line, besides its time.
_MEASURED = ("loss", "learning_rate", "gradient_norm", "max_norm")

#: Numbers that JSON's readers agree on.
_MOST = 1 << 53
_MEASURES = (int, float, type(None))


def read_metrics(run_dir: Path) -> list[TimedWave]:
    """The waves of all virtual workers of a run, in order of time; empty if it wrote none.

    At most `down_sampled.MOST_POINTS` per virtual worker: of longer runs, each stands for several consecutive waves.
    Torn lines and lines of other kinds are skipped.

    Raises:
        OSError: a file cannot be read.
    """
    found = [_wave_of(point) for path in metrics_files(run_dir) for point in points_of(path, WaveReduction())]
    return sorted(found, key=lambda wave: wave.t)


def waves_by_worker(run_dir: Path) -> dict[int, list[TimedWave]]:
    """Virtual worker → its waves, as in `read_metrics`; those without a wave are left out.

    Raises:
        OSError: a file cannot be read.
    """
    return {
        worker_of(path): [_wave_of(point) for point in points_of(path, WaveReduction())]
        for path in metrics_files(run_dir)
    }


def worker_of(path: Path) -> int:
    """The virtual worker whose file this is."""
    return int(path.name.partition(".")[0].removeprefix("vw-"))


def metrics_files(run_dir: Path) -> list[Path]:
    """The files of the virtual workers of a run, by the plain file of their first segment."""
    return streams_in(run_dir / _FOLDER, "vw-")


def _wave_of(point: Point) -> TimedWave:
    return TimedWave(point["t"], WaveMetrics(**{name: value for name, value in point.items() if name != "t"}))


class FollowedMetrics:
    """The metrics of a run that is read again and again while it trains. Not thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        """Refer to the run, without access to it."""
        self._run_dir = run_dir
        self._curves: dict[Path, FollowedCurve] = {}

    def read(self) -> dict[int, list[TimedWave]]:
        """Virtual worker → its waves so far, as in `read_metrics`.

        Raises:
            OSError: a file cannot be read.
        """
        for path in metrics_files(self._run_dir):
            self._curves.setdefault(path, FollowedCurve(path, WaveReduction()))
        return {worker_of(path): [_wave_of(point) for point in curve.points()] for path, curve in self._curves.items()}


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None
