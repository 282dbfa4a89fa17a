"""Curves as data for uPlot, which is as it was published; names stay names."""

from __future__ import annotations

import json
import math
import re
from hashlib import sha256
from importlib.resources import files
from typing import Any

import pytest

from hetpipe.report.charts import (
    Chart,
    CurvePoint,
    Line,
    chart_data,
    chart_scripts,
    chart_styles,
    figure_of,
    is_logarithmic,
    measured,
    short_number,
)
from hetpipe.report.page import render
from tests.report.test_plan_page import Page

HOSTILE = '</script><script>alert(1)</script><!-- "&'


def line(name: str, values: list[float], spread: float = 0.0) -> Line:
    points = tuple(
        CurvePoint(10.0 * n, value, value - spread, value + spread) for n, value in enumerate(values, start=1)
    )
    return Line(name, "--series-0", points)


def chart(*lines: Line, title: str = "A <title>", y_label: str = "loss") -> Chart:
    return Chart(title, "minibatches", y_label, lines)


def chart_figure(chart: Chart) -> str:
    return str(render("curves.html.j2", chart=figure_of(chart)))


def data_in(figure: str) -> Any:
    (found,) = re.findall(r'<script type="application/json">(.*?)</script>', figure)
    return json.loads(found)


def test_the_data_is_the_points() -> None:
    data = chart_data(chart(line("wave", [2.0, 1.0], 0.25), line("stash", [2.0, 1.1234567])))
    assert data == {
        "x": "minibatches",
        "y": "loss",
        "log": False,
        "steps": False,
        "lines": [
            {
                "name": "wave",
                "colour": "--series-0",
                "x": [10, 20],
                "mean": [2, 1],
                "least": [1.75, 0.75],
                "most": [2.25, 1.25],
            },
            {"name": "stash", "colour": "--series-0", "x": [10, 20], "mean": [2, 1.12346]},
        ],
    }
    assert data_in(chart_figure(chart(line("wave", [2.0])))) == chart_data(chart(line("wave", [2.0])))


def test_a_wide_range_of_a_positive_quantity_is_logarithmic() -> None:
    def axis(*lines: Line) -> tuple[str, bool]:
        data = chart_data(chart(*lines))
        return data["y"], data["log"]

    assert axis(line("a", [2.0, 0.25])) == ("loss, logarithmic", True)
    assert axis(line("a", [2.0]), line("b", [0.25])) == ("loss, logarithmic", True)
    assert axis(line("a", [2.0, 0.26])) == ("loss", False)
    assert axis(line("a", [2.0, 0.26], 0.1)) == ("loss, logarithmic", True)
    assert axis(line("a", [2.0, -1.0])) == ("loss", False)


@pytest.mark.parametrize(
    ("values", "expected"), [([1.0, 8.0], True), ([1.0, 7.9], False), ([0.0, 8.0], False), ([-8.0, -1.0], False)]
)
def test_the_rule_of_logarithms(values: list[float], expected: bool) -> None:  # noqa: FBT001 - a parameter of a test
    assert is_logarithmic(values) is expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_not_drawn(bad: float) -> None:
    good = CurvePoint(1.0, 2.0, 1.0, 3.0)
    assert measured([good, CurvePoint(2.0, bad, 1.0, bad)]) == (good,)


def test_numbers_are_short() -> None:
    assert [short_number(value) for value in (1 / 3, 1234567.0, 1e-9, 12, -0.5)] == [0.333333, 1234567, 1e-09, 12, -0.5]
    assert json.dumps(short_number(12.0)) == "12"


def test_a_figure_says_in_words_where_lines_end() -> None:
    figure = Page(chart_figure(chart(line("wave", [2.0, 1.0], 0.1), line("a & b", [2.0, 1.5]))))
    tag, attributes = figure.elements[0]
    assert (tag, attributes["aria-label"]) == ("figure", "A <title>: wave ends at 1.00, a & b ends at 1.50")
    assert "A <title>" in figure.text


def test_nothing_measured() -> None:
    figure = Page(chart_figure(chart()))
    assert figure.text == "A <title>Nothing was measured."
    assert "script" not in dict(figure.elements)


def test_names_cannot_end_the_data() -> None:
    figure = chart_figure(chart(line(HOSTILE, [2.0, 1.0]), title=HOSTILE, y_label=HOSTILE))
    assert figure.lower().count("<script") == figure.lower().count("</script") == 1
    assert "<!--" not in figure
    data = data_in(figure)
    assert (data["y"], data["lines"][0]["name"]) == (HOSTILE, HOSTILE)


def test_uplot_is_as_published_and_comes_with_its_licence() -> None:
    folder = files("hetpipe") / "vendor" / "uplot"
    sums = dict(re.findall(r"\| `([\w.]+)` \| `(\w{64})` \|", (folder / "README.md").read_text()))
    found = {one.name: sha256(one.read_bytes()).hexdigest() for one in folder.iterdir() if one.name != "README.md"}
    assert found == sums
    uplot, _ = chart_scripts()
    assert uplot.startswith("/*\nThe MIT License")
    version = re.search(r"uPlot \(v([\d.]+)\)", uplot)
    assert version is not None
    assert f"Version {version[1]}," in (folder / "README.md").read_text()


def test_scripts_load_nothing_and_write_no_html() -> None:
    _, own = chart_scripts()
    assert not re.search(r"https?:|import|fetch|XMLHttpRequest|innerHTML|document\.write|eval", own)
    assert not any(re.search(r"url\(|@import", style) for style in chart_styles())
