"""The only module that reads time, so that tests can inject it.

Protocol code uses `monotonic` alone: a jump of the wall clock changes nothing. `wall` serves file names and logs.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time. Implementations are thread-safe."""

    def monotonic(self) -> float:
        """Seconds that never go backwards; the origin is arbitrary."""
        ...

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC; for people, never for decisions."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block the calling thread for `seconds` (≥ 0)."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        """`CLOCK_MONOTONIC`, shared by all processes of one host."""
        return time.monotonic()

    def wall(self) -> float:
        """`CLOCK_REALTIME`."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""
        time.sleep(seconds)


SYSTEM_CLOCK = SystemClock()
