"""Curves over seeds as an SVG: a line for the mean, a band from the least to the most. Pure: points in, text out.

Lines are named at their ends, and every measured place tells its figures when it is pointed at, without any script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from hetpipe.cli.compare_statistics import CurvePoint
from hetpipe.cli.quantities import significant

#: Pixels at full size; the picture shrinks with the page.
_WIDTH, _HEIGHT = 540, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 108, 12, 40
_LABEL_HEIGHT = 14
_TICKS = 6

#: A logarithmic scale where the values of a positive quantity span so much.
_LOG_FROM = 8.0
#: Beyond so many points of a line only some tell their figures.
_MOST_POINTED = 40

#: To be put into the page's style sheet once; the colours are those of the page's series, `--series-0` and so on.
CHART_CSS = """
.chart{width:100%;height:auto}
.chart text{font:12px ui-sans-serif,system-ui,sans-serif;fill:var(--faint)}
.chart .grid{stroke:var(--rule)}
.chart .line{fill:none;stroke-width:2;stroke-linejoin:round}
.chart .band{opacity:.16;stroke:none}
.chart .place{fill:transparent}
.chart .place:hover{fill:var(--ink)}
.chart .name{font-weight:600}
"""


@dataclass(frozen=True, slots=True)
class Line:
    """One curve."""

    name: str
    """Any text."""
    colour: str
    """Name of a variable of the page's style sheet, such as `--series-0`."""
    points: tuple[CurvePoint, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over the same axes; all texts are any texts."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        position: Callable[[float], float] = math.log if self.is_log else float
        low, high = position(self.low), position(self.high)
        share = (position(value) - low) / (high - low)
        return round(self.start + (self.end - self.start) * share, 1)


def draw_chart(chart: Chart) -> str:
    """The chart as an `<svg>` element of the class `chart`; nothing but a sentence where there are no points."""
    lines = [line for line in chart.lines if line.points]
    if not lines:
        return f'<p class="faint">{escape(chart.title)}: nothing was measured.</p>'
    return "\n".join(_parts(chart, lines))


def _parts(chart: Chart, lines: Sequence[Line]) -> Iterator[str]:
    xs = [point.x for line in lines for point in line.points]
    values = [value for line in lines for point in line.points for value in (point.least, point.most)]
    x = _Scale(*_range(min(0.0, *xs), max(xs)), start=_LEFT, end=_WIDTH - _RIGHT)
    is_log = min(values) > 0 and max(values) / min(values) >= _LOG_FROM
    y = _Scale(*_range(min(values), max(values)), start=_HEIGHT - _BOTTOM, end=_TOP, is_log=is_log)
    ends = ", ".join(f"{line.name} ends at {significant_value(line.points[-1].mean)}" for line in lines)
    yield (
        f'<svg class="chart" role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'aria-label="{escape(chart.title)}: {escape(ends)}">'
    )
    yield from _axes(chart, x, y)
    for line in lines:
        yield from _line(chart, line, x, y)
    yield from _names(lines, x, y)
    yield "</svg>"


def _range(low: float, high: float) -> tuple[float, float]:
    """The same, or something around a single value."""
    return (low, high) if high > low else (low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2)


def _axes(chart: Chart, x: _Scale, y: _Scale) -> Iterator[str]:
    for value in log_ticks(y.low, y.high) if y.is_log else even_ticks(y.low, y.high):
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value)}" y2="{y(value)}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{tick_text(value)}</text>'
    for value in even_ticks(x.low, x.high):
        yield f'<text x="{x(value)}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{tick_text(value)}</text>'
    logarithmic = ", logarithmic" if y.is_log else ""
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    yield f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(chart.x_label)}</text>'
    yield (
        f'<text transform="translate(12 {(_TOP + _HEIGHT - _BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y_label)}{logarithmic}</text>"
    )


def _line(chart: Chart, line: Line, x: _Scale, y: _Scale) -> Iterator[str]:
    points = line.points
    if any(point.least < point.most for point in points):
        around = [(point.x, point.most) for point in points] + [(point.x, point.least) for point in reversed(points)]
        yield f'<polygon class="band" style="fill:var({line.colour})" points="{_places(around, x, y)}"/>'
    mean = _places([(point.x, point.mean) for point in points], x, y)
    yield f'<polyline class="line" style="stroke:var({line.colour})" points="{mean}"/>'
    step = -(-len(points) // _MOST_POINTED)
    for point in points[step - 1 :: step]:
        spread = f" ({significant_value(point.least)} to {significant_value(point.most)})"
        yield (
            f'<circle class="place" cx="{x(point.x)}" cy="{y(point.mean)}" r="4"><title>{escape(line.name)}: '
            f"{significant_value(point.mean)}{spread if point.least < point.most else ''} at "
            f"{tick_text(point.x)} {escape(chart.x_label)}</title></circle>"
        )


def _places(points: Sequence[tuple[float, float]], x: _Scale, y: _Scale) -> str:
    return " ".join(f"{x(across)},{y(up)}" for across, up in points)


def _names(lines: Sequence[Line], x: _Scale, y: _Scale) -> Iterator[str]:
    """Each line's name at its end, moved apart where ends are close."""
    ordered = sorted(lines, key=lambda line: y(line.points[-1].mean))
    heights = apart([y(line.points[-1].mean) for line in ordered], _LABEL_HEIGHT, _HEIGHT - _BOTTOM)
    right = x(max(line.points[-1].x for line in lines)) + 8
    for line, height in zip(ordered, heights, strict=True):
        yield (
            f'<text class="name" style="fill:var({line.colour})" x="{right}" y="{height + 4:.1f}">'
            f"{escape(line.name)}</text>"
        )


def apart(heights: Sequence[float], distance: float, most: float) -> list[float]:
    """Ascending heights, moved so little that neighbours are `distance` apart and none is beyond `most`.

    >>> apart([10, 12, 50], 14, 100), apart([90, 95], 14, 100)
    ([10, 24, 50], [86, 100])
    """
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + distance) if moved else height)
    limit = most
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - distance
    return moved


def even_ticks(low: float, high: float) -> list[float]:
    """Round values in a range: multiples of 1, 2 or 5 times a power of ten.

    >>> even_ticks(0.0, 2700.0), even_ticks(0.13, 0.97)
    ([0.0, 500.0, 1000.0, 1500.0, 2000.0, 2500.0], [0.2, 0.4, 0.6, 0.8])
    """
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Values 1, 2 and 5 times a power of ten in a range.

    >>> log_ticks(0.03, 2.4)
    [0.05, 0.1, 0.2, 0.5, 1.0, 2.0]
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [float(f"{factor}e{power}") for power in powers for factor in (1, 2, 5)]
    return [value for value in values if low <= value <= high]


def tick_text(value: float) -> str:
    """A value at an axis, without digits that say nothing.

    >>> tick_text(2500.0), tick_text(0.2), tick_text(0.0)
    ('2500', '0.2', '0')
    """
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"  # noqa: PLR2004 - four digits


def significant_value(value: float) -> str:
    """A value in a sentence.

    >>> significant_value(0.08314), significant_value(-1.5)
    ('0.0831', '-1.50')
    """
    return f"{'-' if value < 0 else ''}{significant(abs(value))}"
