"""Runs of a comparison that nobody trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from hetpipe.comparison.record import Point, TrialRecord, TrialState
from hetpipe.comparison.trials import Trial, trials_of
from hetpipe.runs.result import TrainResult
from hetpipe.values.policies import WeightPolicy
from tests.cli.fakes import RESULT


@dataclass(frozen=True, slots=True)
class Asked:
    """What to train, as the options of the command say it."""

    weights: str | None
    seeds: int
    settings: Sequence[str] = ()
    own_settings: Sequence[str] = ()
    vary: Sequence[str] = ()


def write_job(folder: Path, **changes: Any) -> Path:
    """A job that every weight policy can train."""
    values: dict[str, Any] = {
        "name": "small",
        "model": "tests.models:mlp32",
        "loss": "tests.models:loss",
        "data": {"train": "tests.models:data32", "eval": "tests.models:data32"},
        "batch_size": 4,
        "epochs": 2,
        "seed": 3,
        "optimizer": {"name": "SGD", "lr": 0.05, "momentum": 0.9},
        "workers": {"count": 1, "stages": 2},
        "sync": {"minibatches_per_wave": 2},
        "parameter_servers": {"count": 1},
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({**values, **changes}))
    return path


def trials(folder: Path, weights: str = "wave,flush", seeds: int = 2, **changes: Any) -> tuple[Trial, ...]:
    """Trials of that job."""
    return trials_of(write_job(folder, **changes), Asked(weights, seeds))


def result(**changes: Any) -> TrainResult:
    """What came of one run of two stages."""
    stages = [
        {
            "vw": 0,
            "stage": stage,
            "weight_bytes": (2 - stage) << 20,
            "activation_bytes": 1 << 19,
            "gradient_norm": None,
            "learning_rate": 0.05,
        }
        for stage in range(2)
    ]
    values = {**RESULT, "waves": 10, "clocks": {"0": 10}, "wall_seconds": 2.0, "stages": stages}
    return TrainResult.from_json({**values, **changes})


def curve(losses: Sequence[float], *, seconds: float = 1.0, **others: float) -> tuple[Point, ...]:
    """An evaluation every 12 minibatches."""
    return tuple(
        Point(12 * number, seconds * number, {"loss": loss, **others}) for number, loss in enumerate(losses, start=1)
    )


def record(weights: WeightPolicy, seed: int, evaluated: Sequence[float] = (1.0, 0.5), **changes: Any) -> TrialRecord:
    """A run that finished, with these evaluations."""
    defaults: dict[str, Any] = {
        "weights": weights,
        "seed": seed,
        "job_digest": "x",
        "run_dir": f"{weights}-seed-{seed}",
        "state": TrialState.FINISHED,
        "evaluations": curve(evaluated, accuracy=1 - evaluated[-1]),
        "losses": curve([2 * loss for loss in evaluated]),
        "result": result(),
    }
    return TrialRecord(**{**defaults, **changes})


def diverged(weights: WeightPolicy, seed: int) -> TrialRecord:
    """A run whose updates got out of hand."""
    sentence = "stage 1 of virtual worker 0: the update of minibatch 37 is not finite in parameter 2.weight"
    return replace(
        record(weights, seed), state=TrialState.DIVERGED, sentence=sentence, evaluations=(), losses=(), result=None
    )
