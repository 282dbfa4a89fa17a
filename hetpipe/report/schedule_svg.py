"""A played timeline as SVG, in the look of the papers' figures: forwards blue, backwards green, updates checkered.

A file of its own that needs no fonts, scripts or page around it. Its description holds all that it shows, as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from hetpipe.decide.schedule.policy import Kind
from hetpipe.decide.schedule.timeline import Box, StageTimeline, Timeline
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

_STYLE = """
.schedule text{font:12px ui-sans-serif,system-ui,-apple-system,"Segoe UI",sans-serif;fill:#3b4350}
.schedule .title{font-size:17px;font-weight:600;fill:#12161d}
.schedule .number text,.schedule .version text{text-anchor:middle;fill:#0d1b2a}
.schedule .number text{font-size:13px;font-weight:600}
.schedule .version text{font-size:10.5px}
.schedule .lane{fill:#f1f1ee}
.schedule .axis{stroke:#dcdcd6}
.schedule .forward,.schedule .backward,.schedule .update{stroke:#4a5563;stroke-width:.8}
.schedule .forward{fill:#a5c8f0}
.schedule .backward{fill:#b3dfb6}
.schedule .update{fill:url(#schedule-checks);stroke:#14532d;stroke-width:1.5}
"""

#: The two greens differ little, so that numbers stay readable on them.
_CHECKS = (
    '<pattern id="schedule-checks" width="10" height="10" patternUnits="userSpaceOnUse">'
    '<path fill="#b3dfb6" d="M0 0h10v10h-10z"/><path fill="#97d09d" d="M0 0h5v5h-5zM5 5h5v5h-5z"/></pattern>'
)

_SWATCHES = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("update", "backward, then an update: a new version with the number of that minibatch"),
)


def draw_schedule(timeline: Timeline) -> str:
    """The picture: an SVG document, in UTF-8 when written."""
    return "\n".join(_Drawing(timeline).parts()) + "\n"


class _Drawing:
    """Places everything on the canvas."""

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

    def parts(self) -> Iterator[str]:
        """The elements, from the background to the front."""
        title, width, height = title_of(self._timeline.pipeline), self._width(), self._height
        yield '<?xml version="1.0" encoding="UTF-8"?>'
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="schedule" role="img" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" aria-labelledby="schedule-title schedule-description">'
        )
        yield f'<title id="schedule-title">{escape(title)}</title>'
        yield f'<desc id="schedule-description">{escape(self._description())}</desc>'
        yield f"<style>{_STYLE}</style>"
        yield f"<defs>{_CHECKS}</defs>"
        yield f'<path fill="#fff" d="M0 0h{width}v{height}h-{width}z"/>'
        yield _text(_MARGIN, _TITLE_Y, title, "title")
        yield _text(_MARGIN, _SETTING_Y, setting_of(self._timeline.pipeline))
        for stage in self._timeline.stages:
            yield self._lane(stage)
        yield from self._axis()
        for stage, facts in zip(self._timeline.stages, self._facts, strict=True):
            yield from self._row(stage, facts)
        yield from self._legend()
        yield "</svg>"

    def _width(self) -> int:
        """As wide as the widest line: of boxes with what is said beside them, or of text."""
        facts = max(len(line) for lines in self._facts for line in lines) * _TEXT_LETTER
        texts = max(map(len, [*self._texts, setting_of(self._timeline.pipeline)])) * _TEXT_LETTER
        swatches = sum(2 * _SWATCH_WIDTH + len(meaning) * _TEXT_LETTER for _, meaning in _SWATCHES)
        title = len(title_of(self._timeline.pipeline)) * _TITLE_LETTER
        boxes = self._right + _MARGIN / 2 + facts - _MARGIN
        return round(max(boxes, texts, swatches, title)) + 2 * _MARGIN

    def _description(self) -> str:
        """All of the picture as sentences."""
        rows = [f"Stage {stage.stage}: {_sequence(stage)}." for stage in self._timeline.stages]
        lines = [setting_of(self._timeline.pipeline), *self._texts[1:]]
        return "\n".join(["Time to the right, one row for each stage.", *(f"{line}." for line in lines), *rows])

    def _y(self, stage: int) -> int:
        return _TOP + stage * _ROW_HEIGHT

    def _x(self, at: int) -> int:
        return self._left + at * self._unit

    def _lane(self, stage: StageTimeline) -> str:
        d = _rectangle(self._left, self._y(stage.stage), self._right - self._left, _BOX_HEIGHT)
        return f'<path class="lane" d="{d}"/>'

    def _axis(self) -> Iterator[str]:
        step = axis_step(-(-_TICK_DISTANCE // self._unit))
        marks = range(0, self._timeline.end + 1, step)
        lines = "".join(f"M{self._x(at)} {_AXIS_Y + 4}V{self._bottom}" for at in marks)
        yield f'<path class="axis" d="{lines}"/>'
        yield _text(_MARGIN, _AXIS_Y, "time")
        for at in marks:
            yield _text(self._x(at), _AXIS_Y, str(at))

    def _row(self, stage: StageTimeline, facts: Sequence[str]) -> Iterator[str]:
        y = self._y(stage.stage)
        yield _text(_MARGIN, y + _NUMBER_Y + 6, f"stage {stage.stage}")
        for kind in ("forward", "backward", "update"):
            boxes = [box for box in stage.boxes if _class_of(box) == kind]
            if boxes:
                yield f'<path class="{kind}" d="{"".join(self._outline(box, y) for box in boxes)}"/>'
        yield self._inscribed("number", y + _NUMBER_Y, [(box, str(box.action.p)) for box in stage.boxes])
        yield self._inscribed(
            "version", y + _VERSION_Y, [(box, version_of(box, predicted=_HAT)) for box in stage.boxes]
        )
        for line, line_y in zip(facts, (_NUMBER_Y, _VERSION_Y), strict=True):
            yield _text(self._right + _MARGIN / 2, y + line_y, line)

    def _outline(self, box: Box, y: int) -> str:
        return _rectangle(self._x(box.start), y, self._x(box.end) - self._x(box.start), _BOX_HEIGHT)

    def _inscribed(self, kind: str, y: int, texts: Sequence[tuple[Box, str]]) -> str:
        shown = "".join(_text((self._x(box.start) + self._x(box.end)) / 2, y, text) for box, text in texts)
        return f'<g class="{kind}">{shown}</g>'

    def _legend(self) -> Iterator[str]:
        x, y = float(_MARGIN), self._bottom + _LEGEND_HEIGHT
        for kind, meaning in _SWATCHES:
            yield f'<path class="{kind}" d="{_rectangle(round(x), y - 12, _SWATCH_WIDTH, 16)}"/>'
            yield _text(round(x) + _SWATCH_WIDTH + 6, y, meaning)
            x += 2 * _SWATCH_WIDTH + len(meaning) * _TEXT_LETTER
        for text in self._texts:
            y += _LEGEND_HEIGHT
            yield _text(_MARGIN, y, text)


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


def _text(x: float, y: int, text: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:g}" y="{y}">{escape(text)}</text>'
