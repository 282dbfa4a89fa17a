"""What a client does when a server is `Busy` with it: asks again, after rests that grow, as long as it has time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

from hetpipe.clock import Clock
from hetpipe.errors import Busy

T = TypeVar("T")

_FIRST_REST_SECONDS = 0.005
_LONGEST_REST_SECONDS = 0.2


def while_busy(work: Callable[[], T], *, until: float, clock: Clock) -> T:
    """What `work` gives, once the server takes it.

    Raises:
        Busy: it did not until the monotonic second `until`.
    """
    rests = _rests(until, clock)
    while True:
        try:
            return work()
        except Busy:
            if not next(rests, False):
                raise


def stream_while_busy(work: Callable[[], Iterator[T]], *, until: float, clock: Clock) -> Generator[T, None, None]:
    """The stream that `work` gives, once the server takes it; a stream that has begun is not begun again.

    Raises:
        Busy: as `while_busy`.
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
    """Rests, and is true after each; ends when there is no time for another."""
    rest = _FIRST_REST_SECONDS
    while clock.monotonic() + rest < until:
        clock.sleep(rest)
        yield True
        rest = min(2 * rest, _LONGEST_REST_SECONDS)
