"""Curves over seeds as charts of a page: a line for the mean, a band from the least to the most.

Decided here: what is in a chart, and that a scale is logarithmic. uPlot draws it, in the page, with `pages/curves.js`;
both are written into the page, which loads nothing. Pure, but for reading those files of the package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from hetpipe.cli.compare_statistics import CurvePoint
from hetpipe.report.quantities import significant

#: A logarithmic scale where the values of a positive quantity span so much.
_LOG_FROM = 8.0

_CHART_CSS = """
.plot{overflow-x:auto;container-type:inline-size}
.plot .u-legend{width:100%;margin:6px 0 0;font-size:13px}
.plot .u-legend :is(th,td){padding:2px 0 2px 12px;border:0;text-align:right}
.plot .u-legend th:first-child{padding-left:0;text-align:left}
.plot .u-legend thead th{font-weight:500;cursor:default}
.plot .u-series th{color:var(--ink)}
.plot .edge{display:none}
.plot .u-marker{border-radius:3px;width:12px;height:12px}
.plot .u-select{background:var(--ink);opacity:.1}
@container (max-width:440px){
  .plot .u-legend :is(th,td){padding-left:6px;font-size:12px}
  .plot .u-legend :is(th,td):nth-child(2){display:none}
}
"""


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


def chart_style() -> str:
    """For the page's style sheet. It uses the variables `--ink`, `--faint` and `--rule`."""
    return _vendored("uPlot.min.css") + _CHART_CSS


def chart_scripts() -> tuple[str, ...]:
    """For the end of the page, in this order: uPlot with its licence, and what draws every figure of `chart_figure`."""
    own = files("hetpipe.cli") / "pages" / "curves.js"
    return f"/*\n{_vendored('LICENSE')}\n*/\n{_vendored('uPlot.iife.min.js')}", own.read_text(encoding="utf-8")


def _vendored(name: str) -> str:
    return (files("hetpipe") / "vendor" / "uplot" / name).read_text(encoding="utf-8")


def chart_figure(chart: Chart) -> str:
    """The chart as a `<figure>`; it says in words where each line ends. Without lines it says that there are none."""
    caption = f"<figcaption>{escape(chart.title)}</figcaption>"
    if not chart.lines:
        return f'<figure class="card">{caption}<p class="faint">Nothing was measured.</p></figure>'
    ends = ", ".join(f"{line.name} ends at {significant_value(line.points[-1].mean)}" for line in chart.lines)
    # Inside of a script no reference such as &lt; is read: names could end it, unless they have no "<".
    data = json.dumps(chart_data(chart), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        f'<figure class="card curves" aria-label="{escape(chart.title)}: {escape(ends)}">{caption}'
        f'<script type="application/json">{data}</script><div class="plot"></div></figure>'
    )


def chart_data(chart: Chart) -> dict[str, Any]:
    """What `pages/curves.js` draws.

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
