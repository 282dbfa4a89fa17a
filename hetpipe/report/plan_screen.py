"""A plan on one screen of a terminal of at least 80 columns; with or without colour, in ASCII if necessary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hetpipe.report.plan_reasons import Reasons
from hetpipe.report.plan_view import PipelineView, PlanView, SpeedView, StageView
from hetpipe.report.text import count, percent, rate
from hetpipe.values.quantities import of_bytes_text, time_text

#: Minimum width for one line per stage; below it, a second line has the layers and the rest.
_WIDE_COLUMNS = 104
_MOST_BAR_COLUMNS = 24
_GOOD_BAR_COLUMNS = 10
_LEAST_BAR_COLUMNS = 4
_SPEED_BAR_COLUMNS = 18
_MOST_NAME_COLUMNS = 20
_MOST_LAYER_NAME_COLUMNS = 28
#: Maximum number of equal virtual workers with listed devices, and of different ones drawn.
_MOST_OTHERS = 7
_MOST_PIPELINES = 8

_ASCII = str.maketrans(
    {
        "█": "#", "▓": "%", "▒": "=", "░": ".", "◀": "<", "─": "-", "–": "-", "−": "-", "·": "|",
        "×": "x", "…": "..", "∞": "inf", "µ": "u", "≥": ">=",
    }
)  # fmt: skip

_COMPUTE, _TRANSFERS = ("█", "blue"), ("▒", "yellow")
_WEIGHTS, _ACTIVATIONS, _RESERVE = ("█", "green"), ("▒", "cyan"), ("▓", "white")
_FREE = ("░", "bright_black")
_MARK = "◀"
_MARKED = "bold red"
_ESTIMATED = "~"

#: Amount, glyph and style of each part of a bar.
_Parts = tuple[tuple[float, tuple[str, str]], ...]


def show_plan(view: PlanView, reasons: Reasons, console: Console, *, why: Literal["brief", "full"]) -> None:
    """Print a plan.

    Args:
        view: the plan to show.
        reasons: its reasons; `brief` shows the bottleneck only.
        console: destination; its width is the limit.
        why: amount of reasons.
    """
    pen = _TextStyle(is_ascii=not console.encoding.startswith("utf"))
    parts: list[RenderableType] = [
        pen.text(view.title, "bold"),
        pen.text(view.subtitle, "dim"),
        Text(),
        _speeds(view.speeds, pen),
        Text(),
        pen.text(reasons.bound),
        Text(),
        *_Stages(view, console.width, pen).lines(),
        Text(),
        _grid((pen.text(label, "dim"), pen.text(text)) for label, text in view.facts),
        *(pen.text(remark, "yellow") for remark in view.remarks),
    ]
    if why == "full":
        parts += _why(reasons, pen)
    console.print(Group(*parts))


@dataclass(frozen=True, slots=True)
class _TextStyle:
    """Text rendering for this terminal."""

    is_ascii: bool

    @property
    def overflow(self) -> Literal["crop", "ellipsis"]:
        """The truncation of long text."""
        return "crop" if self.is_ascii else "ellipsis"

    def text(self, text: str, style: str = "") -> Text:
        # Names come from files, and must not move the cursor.
        shown = "".join(character if character.isprintable() else "?" for character in text)
        if self.is_ascii:
            shown = shown.translate(_ASCII).encode("ascii", "replace").decode("ascii")
        return Text(shown, style=style)

    def bar(self, width: int, whole: float, parts: _Parts) -> Text:
        """A bar of adjacent parts; the rest is free. Parts below half a cell are not shown."""
        bar = Text()
        done, position = 0.0, 0
        for amount, (glyph, style) in parts:
            done += amount
            end = min(round(width * done / whole), width) if whole else 0
            bar.append_text(self.text(glyph * (end - position), style))
            position = max(position, end)
        return bar.append_text(self.text(_FREE[0] * (width - position), _FREE[1]))

    def cell(self, text: Text, width: int, align: Literal["left", "right"]) -> Text:
        """Exactly `width` columns."""
        text.truncate(width, overflow=self.overflow)
        text.align(align, width)
        return text


def _grid(rows: Iterable[tuple[Text, ...]]) -> Table:
    """Columns of minimum width; the last one wraps."""
    table = Table.grid(padding=(0, 2))
    cells = list(rows)
    for position in range(len(cells[0]) if cells else 0):
        is_last = position == len(cells[0]) - 1
        table.add_column(no_wrap=not is_last, overflow="fold")
    for row in cells:
        table.add_row(*row)
    return table


def _speeds(speeds: Sequence[SpeedView], pen: _TextStyle) -> Table:
    fastest = max(speed.samples_per_second or 0.0 for speed in speeds)
    rows = []
    for index, speed in enumerate(speeds):
        figure = "-" if speed.samples_per_second is None else f"{rate(speed.samples_per_second)} samples/s"
        style = "bold" if index == 0 else ""
        bar = pen.bar(_SPEED_BAR_COLUMNS, fastest, ((speed.samples_per_second or 0.0, _COMPUTE),))
        rows.append((pen.text(speed.name, style), pen.text(figure, style), bar, pen.text(speed.remark, "dim")))
    return _grid(rows)


@dataclass(frozen=True, slots=True)
class _Column:
    """One column of all tables of stages."""

    heading: str
    width: int
    cell: Callable[[int, StageView], Text]
    align: Literal["left", "right"] = "left"


class _Stages:
    """The stages, one or two lines each; all pipelines share the column widths, so that bars are comparable."""

    def __init__(self, view: PlanView, width: int, pen: _TextStyle) -> None:
        self._view = view
        self._pen = pen
        self._is_wide = width >= _WIDE_COLUMNS
        self._width = width
        slowest_first = sorted(view.pipelines, key=lambda pipeline: pipeline.samples_per_second)
        self._pipelines = [one for one in view.pipelines if one in slowest_first[:_MOST_PIPELINES]]
        self._stages = [stage for pipeline in self._pipelines for stage in pipeline.stages]
        self._has_utilisation = any(stage.utilisation is not None for stage in self._stages)
        bare = self._columns(names=0, bar=0)
        free = width - sum(column.width for column in bare) - (len(bare) - 1)
        longest = max(len(stage.names) for stage in self._stages) if self._is_wide else 0
        names = min(longest, _MOST_LAYER_NAME_COLUMNS, max(0, free - 2 * _GOOD_BAR_COLUMNS))
        bar = max(_LEAST_BAR_COLUMNS, min((free - names) // 2, _MOST_BAR_COLUMNS))
        self._drawn = self._columns(names=names, bar=bar)

    def lines(self) -> Iterator[Text]:
        """Each pipeline, then the legend."""
        yield self._line(self._pen.text(column.heading, "dim") for column in self._drawn)
        for pipeline in self._pipelines:
            yield self._heading(pipeline)
            for index, stage in enumerate(pipeline.stages):
                yield self._line(column.cell(index, stage) for column in self._drawn)
                if not self._is_wide:
                    yield self._detail(stage)
            yield from self._others(pipeline)
        left = len(self._view.pipelines) - len(self._pipelines)
        if left:
            yield self._pen.text(f"and {count(left, 'faster kind')} of virtual workers; --html draws them all", "dim")
        yield self._legend()
        if self._view.estimated:
            yield self._pen.text(f"{_ESTIMATED} estimated, not measured: {', '.join(self._view.estimated)}", "yellow")

    def _columns(self, *, names: int, bar: int) -> list[_Column]:
        pen, longest_ms = self._pen, self._view.longest_ms
        time_width = max(len(_time(stage)) for stage in self._stages) + len(_MARK) + 1
        columns = [
            _Column("#", len(str(len(self._stages))), lambda index, _: pen.text(str(index)), "right"),
            self._text("device", lambda stage: stage.device),
            self._text("type", lambda stage: stage.kind),
            _Column("time", bar, lambda _, stage: pen.bar(bar, longest_ms, _time_parts(stage))),
            _Column("", time_width, lambda _, stage: self._marked_time(stage)),
            _Column("memory", bar, lambda _, stage: pen.bar(bar, stage.device_bytes, _memory_parts(stage))),
            self._text("", _memory),
        ]
        if self._is_wide:
            columns[3:3] = [
                self._text("layers", lambda stage: stage.layers),
                _Column("", names, lambda _, stage: pen.text(stage.names, "dim")),
            ]
            columns += [
                self._text("in flight", lambda stage: str(stage.in_flight), "right"),
                self._text("receives", _receives, "right"),
                *([self._text("MFU", _utilisation, "right")] if self._has_utilisation else []),
                self._text("", _memory_policies),
            ]
        return columns

    def _text(
        self, heading: str, value: Callable[[StageView], str], align: Literal["left", "right"] = "left"
    ) -> _Column:
        """A column as wide as its texts, within bounds."""
        widest = max(len(value(stage)) for stage in self._stages)
        width = max(len(heading), min(widest, _MOST_NAME_COLUMNS))
        return _Column(heading, width, lambda _, stage: self._pen.text(value(stage)), align)

    def _line(self, cells: Iterable[Text]) -> Text:
        fitted = [
            self._pen.cell(cell, column.width, column.align) for cell, column in zip(cells, self._drawn, strict=True)
        ]
        line = Text(" ").join(fitted)
        line.truncate(self._width, overflow="crop")
        line.rstrip()
        return line

    def _heading(self, pipeline: PipelineView) -> Text:
        each = " each" if len(pipeline.workers) > 1 else ""
        text = f"{pipeline.heading}: {rate(pipeline.samples_per_second)} samples/s{each}"
        slowest = ", the slowest" if pipeline.is_slowest and len(self._view.pipelines) > 1 else ""
        return self._pen.text(text + slowest, "bold")

    def _marked_time(self, stage: StageView) -> Text:
        if stage.is_bottleneck:
            return self._pen.text(f"{_time(stage)} {_MARK}", _MARKED)
        return self._pen.text(_time(stage))

    def _detail(self, stage: StageView) -> Text:
        parts = [
            f"{'layers' if '–' in stage.layers else 'layer'} {stage.layers}",
            f"{stage.in_flight} in flight",
            f"receives {_receives(stage)}",
        ]
        if stage.utilisation is not None:
            parts.append(f"{_utilisation(stage)} MFU")
        if stage.memory_policies:
            parts.append(stage.memory_policies)
        parts.append(stage.names)  # the part that may be cut off comes last
        detail = self._pen.text(f"  {' · '.join(parts)}", "dim")
        detail.truncate(self._width, overflow=self._pen.overflow)
        return detail

    def _others(self, pipeline: PipelineView) -> Iterator[Text]:
        """The devices of the virtual workers that are not drawn, filling lines."""
        shown = pipeline.workers[1 : _MOST_OTHERS + 1]
        line = ""
        for worker, devices in zip(shown, pipeline.devices[1:], strict=False):
            entry = f"{worker}: {', '.join(devices)}"
            joined = f"{line} · {entry}"
            if line and len(joined) <= self._width:
                line = joined
                continue
            if line:
                yield self._pen.text(line, "dim")
            line = f"  virtual worker {entry}"
        if line:
            yield self._pen.text(line, "dim")
        left = len(pipeline.workers) - 1 - len(shown)
        if left:
            yield self._pen.text(f"  and {left} more; --json has their devices", "dim")

    def _legend(self) -> Text:
        time = [(_COMPUTE, "compute"), (_TRANSFERS, "transfers"), ((_MARK, _MARKED), "longest")]
        memory = [(_WEIGHTS, "weights"), (_ACTIVATIONS, "activations"), (_FREE, "free")]
        if any(stage.reserve_bytes for stage in self._stages):
            memory.insert(2, (_RESERVE, "reserve"))
        legend = Text()
        for heading, signs in (("time:", time), ("  memory:", memory)):
            legend.append_text(self._pen.text(heading, "dim"))
            for (glyph, style), meaning in signs:
                legend.append_text(self._pen.text(f" {glyph}", style)).append_text(self._pen.text(f" {meaning}", "dim"))
        return legend


def _time(stage: StageView) -> str:
    return f"{_ESTIMATED if stage.is_estimated else ''}{time_text(stage.time_ms)}"


def _receives(stage: StageView) -> str:
    return time_text(stage.receive_ms)


def _utilisation(stage: StageView) -> str:
    return "-" if stage.utilisation is None else percent(stage.utilisation)


def _memory(stage: StageView) -> str:
    return of_bytes_text(stage.memory_bytes, stage.device_bytes)


def _memory_policies(stage: StageView) -> str:
    return stage.memory_policies


def _time_parts(stage: StageView) -> _Parts:
    return ((stage.forward_ms + stage.backward_ms, _COMPUTE), (stage.receive_ms, _TRANSFERS))


def _memory_parts(stage: StageView) -> _Parts:
    return (
        (stage.parameter_bytes, _WEIGHTS),
        (stage.activation_bytes, _ACTIVATIONS),
        (stage.reserve_bytes, _RESERVE),
    )


def _why(reasons: Reasons, pen: _TextStyle) -> Iterator[RenderableType]:
    yield Text()
    yield pen.text("alternatives, compared with this plan", "bold")
    rows = [
        (
            pen.text(one.name),
            pen.text("-" if one.samples_per_second is None else f"{rate(one.samples_per_second)} samples/s"),
            pen.text(one.reason, "dim"),
        )
        for one in reasons.rejected
    ]
    yield _grid(rows) if rows else pen.text("no alternatives were considered", "dim")
    for heading, sentences in (("why this N", reasons.waves), ("why these cuts", reasons.cuts)):
        yield Text()
        yield pen.text(heading, "bold")
        yield from (pen.text(sentence) for sentence in sentences)
    if reasons.borders:
        yield Text()
        yield pen.text("borders of stages", "bold")
    for border in reasons.borders:
        yield pen.text(border.heading)
        yield pen.text(f"  {border.crossing}", "dim")
        yield from (pen.text(f"  not {sentence}", "dim") for sentence in border.alternatives)
    if reasons.forbidden:
        yield Text()
        yield pen.text("forbidden cuts", "bold")
        yield from (pen.text(sentence) for sentence in reasons.forbidden)
