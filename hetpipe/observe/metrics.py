"""How training went, wave by wave: `RUN_DIR/metrics/vw-V.jsonl`, one JSON object per line.

The last stage of a virtual worker writes, because the losses are there. A line is what one wave did; whoever draws a
curve adds up minibatches and samples. Numbers that are not finite, which JSON does not have, become null.

This is a run's own record, every wave of it, kept with the run. What a cluster tells while it works, to be fetched by
Prometheus from every process, is `observe.metric_names` and what goes with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import HistoryIncomplete
from hetpipe.observe.line_file import LineFile

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveMetrics:
    """One wave of one virtual worker."""

    wave: int
    p: int
    """Its last minibatch."""
    minibatches: int
    """In this wave."""
    samples: int
    loss: float | None
    """Mean over the samples; None if it is not finite."""
    learning_rate: float | None
    """Of the next update; None on a stage without parameters."""
    gradient_norm: float | None
    """Of the last gradient that was stepped, before it was clipped; None without clipping."""
    max_norm: float | None
    """What that norm was clipped to; None without clipping."""


@dataclass(frozen=True, slots=True)
class TimedWave:
    """A line of the file."""

    t: float
    """Monotonic seconds at the end of the wave on the last stage; comparable between processes of one host only."""
    wave: WaveMetrics


class MetricsWriter(Protocol):
    """Takes the waves of one virtual worker in their order. Used by one thread."""

    def write(self, wave: WaveMetrics) -> None:
        """Record one wave."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class NullMetrics(MetricsWriter):
    """Writes nothing."""

    def write(self, wave: WaveMetrics) -> None:
        """Forget it."""

    def on_alarm(self, listener: Callable[[HistoryIncomplete], None]) -> None:
        """Never: no wave is to be kept."""

    def close(self) -> None:
        """Nothing is open."""


class Metrics(MetricsWriter):
    """Appends to a file, one unbuffered write per wave, so that a killed process leaves whole lines only."""

    def __init__(self, path: Path, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Open or make `path` and its folder.

        Raises:
            OSError: the file cannot be had, though the disk is well.
        """
        self._clock = clock
        self._file = LineFile(path)

    def write(self, wave: WaveMetrics) -> None:
        """See `MetricsWriter.write`; nothing once the disk has failed."""
        values = {"t": round(self._clock.monotonic(), 6), **{k: _finite(v) for k, v in asdict(wave).items()}}
        self._file.write(f"{_encode(values)}\n".encode())

    def on_alarm(self, listener: Callable[[HistoryIncomplete], None]) -> None:
        """Call `listener` once, when waves begin to lack: from the thread that writes, or now."""
        self._file.on_alarm(listener)

    def close(self) -> None:
        """See `MetricsWriter.close`."""
        self._file.close()


_FOLDER = "metrics"


def metrics_path(run_dir: Path, vw: int) -> Path:
    """The file of one virtual worker."""
    return run_dir / _FOLDER / f"vw-{vw}.jsonl"


def read_metrics(run_dir: Path) -> list[TimedWave]:
    """The waves of all virtual workers of a run, in the order of time; empty where it wrote none.

    Lines that are torn or of another kind are passed over.

    Raises:
        OSError: a file cannot be read.
    """
    found = []
    for path in sorted((run_dir / _FOLDER).glob("vw-*.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(values, dict) and values.keys() >= _NAMES and isinstance(values["t"], float | int):
                found.append(_revived(values))
    return sorted(found, key=lambda wave: wave.t)


def _revived(values: Mapping[str, Any]) -> TimedWave:
    return TimedWave(values["t"], WaveMetrics(**{name: values[name] for name in _NAMES - {"t"}}))


_NAMES = {"t", *(field.name for field in fields(WaveMetrics))}


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None
