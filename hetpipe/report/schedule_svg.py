"""A simulated timeline as SVG, in the style of the papers' figures: forwards blue, backwards green, updates checkered.

A self-contained file without fonts, scripts or a page. Its description has the whole content as text. This module
computes the layout; `templates/schedule.svg.j2` draws it in the colours of `templates/schedule.css`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hetpipe.decide.schedule.policy import Kind
from hetpipe.decide.schedule.timeline import Box, StageTimeline, Timeline
from hetpipe.report.page import render, resource
from hetpipe.report.schedule_view import (
    axis_step,
    figures_of,
    legend_of,
    setting_of,
    stage_facts,
    title_of,
    version_of,
)

#: Pixels.
_MARGIN = 16
_TITLE_Y, _SETTING_Y, _AXIS_Y, _TOP = 32, 54, 82, 90
_ROW_HEIGHT = 46
_BOX_HEIGHT = 38
_NUMBER_Y, _VERSION_Y = 17, 31
_LABEL_WIDTH = 66
_LEAST_UNIT = 24
_TICK_DISTANCE = 60
_LEGEND_HEIGHT = 22
_SWATCH_WIDTH = 26

#: Widths of an average character of each class of text.
_NUMBER_LETTER, _VERSION_LETTER, _TEXT_LETTER, _TITLE_LETTER = 8.4, 7.0, 6.6, 9.8

_HAT = "Ŵ"

_SWATCHES = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("update", "backward, then an update: a new version with the number of that minibatch"),
)


def draw_schedule(timeline: Timeline) -> str:
    """The picture: an SVG document, in UTF-8 when written."""
    return str(_Drawing(timeline).drawn())


@dataclass(frozen=True, slots=True)
class _Text:
    x: str
    y: int
    text: str
    kind: str = ""
    """A class of the style sheet, if any."""


@dataclass(frozen=True, slots=True)
class _Path:
    kind: str
    d: str


@dataclass(frozen=True, slots=True)
class _Row:
    """A stage."""

    label: _Text
    boxes: list[_Path]
    """One path per kind of box."""
    inscriptions: list[tuple[str, list[_Text]]]
    """The texts in the boxes, by class."""
    facts: list[_Text]


class _Drawing:
    """The layout."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._unit = max(_unit_width(box) for stage in timeline.stages for box in stage.boxes)
        self._facts = [_fact_lines(timeline, stage) for stage in timeline.stages]
        self._left = _MARGIN + _LABEL_WIDTH
        self._right = self._left + timeline.end * self._unit
        self._bottom = _TOP + len(timeline.stages) * _ROW_HEIGHT
        self._texts = [
            "number: minibatch; below it: the weights that it is computed with",
            *legend_of(timeline, predicted=_HAT),
            figures_of(timeline),
        ]
        self._height = self._bottom + _LEGEND_HEIGHT * (1 + len(self._texts)) + _MARGIN

    def drawn(self) -> Markup:
        """The document."""
        pipeline, stages = self._timeline.pipeline, self._timeline.stages
        title = title_of(pipeline)
        swatches, legend = self._legend()
        return render(
            "schedule.svg.j2",
            title=title,
            description=self._description(),
            style=resource("schedule.css"),
            width=self._width(),
            height=self._height,
            head=[_text(_MARGIN, _TITLE_Y, title, "title"), _text(_MARGIN, _SETTING_Y, setting_of(pipeline))],
            lanes=[self._lane(stage) for stage in stages],
            axis=_Path("axis", "".join(f"M{self._x(at)} {_AXIS_Y + 4}V{self._bottom}" for at in self._marks())),
            times=[
                _text(_MARGIN, _AXIS_Y, "time"),
                *(_text(self._x(at), _AXIS_Y, str(at)) for at in self._marks()),
            ],
            rows=[self._row(stage, facts) for stage, facts in zip(stages, self._facts, strict=True)],
            swatches=swatches,
            legend=legend,
        )

    def _width(self) -> int:
        """The width of the widest line: of boxes with their labels, or of text."""
        facts = max(len(line) for lines in self._facts for line in lines) * _TEXT_LETTER
        texts = max(map(len, [*self._texts, setting_of(self._timeline.pipeline)])) * _TEXT_LETTER
        swatches = sum(2 * _SWATCH_WIDTH + len(meaning) * _TEXT_LETTER for _, meaning in _SWATCHES)
        title = len(title_of(self._timeline.pipeline)) * _TITLE_LETTER
        boxes = self._right + _MARGIN / 2 + facts - _MARGIN
        return round(max(boxes, texts, swatches, title)) + 2 * _MARGIN

    def _description(self) -> list[str]:
        """The whole picture as sentences."""
        rows = [f"Stage {stage.stage}: {_sequence(stage)}." for stage in self._timeline.stages]
        lines = [setting_of(self._timeline.pipeline), *self._texts[1:]]
        return ["Time to the right, one row for each stage.", *(f"{line}." for line in lines), *rows]

    def _y(self, stage: int) -> int:
        return _TOP + stage * _ROW_HEIGHT

    def _x(self, at: int) -> int:
        return self._left + at * self._unit

    def _lane(self, stage: StageTimeline) -> _Path:
        d = _rectangle(self._left, self._y(stage.stage), self._right - self._left, _BOX_HEIGHT)
        return _Path("lane", d)

    def _marks(self) -> range:
        return range(0, self._timeline.end + 1, axis_step(-(-_TICK_DISTANCE // self._unit)))

    def _row(self, stage: StageTimeline, facts: Sequence[str]) -> _Row:
        y = self._y(stage.stage)
        by_kind = {
            kind: [self._outline(box, y) for box in stage.boxes if _class_of(box) == kind]
            for kind in ("forward", "backward", "update")
        }
        numbers = [self._inscribed(box, y + _NUMBER_Y, str(box.action.p)) for box in stage.boxes]
        versions = [self._inscribed(box, y + _VERSION_Y, version_of(box, predicted=_HAT)) for box in stage.boxes]
        return _Row(
            label=_text(_MARGIN, y + _NUMBER_Y + 6, f"stage {stage.stage}"),
            boxes=[_Path(kind, "".join(outlines)) for kind, outlines in by_kind.items() if outlines],
            inscriptions=[("number", numbers), ("version", versions)],
            facts=[
                _text(self._right + _MARGIN / 2, y + line_y, line)
                for line, line_y in zip(facts, (_NUMBER_Y, _VERSION_Y), strict=True)
            ],
        )

    def _outline(self, box: Box, y: int) -> str:
        return _rectangle(self._x(box.start), y, self._x(box.end) - self._x(box.start), _BOX_HEIGHT)

    def _inscribed(self, box: Box, y: int, text: str) -> _Text:
        return _text((self._x(box.start) + self._x(box.end)) / 2, y, text)

    def _legend(self) -> tuple[list[tuple[_Path, _Text]], list[_Text]]:
        """The kinds of boxes, side by side, and the lines below them."""
        x, y = float(_MARGIN), self._bottom + _LEGEND_HEIGHT
        swatches = []
        for kind, meaning in _SWATCHES:
            swatch = _Path(kind, _rectangle(round(x), y - 12, _SWATCH_WIDTH, 16))
            swatches.append((swatch, _text(round(x) + _SWATCH_WIDTH + 6, y, meaning)))
            x += 2 * _SWATCH_WIDTH + len(meaning) * _TEXT_LETTER
        lines = enumerate(self._texts, start=1)
        return swatches, [_text(_MARGIN, y + number * _LEGEND_HEIGHT, text) for number, text in lines]


def _class_of(box: Box) -> str:
    if box.makes_update:
        return "update"
    return "forward" if box.action.kind is Kind.FORWARD else "backward"


def _unit_width(box: Box) -> int:
    """Pixels that a unit of time needs for the texts of `box` to fit."""
    number = len(str(box.action.p)) * _NUMBER_LETTER
    version = len(version_of(box, predicted=_HAT)) * _VERSION_LETTER
    return max(_LEAST_UNIT, -(-round(max(number, version) + 8) // (box.end - box.start)))


def _fact_lines(timeline: Timeline, stage: StageTimeline) -> tuple[str, str]:
    busy, in_flight, buffers = stage_facts(timeline, stage)
    return f"{busy}, {in_flight}", buffers


def _sequence(stage: StageTimeline) -> str:
    return " ".join(f"{box} on {version_of(box, predicted=_HAT)}," for box in stage.boxes).rstrip(",")


def _rectangle(x: int, y: int, width: int, height: int) -> str:
    return f"M{x} {y}h{width}v{height}h-{width}z"


def _text(x: float, y: int, text: str, kind: str = "") -> _Text:
    return _Text(f"{x:g}", y, text, kind)
