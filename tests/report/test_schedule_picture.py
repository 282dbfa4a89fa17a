"""The timeline as text: golden pictures; every box can be read back from it, however narrow the screen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hetpipe.decide.schedule.timeline import Pipeline, Timeline, play
from hetpipe.report import schedule_picture
from hetpipe.report.schedule_picture import picture_lines
from hetpipe.report.schedule_view import version_of
from tests.cli.golden_schedules import FOLDER, golden_files

_BOX = re.compile(r"\[([FB]\d+)(\*?) *\]")

TIMELINES = [
    play(Pipeline(num_stages=4, num_minibatches=8, weights="double_buffer")),
    play(Pipeline(num_stages=11, num_minibatches=13, weights="predict", minibatches_per_wave=11)),
    play(Pipeline(num_stages=3, num_minibatches=14, weights="flush", schedule="gpipe", backward_units=1)),
    play(Pipeline(num_stages=1, num_minibatches=1, backward_units=7)),
]


@pytest.mark.parametrize(("path", "text"), golden_files().items(), ids=lambda entry: getattr(entry, "name", ""))
def test_golden(path: Path, text: str) -> None:
    assert path.read_text(encoding="utf-8") == text, "say: python -m tests.cli.golden_schedules"


def test_no_golden_file_is_left_over() -> None:
    assert set(FOLDER.iterdir()) == set(golden_files())


def strip(timeline: Timeline, width: int) -> list[str]:
    """The lines of times, boxes and versions."""
    lines = picture_lines(timeline, width)
    return lines[3 : lines.index("F forward, B backward; below each the weights that it computes with")]


def rows(timeline: Timeline, width: int) -> list[tuple[str, str]]:
    """What is in the lines of boxes and of versions of every stage, all pieces joined."""
    joined = [("", "")] * len(timeline.stages)
    lines = strip(timeline, width)
    for index, line in enumerate(lines):
        if line.startswith("stage"):
            label = re.match(r"stage +(\d+) ", line + " ")
            assert label is not None
            boxes, versions = joined[int(label[1])]
            joined[int(label[1])] = (boxes + line[label.end() :], f"{versions} {lines[index + 1]}")
    return joined


@pytest.mark.parametrize("timeline", TIMELINES)
def test_every_box_can_be_read(timeline: Timeline) -> None:
    """A box begins where it does in time, and what it computes with stands below it."""
    time, *_ = strip(timeline, 10_000)
    gutter = len(f"stage {len(timeline.stages) - 1} ")
    marks = re.findall(r"\d+", time)
    unit = (time.index(marks[1]) - gutter) // int(marks[1])
    for stage, (boxes, versions) in zip(timeline.stages, rows(timeline, 10_000), strict=True):
        indent = gutter - len(f"stage {stage.stage} ")
        found = [
            ((match.start() - indent) // unit, (match.end() - indent) // unit, match[1], bool(match[2]))
            for match in _BOX.finditer(boxes)
        ]
        assert found == [(box.start, box.end, str(box), box.makes_update) for box in stage.boxes]
        below = versions[1:]
        for box in stage.boxes:
            at = gutter + box.start * unit + 1
            assert re.split(r" |$", below[at:])[0] == version_of(box)


@pytest.mark.parametrize("timeline", TIMELINES)
@pytest.mark.parametrize("width", [30, 47, 80, 101])
def test_a_narrow_screen_shows_the_same_in_pieces(
    timeline: Timeline, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_picture, "_MOST_LINES", 1_000_000)
    assert max(map(len, strip(timeline, width))) <= width
    wide, narrow = rows(timeline, 10_000), rows(timeline, width)
    assert [texts.replace(" ", "") for row in narrow for texts in row] == [
        texts.replace(" ", "") for row in wide for texts in row
    ]


def test_a_screen_that_is_too_narrow_for_anything_gets_one_unit_at_a_time() -> None:
    assert max(map(len, strip(TIMELINES[0], 1))) == len("stage 0 [F1]")


def test_a_long_timeline_is_cut_and_says_so() -> None:
    timeline = play(Pipeline(num_stages=8, num_minibatches=400))
    lines = picture_lines(timeline, 80)
    assert len(lines) < 430
    assert f"continues to time {timeline.end}; --svg FILE draws all of it, --json has every box" in lines


@pytest.mark.parametrize("timeline", TIMELINES)
def test_ascii_is_enough(timeline: Timeline) -> None:
    assert "\n".join(picture_lines(timeline, 100)).isascii()
