"""Persistent record of a comparison: `compare.json` beside the run folders, which are those of `hetpipe train`.

The file holds every finished run with its curves and is rewritten after each of them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hetpipe.clock import Clock
from hetpipe.comparison.trials import Trial, label_of
from hetpipe.errors import ProtocolViolation, UserError
from hetpipe.runs.result import TrainResult
from hetpipe.runs.run_folder import RUNS, fresh_folder
from hetpipe.values.policies import WeightPolicy
from hetpipe.values.wire import from_json, plain

FILE = "compare.json"

#: Not in names of folders.
_NOT_IN_NAMES = re.compile(r"[^\w.]+", re.ASCII)

#: Of its format.
VERSION = 1


class TrialState(StrEnum):
    """Outcome of one run of a comparison."""

    FINISHED = "finished"
    DIVERGED = "diverged"
    """An update was not finite. That is a result, not a failure."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Point:
    """Measurements at one moment of a run."""

    minibatches: float
    """Committed by then, over all virtual workers."""
    seconds: float
    """Since all stages were ready."""
    values: dict[str, float]
    """By name, `loss` among them; those that are finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One run that was not interrupted."""

    weights: WeightPolicy
    seed: int
    values: str = ""
    """Of the keys that vary, as in `Trial`."""
    job_digest: str
    """Of its job: a run is used again only for an equal one."""
    run_dir: str
    """Its folder, within that of the comparison."""
    state: TrialState
    sentence: str = ""
    """The reason, unless it finished."""
    evaluations: tuple[Point, ...] = ()
    losses: tuple[Point, ...] = ()
    """Training loss, waves put together to a few hundred points; empty where the run wrote no metrics."""
    distances: tuple[Point, ...] = ()
    """`clock distance`: how far virtual workers were apart, in waves; empty where the run wrote no history."""
    result: TrainResult | None = None
    """None unless it finished."""

    def is_of(self, trial: Trial) -> bool:
        """Whether this is the record of `trial`."""
        key = (self.label, self.seed, self.job_digest)
        return key == (trial.label, trial.seed, trial.job_digest)

    @property
    def label(self) -> str:
        """Its row of the comparison."""
        return label_of(self.weights, self.values)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Content of `compare.json`."""

    version: int
    name: str
    """The job's."""
    runs: tuple[TrialRecord, ...]


class ComparisonFolder:
    """The folder of one comparison."""

    def __init__(self, path: Path, records: Sequence[TrialRecord] = ()) -> None:
        #: Absolute.
        self.path = path.absolute()
        #: Every finished run, oldest first; one per trial.
        self.records = list(records)

    @classmethod
    def open(cls, run_dir: Path | None, *, name: str, clock: Clock, runs_dir: Path = RUNS) -> ComparisonFolder:
        """Open the comparison in `run_dir`, or create one there or in `runs_dir`.

        Raises:
            UserError: `run_dir` is not a comparison, or cannot be read or created.
        """
        try:
            if run_dir is None:
                return cls(fresh_folder(runs_dir, f"compare-{name}", clock))
            run_dir.mkdir(parents=True, exist_ok=True)
            if (run_dir / FILE).exists():
                return cls(run_dir, _read(run_dir / FILE).runs)
            if any(run_dir.iterdir()):
                raise UserError(f"--run-dir {run_dir}: is not empty and no comparison (no {FILE}); name a new folder")
        except OSError as error:
            where = run_dir or runs_dir
            raise UserError(
                f"cannot make the comparison's folder {where}: {error.strerror}; name another with --run-dir"
            ) from error
        return cls(run_dir)

    def find(self, trial: Trial) -> TrialRecord | None:
        """The record of `trial`, whatever its outcome."""
        return next((one for one in self.records if one.is_of(trial)), None)

    def fresh_run_dir(self, trial: Trial) -> Path:
        """An unused folder for a run of `trial`."""
        name, number = f"{_NOT_IN_NAMES.sub('-', trial.label)}-seed-{trial.seed}", 1
        while (path := self.path / (name if number == 1 else f"{name}-{number}")).exists():
            number += 1
        return path

    def add(self, record: TrialRecord, *, name: str) -> None:
        """Store `record`, replacing one of the same row and seed, and write the file.

        Raises:
            UserError: it cannot be written.
        """
        key = (record.label, record.seed)
        self.records = [*(one for one in self.records if (one.label, one.seed) != key), record]
        content = plain(Comparison, Comparison(VERSION, name, tuple(self.records)))
        unfinished = self.path / f".{FILE}.{os.getpid()}"
        try:
            unfinished.write_text(json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
            unfinished.replace(self.path / FILE)
        except OSError as error:
            raise UserError(f"cannot write {self.path / FILE}: {error.strerror}") from error


def _read(path: Path) -> Comparison:
    sentence = f"{path} is damaged or of another version; name another folder with --run-dir"
    try:
        found: Comparison = from_json(Comparison, path.read_bytes())
    except ProtocolViolation as error:
        raise UserError(sentence) from error
    if found.version != VERSION:
        raise UserError(sentence)
    return found
