"""A pipeline at work, as SVG: one row per stage, time to the right. Pure: activities in, text out.

In a row, boxes are computations with the number of their minibatch, forward lighter than backward. Lines between rows
are activations on their way down and gradients on their way up; thin bars under a row are pushes and pulls. What is
left empty of a row is waiting, marked where it is for weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from hetpipe.decide.planner.costs import TICKS_PER_MS
from hetpipe.decide.simulator.result import ActivityKind, SimulatedActivity
from hetpipe.report.quantities import time_text

#: Pixels. A row is its label, its boxes, then its pushes and pulls; the label comes again for those who scroll.
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

#: To be put into the page's style sheet once; dark and light are the page's, by these variables.
PICTURE_CSS = """
.pipeline text{font:11px ui-sans-serif,system-ui,sans-serif;fill:var(--ink)}
.pipeline .faint{fill:var(--faint)}
.pipeline .label{fill:var(--faint);paint-order:stroke;stroke:var(--card);stroke-width:4px;stroke-linejoin:round}
.pipeline .lane{fill:var(--lane)}
.pipeline .forward rect{fill:var(--forward);stroke:var(--card);stroke-width:.8}
.pipeline .backward rect{fill:var(--backward);stroke:var(--card);stroke-width:.8}
.pipeline .forward text,.pipeline .backward text{fill:var(--on-box);text-anchor:middle}
.pipeline .activations{stroke:var(--forward)}
.pipeline .gradients{stroke:var(--backward)}
.pipeline .move{stroke-width:1.25;opacity:.75}
.pipeline .push{fill:var(--push)}
.pipeline .pull{fill:var(--pull)}
.pipeline .weights-wait{fill:var(--wait)}
.pipeline .publish{stroke:var(--push);stroke-dasharray:3 3}
.pipeline .axis{stroke:var(--rule)}
"""

#: Class and meaning of everything that has a colour.
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
) -> str:
    """The picture of `rows` from 0 to `end_ticks`.

    Args:
        activities: of the whole run, in any order; those of other stages are left out.
        rows: from top to bottom; the stages of a virtual worker one below the other.
        end_ticks: what begins later is left out, what goes on is cut off.
        title: its accessible name; any text.

    Returns:
        An `<svg>` element with the class `pipeline`; its colours are those of `PICTURE_CSS`.
    """
    return "\n".join(_Picture(activities, rows, end_ticks, title).parts())


class _Picture:
    """Places everything on the canvas."""

    def __init__(
        self, activities: Sequence[SimulatedActivity], rows: Sequence[PictureRow], end_ticks: int, title: str
    ) -> None:
        self._rows = rows
        self._end = max(end_ticks, 1)
        self._title = title
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

    def parts(self) -> Iterator[str]:
        """The elements, from the background to the front."""
        yield (
            f'<svg class="pipeline" role="img" aria-label="{escape(self._title)}" width="{self._width}" '
            f'height="{self._height}" viewBox="0 0 {self._width} {self._height}">'
        )
        yield from self._axis()
        for row in self._rows:
            yield from self._row(row)
        for row in self._rows:
            yield from self._labels(row)
        yield "</svg>"

    def _pixels_per_tick(self) -> float:
        """So that an average box has room for its number."""
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

    def _axis(self) -> Iterator[str]:
        step = _round_step(_TICK_DISTANCE / self._scale)
        for position in range(self._end // step + 1):
            x = self._x(position * step)
            yield f'<line class="axis" x1="{x}" x2="{x}" y1="{_TOP - 10}" y2="{self._height}"/>'
            yield f'<text class="faint" x="{x + 3}" y="{_TOP - 12}">{time_text(position * step / TICKS_PER_MS)}</text>'
        for publish in self._publishes:
            x = self._x(publish.end_ticks)
            yield (
                f'<line class="publish" x1="{x}" x2="{x}" y1="{_TOP - 10}" y2="{self._height}">'
                f"<title>clock {publish.number} is published, {_at(publish.end_ticks)}</title></line>"
            )

    def _row(self, row: PictureRow) -> Iterator[str]:
        top = self._tops[row.vw, row.stage]
        found = self._by_row[row.vw, row.stage]
        length = self._x(self._end) - _MARGIN
        yield f'<rect class="lane" x="{_MARGIN}" y="{top}" width="{length:.1f}" height="{_BOX_HEIGHT}"/>'
        yield from self._waits(found, top)
        for one in found:
            if one.kind in _COMPUTATIONS:
                yield self._box(one, top)
            elif one.kind in (ActivityKind.ACTIVATIONS, ActivityKind.GRADIENTS):
                yield from self._move(one, top)
            elif one.end_ticks > one.start_ticks:
                yield self._strip(one, top)

    def _labels(self, row: PictureRow) -> Iterator[str]:
        y = self._tops[row.vw, row.stage] - 4
        for x in range(_MARGIN, max(self._width - _LABEL_DISTANCE // 2, _MARGIN + 1), _LABEL_DISTANCE):
            yield f'<text class="label" x="{x}" y="{y}">{escape(row.label)}</text>'

    def _waits(self, found: Sequence[SimulatedActivity], top: int) -> Iterator[str]:
        """Gaps that end in the instant in which weights arrive."""
        arrivals = {one.end_ticks for one in found if one.kind is ActivityKind.PULL}
        arrivals |= {one.end_ticks for one in self._publishes}
        free_since = 0
        for one in found:
            if one.kind in _COMPUTATIONS:
                if one.start_ticks > free_since and one.start_ticks in arrivals:
                    yield self._rect("weights-wait", free_since, one.start_ticks, top, _BOX_HEIGHT, "waits for weights")
                free_since = one.end_ticks

    def _box(self, one: SimulatedActivity, top: int) -> str:
        label = f"{_LETTERS[one.kind]}{one.number}"
        x, end = self._x(one.start_ticks), self._x(one.end_ticks)
        text = ""
        for shown in (label, str(one.number)):
            if end - x >= len(shown) * _LETTER_WIDTH + 2:
                text = f'<text x="{(x + end) / 2:.1f}" y="{top + 14}">{shown}</text>'
                break
        rect = self._rect("", one.start_ticks, one.end_ticks, top, _BOX_HEIGHT, label)
        return f'<g class="{_COMPUTATIONS[one.kind]}">{rect}{text}</g>'

    def _move(self, one: SimulatedActivity, top: int) -> Iterator[str]:
        """From the lower edge of the sender to the upper edge of the receiver, or the other way round."""
        assert one.vw is not None
        assert one.stage is not None
        is_forward = one.kind is ActivityKind.ACTIVATIONS
        other = self._tops.get((one.vw, one.stage + (1 if is_forward else -1)))
        if other is None:
            return
        y1, y2 = (top + _BOX_HEIGHT, other) if is_forward else (top, other + _BOX_HEIGHT)
        x1, x2 = self._x(one.start_ticks), self._x(one.end_ticks)
        yield (
            f'<line class="move {one.kind.value}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}">'
            f"<title>{one.kind.value} of {one.number}, {_span(one)}</title></line>"
        )

    def _strip(self, one: SimulatedActivity, top: int) -> str:
        is_push = one.kind is ActivityKind.PUSH
        y = top + _BOX_HEIGHT + 2 + (0 if is_push else _STRIP_HEIGHT + 1)
        what = f"push of wave {one.number}" if is_push else f"pull of clock {one.number}"
        where = "" if one.shard is None else f", shard {one.shard}"
        return self._rect(one.kind.value, one.start_ticks, one.end_ticks, y, _STRIP_HEIGHT, what + where)

    def _rect(self, kind: str, start: int, end: int, y: int, height: int, what: str) -> str:
        x = self._x(start)
        width = max(self._x(end) - x, 0.5)
        described = f"{what}, {_at(start)} to {_at(end)}"
        name = f'class="{kind}" ' if kind else ""
        return (
            f'<rect {name}x="{x}" y="{y}" width="{width:.1f}" height="{height}" rx="1.5">'
            f"<title>{described}</title></rect>"
        )


def _at(at_ticks: int) -> str:
    return time_text(at_ticks / TICKS_PER_MS)


def _span(one: SimulatedActivity) -> str:
    return f"{_at(one.start_ticks)} to {_at(one.end_ticks)}"


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
