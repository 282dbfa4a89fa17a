"""Formatting of times and sizes. Pure; rates and counts are in `report.text`."""

from __future__ import annotations

import math

_KIB = 1024
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def significant(value: float) -> str:
    """Format with three significant digits, never with an exponent.

    >>> significant(0.03141), significant(8.4249), significant(0.99996), significant(1234.5), significant(0.0)
    ('0.0314', '8.42', '1.00', '1234', '0')
    """
    if value < 100:  # noqa: PLR2004 - three digits
        value = float(f"{value:.3g}")
    if value >= 100:  # noqa: PLR2004 - three digits
        return f"{value:.0f}"
    for decimals, least in ((1, 10.0), (2, 1.0), (3, 0.1), (4, 0.01)):
        if value >= least:
            return f"{value:.{decimals}f}"
    return f"{value:.5f}".rstrip("0").rstrip(".") if value else "0"


def time_text(milliseconds: float) -> str:
    """A short time.

    >>> time_text(8.4249), time_text(0.0042), time_text(12345.0)
    ('8.42 ms', '4.20 µs', '12.3 s')
    """
    if milliseconds >= 10_000:  # noqa: PLR2004 - for readability
        return f"{significant(milliseconds / 1000)} s"
    if 0 < milliseconds < 0.01:  # noqa: PLR2004 - for readability
        return f"{significant(milliseconds * 1000)} µs"
    return f"{significant(milliseconds)} ms"


def bytes_text(num_bytes: float, *, round_up: bool = False) -> str:
    """A size in binary units, with three significant digits.

    Args:
        num_bytes: the size.
        round_up: whether the text must not state less than the size, as for memory that has to be added.

    >>> bytes_text(0), bytes_text(1536), bytes_text(12 << 30), bytes_text(10.55 * 2**30)
    ('0 bytes', '1.5 KiB', '12 GiB', '10.6 GiB')
    >>> bytes_text(420_491_316), bytes_text(420_491_316, round_up=True)
    ('401 MiB', '402 MiB')
    """
    unit = 0
    while num_bytes >= _KIB and unit + 1 < len(_UNITS):
        num_bytes /= _KIB
        unit += 1
    if round_up:
        steps = 1 if num_bytes >= 100 else 10 if num_bytes >= 10 else 100  # noqa: PLR2004 - three digits
        num_bytes = math.ceil(num_bytes * steps) / steps
    digits = significant(num_bytes)
    return f"{digits.rstrip('0').rstrip('.') if '.' in digits else digits} {_UNITS[unit]}"


def of_bytes_text(used: int, available: int) -> str:
    """A part of a size, in the unit of the whole unless it is tiny in that.

    >>> of_bytes_text(10 << 30, 12 << 30), of_bytes_text(100 << 20, 6 << 30), of_bytes_text(3 << 20, 6 << 30)
    ('10.0 of 12 GiB', '0.1 of 6 GiB', '3 MiB of 6 GiB')
    """
    whole = bytes_text(available)
    in_its_unit = used / _KIB ** _UNITS.index(whole.split(" ")[1])
    return f"{in_its_unit:.1f} of {whole}" if in_its_unit >= 0.05 else f"{bytes_text(used)} of {whole}"  # noqa: PLR2004
