"""Mean and spread over seeds, and curves of several runs resampled to one grid."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, stdev
from typing import Literal

from hetpipe.comparison.record import Point
from hetpipe.observe.clock_curve import ClockPoint
from hetpipe.observe.metrics import TimedWave
from hetpipe.report.charts import CurvePoint

#: The x axes of curves.
Axis = Literal["minibatches", "seconds"]

#: The name of the values of `distance_curve`.
CLOCK_DISTANCE = "clock distance"

#: Maximum points of a curve: enough for its shape, few enough to average out single waves.
MOST_POINTS = 120


@dataclass(frozen=True, slots=True)
class Spread:
    """Summary statistics of a quantity over several runs."""

    mean: float
    deviation: float | None
    """Standard deviation of the sample (divided by n − 1); None of one run."""
    least: float
    most: float


def spread_of(values: Iterable[float | None]) -> Spread | None:
    """Mean and spread of the finite values; None if there are none.

    >>> spread_of([1.0, 3.0, None])
    Spread(mean=2.0, deviation=1.4142135623730951, least=1.0, most=3.0)
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    return Spread(fmean(known), stdev(known) if len(known) > 1 else None, min(known), max(known))


def training_curve(waves: Sequence[TimedWave], *, began: float) -> tuple[Point, ...]:
    """Training loss of a run, averaged over consecutive waves to few points.

    A point is placed at the end of its waves; its loss is their mean, weighted as in the run (job key `mean_over`).

    Args:
        waves: of all virtual workers, in order of time.
        began: start of training, in monotonic seconds.
    """
    counts = list(accumulate(one.wave.minibatches for one in waves))
    points = []
    for chunk in _chunks(len(waves), MOST_POINTS):
        known = [(one.wave.loss, one.wave.weight) for one in waves[chunk] if one.wave.loss is not None]
        total = sum(weight for _, weight in known)
        if total:
            loss = sum(loss * weight for loss, weight in known) / total
            points.append(Point(counts[chunk.stop - 1], waves[chunk.stop - 1].t - began, {"loss": loss}))
    return tuple(points)


def distance_curve(commits: Sequence[ClockPoint], *, began: float, batch_size: int) -> tuple[Point, ...]:
    """Clock distance between the virtual workers of a run: maximum over consecutive commits, reduced to few points.

    Args:
        commits: in order, histories concatenated.
        began: start of training, in monotonic seconds.
        batch_size: samples of a minibatch; the last ones of an epoch may have fewer.
    """
    points = []
    for chunk in _chunks(len(commits), MOST_POINTS):
        last = commits[chunk.stop - 1]
        distance = max(one.distance for one in commits[chunk])
        points.append(Point(last.samples / batch_size, last.t - began, {CLOCK_DISTANCE: float(distance)}))
    return tuple(points)


def _chunks(number: int, most: int) -> Iterator[slice]:
    """Split `number` items into at most `most` non-empty ranges of almost equal length."""
    parts = min(number, most)
    for part in range(parts):
        yield slice(part * number // parts, (part + 1) * number // parts)


def common_curve(runs: Sequence[Sequence[Point]], name: str, axis: Axis) -> tuple[CurvePoint, ...]:
    """The value `name` of several runs against `axis`: mean, minimum and maximum.

    Runs measured at the same points are compared there. Otherwise each is interpolated at `MOST_POINTS` evenly spaced
    points of the common range. Runs without the value are omitted.
    """
    curves = [curve for run in runs if (curve := _curve(run, name, axis))]
    if not curves:
        return ()
    places = [x for x, _ in curves[0]]
    if any([x for x, _ in curve] != places for curve in curves):
        first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
        if first > last:
            return ()
        places = [first + (last - first) * step / (MOST_POINTS - 1) for step in range(MOST_POINTS)]
    found = []
    for x in places:
        values = [_read_off(curve, x) for curve in curves]
        found.append(CurvePoint(x, fmean(values), min(values), max(values)))
    return tuple(found)


def _curve(run: Sequence[Point], name: str, axis: Axis) -> list[tuple[float, float]]:
    return [(getattr(point, axis), point.values[name]) for point in run if name in point.values]


def _read_off(curve: Sequence[tuple[float, float]], x: float) -> float:
    """Linear interpolation at `x`; constant beyond the ends."""
    right = bisect_left(curve, x, key=lambda point: point[0])
    if right == 0:
        return curve[0][1]
    if right == len(curve):
        return curve[-1][1]
    (x0, y0), (x1, y1) = curve[right - 1], curve[right]
    return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
