"""Formatting of numbers, durations and tables. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

#: Name of the loss among the evaluated values; the others are metrics.
LOSS = "loss"

_MINUTE_SECONDS = 60
_HOUR_SECONDS = 3600

#: A value that a `key=value` line can hold without quotes.
_PLAIN_VALUE = re.compile(r"[^\s\"'=]+")


def duration(seconds: float | None) -> str:
    """A duration for people.

    >>> duration(4.2), duration(65.0), duration(7384.0), duration(None)
    ('4.2 s', '1 min 05 s', '2 h 03 min', '?')
    """
    if seconds is None or not math.isfinite(seconds):
        return "?"
    if seconds < 10:  # noqa: PLR2004 - below, tenths matter
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _MINUTE_SECONDS:
        return f"{whole} s"
    if whole < _HOUR_SECONDS:
        return f"{whole // _MINUTE_SECONDS} min {whole % _MINUTE_SECONDS:02d} s"
    return f"{whole // _HOUR_SECONDS} h {whole % _HOUR_SECONDS // _MINUTE_SECONDS:02d} min"


def rate(per_second: float) -> str:
    """A rate with its significant digits.

    >>> rate(4151.3), rate(37.26), rate(0.5)
    ('4151', '37.3', '0.50')
    """
    if per_second >= 100:  # noqa: PLR2004
        return f"{per_second:.0f}"
    return f"{per_second:.1f}" if per_second >= 1 else f"{per_second:.2f}"


def measure(value: float | None) -> str:
    """A loss or a metric.

    >>> measure(0.96338), measure(None), measure(1.25e-6), measure(3.2e21)
    ('0.9634', '-', '1.25e-06', '3.20e+21')
    """
    if value is None:
        return "-"
    return f"{value:.4f}" if not value or 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"  # noqa: PLR2004


def loss_first(names: Iterable[str]) -> list[str]:
    """The names of the evaluated values, in display order.

    >>> loss_first(["accuracy", "loss"])
    ['loss', 'accuracy']
    """
    return sorted(names, key=lambda name: (name != LOSS, name))


def percent(share: float) -> str:
    """A share of 1.

    >>> percent(0.138)
    '13.8 %'
    """
    return f"{100 * share:.1f} %"


def count(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun.

    >>> count(1, "wave"), count(2, "wave")
    ('1 wave', '2 waves')
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def pairs(values: Mapping[str, object]) -> str:
    """One structured line: `key=value` with quotes where a value needs them, None left out.

    >>> pairs({"state": "running", "note": "a b", "loss": None})
    'state=running note="a b"'
    """
    return " ".join(f"{key}={_value(value)}" for key, value in values.items() if value is not None)


def _value(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if _PLAIN_VALUE.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with aligned columns; a column of numbers only (below its heading) is aligned to the right.

    >>> columns([["vw", "state"], ["10", "up"], ["9", "down"]])
    ['vw  state', '10  up', ' 9  down']
    """
    if not rows:
        return []
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    numeric = [all(_is_number(row[index]) for row in rows[1:]) for index in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _is_number(text: str) -> bool:
    return text in {"", "-"} or text.replace(".", "", 1).isdigit()


def shown_path(path: Path, current: Path) -> str:
    """`path` relative to the folder `current` if below it, else absolute.

    >>> shown_path(Path("/home/me/runs/a"), Path("/home/me")), shown_path(Path("/data/a"), Path("/home/me"))
    ('runs/a', '/data/a')
    """
    return str(path.relative_to(current)) if path.is_relative_to(current) else str(path)
