"""Means, spreads and curves of several runs."""

from __future__ import annotations

import math

import pytest

from hetpipe.comparison.record import Point
from hetpipe.comparison.statistics import (
    MOST_POINTS,
    Spread,
    common_curve,
    spread_of,
    training_curve,
)
from hetpipe.observe.metrics import TimedWave, WaveMetrics
from hetpipe.report.charts import CurvePoint
from tests.comparison.comparisons import curve


def test_a_spread() -> None:
    assert spread_of([1.0, 2.0, 3.0]) == Spread(2.0, 1.0, 1.0, 3.0)
    assert spread_of([5.0, None, math.nan, math.inf]) == Spread(5.0, None, 5.0, 5.0)
    assert spread_of([None]) is None


def wave(t: float, minibatches: int, samples: int, loss: float | None) -> TimedWave:
    metrics = WaveMetrics(
        wave=0,
        p=0,
        minibatches=minibatches,
        samples=samples,
        weight=samples,
        loss=loss,
        learning_rate=None,
        gradient_norm=None,
        max_norm=None,
    )
    return TimedWave(t, metrics)


def test_waves_become_few_points_that_lose_no_minibatch() -> None:
    waves = [wave(10.0 + 0.5 * number, 4, 16, float(number)) for number in range(1, 5 * MOST_POINTS + 1)]
    points = training_curve(waves, began=10.0)
    assert len(points) == MOST_POINTS
    assert (points[-1].minibatches, points[-1].seconds) == (4 * len(waves), 0.5 * len(waves))
    assert points[0].values == {"loss": pytest.approx(3.0)}
    assert [point.minibatches for point in points[:3]] == [20, 40, 60]


def test_waves_weigh_by_their_samples() -> None:
    many = [wave(float(n), 1, 1 if n % 2 else 3, 0.0 if n % 2 else 1.0) for n in range(2 * MOST_POINTS)]
    assert {point.values["loss"] for point in training_curve(many, began=0.0)} == {0.75}


def test_waves_without_a_loss_are_passed_over() -> None:
    assert training_curve([], began=0.0) == ()
    points = training_curve([wave(1.0, 4, 16, None), wave(2.0, 4, 16, 0.5), wave(3.0, 0, 0, None)], began=0.0)
    assert [(point.minibatches, point.values) for point in points] == [(8, {"loss": 0.5})]


def test_runs_measured_at_the_same_places() -> None:
    runs = [curve([1.0, 0.5]), curve([2.0, 1.0])]
    assert common_curve(runs, "loss", "minibatches") == (CurvePoint(12, 1.5, 1.0, 2.0), CurvePoint(24, 0.75, 0.5, 1.0))


def test_runs_of_different_speed_are_read_off_where_all_have_been() -> None:
    fast, slow = curve([1.0, 0.0], seconds=1.0), curve([1.0, 0.0], seconds=2.0)
    found = common_curve([fast, slow], "loss", "seconds")
    assert (found[0].x, found[-1].x, len(found)) == (2.0, 2.0, MOST_POINTS)
    wide = common_curve([curve([1.0, 0.0, 0.0], seconds=1.0), slow], "loss", "seconds")
    assert (wide[0].x, wide[-1].x) == (2.0, 3.0)
    assert (wide[-1].least, wide[-1].most) == (0.0, 0.5)
    assert common_curve([fast, curve([1.0], seconds=9.0)], "loss", "seconds") == ()


def test_runs_without_the_value_are_left_out() -> None:
    runs = [curve([1.0]), (Point(12, 1.0, {"accuracy": 0.5}),), ()]
    assert common_curve(runs, "accuracy", "minibatches") == (CurvePoint(12, 0.5, 0.5, 0.5),)
    assert common_curve(runs, "nothing", "minibatches") == ()
