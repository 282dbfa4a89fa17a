"""The pictures of `python -m benchmarks headline --json FILE` and `thousand --json FILE`, as SVG.

`python -m benchmarks.pictures FILE FOLDER` draws, for each model, samples per second of every contender, its loss over
time, and what the nodes add one by one; or how the cost of a clock shard grows with its stages. This module says where
everything is; the templates beside it draw it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_HERE = Path(__file__).parent

#: Pixels.
_WIDTH, _RIGHT = 860, 190
_CHARACTER = 7.2  # of a name, about
_TOP, _ROW, _BOTTOM = 44, 26, 36
_PLOT_HEIGHT = 280

_COLOURS = ("#1f5fa8", "#c2410c", "#15803d", "#7c3aed", "#a16207", "#0e7490", "#be185d", "#4a5563")

_RATES, _CURVES = "samples per second, seconds and shares of time", "seconds and loss"
_NODES = "simulated samples per second, node by node"
_GROWTH = "stages on one clock shard"


def bars(
    title: str, rows: Sequence[tuple[str, float, float | None]], *, legend: str, mark_name: str = "simulated"
) -> str:
    """An SVG of horizontal bars.

    Args:
        title: heading.
        rows: name, length, and where a mark is; None for no mark.
        legend: what they mean.
        mark_name: what is at a mark.
    """
    longest = max(max(value, mark or 0.0) for _, value, mark in rows)
    left = round(24 + _CHARACTER * max(len(name) for name, _, _ in rows))
    scale = (_WIDTH - left - _RIGHT) / longest
    drawn = [
        {
            "name": name,
            "y": _TOP + index * _ROW,
            "width": round(scale * value, 1),
            "mark": None if mark is None else round(left + scale * mark, 1),
            "end": round(left + scale * max(value, mark or 0.0) + 8, 1),
            "text": f"{value:.0f}" + ("" if mark is None else f" ({mark_name} {mark:.0f})"),
        }
        for index, (name, value, mark) in enumerate(rows)
    ]
    height = _TOP + len(rows) * _ROW + _BOTTOM
    return _drawn("bars.svg.j2", title=title, rows=drawn, width=_WIDTH, height=height, left=left, legend=legend)


def lines(title: str, curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """An SVG of curves over seconds, with a grid and a legend; those of one colour differ by their dashes."""
    points = [point for curve in curves.values() for point in curve]
    last = max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    left, right, bottom = 56, _WIDTH - _RIGHT - 30, _TOP + _PLOT_HEIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (right - left) * x / last, bottom - _PLOT_HEIGHT * (y - low) / (high - low)

    drawn = [
        {
            "name": name,
            "colour": _COLOURS[index % len(_COLOURS)],
            "dashes": "none" if index < len(_COLOURS) else "5 3",
            "points": " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in curve),
            "y": _TOP + 10 + index * 18,
        }
        for index, (name, curve) in enumerate(curves.items())
    ]
    up = [{"at": round(place(0.0, y)[1], 1), "text": f"{y:.1f}"} for y in _ticks(low, high)]
    across = [{"at": round(place(x, low)[0], 1), "text": f"{x:g} s"} for x in _ticks(0.0, last)]
    height = max(bottom + _BOTTOM, _TOP + 10 + 18 * len(curves) + _BOTTOM)
    return _drawn(
        "lines.svg.j2",
        title=title,
        lines=drawn,
        up=up,
        across=across,
        width=_WIDTH,
        height=height,
        left=left,
        right=right,
        bottom=bottom,
    )


def _ticks(low: float, high: float) -> list[float]:
    """About five round values between two.

    >>> _ticks(0.0, 21.0), _ticks(1.2, 2.3)
    ([0.0, 5.0, 10.0, 15.0, 20.0], [1.2, 1.4, 1.6, 1.8, 2.0, 2.2])
    """
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((factor * power for factor in (1, 2, 5, 10)), key=lambda size: abs(size - rough))
    first = math.ceil(round(low / step, 6))
    return [round(step * number, 6) for number in range(first, math.floor(round(high / step, 6)) + 1)]


def _drawn(template: str, **values: Any) -> str:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)


def draw(said: Mapping[str, Any], folder: Path) -> None:
    """Write all pictures of a run into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    models = [name.removesuffix(f", {_RATES}") for name in said if name.endswith(_RATES)]
    for model in models:
        rates = [(name, one["measured"], one["simulated"]) for name, one in said[f"{model}, {_RATES}"].items()]
        title = f"Like {model}: samples per second on the paper's cluster, emulated"
        _write(folder / f"{model}-rates.svg", bars(title, rates, legend="bars: measured; line: simulated"))
        title = f"Like {model}: loss over seconds of the cluster, D = 0"
        # Three curves of one allocation, one per D, would hide all others.
        curves = {
            name: said[f"{model}, {_CURVES}"][name] for name, *_ in rates if "D = " not in name or "D = 0" in name
        }
        _write(folder / f"{model}-loss.svg", lines(title, curves))
        nodes = [
            (f"{name}, {contender}", rate, None)
            for name, row in said[f"{model}, {_NODES}"].items()
            for contender, rate in row.items()
            if contender != "its devices"
        ]
        title = f"Like {model}: nodes added one by one"
        _write(folder / f"{model}-nodes.svg", bars(title, nodes, legend="samples per second, simulated"))
    for name, sizes in said.items():
        if name.endswith(_GROWTH):
            _write(folder / "growth.svg", growth(sizes))


def growth(sizes: Mapping[str, Mapping[str, float]]) -> str:
    """An SVG of how late a clock is, and how long the clock shard computes per wave, by the number of stages.

    For four times the stages of the largest run, the clock shard's time is that of the line through the two largest.
    """
    late = [(f"{name}: late", one["milliseconds late, median"], one["99th percentile"]) for name, one in sizes.items()]
    per_wave = {
        int(name.split()[0]): int(name.split()[0]) * one["milliseconds of processor per stage and wave"]
        for name, one in sizes.items()
        if "a wave of" not in name
    }
    (before, low), (last, high) = sorted(per_wave.items())[-2:]
    busy = [(f"{number} stages: clock shard", value, None) for number, value in per_wave.items()]
    busy.append((f"{4 * last} stages: extrapolated", high + (high - low) * 3 * last / (last - before), None))
    title = "Milliseconds from the last commit to a published clock, and of processor per wave"
    legend = "line: 99th percentile; waves shorter than the clock shard's bar saturate it"
    return bars(title, [*late, *busy], legend=legend, mark_name="99th percentile")


def _write(path: Path, picture: str) -> None:
    path.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
