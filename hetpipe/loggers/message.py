"""Messages from the coordinator to the logging process: one JSON object per line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetpipe.values.events import Evaluated, ProgressTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The first message: the run and its loggers."""

    run_dir: str
    previous: str = ""
    """Folder of the run that this one resumes; empty: none, or unknown."""
    keys: dict[str, str] = field(default_factory=dict)
    """The keys of the job, dotted, with their values."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Logger → its options."""


@dataclass(frozen=True, slots=True)
class Values:
    """Values at a step."""

    step: int
    """Committed minibatches."""
    values: dict[str, float]
    wall: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class StepRewind:
    """Training continues from an earlier step, after a rewind."""


def of_progress(table: ProgressTable, minibatches: int, *, wall: float) -> Values:
    """Values of a progress table, about once a second; losses are means over the virtual workers."""
    values = {
        "train/loss": _mean([row.loss for row in table.rows]),
        "run/samples_per_second": table.samples_per_second,
        "run/epoch": float(table.epoch),
        "run/clock_distance": float(max((row.distance for row in table.rows), default=0)),
        "run/tokens_per_second": table.tokens_per_second,
        "run/model_flops_utilisation": table.model_flops_utilisation,
    }
    for name in sorted({name for row in table.rows for name in row.losses}):
        values[f"train/{name}"] = _mean([row.losses.get(name) for row in table.rows])
    return Values(minibatches, _finite(values), wall)


def of_evaluation(evaluated: Evaluated, *, wall: float) -> Values:
    """Values of an evaluation; `eval-part/NAME` if it covers only a part of the evaluation data."""
    kind = "eval" if evaluated.whole else "eval-part"
    values = {f"{kind}/{name}": value for name, value in evaluated.values.items()}
    return Values(evaluated.minibatches, _finite(values), wall)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _finite(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
