"""The charts of a run, and of several runs over the same axes.

What a rewind has undone is drawn faint, as a line of its own: the line of the training goes on from the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from hetpipe.observe.metrics import TimedWave, WaveMetrics
from hetpipe.report.charts import Chart, CurvePoint, Line, measured
from hetpipe.report.text import LOSS, loss_first
from hetpipe.ui.snapshot import Attempt, Evaluation, RunSnapshot
from hetpipe.values.sync import SYNC_KINDS

#: Most points of a line: enough for its shape, few enough to average single waves.
_MOST_POINTS = 160

#: Colours of the lines of one run, and of runs that are compared: variables of `compare.css`.
_TRAINING, _EVALUATION, _UNDONE, _BOUND = "--series-0", "--series-1", "--faint", "--accent"
NUM_COLOURS = 7

Value = Callable[[WaveMetrics], float | None]


def charts_of(snapshot: RunSnapshot) -> list[Chart]:
    """The charts of one run, the most wanted first; empty before its first wave."""
    loss = [
        *_training(snapshot.attempts, "training", _TRAINING),
        *_evaluated(snapshot, LOSS, "evaluation", _EVALUATION),
    ]
    names = loss_first({name: None for one in snapshot.evaluations for name in one.values})
    found = [Chart("Loss", "minibatches", "loss", tuple(loss))]
    found += [
        Chart(f"Evaluation: {name}", "minibatches", name, tuple(_evaluated(snapshot, name, name, _EVALUATION)))
        for name in names
        if name != LOSS
    ]
    found += _named_losses(snapshot.attempts[-1])
    if len({one.wave.learning_rate for own in snapshot.attempts[-1].waves for one in own}) > 1:
        rates = _state(snapshot.attempts, lambda one: one.learning_rate)
        found.append(Chart("Learning rate", "minibatches", "learning rate", rates))
    norms = _state(snapshot.attempts, lambda one: one.gradient_norm)
    found.append(Chart("Gradient norm", "minibatches", "norm before clipping", norms))
    return [chart for chart in found if chart.lines]


def clock_chart(snapshot: RunSnapshot) -> Chart:
    """The distance between the fastest and the slowest virtual worker over time, and its bound; newest attempt."""
    commits = snapshot.attempts[-1].commits
    if not commits:
        return Chart("Clock distance", "seconds", "waves", ())
    began, ended = commits[0].t, commits[-1].t
    points = [
        _whole(commits[first].t - began, max(one.distance for one in commits[first:last]))
        for first, last in _chunks(len(commits))
    ]
    if points[-1].x < ended - began:
        points.append(_whole(ended - began, commits[-1].distance))
    lines = [Line("largest distance", _TRAINING, tuple(points))]
    bound = bound_of(snapshot)
    if bound is not None:
        ends = (points[0].x, points[-1].x)
        lines.append(Line("bound D + 1", _BOUND, tuple(_whole(x, bound) for x in ends)))
    return Chart("Clock distance", "seconds", "waves", tuple(lines), has_steps=True)


def _whole(x: float, value: int) -> CurvePoint:
    return CurvePoint(x, value, value, value)


def bound_of(snapshot: RunSnapshot) -> int | None:
    """D + 1, the largest distance allowed; None if there is none, or it is unknown."""
    sync = snapshot.brief.job.get("sync")
    if not isinstance(sync, Mapping):
        return None
    traits, given = SYNC_KINDS.get(str(sync.get("kind"))), sync.get("D")
    if traits is None or traits.bound == "none":
        return None
    staleness = 0 if traits.bound == "zero" else given
    return staleness + 1 if isinstance(staleness, int) else None


def compared(runs: Sequence[RunSnapshot]) -> list[Chart]:
    """Charts of several runs, a line for each; charts without a line are left out."""
    colours = [f"--series-{index % NUM_COLOURS}" for index in range(len(runs))]
    named = list(zip(runs, colours, strict=True))
    training = [line for run, colour in named for line in _training(run.attempts, run.brief.name, colour)[-1:]]
    found = [Chart("Training loss", "minibatches", "loss", tuple(training))]
    for name in loss_first({name: None for run in runs for one in run.evaluations for name in one.values}):
        lines = [line for run, colour in named for line in _evaluated(run, name, run.brief.name, colour)[-1:]]
        found.append(Chart(f"Evaluation: {name}", "minibatches", name, tuple(lines)))
    return [chart for chart in found if chart.lines]


def _training(attempts: Sequence[Attempt], name: str, colour: str) -> list[Line]:
    """The training loss, last; before it, what rewinds have undone."""
    return _parts(attempts, name, colour, lambda attempt: _averaged(attempt, lambda wave: wave.loss))


def _parts(
    attempts: Sequence[Attempt], name: str, colour: str, curve: Callable[[Attempt], list[CurvePoint]]
) -> list[Line]:
    curves = [curve(attempt) for attempt in attempts]
    valid: list[CurvePoint] = []
    lines = []
    for number, (points, attempt) in enumerate(zip(curves, attempts, strict=True)):
        undone = [point for point in valid if point.x > attempt.start]
        if number and undone:
            lines.append(Line(f"{name}, undone by rewind {number}", _UNDONE, tuple(undone)))
        valid = [*(point for point in valid if point.x <= attempt.start), *points]
    return [*lines, Line(name, colour, tuple(valid))] if valid else lines


def _averaged(attempt: Attempt, value: Value) -> list[CurvePoint]:
    """Means over consecutive waves of all virtual workers; the band is that of the virtual workers' means."""
    waves = sorted(((one, vw) for vw, own in enumerate(attempt.waves) for one in own), key=lambda pair: pair[0].t)
    done = attempt.start
    points = []
    # A point has about as many waves as there are virtual workers, or it would be the loss of one of them.
    for first, last in _chunks(len(waves), least=max(1, len(attempt.waves))):
        chunk = waves[first:last]
        done += sum(one.wave.minibatches for one, _ in chunk)
        by_worker: dict[int, list[TimedWave]] = {}
        for one, vw in chunk:
            by_worker.setdefault(vw, []).append(one)
        means = [mean for own in by_worker.values() if (mean := _mean(own, value)) is not None]
        whole = _mean([one for one, _ in chunk], value)
        if whole is not None:
            points.append(CurvePoint(done, whole, min(means), max(means)))
    return list(measured(points))


def _mean(waves: Iterable[TimedWave], value: Value) -> float | None:
    known = [(found, one.wave.weight) for one in waves if (found := value(one.wave)) is not None]
    total = sum(weight for _, weight in known)
    return sum(found * weight for found, weight in known) / total if total else None


def _evaluated(snapshot: RunSnapshot, name: str, label: str, colour: str) -> list[Line]:
    """A metric at each evaluation of the whole evaluation data, last; before it, evaluations that were undone."""
    starts = [attempt.start for attempt in snapshot.attempts]

    def is_undone(one: Evaluation) -> bool:
        return any(one.minibatches > start for start in starts[one.rewinds + 1 :])

    lines = []
    for undone in (True, False):
        points = [
            CurvePoint(one.minibatches, value, value, value)
            for one in snapshot.evaluations
            if one.whole and is_undone(one) is undone
            if (value := one.values.get(name)) is not None and math.isfinite(value)
        ]
        # Of several at the same place, the last one.
        points = [one for at, one in enumerate(points) if at + 1 == len(points) or points[at + 1].x > one.x]
        if points:
            lines.append(
                Line(f"{label}, undone", _UNDONE, tuple(points)) if undone else Line(label, colour, tuple(points))
            )
    return lines


def _named_losses(attempt: Attempt) -> list[Chart]:
    """Each of several losses."""
    names = sorted({name for own in attempt.waves for one in own[:1] for name in one.wave.losses})
    lines = []
    for index, name in enumerate(names):
        points = _averaged(attempt, lambda wave, name=name: wave.losses.get(name))  # type: ignore[misc]
        if points:
            lines.append(Line(name, f"--series-{index % NUM_COLOURS}", tuple(points)))
    return [Chart("Training losses by name", "minibatches", "loss", tuple(lines))] if lines else []


def _state(attempts: Sequence[Attempt], value: Value) -> tuple[Line, ...]:
    points = _averaged(attempts[-1], value)
    return (Line("mean", _TRAINING, tuple(points)),) if points else ()


def _chunks(number: int, *, least: int = 1) -> list[tuple[int, int]]:
    """Split `number` items into ranges of about equal length, of at least `least` items if there are as many."""
    parts = min(-(-number // least), _MOST_POINTS)
    return [(part * number // parts, (part + 1) * number // parts) for part in range(parts)]
