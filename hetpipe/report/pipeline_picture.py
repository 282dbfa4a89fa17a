"""A running pipeline, as SVG: one row per stage, time to the right. Pure.

This module computes the layout; `templates/pipeline.svg.j2` draws it in the colours of `templates/pipeline.css`.

In a row, boxes are computations with the number of their minibatch, forward lighter than backward. Lines between rows
are activations (down) and gradients (up); thin bars under a row are pushes and pulls. Gaps in a row are waits, marked
if they are for weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hetpipe.decide.planner.costs import TICKS_PER_MS
from hetpipe.decide.simulator.result import ActivityKind, SimulatedActivity
from hetpipe.report.page import render
from hetpipe.values.quantities import time_text

#: Pixels. A row has its label, its boxes, then its pushes and pulls; the label is repeated for scrolling.
_MARGIN = 6
_TOP = 26
_LABEL_HEIGHT = 15
_LABEL_DISTANCE = 700
_BOX_HEIGHT = 20
_STRIP_HEIGHT = 4
_ROW_HEIGHT = 54
_WORKER_GAP = 12
_MEAN_BOX_WIDTH = 30
_MOST_WIDTH = 12_000
_TICK_DISTANCE = 90
_LETTER_WIDTH = 6.6

#: CSS class and meaning of each colour.
LEGEND: tuple[tuple[str, str], ...] = (
    ("forward", "forward; lines: activations"),
    ("backward", "backward; lines: gradients"),
    ("push", "push of a wave; dashed: a clock is published"),
    ("pull", "pull of weights"),
    ("wait", "waits for weights"),
    ("lane", "waits for a neighbour"),
)

_COMPUTATIONS = {ActivityKind.FORWARD: "forward", ActivityKind.BACKWARD: "backward"}
_LETTERS = {ActivityKind.FORWARD: "F", ActivityKind.BACKWARD: "B"}


@dataclass(frozen=True, slots=True)
class PictureRow:
    """One stage of one virtual worker."""

    vw: int
    stage: int
    label: str
    """Shown beside the row; any text."""


def draw_pipeline(
    activities: Sequence[SimulatedActivity], rows: Sequence[PictureRow], *, end_ticks: int, title: str
) -> Markup:
    """The picture of `rows` from 0 to `end_ticks`.

    Args:
        activities: of the whole run, in any order; those of other stages are ignored.
        rows: from top to bottom; the stages of a virtual worker one below the other.
        end_ticks: later activities are omitted, longer ones are cut off.
        title: its accessible name; any text.

    Returns:
        An `<svg>` element with the class `pipeline`; its colours are those of `pipeline.css`.
    """
    return _Picture(activities, rows, end_ticks).drawn(title)


@dataclass(frozen=True, slots=True)
class _Rect:
    """`kind` is a class of the style sheet, `what` is the tooltip; either may be empty."""

    kind: str
    x: float
    y: int
    width: float
    height: int
    what: str = ""


@dataclass(frozen=True, slots=True)
class _Line:
    kind: str
    x1: float
    y1: int
    x2: float
    y2: int
    what: str = ""


@dataclass(frozen=True, slots=True)
class _Text:
    kind: str
    x: float | str
    y: int
    text: str


@dataclass(frozen=True, slots=True)
class _Box:
    """A computation."""

    kind: str
    rect: _Rect
    number: _Text | None
    """None if it does not fit."""


@dataclass(frozen=True, slots=True)
class _Row:
    """The shapes of a stage, from the background to the front."""

    lane: _Rect
    waits: list[_Rect]
    strips: list[_Rect]
    """Pushes and pulls."""
    moves: list[_Line]
    boxes: list[_Box]


class _Picture:
    """The layout."""

    def __init__(self, activities: Sequence[SimulatedActivity], rows: Sequence[PictureRow], end_ticks: int) -> None:
        self._rows = rows
        self._end = max(end_ticks, 1)
        self._tops: dict[tuple[int, int], int] = {}
        top = _TOP
        for row, before in zip(rows, [None, *rows], strict=False):
            top += _WORKER_GAP if before is not None and before.vw != row.vw else 0
            self._tops[row.vw, row.stage] = top + _LABEL_HEIGHT
            top += _ROW_HEIGHT
        self._height = top
        self._publishes = [one for one in activities if one.kind is ActivityKind.PUBLISH and one.end_ticks <= self._end]
        self._by_row: dict[tuple[int, int], list[SimulatedActivity]] = defaultdict(list)
        for one in sorted(activities, key=lambda one: (one.start_ticks, one.end_ticks)):
            if one.vw is not None and one.stage is not None and one.start_ticks < self._end:
                self._by_row[one.vw, one.stage].append(one)
        self._scale = self._pixels_per_tick()
        self._width = round(2 * _MARGIN + self._end * self._scale)

    def drawn(self, title: str) -> Markup:
        """Render the `svg` element."""
        return render(
            "pipeline.svg.j2",
            title=title,
            width=self._width,
            height=self._height,
            lines=[*self._marks(), *self._published()],
            times=list(self._times()),
            rows=[self._row(row) for row in self._rows],
            labels=[label for row in self._rows for label in self._labels(row)],
        )

    def _pixels_per_tick(self) -> float:
        """The scale at which an average box can contain its number."""
        lengths = [
            one.end_ticks - one.start_ticks
            for position in self._tops
            for one in self._by_row[position]
            if one.kind in _COMPUTATIONS
        ]
        mean = sum(lengths) / len(lengths) if lengths else 0
        return min(_MEAN_BOX_WIDTH / mean if mean else _MOST_WIDTH / self._end, _MOST_WIDTH / self._end)

    def _x(self, at_ticks: int) -> float:
        return round(_MARGIN + min(at_ticks, self._end) * self._scale, 1)

    def _steps(self) -> range:
        """The marks of the axis, in ticks."""
        return range(0, self._end + 1, _round_step(_TICK_DISTANCE / self._scale))

    def _marks(self) -> Iterator[_Line]:
        for at_ticks in self._steps():
            x = self._x(at_ticks)
            yield _Line("axis", x, _TOP - 10, x, self._height)

    def _times(self) -> Iterator[_Text]:
        for at_ticks in self._steps():
            yield _Text("faint", self._x(at_ticks) + 3, _TOP - 12, _at(at_ticks))

    def _published(self) -> Iterator[_Line]:
        for publish in self._publishes:
            x = self._x(publish.end_ticks)
            what = f"clock {publish.number} is published, {_at(publish.end_ticks)}"
            yield _Line("publish", x, _TOP - 10, x, self._height, what)

    def _row(self, row: PictureRow) -> _Row:
        top = self._tops[row.vw, row.stage]
        found = self._by_row[row.vw, row.stage]
        moves = (ActivityKind.ACTIVATIONS, ActivityKind.GRADIENTS)
        strips = (one for one in found if one.kind not in (*_COMPUTATIONS, *moves) and one.end_ticks > one.start_ticks)
        return _Row(
            lane=_Rect("lane", _MARGIN, top, self._x(self._end) - _MARGIN, _BOX_HEIGHT),
            waits=list(self._waits(found, top)),
            strips=[self._strip(one, top) for one in strips],
            moves=list(self._moves((one for one in found if one.kind in moves), top)),
            boxes=[self._box(one, top) for one in found if one.kind in _COMPUTATIONS],
        )

    def _labels(self, row: PictureRow) -> Iterator[_Text]:
        y = self._tops[row.vw, row.stage] - 4
        for x in range(_MARGIN, max(self._width - _LABEL_DISTANCE // 2, _MARGIN + 1), _LABEL_DISTANCE):
            yield _Text("label", x, y, row.label)

    def _waits(self, found: Sequence[SimulatedActivity], top: int) -> Iterator[_Rect]:
        """Gaps that end at the arrival of weights."""
        arrivals = {one.end_ticks for one in found if one.kind is ActivityKind.PULL}
        arrivals |= {one.end_ticks for one in self._publishes}
        free_since = 0
        for one in found:
            if one.kind in _COMPUTATIONS:
                if one.start_ticks > free_since and one.start_ticks in arrivals:
                    yield self._rect("weights-wait", free_since, one.start_ticks, top, _BOX_HEIGHT, "waits for weights")
                free_since = one.end_ticks

    def _box(self, one: SimulatedActivity, top: int) -> _Box:
        label = f"{_LETTERS[one.kind]}{one.number}"
        x, end = self._x(one.start_ticks), self._x(one.end_ticks)
        fitting = (shown for shown in (label, str(one.number)) if end - x >= len(shown) * _LETTER_WIDTH + 2)
        number = next((_Text("", f"{(x + end) / 2:.1f}", top + 14, shown) for shown in fitting), None)
        rect = self._rect("", one.start_ticks, one.end_ticks, top, _BOX_HEIGHT, label)
        return _Box(_COMPUTATIONS[one.kind], rect, number)

    def _moves(self, moves: Iterable[SimulatedActivity], top: int) -> Iterator[_Line]:
        """A line from the sender's edge to the receiver's."""
        for one in moves:
            assert one.vw is not None
            assert one.stage is not None
            is_forward = one.kind is ActivityKind.ACTIVATIONS
            other = self._tops.get((one.vw, one.stage + (1 if is_forward else -1)))
            if other is None:
                continue
            y1, y2 = (top + _BOX_HEIGHT, other) if is_forward else (top, other + _BOX_HEIGHT)
            what = f"{one.kind.value} of {one.number}, {_at(one.start_ticks)} to {_at(one.end_ticks)}"
            yield _Line(f"move {one.kind.value}", self._x(one.start_ticks), y1, self._x(one.end_ticks), y2, what)

    def _strip(self, one: SimulatedActivity, top: int) -> _Rect:
        is_push = one.kind is ActivityKind.PUSH
        y = top + _BOX_HEIGHT + 2 + (0 if is_push else _STRIP_HEIGHT + 1)
        what = f"push of wave {one.number}" if is_push else f"pull of clock {one.number}"
        where = "" if one.shard is None else f", shard {one.shard}"
        return self._rect(one.kind.value, one.start_ticks, one.end_ticks, y, _STRIP_HEIGHT, what + where)

    def _rect(self, kind: str, start: int, end: int, y: int, height: int, what: str) -> _Rect:
        x = self._x(start)
        return _Rect(kind, x, y, max(self._x(end) - x, 0.5), height, f"{what}, {_at(start)} to {_at(end)}")


def _at(at_ticks: int) -> str:
    return time_text(at_ticks / TICKS_PER_MS)


def _round_step(least_ticks: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, … ticks that is at least `least_ticks`.

    >>> _round_step(130.0), _round_step(0.2), _round_step(5000)
    (200, 1, 5000)
    """
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= least_ticks:
                return factor * power
        power *= 10
