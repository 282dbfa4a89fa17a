"""HTML page of a comparison: findings, tables, curves over minibatches and over time. Pure.

Computes the values; the template is `templates/compare.html.j2`, which escapes job and metric names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from hetpipe.comparison.record import TrialRecord, TrialState
from hetpipe.comparison.statistics import CLOCK_DISTANCE, Axis, common_curve
from hetpipe.comparison.view import ComparisonView
from hetpipe.report.charts import Chart, Line, chart_scripts, chart_styles, figure_of, measured
from hetpipe.report.page import render_page, resource
from hetpipe.report.text import LOSS, count, duration, loss_first
from hetpipe.values.policies import WEIGHT_POLICIES

_AXES: tuple[tuple[Axis, str], ...] = (("minibatches", "by minibatches"), ("seconds", "by time"))


def page_of(view: ComparisonView, records: Sequence[TrialRecord]) -> str:
    """Render the whole document.

    Args:
        view: the comparison.
        records: all its runs, for the curves.
    """
    colours = _colours(records)
    charts = [tuple(map(figure_of, pair)) for pair in _charts(records, colours)]
    return render_page(
        "compare.html.j2",
        title=view.title,
        subtitle=view.subtitle,
        styles=(*chart_styles(), resource("page.css"), resource("compare.css")),
        scripts=chart_scripts() if charts else (),
        view=view,
        charts=charts,
        colours=colours,
        runs_summary=count(len(records), "run"),
        runs=list(map(_run, records)),
    )


def _charts(records: Sequence[TrialRecord], colours: Mapping[str, str]) -> list[tuple[Chart, ...]]:
    """One chart per measured quantity and axis; empty if no run has data to compare."""
    finished = [one for one in records if one.state is TrialState.FINISHED]
    names = dict.fromkeys(name for one in finished for point in one.evaluations for name in point.values)
    pairs = [_pair(f"Evaluation: {name}", name, finished, "evaluations", colours) for name in loss_first(names)]
    pairs.append(_pair("Training loss", LOSS, finished, "losses", colours))
    pairs.append(_pair("Largest clock distance", CLOCK_DISTANCE, finished, "distances", colours))
    return [pair for pair in pairs if any(chart.lines for chart in pair)]


def _pair(
    title: str,
    name: str,
    finished: Sequence[TrialRecord],
    which: Literal["evaluations", "losses", "distances"],
    colours: Mapping[str, str],
) -> tuple[Chart, ...]:
    charts = []
    for axis, words in _AXES:
        lines = []
        for label in dict.fromkeys(one.label for one in finished):
            runs = [getattr(one, which) for one in finished if one.label == label]
            if points := measured(common_curve(runs, name, axis)):
                lines.append(Line(label, colours[label], points))
        charts.append(Chart(f"{title} {words}", axis, name, tuple(lines)))
    return tuple(charts)


def _colours(records: Sequence[TrialRecord]) -> dict[str, str]:
    """Colour of each row: that of its policy, the same in every comparison, unless values vary."""
    vary = any(one.values for one in records)
    weights = {one.label: one.weights for one in records}
    places = {label: at if vary else WEIGHT_POLICIES.index(weights[label]) for at, label in enumerate(weights)}
    return {label: f"--series-{place % len(WEIGHT_POLICIES)}" for label, place in places.items()}


def _run(record: TrialRecord) -> tuple[str, ...]:
    """Table row of a run."""
    loss = record.evaluations[-1].values.get(LOSS) if record.evaluations else None
    wall = None if record.result is None else record.result.wall_seconds
    return (
        record.label,
        str(record.seed),
        record.state,
        "–" if loss is None else f"{loss:.4f}",
        duration(wall),
        record.run_dir,
    )
