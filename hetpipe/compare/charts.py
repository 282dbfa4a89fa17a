"""Curves over seeds as charts of a page: a line for the mean, a band from the least to the most.

Decided here: what is in a chart, and that a scale is logarithmic. uPlot draws it, in the page, with `curves.js`;
both are written into the page, which loads nothing. Pure, but for reading those files of the package.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from hetpipe.compare.statistics import CurvePoint
from hetpipe.report.page import resource, shipped
from hetpipe.report.quantities import significant

#: A logarithmic scale where the values of a positive quantity span so much.
_LOG_FROM = 8.0


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
    """Curves over the same axes; all texts are any texts. Charts with the same `x_label` share their cursor."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]


def measured(points: Iterable[CurvePoint]) -> tuple[CurvePoint, ...]:
    """Those points that can be drawn: a metric may be infinite, or no number."""
    return tuple(one for one in points if all(map(math.isfinite, (one.x, one.mean, one.least, one.most))))


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart as `templates/curves.html.j2` shows it."""

    title: str
    ends: str
    """In words, where each line ends."""
    data: Mapping[str, Any]
    """Data of the chart, made by `chart_data`; empty where there are no lines."""


def chart_styles() -> tuple[Markup, ...]:
    """For the page's style sheet. They use the variables `--ink`, `--faint` and `--rule`."""
    return shipped("vendor/uplot/uPlot.min.css"), resource("curves.css")


def chart_scripts() -> tuple[Markup, ...]:
    """For the end of the page, in this order: uPlot with its licence, and what draws every figure of the page."""
    licence, uplot = shipped("vendor/uplot/LICENSE"), shipped("vendor/uplot/uPlot.iife.min.js")
    return Markup("/*\n") + licence + Markup("\n*/\n") + uplot, resource("curves.js")


def figure_of(chart: Chart) -> Figure:
    """The chart, ready for the page."""
    if not chart.lines:
        return Figure(chart.title, "", {})
    ends = ", ".join(f"{line.name} ends at {significant_value(line.points[-1].mean)}" for line in chart.lines)
    return Figure(chart.title, ends, chart_data(chart))


def chart_data(chart: Chart) -> dict[str, Any]:
    """What `curves.js` draws.

    `x` and `y` are the labels of the axes, `log` says whether that of y is logarithmic. Of each of `lines`: `name`,
    `colour`, and columns of the same length, `x` and `mean`, and `least` and `most` where runs differ.
    """
    is_log = is_logarithmic([value for line in chart.lines for one in line.points for value in (one.least, one.most)])
    return {
        "x": chart.x_label,
        "y": f"{chart.y_label}, logarithmic" if is_log else chart.y_label,
        "log": is_log,
        "lines": [_line_data(line) for line in chart.lines],
    }


def _line_data(line: Line) -> dict[str, Any]:
    columns = ["x", "mean"]
    if any(one.least < one.most for one in line.points):
        columns += ["least", "most"]
    data = {column: [short_number(getattr(one, column)) for one in line.points] for column in columns}
    return {"name": line.name, "colour": line.colour, **data}


def is_logarithmic(values: Sequence[float]) -> bool:
    """Whether a logarithmic scale shows these values better.

    >>> is_logarithmic([0.1, 0.8]), is_logarithmic([0.1, 0.7]), is_logarithmic([0.0, 0.8])
    (True, False, False)
    """
    return min(values) > 0 and max(values) / min(values) >= _LOG_FROM


def short_number(value: float) -> float:
    """Six digits that mean something; whole numbers as they are, without a point.

    >>> short_number(0.12345678), short_number(1234567.0)
    (0.123457, 1234567)
    """
    return int(value) if float(value).is_integer() else float(f"{value:.6g}")


def significant_value(value: float) -> str:
    """A value in a sentence.

    >>> significant_value(0.08314), significant_value(-1.5)
    ('0.0831', '-1.50')
    """
    return f"{'-' if value < 0 else ''}{significant(abs(value))}"
