"""Retry of `Busy` calls with exponential backoff until a deadline."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

from hetpipe.clock import Clock
from hetpipe.errors import Busy

T = TypeVar("T")

_FIRST_REST_SECONDS = 0.005
_LONGEST_REST_SECONDS = 0.2


def while_busy(work: Callable[[], T], *, until: float, clock: Clock) -> T:
    """The result of `work`, retried while it raises `Busy`.

    Raises:
        Busy: it still does at monotonic second `until`.
    """
    rests = _rests(until, clock)
    while True:
        try:
            return work()
        except Busy:
            if not next(rests, False):
                raise


def stream_while_busy(work: Callable[[], Iterator[T]], *, until: float, clock: Clock) -> Generator[T, None, None]:
    """The stream returned by `work`, retried until its first message; a stream that has begun is not restarted.

    Raises:
        Busy: as for `while_busy`.
    """
    rests = _rests(until, clock)
    begun = False
    while True:
        try:
            for item in work():
                begun = True
                yield item
        except Busy:
            if begun or not next(rests, False):
                raise
        else:
            return


def _rests(until: float, clock: Clock) -> Iterator[bool]:
    """Sleep between attempts; yields after each sleep, and ends when the deadline leaves no time for another."""
    rest = _FIRST_REST_SECONDS
    while clock.monotonic() + rest < until:
        clock.sleep(rest)
        yield True
        rest = min(2 * rest, _LONGEST_REST_SECONDS)
