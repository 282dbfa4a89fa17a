"""A run's folder from Python."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetpipe.errors import UserError
from hetpipe.observe.metrics import Metrics, WaveMetrics, metrics_path
from hetpipe.runs.run import Run
from hetpipe.runs.run_folder import RunFolder, RunRecord
from tests.cli.fakes import small_job
from tests.support.fake_clock import FakeClock


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = RunFolder(tmp_path / "runs" / "one")
    made.path.mkdir(parents=True)
    made.write_job(small_job())
    made.write_record(RunRecord(run_dir=str(made.path), name="one", host="h", started_wall=1.0))
    return made.path


@pytest.fixture(autouse=True)
def pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames as lists of their rows."""
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))


def write_waves(folder: Path, clock: FakeClock, *losses: float) -> None:
    metrics = Metrics(metrics_path(folder, 0), clock=clock)
    for wave, loss in enumerate(losses):
        metrics.write(
            WaveMetrics(
                wave=wave,
                p=2 * wave + 2,
                minibatches=2,
                samples=8,
                weight=8,
                loss=loss,
                learning_rate=0.1,
                gradient_norm=None,
                max_norm=None,
                losses={"main": loss},
            )
        )
        clock.advance(2.0)
    metrics.close()


def test_metrics_of_a_run_that_was_rewound(folder: Path) -> None:
    clock = FakeClock()
    write_waves(folder, clock, 3.0, 2.0)
    write_waves(folder / "rewind-1", clock, 1.0)
    rows: Any = Run(folder).metrics()
    assert [(row["rewinds"], row["t"], row["wave"], row["loss"], row["losses.main"]) for row in rows] == [
        (0, 0.0, 0, 3.0, 3.0),
        (0, 2.0, 1, 2.0, 2.0),
        (1, 4.0, 0, 1.0, 1.0),
    ]
    assert "losses" not in rows[0]


def test_evaluations(folder: Path) -> None:
    assert list(Run(folder).evaluations()) == []
    line = {"epoch": 1, "clock": 3, "values": {"loss": 0.5, "accuracy": 0.9}}
    (folder / "evaluations.jsonl").write_text(json.dumps(line) + "\n")
    rows: Any = Run(folder).evaluations()
    assert rows == [{"epoch": 1, "clock": 3, "loss": 0.5, "accuracy": 0.9}]
    (folder / "evaluations.jsonl").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        Run(folder).evaluations()


def test_without_pandas(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="pip install pandas"):
        Run(folder).metrics()


def test_the_latest_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parents[1])
    run = Run()
    assert run.path == folder
    assert repr(run) == f"hetpipe.Run({str(folder)!r})"
    assert run.job == small_job()
    assert run.result is None


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        Run(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is not a run"):
        Run(tmp_path)
