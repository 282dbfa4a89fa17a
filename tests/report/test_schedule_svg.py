"""The timeline as SVG: valid XML that needs nothing around it, with boxes where they are in time and texts inside."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from hetpipe.decide.schedule.policy import Kind
from hetpipe.decide.schedule.timeline import Pipeline, Timeline, play
from hetpipe.report.schedule_svg import draw_schedule
from hetpipe.report.schedule_view import version_of

_NS = "{http://www.w3.org/2000/svg}"
_RECTANGLE = re.compile(r"M(\d+) (\d+)h(\d+)v(\d+)h-\3z")

TIMELINES = [
    play(Pipeline(num_stages=4, num_minibatches=12, weights="double_buffer")),
    play(Pipeline(num_stages=11, num_minibatches=13, weights="predict", minibatches_per_wave=11)),
    play(Pipeline(num_stages=2, num_minibatches=120, weights="flush", schedule="gpipe", backward_units=1)),
    play(Pipeline(num_stages=1, num_minibatches=1, backward_units=7)),
]

#: A generous letter of each class of text, in pixels.
LETTER = {"number": 8.4, "version": 6.8}


def parsed(timeline: Timeline) -> ET.Element:
    return ET.fromstring(draw_schedule(timeline).encode())


def rectangles(picture: ET.Element, kind: str) -> list[tuple[int, int, int, int]]:
    """Left, top, width and height of every box of a class, and of its swatch in the legend."""
    paths = [path for path in picture.iter(f"{_NS}path") if path.get("class") == kind]
    found = [match for path in paths for match in _RECTANGLE.finditer(path.attrib["d"])]
    return [(int(match[1]), int(match[2]), int(match[3]), int(match[4])) for match in found]


def texts(picture: ET.Element, kind: str) -> list[ET.Element]:
    return [text for group in picture.iter(f"{_NS}g") if group.get("class") == kind for text in group]


@pytest.mark.parametrize("timeline", TIMELINES)
def test_boxes_are_where_they_are_in_time(timeline: Timeline) -> None:
    picture = parsed(timeline)
    lanes = rectangles(picture, "lane")
    left, _, length, _ = lanes[0]
    unit = length // timeline.end
    wanted: dict[str, set[tuple[int, int, int, int]]] = {"forward": set(), "backward": set(), "update": set()}
    for stage, (_, top, _, height) in zip(timeline.stages, lanes, strict=True):
        for box in stage.boxes:
            kind = "update" if box.makes_update else "forward" if box.action.kind is Kind.FORWARD else "backward"
            wanted[kind].add((left + box.start * unit, top, (box.end - box.start) * unit, height))
    for kind, boxes in wanted.items():
        *found, swatch = rectangles(picture, kind)
        assert len(found) == len(boxes)
        assert set(found) == boxes
        assert swatch[1] > lanes[-1][1] + lanes[-1][3]


@pytest.mark.parametrize("timeline", TIMELINES)
def test_texts_are_inside_their_boxes(timeline: Timeline) -> None:
    picture = parsed(timeline)
    left, _, length, _ = rectangles(picture, "lane")[0]
    unit = length / timeline.end
    boxes = [box for stage in timeline.stages for box in stage.boxes]
    for kind, shown in (
        ("number", [str(box.action.p) for box in boxes]),
        ("version", [version_of(box, predicted="Ŵ") for box in boxes]),
    ):
        found = texts(picture, kind)
        assert [text.text for text in found] == shown
        for text, box in zip(found, boxes, strict=True):
            half = len(str(text.text)) * LETTER[kind] / 2
            middle = float(text.attrib["x"])
            assert left + box.start * unit <= middle - half
            assert middle + half <= left + box.end * unit


@pytest.mark.parametrize("timeline", TIMELINES)
def test_everything_is_on_the_canvas(timeline: Timeline) -> None:
    picture = parsed(timeline)
    width, height = int(picture.attrib["width"]), int(picture.attrib["height"])
    assert picture.attrib["viewBox"] == f"0 0 {width} {height}"
    for text in picture.iter(f"{_NS}text"):
        letter = 9.5 if text.get("class") == "title" else 6.2
        middle = text.get("class") is None and text in texts(picture, "number") + texts(picture, "version")
        end = float(text.attrib["x"]) + (0 if middle else len(str(text.text)) * letter)
        assert 0 < end <= width
        assert 0 < float(text.attrib["y"]) < height
    for kind in ("lane", "forward", "backward", "update"):
        assert all(x + w <= width and y + h <= height for x, y, w, h in rectangles(picture, kind))


def test_it_has_a_name_and_a_description_for_those_who_do_not_see_it() -> None:
    picture = parsed(TIMELINES[0])
    title, description = picture.find(f"{_NS}title"), picture.find(f"{_NS}desc")
    assert picture.get("role") == "img"
    assert title is not None
    assert description is not None
    assert picture.attrib["aria-labelledby"].split() == [title.get("id"), description.get("id")]
    assert title.text == "PipeDream-2BW: weights double_buffer, schedule 1f1b"
    assert "Stage 3: F1 on W0, B1 on W0," in str(description.text)
    assert "B12 on W4." in str(description.text)


def test_it_needs_nothing_from_elsewhere() -> None:
    text = draw_schedule(TIMELINES[1])
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]
    assert re.findall(r"url\(([^)]*)\)", text) == ["#schedule-checks"]
    assert "@import" not in text
    assert "<script" not in text
