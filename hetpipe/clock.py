"""The only module that reads time, so that tests can inject it.

Protocol code uses `monotonic` only, and is unaffected by jumps of the wall clock. `wall` is for file names and logs.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time. Implementations are thread-safe."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary origin; never decreasing."""
        ...

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC; for display, never for decisions."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block the calling thread for `seconds` (≥ 0)."""
        ...


class SystemClock:
    """The system clocks."""

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
