"""Waiting for other processes in tests: by looking often, with a deadline, on hetpipe's own clock."""

from __future__ import annotations

from collections.abc import Callable

from hetpipe.clock import SYSTEM_CLOCK

_PAUSE_SECONDS = 0.02


def wait_until(condition: Callable[[], bool], *, timeout_seconds: float, what: str) -> None:
    """Return as soon as `condition` holds.

    Raises:
        AssertionError: it did not hold within `timeout_seconds`.
    """
    deadline = SYSTEM_CLOCK.monotonic() + timeout_seconds
    while not condition():
        assert SYSTEM_CLOCK.monotonic() < deadline, f"no {what} within {timeout_seconds} s"
        SYSTEM_CLOCK.sleep(_PAUSE_SECONDS)
