"""Charts of curves over several runs or workers: a line for the mean, a band from minimum to maximum.

Selects the content of a chart and its scale. uPlot draws it in the page with `curves.js`; both are inlined, and the
page loads nothing. Pure, except for reading those package files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from hetpipe.values.quantities import significant

#: A logarithmic scale where the values of a positive quantity span so much.
_LOG_FROM = 8.0


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One point of a curve over several runs, or several virtual workers."""

    x: float
    mean: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Line:
    """One curve."""

    name: str
    """Any text."""
    colour: str
    """Name of a variable of the page's style sheet, such as `--series-0`."""
    points: tuple[CurvePoint, ...]
    """At least one, at ascending places, all finite; see `measured`."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over the same axes; texts are free-form. Charts with the same `x_label` share their cursor."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    has_steps: bool = False
    """Values are whole numbers, each until the next point."""


def measured(points: Iterable[CurvePoint]) -> tuple[CurvePoint, ...]:
    """Points that can be drawn; infinite and NaN metrics are dropped."""
    return tuple(one for one in points if all(map(math.isfinite, (one.x, one.mean, one.least, one.most))))


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart as input of `templates/curves.html.j2`."""

    title: str
    ends: str
    """In words, where each line ends."""
    data: Mapping[str, Any]
    """Data of the chart, made by `chart_data`; empty where there are no lines."""


def chart_styles() -> tuple[Markup, ...]:
    """CSS for the page's style sheet. Uses the variables `--ink`, `--faint` and `--rule`."""
    from hetpipe.report.page import resource, shipped  # jinja2 is for pages only: commands compute curves for screens

    return shipped("vendor/uplot/uPlot.min.css"), resource("curves.css")


def chart_scripts() -> tuple[Markup, ...]:
    """Scripts for the end of the page, in this order: uPlot with its licence, and the code that draws all figures."""
    from hetpipe.report.page import resource, shipped  # as above

    licence, uplot = shipped("vendor/uplot/LICENSE"), shipped("vendor/uplot/uPlot.iife.min.js")
    return Markup("/*\n") + licence + Markup("\n*/\n") + uplot, resource("curves.js")


def figure_of(chart: Chart) -> Figure:
    """Convert a chart for the page."""
    if not chart.lines:
        return Figure(chart.title, "", {})
    ends = ", ".join(f"{line.name} ends at {significant_value(line.points[-1].mean)}" for line in chart.lines)
    return Figure(chart.title, ends, chart_data(chart))


def chart_data(chart: Chart) -> dict[str, Any]:
    """JSON input of `curves.js`.

    `x` and `y` are axis labels; `log` is whether the y axis is logarithmic, `steps` whether values are whole numbers,
    each until the next point. Each of `lines` has `name`, `colour`, and columns of equal length: `x`, `mean`, and
    `least` and `most` where runs differ.
    """
    is_log = is_logarithmic([value for line in chart.lines for one in line.points for value in (one.least, one.most)])
    return {
        "x": chart.x_label,
        "y": f"{chart.y_label}, logarithmic" if is_log else chart.y_label,
        "log": is_log,
        "steps": chart.has_steps,
        "lines": [_line_data(line) for line in chart.lines],
    }


def _line_data(line: Line) -> dict[str, Any]:
    columns = ["x", "mean"]
    if any(one.least < one.most for one in line.points):
        columns += ["least", "most"]
    data = {column: [short_number(getattr(one, column)) for one in line.points] for column in columns}
    return {"name": line.name, "colour": line.colour, **data}


def is_logarithmic(values: Sequence[float]) -> bool:
    """Whether the values call for a logarithmic scale.

    >>> is_logarithmic([0.1, 0.8]), is_logarithmic([0.1, 0.7]), is_logarithmic([0.0, 0.8])
    (True, False, False)
    """
    return min(values) > 0 and max(values) / min(values) >= _LOG_FROM


def short_number(value: float) -> float:
    """Six significant digits; whole numbers without a decimal point.

    >>> short_number(0.12345678), short_number(1234567.0)
    (0.123457, 1234567)
    """
    return int(value) if float(value).is_integer() else float(f"{value:.6g}")


def significant_value(value: float) -> str:
    """A value formatted for a sentence, with three significant digits.

    >>> significant_value(0.08314), significant_value(-1.5)
    ('0.0831', '-1.50')
    """
    return f"{'-' if value < 0 else ''}{significant(abs(value))}"
