"""A bound on the streams that wait, and a way to end them at once.

A streaming handler of a sync server holds a thread while its client watches. `Watchers` admits a limited number of
them, fewer than the pool has threads, so that ordinary calls always find one. A watch ends when its client goes away,
when the server stops, when a newer watch takes its place, or when its time is up; the client then opens the next one
from the last position it saw.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc

from hetpipe.clock import Clock
from hetpipe.errors import ResourceExhausted

T = TypeVar("T")

#: Seconds after which a server ends a stream by itself.
STREAM_SECONDS = 30.0

#: Seconds after which a client gives up on a stream that its server should have ended.
STREAM_DEADLINE_SECONDS = STREAM_SECONDS + 10.0


class Watch:
    """One stream's wait. `wait` is called from the handler's thread, `end` from any."""

    def __init__(self, condition: threading.Condition, clock: Clock, seconds: float) -> None:
        self._condition = condition
        self._clock = clock
        self._deadline = clock.monotonic() + seconds
        self._ended = False

    def end(self) -> None:
        """Wake the handler and let its `wait` return None."""
        with self._condition:
            self._ended = True
            self._condition.notify_all()

    def wait(self, ready: Callable[[], T | None], *, look_seconds: float = STREAM_SECONDS) -> T | None:
        """Block until `ready` gives a value; None when the watch has ended.

        `ready` runs with the condition's lock held, first at once, then after every notification, and whenever
        `look_seconds` have passed without one.
        """
        with self._condition:
            while not self._ended:
                value = ready()
                if value is not None:
                    return value
                left = self._deadline - self._clock.monotonic()
                if left <= 0.0:
                    return None
                self._condition.wait(min(left, look_seconds))
        return None


class Watchers:
    """The streams of one kind. Thread-safe."""

    def __init__(self, *, limit: int, what: str, condition: threading.Condition, clock: Clock) -> None:
        """Admit `limit` streams at a time.

        Args:
            limit: at least 1, and less than the server's threads.
            what: what the streams watch, for the refusal's sentence.
            condition: notified by the owner whenever what is watched may have changed.
            clock: bounds the length of a watch.
        """
        self._limit = limit
        self._what = what
        self._condition = condition
        self._clock = clock
        self._watches: set[Watch] = set()
        self._closed = False

    def __len__(self) -> int:
        """Streams open now."""
        with self._condition:
            return len(self._watches)

    @contextmanager
    def watch(self, context: grpc.ServicerContext, *, seconds: float = STREAM_SECONDS) -> Iterator[Watch]:
        """Admit the stream of `context` for at most `seconds`.

        Raises:
            ResourceExhausted: there are too many already.
        """
        watch = Watch(self._condition, self._clock, seconds)
        with self._condition:
            if len(self._watches) >= self._limit:
                raise ResourceExhausted(f"{self._limit} streams already watch {self._what}, which is the limit")
            self._watches.add(watch)
            closed = self._closed
        try:
            if closed or not context.add_callback(watch.end):
                watch.end()
            yield watch
        finally:
            with self._condition:
                self._watches.discard(watch)

    def close(self) -> None:
        """End all streams, and every one to come at once."""
        with self._condition:
            self._closed = True
            watches = tuple(self._watches)
        for watch in watches:
            watch.end()
