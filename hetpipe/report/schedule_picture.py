"""A simulated timeline as plain text: per stage a line of boxes, and below it the weights that they use. Pure.

    time     0       2       4
    stage 0 [F1]            [B1*   ]
             W0              W0
    stage 1     [F1][B1*   ]
                 W0  W0

Everything is ASCII and nothing depends on colour. A timeline wider than the screen continues below, like a score.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
from hetpipe.report.text import columns

#: Maximum number of lines of boxes.
_MOST_LINES = 400

#: Least distance between two times of the axis.
_TIME_COLUMNS = 8

_UPDATE_MARK = "*"


def picture_lines(timeline: Timeline, width: int) -> list[str]:
    """The picture, its legend, and a summary of every stage.

    Args:
        timeline: the simulated actions.
        width: columns of the screen; only a single unit of time may be wider, and sentences are not broken.
    """
    facts = [[f"stage {stage.stage}", *stage_facts(timeline, stage)] for stage in timeline.stages]
    return [
        title_of(timeline.pipeline),
        setting_of(timeline.pipeline),
        "",
        *_Strip(timeline, width).lines(),
        "F forward, B backward; below each the weights that it computes with",
        f"{_UPDATE_MARK} an update follows; the version that it makes has the number of that minibatch",
        *legend_of(timeline),
        "",
        *columns(facts),
        figures_of(timeline),
    ]


class _Strip:
    """The rows of boxes, cut into pieces that fit on the screen."""

    def __init__(self, timeline: Timeline, width: int) -> None:
        self._timeline = timeline
        self._labels = [f"stage {stage.stage} " for stage in timeline.stages]
        self._gutter = max(map(len, self._labels))
        #: Columns of a unit of time.
        self._unit = max(
            -(-max(len(_label(box)), len(version_of(box)) + 1) // (box.end - box.start))
            for stage in timeline.stages
            for box in stage.boxes
        )
        self._step = axis_step(-(-_TIME_COLUMNS // self._unit))
        units = max(1, (width - self._gutter) // self._unit)
        #: Units of time in one piece; whole steps of the axis, if one fits.
        self._units = units - units % self._step if units > self._step else units

    def lines(self) -> Iterator[str]:
        """The pieces, each with its axis and followed by a blank line; then a remark if the rest is omitted."""
        end = self._timeline.end
        pieces = range(0, end, self._units)
        most = max(1, _MOST_LINES // (2 * len(self._labels) + 2))
        rows = [(label, *self._row(stage)) for label, stage in zip(self._labels, self._timeline.stages, strict=True)]
        for start in pieces[:most]:
            stop = min(start + self._units, end)
            yield self._line("time", self._axis(start, stop))
            for label, boxes, versions in rows:
                yield self._line(label, boxes[start * self._unit : stop * self._unit])
                yield self._line("", versions[start * self._unit : stop * self._unit])
            yield ""
        if len(pieces) > most:
            yield f"continues to time {end}; --svg FILE draws all of it, --json has every box"
            yield ""

    def _line(self, label: str, text: str) -> str:
        return f"{label:{self._gutter}}{text}".rstrip()

    def _axis(self, start: int, stop: int) -> str:
        marks = ((at - start, str(at)) for at in range(start, stop) if at % self._step == 0)
        return self._placed(marks)[: (stop - start) * self._unit]

    def _row(self, stage: StageTimeline) -> tuple[str, str]:
        """The line of boxes and the line of versions, from 0 to the end."""
        boxes = ((box.start, self._box(box)) for box in stage.boxes)
        versions = ((box.start, f" {version_of(box)}") for box in stage.boxes)
        return self._placed(boxes), self._placed(versions)

    def _box(self, box: Box) -> str:
        inner = _label(box)[1:-1]
        return f"[{inner:{(box.end - box.start) * self._unit - 2}}]"

    def _placed(self, texts: Iterable[tuple[int, str]]) -> str:
        """Texts at their units of time, in order of time, without overlaps."""
        line = ""
        for at, text in texts:
            line = f"{line:{at * self._unit}}{text}"
        return line


def _label(box: Box) -> str:
    """`[F5]`; `[B4*]` where an update follows."""
    return f"[{box}{_UPDATE_MARK if box.makes_update else ''}]"
