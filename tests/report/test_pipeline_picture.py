"""The picture of a pipeline: boxes where the activities are, in true proportion."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from hetpipe.decide.planner.costs import TICKS_PER_MS
from hetpipe.decide.simulator.result import ActivityKind, SimulatedActivity
from hetpipe.report.pipeline_picture import PictureRow, draw_pipeline

ROWS = [PictureRow(0, 0, "first <&>"), PictureRow(0, 1, "second")]


def activity(
    kind: ActivityKind, stage: int | None, number: int, start_ms: int, end_ms: int, *, shard: int | None = None
) -> SimulatedActivity:
    vw = None if stage is None else 0
    return SimulatedActivity(kind, vw, stage, shard, number, start_ms * TICKS_PER_MS, end_ms * TICKS_PER_MS)


#: One minibatch through two stages, then a second one that waits for weights.
STORY = [
    activity(ActivityKind.FORWARD, 0, 1, 0, 10),
    activity(ActivityKind.ACTIVATIONS, 0, 1, 10, 12),
    activity(ActivityKind.FORWARD, 1, 1, 12, 20),
    activity(ActivityKind.BACKWARD, 1, 1, 20, 36),
    activity(ActivityKind.PUSH, 1, 0, 36, 40, shard=3),
    activity(ActivityKind.GRADIENTS, 1, 1, 36, 38),
    activity(ActivityKind.BACKWARD, 0, 1, 38, 58),
    activity(ActivityKind.PUBLISH, None, 1, 70, 70),
    activity(ActivityKind.PULL, 0, 1, 70, 75, shard=0),
    activity(ActivityKind.FORWARD, 0, 2, 75, 85),
]


def draw(end_ms: int = 85, story: list[SimulatedActivity] | None = None) -> ET.Element:
    activities = STORY if story is None else story
    svg = draw_pipeline(activities, ROWS, end_ticks=end_ms * TICKS_PER_MS, title='a "picture" of <it>')
    return ET.fromstring(svg)


def rects(picture: ET.Element, kind: str) -> list[ET.Element]:
    if kind in ("forward", "backward"):
        return [rect for group in picture.iter("g") if group.get("class") == kind for rect in group.iter("rect")]
    return [rect for rect in picture.iter("rect") if rect.get("class") == kind]


def number(element: ET.Element, name: str) -> float:
    return float(element.attrib[name])


def test_it_has_a_name_and_labels() -> None:
    picture = draw()
    assert picture.get("aria-label") == 'a "picture" of <it>'
    texts = [text.text for text in picture.iter("text")]
    assert "first <&>" in texts
    assert "second" in texts
    assert "0 ms" in texts


def test_boxes_are_in_proportion() -> None:
    picture = draw()
    forwards, backwards = rects(picture, "forward"), rects(picture, "backward")
    assert len(forwards) == 3
    assert len(backwards) == 2
    assert number(backwards[0], "width") == pytest.approx(2 * number(forwards[0], "width"), abs=0.2)
    assert number(forwards[-1], "y") > number(forwards[0], "y")
    told = [title.text for title in forwards[0].iter("title")]
    assert told == ["F1, 0 ms to 10.0 ms"]


def test_transfers_join_the_rows() -> None:
    picture = draw()
    moves = {str(line.get("class")): line for line in picture.iter("line") if "move" in str(line.get("class"))}
    down, up = moves["move activations"], moves["move gradients"]
    upper, lower = (number(rect, "y") for rect in rects(picture, "lane"))
    assert upper < number(down, "y1") < number(down, "y2") == lower
    assert number(up, "y1") == lower > number(up, "y2")


def test_pushes_pulls_and_publishes() -> None:
    picture = draw()
    assert [title.text for title in rects(picture, "push")[0].iter("title")] == [
        "push of wave 0, shard 3, 36.0 ms to 40.0 ms"
    ]
    assert len(rects(picture, "pull")) == 1
    assert sum(line.get("class") == "publish" for line in picture.iter("line")) == 1


def test_waiting_for_weights_is_marked() -> None:
    (wait,) = rects(draw(), "weights-wait")
    assert [title.text for title in wait.iter("title")] == ["waits for weights, 58.0 ms to 75.0 ms"]


def test_what_is_later_is_cut_off() -> None:
    picture = draw(end_ms=30)
    right = number(picture, "width")
    for rect in picture.iter("rect"):
        assert number(rect, "x") + number(rect, "width") <= right
    assert len(rects(picture, "backward")) == 1
    assert not rects(picture, "pull")


def test_nothing_at_all_can_be_drawn() -> None:
    assert not rects(draw(story=[]), "forward")


def test_a_long_run_stays_a_picture() -> None:
    story = [activity(ActivityKind.FORWARD, 0, p, 10 * p, 10 * p + 1) for p in range(50)]
    assert number(draw(end_ms=1_000_000, story=story), "width") < 20_000
