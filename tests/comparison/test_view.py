"""What of a comparison is shown: summaries, tables, and what the seeds allow to be said."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from hetpipe.comparison.record import Point, TrialRecord, TrialState
from hetpipe.comparison.view import ComparisonView, summaries_of, view_of
from tests.comparison.comparisons import diverged, record, result, trials

#: Of two policies: one that is better, and one that is faster.
RECORDS = [
    record("wave", 3, [1.0, 0.6, 0.7], result=result(samples_per_second=300.0)),
    record("wave", 4, [1.2, 0.9, 0.8], result=result(samples_per_second=340.0)),
    record("flush", 3, [1.0, 0.2]),
    record("flush", 4, [1.0, 0.3]),
]


def view(records: list[TrialRecord], folder: Path, **changes: Any) -> ComparisonView:
    summaries = summaries_of(["wave", "flush", "stash"], records)
    return view_of(trials(folder, **changes)[0].job, 2, summaries, records)


def test_summaries_are_over_the_seeds() -> None:
    wave, flush = summaries_of(["wave", "flush", "stash"], RECORDS)
    assert (wave.weights, wave.finished, wave.diverged, wave.failed) == ("wave", 2, 0, 0)
    assert wave.final["loss"].mean == pytest.approx(0.75)
    assert astuple(wave.best["loss"]) == pytest.approx((0.7, 0.1414, 0.6, 0.8), abs=1e-4)
    assert list(wave.final) == ["loss", "accuracy"]
    assert wave.samples_per_second is not None
    assert astuple(wave.samples_per_second) == pytest.approx((320.0, 28.284, 300.0, 340.0), abs=1e-3)
    assert wave.wave_seconds is not None
    assert wave.wave_seconds.mean == 0.2
    assert [(one.stage, one.weight_bytes) for one in flush.stages] == [(0, 2 << 20), (1, 1 << 20)]


def test_waves_of_several_workers_take_their_time_side_by_side() -> None:
    (wave,) = summaries_of(["wave"], [record("wave", 0, result=result(waves=20, clocks={"0": 10, "1": 10}))])
    assert wave.wave_seconds is not None
    assert wave.wave_seconds.mean == pytest.approx(0.2)


def test_the_metrics_of_the_best_evaluation_are_those_at_its_least_loss() -> None:
    points = tuple(Point(n, float(n), {"loss": loss, "accuracy": a}) for n, loss, a in [(1, 0.5, 0.7), (2, 0.9, 0.8)])
    (wave,) = summaries_of(["wave"], [record("wave", 3, evaluations=points)])
    assert (wave.best["accuracy"].mean, wave.final["accuracy"].mean) == (0.7, 0.8)


def test_runs_that_diverged_are_counted_and_left_out_of_the_figures(tmp_path: Path) -> None:
    failed = replace(diverged("flush", 4), state=TrialState.FAILED, sentence="stage 0 was killed")
    records = [RECORDS[0], diverged("wave", 4), RECORDS[2], failed]
    shown = view(records, tmp_path)
    assert [row.cells[1] for row in shown.tables[0].rows] == ["1 of 2", "1 of 2"]
    assert shown.tables[0].rows[0].cells[2] == "0.7000"
    assert shown.remarks[-2].startswith("wave, seed 4 diverged at minibatch 37: stage 1 of virtual worker 0")
    assert shown.remarks[-1] == "flush, seed 4 failed: stage 0 was killed"


def test_nothing_finished(tmp_path: Path) -> None:
    shown = view([diverged("wave", 3)], tmp_path)
    assert [table.rows[0].cells[1:] for table in shown.tables] == [("0 of 1", "-"), ("-", "-"), ("-",), ("-",)]


def test_the_tables(tmp_path: Path) -> None:
    quality, speed, weights, activations = view(RECORDS, tmp_path).tables
    assert quality.headings == (
        "weights",
        "finished",
        "loss",
        "best loss",
        "accuracy",
        "accuracy at best loss",
        "training loss",
    )
    assert quality.rows[0].cells[:3] == ("wave", "2 of 2", "0.7500 ± 0.0707")
    # of the loss less is better; nobody says what is better of an accuracy; the training losses are equal
    assert [sorted(row.best) for row in quality.rows] == [[], [2, 3]]
    assert speed.headings == ("weights", "samples/s", "ms/wave")
    assert speed.rows[0].cells == ("wave", "320 ± 28.3", "200 ± 0")
    assert [sorted(row.best) for row in speed.rows] == [[1], []]
    assert weights.headings == activations.headings == ("weights", "stage 0", "stage 1", "all stages")
    assert weights.rows[0].cells == ("wave", "2 MiB", "1 MiB", "3 MiB")
    assert activations.rows[0].cells == ("wave", "512 KiB", "512 KiB", "1 MiB")


def test_the_policy_with_the_least_bytes_is_marked(tmp_path: Path) -> None:
    stages = [replace(stage, weight_bytes=5) for stage in result().stages]
    small = record("flush", 3, result=replace(result(), stages=tuple(stages)))
    (_, _, weights, _) = view([RECORDS[0], small], tmp_path).tables
    assert [(row.cells[1:], sorted(row.best)) for row in weights.rows] == [
        (("2 MiB", "1 MiB", "3 MiB"), []),
        (("5 bytes", "5 bytes", "10 bytes"), [3]),
    ]


def test_what_it_is_called(tmp_path: Path) -> None:
    shown = view(RECORDS, tmp_path)
    assert shown.title == "small: 2 weight policies, 2 seeds"
    assert shown.subtitle == (
        "1 virtual worker of 2 stages, 2 minibatches of 4 samples per wave, SGD (lr 0.05, momentum 0.9), 2 epochs, "
        "sync wsp"
    )
    planned = view(RECORDS, tmp_path, workers={"stages": "auto"}).subtitle
    assert planned.startswith("planned virtual workers, 2 minibatches")


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([0.2, 0.3], "every seed of the first is below every seed of the second"),
        ([0.5, 0.75], "the seeds of the two overlap"),
    ],
)
def test_what_the_seeds_allow_to_be_said(losses: list[float], words: str, tmp_path: Path) -> None:
    flush = [record("flush", seed, [1.0, loss]) for seed, loss in zip((3, 4), losses, strict=True)]
    remark = view([*RECORDS[:2], *flush], tmp_path).remarks[0]
    assert remark.startswith("Least loss at the end: flush with 0.")
    assert remark.endswith(f"; {words}.")


def test_one_seed_says_little(tmp_path: Path) -> None:
    remarks = view([RECORDS[0], RECORDS[2]], tmp_path).remarks
    assert remarks[0] == (
        "Least loss at the end: flush with 0.2000, then wave with 0.7000; one seed says nothing of the spread, so take "
        "more."
    )
    assert remarks[1] == "Fastest: wave with 300 samples/s; slowest: flush with 184, 1.63 times slower."
