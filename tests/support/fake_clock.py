"""A clock that moves only when a test says so."""

from __future__ import annotations

import threading


class FakeClock:
    """A `hetpipe.clock.Clock` under the control of a test. Thread-safe.

    Time stands still until `advance`. `sleep` blocks its thread until others have advanced the clock far enough, or,
    with `auto_advance=True`, advances the clock itself and returns at once, which suits single-threaded tests.
    """

    def __init__(self, *, monotonic: float = 0.0, wall: float = 1_700_000_000.0, auto_advance: bool = False) -> None:
        self._monotonic = monotonic
        #: Wall time = monotonic time + this; `jump_wall` changes it.
        self._wall_offset = wall - monotonic
        self._auto_advance = auto_advance
        self._sleepers = 0
        self._changed = threading.Condition()

    def monotonic(self) -> float:
        """Seconds; starts at the value given and never falls."""
        with self._changed:
            return self._monotonic

    def wall(self) -> float:
        """Seconds since 1970; moves with `monotonic`, and by `jump_wall`."""
        with self._changed:
            return self._monotonic + self._wall_offset

    def sleep(self, seconds: float) -> None:
        """Return once the clock shows `seconds` more than now."""
        with self._changed:
            if self._auto_advance:
                self._monotonic += seconds
                self._changed.notify_all()
                return
            until = self._monotonic + seconds
            self._sleepers += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._monotonic >= until)
            finally:
                self._sleepers -= 1

    def advance(self, seconds: float) -> None:
        """Move time forward by `seconds` (≥ 0) and wake the sleepers whose time has come.

        Raises:
            ValueError: `seconds` is negative.
        """
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back: {seconds} s")
        with self._changed:
            self._monotonic += seconds
            self._changed.notify_all()

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an operator or NTP would; `monotonic` does not notice."""
        with self._changed:
            self._wall_offset += seconds

    def wait_sleepers(self, count: int, *, timeout_seconds: float = 5.0) -> bool:
        """Wait (in real time) until `count` threads are blocked in `sleep`; False if that does not happen in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._sleepers >= count, timeout=timeout_seconds)
