"""How much a benchmark does: what is measured, or, in a smoke run, just enough to see that it still works.

A smoke run is asked for by `python -m benchmarks --smoke`, which says so to all processes by the environment.
"""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

SMOKE = "HETPIPE_BENCHMARKS_SMOKE"


def is_smoke() -> bool:
    """Whether figures are of no interest in this process."""
    return SMOKE in os.environ


def sized(measured: T, smoke: T) -> T:
    """`measured`, or `smoke` in a smoke run."""
    return smoke if is_smoke() else measured
