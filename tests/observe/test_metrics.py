"""Waves as lines of a file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hetpipe.observe.metrics import Metrics, NullMetrics, WaveMetrics, WaveReduction, metrics_path, read_metrics
from tests.support.fake_clock import FakeClock

WAVE = WaveMetrics(
    wave=2, p=12, minibatches=4, samples=60, weight=60, loss=0.25, learning_rate=0.1, gradient_norm=None, max_norm=None
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    clock, path = FakeClock(monotonic=5.0), metrics_path(tmp_path, 1)
    metrics = Metrics(path, clock=clock)
    metrics.write(WAVE)
    clock.advance(0.5)
    metrics.write(replace(WAVE, wave=3, p=16))
    metrics.close()
    metrics.close()
    assert path == tmp_path / "metrics" / "vw-1.jsonl"
    assert [(one.t, one.wave.wave, one.wave.p) for one in read_metrics(tmp_path)] == [(5.0, 2, 12), (5.5, 3, 16)]
    assert read_metrics(tmp_path)[0].wave == WAVE


def test_the_keys_of_a_line(tmp_path: Path) -> None:
    path = metrics_path(tmp_path, 0)
    Metrics(path, clock=FakeClock()).write(WAVE)
    measured = ["loss", "learning_rate", "gradient_norm", "max_norm", "losses"]
    assert list(json.loads(path.read_text())) == ["t", "wave", "p", "minibatches", "samples", "weight", *measured]


def test_several_losses_are_read_and_merged_by_name(tmp_path: Path) -> None:
    metrics = Metrics(metrics_path(tmp_path, 0), clock=FakeClock())
    metrics.write(replace(WAVE, weight=3, losses={"main": 1.0, "aux": float("nan")}))
    metrics.write(replace(WAVE, weight=1, losses={"main": 3.0, "aux": 2.0}))
    one, other = (found.wave for found in read_metrics(tmp_path))
    assert (one.losses, other.losses) == ({"main": 1.0, "aux": None}, {"main": 3.0, "aux": 2.0})
    merged = WaveReduction().merged({**asdict(one), "t": 1.0}, {**asdict(other), "t": 2.0})
    assert (merged["weight"], merged["losses"]) == (4, {"main": 1.5, "aux": 2.0})


def test_a_line_of_a_run_before_weights_and_several_losses(tmp_path: Path) -> None:
    path = metrics_path(tmp_path, 0)
    Metrics(path, clock=FakeClock()).write(WAVE)
    line = json.loads(path.read_text())
    del line["weight"], line["losses"]
    path.write_text(json.dumps(line) + "\n")
    assert [one.wave for one in read_metrics(tmp_path)] == [WAVE]


@pytest.mark.parametrize("losses", [3, ["main"], {"main": "1"}, {"main": True}, None])
def test_losses_of_another_kind_are_passed_over(losses: object, tmp_path: Path) -> None:
    path = metrics_path(tmp_path, 0)
    Metrics(path, clock=FakeClock()).write(WAVE)
    path.write_text(json.dumps({**json.loads(path.read_text()), "losses": losses}) + "\n")
    assert read_metrics(tmp_path) == []


def test_a_disk_that_fails_ends_the_file_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(metrics_path(tmp_path, 0), clock=FakeClock())
    metrics.write(WAVE)
    with monkeypatch.context() as broken:
        broken.setattr(os, "write", lambda _descriptor, _data: 3)
        metrics.write(WAVE)
    metrics.write(WAVE)
    assert [one.wave for one in read_metrics(tmp_path)] == [WAVE]


def test_numbers_json_does_not_have_become_null(tmp_path: Path) -> None:
    path = metrics_path(tmp_path, 0)
    Metrics(path, clock=FakeClock()).write(replace(WAVE, loss=float("nan"), gradient_norm=float("inf")))
    assert json.loads(path.read_text())["loss"] is None
    assert read_metrics(tmp_path)[0].wave.gradient_norm is None


def test_a_later_process_goes_on_and_torn_lines_are_passed_over(tmp_path: Path) -> None:
    path = metrics_path(tmp_path, 0)
    for _ in range(2):
        Metrics(path, clock=FakeClock()).write(WAVE)
    with path.open("a") as file:
        file.write('{"t":1.0,"wa')
    assert [one.wave for one in read_metrics(tmp_path)] == [WAVE, WAVE]


def test_virtual_workers_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    for vw, seconds in ((0, 3.0), (1, 1.0), (1, 4.0)):
        Metrics(metrics_path(tmp_path, vw), clock=FakeClock(monotonic=seconds)).write(replace(WAVE, wave=vw))
    assert [(one.t, one.wave.wave) for one in read_metrics(tmp_path)] == [(1.0, 1), (3.0, 0), (4.0, 1)]
    assert read_metrics(tmp_path / "nothing") == []


def test_nothing_is_written_where_nobody_asks() -> None:
    metrics = NullMetrics()
    metrics.write(WAVE)
    metrics.close()
