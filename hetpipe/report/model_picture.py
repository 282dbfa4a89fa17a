"""A model with its cuts, as SVG: layers from top to bottom, and between them the bytes of a cut. Pure.

This module computes the layout; `templates/model.svg.j2` draws it in the colours of `templates/model.css`.

A box is a layer; beside it, each kind of virtual worker has a column in the colours of its stages. Two bars between
layers are the bytes sent forward and backward over a cut there; the border of a stage is a line across. Where no stage
may end, the line is dashed and has the reason; so has a layer that cannot be cut itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hetpipe.decide.planner.borders import place_text
from hetpipe.report.page import render
from hetpipe.values.profile import AliveValue, ForbiddenCut, LayerProfile
from hetpipe.values.quantities import bytes_text

#: Pixels.
_BOX_HEIGHT = 24
_GAP = 24
_TOP = 24
_NAME_WIDTH = 260
_COLUMN_WIDTH = 76
_MOST_COLUMNS = 4
_BAR_WIDTH = 180
_BAR_HEIGHT = 7
_TEXT_WIDTH = 400
_SPACE = 14
_LETTER_WIDTH = 6.4

#: Number of colours; further stages reuse them.
NUM_COLOURS = 6

#: Maximum number of values in a tooltip; the rest is counted.
_MOST_ALIVE = 12

#: CSS class and meaning of each colour.
LEGEND: tuple[tuple[str, str], ...] = (
    ("forward", "sent forward over a cut"),
    ("backward", "sent backward: gradients"),
    ("border", "border of stages"),
    ("barred", "no cut there"),
)


@dataclass(frozen=True, slots=True)
class StageColumn:
    """The stages of virtual workers with equal pipelines."""

    heading: str
    cuts: tuple[int, ...]
    """The layers before each border of stages, ascending."""


@dataclass(frozen=True, slots=True)
class _Rect:
    kind: str
    x: float
    y: float
    width: float
    height: float
    what: str = ""


@dataclass(frozen=True, slots=True)
class _Line:
    kind: str
    x1: float
    x2: float
    y: float
    what: str = ""


@dataclass(frozen=True, slots=True)
class _Text:
    kind: str
    x: float
    y: float
    text: str
    what: str = ""


def draw_model(layers: Sequence[LayerProfile], columns: Sequence[StageColumn], *, title: str) -> Markup:
    """The picture of a model.

    Args:
        layers: of the profile.
        columns: kinds of virtual workers; the first few are drawn.
        title: its accessible name; any text.

    Returns:
        An `<svg>` element with the class `model`; its colours are those of `model.css`.
    """
    return _Picture(layers, columns[:_MOST_COLUMNS]).drawn(title)


class _Picture:
    """The layout."""

    def __init__(self, layers: Sequence[LayerProfile], columns: Sequence[StageColumn]) -> None:
        self._layers = layers
        self._columns = columns
        self._names = _SPACE + len(columns) * _COLUMN_WIDTH
        self._bars = self._names + _NAME_WIDTH + _SPACE
        self._texts = self._bars + _BAR_WIDTH + _SPACE
        self._most = max((max(one.output_bytes, one.backward_bytes) for one in layers[:-1]), default=0)

    def drawn(self, title: str) -> Markup:
        """Render the `svg` element."""
        cuts = range(1, len(self._layers))
        return render(
            "model.svg.j2",
            title=title,
            width=self._texts + _TEXT_WIDTH,
            height=_TOP + len(self._layers) * (_BOX_HEIGHT + _GAP),
            lines=[line for cut in cuts for line in self._lines(cut)],
            rects=[
                *(box for index in range(len(self._layers)) for box in self._boxes(index)),
                *(bar for cut in cuts for bar in self._bars_of(cut)),
            ],
            texts=[
                *(
                    _Text("heading", _SPACE + at * _COLUMN_WIDTH, _TOP - 10, _fitting(one.heading, _COLUMN_WIDTH - 4))
                    for at, one in enumerate(self._columns)
                ),
                *(text for index in range(len(self._layers)) for text in self._names_of(index)),
                *(text for cut in cuts for text in self._words(cut)),
            ],
        )

    def _y(self, index: int) -> int:
        """The top of a layer."""
        return _TOP + index * (_BOX_HEIGHT + _GAP)

    def _middle(self, cut: int) -> float:
        return self._y(cut) - _GAP / 2

    def _borders(self, cut: int) -> list[int]:
        """The columns with a border between stages at this cut."""
        return [at for at, column in enumerate(self._columns) if cut in column.cuts]

    def _boxes(self, index: int) -> Iterator[_Rect]:
        for at, column in enumerate(self._columns):
            stage = sum(cut <= index for cut in column.cuts)
            # The boxes of one stage are connected.
            tail = 0 if index + 1 == len(self._layers) or index + 1 in column.cuts else _GAP
            x, height = _SPACE + at * _COLUMN_WIDTH, _BOX_HEIGHT + tail
            what = f"{column.heading}, stage {stage}: {self._layers[index].name}"
            yield _Rect(f"stage{stage % NUM_COLOURS}", x, self._y(index), _COLUMN_WIDTH - 8, height, what)
        yield _Rect("unit", self._names, self._y(index), _NAME_WIDTH, _BOX_HEIGHT, self._layers[index].name)

    def _names_of(self, index: int) -> Iterator[_Text]:
        layer, y = self._layers[index], self._y(index) + 16
        yield _Text("", self._names + 8, y, _fitting(f"{index}  {layer.name}", _NAME_WIDTH - 16), layer.name)
        for at, column in enumerate(self._columns):
            if index == 0 or index in column.cuts:
                stage = sum(cut <= index for cut in column.cuts)
                yield _Text("stage", _SPACE + at * _COLUMN_WIDTH + 8, y, f"stage {stage}")
        if layer.forbidden:
            places = sum(each.places for each in layer.forbidden)
            text = f"✕ not cut at {places} {'place' if places == 1 else 'places'} within: {layer.forbidden[0].reason}"
            room = self._texts + _TEXT_WIDTH - self._bars
            yield _Text("barred", self._bars, y, _fitting(text, room), _reasons(layer.forbidden))

    def _lines(self, cut: int) -> Iterator[_Line]:
        layer, y = self._layers[cut - 1], self._middle(cut)
        end = self._names + _NAME_WIDTH
        if layer.no_cut:
            yield _Line("barred", self._names, end, y, f"no cut: {layer.no_cut}")
        for at in self._borders(cut):
            x = _SPACE + at * _COLUMN_WIDTH
            yield _Line("border", x, x + _COLUMN_WIDTH - 8, y)
        if self._borders(cut):
            yield _Line("border", self._names, end, y, _alive(layer.alive))

    def _bars_of(self, cut: int) -> Iterator[_Rect]:
        layer, y = self._layers[cut - 1], self._middle(cut)
        sizes = (("forward", layer.output_bytes, y - _BAR_HEIGHT), ("backward", layer.backward_bytes, y))
        for kind, size, top in sizes:
            width = round(_BAR_WIDTH * size / self._most, 1) if self._most else 0.0
            yield _Rect(kind, self._bars, top, width, _BAR_HEIGHT - 1, _alive(layer.alive))

    def _words(self, cut: int) -> Iterator[_Text]:
        layer, y = self._layers[cut - 1], self._middle(cut) + 4
        if layer.no_cut:
            yield _Text("barred", self._texts, y, _fitting(f"✕ no cut: {layer.no_cut}", _TEXT_WIDTH), layer.no_cut)
            return
        text = f"{bytes_text(layer.output_bytes)} forward, {bytes_text(layer.backward_bytes)} back"
        if layer.tie_bytes:
            text += f", {bytes_text(layer.tie_bytes)} of it tied weights"
        kind = "at-border" if self._borders(cut) else "faint"
        yield _Text(kind, self._texts, y, _fitting(text, _TEXT_WIDTH), _alive(layer.alive))


def _alive(values: Sequence[AliveValue]) -> str:
    """The tooltip: the largest values first."""
    shown = sorted(values, key=lambda value: -value.num_bytes)
    lines = [
        f"{value.name}: {bytes_text(value.num_bytes)}{'' if value.has_gradient else ', no gradient'}"
        for value in shown[:_MOST_ALIVE]
    ]
    left = len(shown) - _MOST_ALIVE
    return "\n".join([*lines, *([f"and {left} more"] if left > 0 else [])])


def _reasons(forbidden: Sequence[ForbiddenCut]) -> str:
    return "\n".join(f"no cut {place_text(each)}: {each.reason}" for each in forbidden[:_MOST_ALIVE])


def _fitting(text: str, width: float) -> str:
    """Truncate a text to the available width.

    >>> _fitting("encoder.layer.0", 64)
    'encoder.l…'
    """
    most = int(width / _LETTER_WIDTH)
    return text if len(text) <= most else f"{text[: most - 1]}…"
