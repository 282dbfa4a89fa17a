"""Curves as SVG: well-formed, named, within their frame."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest

from hetpipe.cli.compare_statistics import CurvePoint
from hetpipe.cli.line_chart import Chart, Line, apart, draw_chart, even_ticks, log_ticks


def line(name: str, values: list[float], spread: float = 0.0) -> Line:
    points = tuple(
        CurvePoint(10.0 * n, value, value - spread, value + spread) for n, value in enumerate(values, start=1)
    )
    return Line(name, "--series-0", points)


def drawn(*lines: Line) -> ET.Element:
    return ET.fromstring(draw_chart(Chart("A <title>", "minibatches", "loss", lines)))


def test_what_it_shows_is_said() -> None:
    svg = drawn(line("wave", [2.0, 1.0], 0.1), line("a & b", [2.0, 1.5]))
    assert svg.attrib["role"] == "img"
    assert svg.attrib["aria-label"] == "A <title>: wave ends at 1.00, a & b ends at 1.50"
    texts = [text.text for text in svg.iter("text")]
    assert {"wave", "a & b", "minibatches", "loss"} <= set(texts)
    told = [title.text for title in svg.iter("title")]
    assert "wave: 1.00 (0.900 to 1.10) at 20 minibatches" in told
    assert "a & b: 1.50 at 20 minibatches" in told


def test_a_band_is_there_only_where_runs_differ() -> None:
    assert len(list(drawn(line("one", [1.0, 2.0])).iter("polygon"))) == 0
    assert len(list(drawn(line("three", [1.0, 2.0], 0.2)).iter("polygon"))) == 1


def test_everything_is_inside_the_frame() -> None:
    svg = drawn(line("a", [3.0, 0.01], 0.005), line("b", [3.0, 0.5]), line("c", [2.9, 0.5]))
    width, height = map(float, svg.attrib["viewBox"].split()[2:])
    for shape in (*svg.iter("polyline"), *svg.iter("polygon")):
        for x, y in (map(float, pair.split(",")) for pair in shape.attrib["points"].split()):
            assert 0 <= x <= width
            assert 0 <= y <= height
    names = [float(text.attrib["y"]) for text in svg.iter("text") if text.attrib.get("class") == "name"]
    assert min(abs(a - b) for a in names for b in names if a != b) >= 14
    assert len(set(names)) == 3


def test_a_wide_range_is_logarithmic() -> None:
    assert any(text.text == "loss, logarithmic" for text in drawn(line("a", [2.0, 0.1])).iter("text"))
    assert any(text.text == "loss" for text in drawn(line("a", [2.0, 1.0])).iter("text"))
    assert any(text.text == "loss" for text in drawn(line("a", [2.0, -1.0])).iter("text"))


def test_many_points_do_not_all_tell_their_figures() -> None:
    svg = drawn(line("a", [1.0 + 1 / n for n in range(1, 201)]))
    assert len(list(svg.iter("circle"))) == 40


def test_a_single_point_and_none() -> None:
    assert len(list(drawn(line("a", [0.0])).iter("circle"))) == 1
    nothing = draw_chart(Chart("A <title>", "x", "y", (Line("a", "--c", ()),)))
    assert nothing == '<p class="faint">A &lt;title&gt;: nothing was measured.</p>'


def test_ticks_are_round_and_inside() -> None:
    assert even_ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert even_ticks(-3.0, 4.0) == [-2.0, 0.0, 2.0, 4.0]
    assert log_ticks(0.5, 1.0) == [0.5, 1.0]


@pytest.mark.parametrize("heights", [[1, 2, 3], [95, 96, 97], [10, 50, 90]])
def test_names_are_moved_apart(heights: list[float]) -> None:
    moved = apart(heights, 14, 100)
    assert all(b - a >= 14 for a, b in pairwise(moved))
    assert moved[-1] <= 100


def test_no_script_and_nothing_from_elsewhere() -> None:
    text = draw_chart(Chart("t", "x", "y", (line("a", [1.0, 2.0]),)))
    assert not re.search(r"<script|href|url\(|http", text)
