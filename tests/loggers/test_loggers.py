"""Curves in the real TensorBoard, Weights & Biases and MLflow, offline: of a run, resumed, rewound, and failing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetpipe.job.log import LogSection
from hetpipe.loggers.feed import Feed
from hetpipe.loggers.kinds import Kept, Logger, missing
from hetpipe.loggers.message import Opening, StepRewind, Values, of_evaluation, of_progress
from hetpipe.loggers.process import STATE_FILE, line_of, log_lines, opening_line
from hetpipe.loggers.series import Series
from hetpipe.values.events import Evaluated
from hetpipe.values.ids import Clock
from tests.cli.fakes import table

Curves = dict[str, list[tuple[int, float]]]

OPTIONS = {
    name: dict(found)
    for name, found in LogSection.model_validate(
        {"tensorboard": {}, "wandb": {"project": "p", "mode": "offline"}, "mlflow": {"experiment": "e"}}
    ).options.items()
}


def opening(folder: Path, *names: str, previous: Path | None = None) -> Opening:
    folder.mkdir(exist_ok=True)
    options = {name: OPTIONS[name] for name in names}
    return Opening(
        run_dir=str(folder), previous="" if previous is None else str(previous), keys={"sync.D": "1"}, options=options
    )


def logged(first: Opening, *messages: Values | StepRewind) -> list[tuple[str, str]]:
    """Log these messages; returns the failures."""
    failures: list[tuple[str, str]] = []
    lines = [opening_line(first), *map(line_of, messages)]
    log_lines(lines, lambda name, sentence: failures.append((name, sentence)))
    return failures


def loss(step: int, value: float) -> Values:
    return Values(step, {"train/loss": value}, 1_795_000_000.0 + step)


def in_tensorboard(folder: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return {
        name: [(one.step, float(make_ndarray(one.tensor_proto))) for one in found.Tensors(name)]
        for name in found.Tags()["tensors"]
    }


def in_mlflow(folder: Path, name: str = "train/loss") -> list[tuple[int, float]]:
    from mlflow.tracking import MlflowClient

    kept = json.loads((folder / STATE_FILE).read_bytes())["loggers"]["mlflow"]
    return [(one.step, one.value) for one in MlflowClient(kept["uri"]).get_metric_history(kept["run_id"], name)]


def in_wandb(folder: Path) -> Curves:
    """Of the offline run in a folder: records behind a header of 7 bytes each, in a file with one of 7 bytes."""
    from wandb.proto import wandb_internal_pb2  # generated at import, for the protobuf that is installed

    record_type: Any = vars(wandb_internal_pb2)["Record"]
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, at = path.read_bytes(), 7
    assert len(data) < 32768, "records do not span blocks"
    curves: Curves = {}
    while at < len(data):
        size = int.from_bytes(data[at + 4 : at + 6], "little")
        record = record_type()
        record.ParseFromString(data[at + 7 : at + 7 + size])
        at += 7 + size
        if record.WhichOneof("record_type") == "history":
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            step = items.pop("minibatches")
            for name, value in items.items():
                if not name.startswith("_"):
                    curves.setdefault(name, []).append((step, value))
    return curves


@pytest.mark.exhaustive
def test_a_run_and_its_continuation_in_all_three(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert logged(opening(first, *OPTIONS), loss(8, 2.0), loss(16, 1.5)) == []
    assert logged(opening(second, *OPTIONS, previous=first), loss(24, 1.25)) == []
    whole = [(8, 2.0), (16, 1.5), (24, 1.25)]
    assert in_tensorboard(second)["train/loss"] == whole
    assert in_mlflow(second) == whole
    assert in_wandb(first)["train/loss"] == whole[:2]
    assert in_wandb(second)["train/loss"] == whole[2:]
    before, after = (json.loads((folder / STATE_FILE).read_bytes())["loggers"] for folder in (first, second))
    assert before["wandb"]["id"] == after["wandb"]["id"]
    assert before["mlflow"] == after["mlflow"]


def test_a_rewind_doubles_no_step_and_stays_visible(tmp_path: Path) -> None:
    messages = (
        loss(8, 2.0),
        loss(16, 1.5),
        loss(24, 1.25),
        StepRewind(),
        loss(16, 1.625),
        loss(24, 1.375),
        loss(32, 1.125),
    )
    assert logged(opening(tmp_path / "run", "tensorboard"), *messages) == []
    curves = in_tensorboard(tmp_path / "run")
    assert curves["train/loss"] == [(8, 2.0), (16, 1.5), (24, 1.25), (32, 1.125)]
    assert curves["repeated-1/train/loss"] == [(16, 1.625), (24, 1.375)]


def test_a_later_process_goes_on_where_the_last_one_was_killed(tmp_path: Path) -> None:
    first = opening(tmp_path / "run", "tensorboard")
    logged(first, loss(8, 2.0))
    logged(first, loss(8, 2.0), loss(16, 1.5))
    curves = in_tensorboard(tmp_path / "run")
    assert curves["train/loss"] == [(8, 2.0), (16, 1.5)]


def test_steps_of_each_series_ascend() -> None:
    series, seen = Series(), dict[str, list[int]]()
    for step in (8, 16, None, 4, 12, 20, None, 4, 8, 24):
        if step is None:
            series = Series.of(json.loads(json.dumps(series.to_object())))
            series.repeat()
            continue
        for name in series.admit(step, {"a": 0.0}):
            seen.setdefault(name, []).append(step)
    assert seen == {"a": [8, 16, 20, 24], "repeated-1/a": [4, 12], "repeated-2/a": [4, 8]}


class _Broken(Logger):
    def __init__(self, _opening: Opening, options: Mapping[str, Any], _kept: Kept) -> None:
        self.options = options

    def log(self, values: Values) -> None:
        if values.step == 16:
            raise ConnectionError("the server is away")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        raise AssertionError("a logger that failed is not used any more")


class _Recording(_Broken):
    steps: list[int] = []  # noqa: RUF012 - of this test

    def log(self, values: Values) -> None:
        self.steps.append(values.step)

    def close(self) -> None:
        self.steps.append(-1)


def test_a_logger_that_fails_is_reported_once_and_the_others_go_on(tmp_path: Path) -> None:
    failures: list[tuple[str, str]] = []
    first = opening(tmp_path / "run", "wandb", "mlflow")
    lines = [opening_line(first), *(line_of(loss(step, 1.0)) for step in (8, 16, 24))]
    log_lines(lines, lambda *one: failures.append(one), kinds={"wandb": _Broken, "mlflow": _Recording})
    assert failures == [("wandb", "ConnectionError: the server is away")]
    assert _Recording.steps == [8, 16, 24, -1]


def failures_of(folder: Path, program: list[str], messages: Iterator[Values]) -> list[tuple[str, str]]:
    failures: list[tuple[str, str]] = []
    feed = Feed(opening(folder, "wandb", "mlflow"), lambda *one: failures.append(one), program=program)
    for message in messages:
        feed.post(message)
    feed.close()
    assert feed.join(20.0)
    return failures


@pytest.mark.processes
def test_a_process_that_dies_is_reported_once_for_each_logger(tmp_path: Path) -> None:
    dies = [sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(3)"]
    failures = failures_of(tmp_path / "run", dies, iter([loss(8, 1.0)]))
    assert [name for name, _ in failures] == ["wandb", "mlflow"]
    assert all("exited with status 3" in sentence for _, sentence in failures)
    missing_program = failures_of(tmp_path / "run", [str(tmp_path / "missing")], iter([]))
    assert all("cannot be started" in sentence for _, sentence in missing_program)


@pytest.mark.processes
def test_the_real_process_writes_what_it_is_fed(tmp_path: Path) -> None:
    failures: list[tuple[str, str]] = []
    feed = Feed(opening(tmp_path / "run", "tensorboard"), lambda *one: failures.append(one))
    for message in (loss(8, 2.0), StepRewind(), loss(4, 2.125), loss(16, 1.5)):
        feed.post(message)
    feed.close()
    assert feed.join(60.0)
    assert failures == []
    assert in_tensorboard(tmp_path / "run") == {
        "train/loss": [(8, 2.0), (16, 1.5)],
        "repeated-1/train/loss": [(4, 2.125)],
    }


@pytest.mark.processes
def test_a_logger_that_fails_after_the_run_does_not_end_the_others(tmp_path: Path) -> None:
    first = opening(tmp_path / "run", "tensorboard")
    lines = opening_line(replace(first, options={"mlflow": {"uri": "no-such-scheme://x"}, **first.options}))
    reads, writes = os.pipe()
    os.close(reads)
    program = [sys.executable, "-m", "hetpipe.loggers.process"]
    done = subprocess.run(
        program, input=lines + line_of(loss(8, 2.0)), stdout=writes, stderr=subprocess.PIPE, check=False
    )
    os.close(writes)
    assert done.returncode == 0, done.stderr.decode()
    assert in_tensorboard(tmp_path / "run") == {"train/loss": [(8, 2.0)]}


def test_values_of_progress_and_evaluations() -> None:
    assert of_progress(table(4, 3), 24, wall=5.0) == Values(
        24,
        {"train/loss": 1.25, "run/samples_per_second": 300.5, "run/epoch": 2.0, "run/clock_distance": 1.0},
        5.0,
    )
    found = Evaluated(Clock(6), 2, 46, {"loss": float("nan"), "accuracy": 0.5}, minibatches=48, whole=False)
    assert of_evaluation(found, wall=5.0) == Values(48, {"eval-part/accuracy": 0.5}, 5.0)


def test_a_missing_package_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetpipe.loggers.kinds.find_spec", lambda name: None if name == "wandb" else object())
    (sentence,) = missing(OPTIONS)
    assert sentence == (
        "log.wandb: the package wandb is not installed where the coordinator runs; install it there: "
        "pip install 'hetpipe[wandb]'"
    )
