"""Bounded server-side streams that can be ended immediately.

A streaming handler of a sync server occupies a thread while its client watches. `Watchers` admits fewer streams than
the pool has threads, so that unary calls always find one. A watch ends when its client disconnects, the server stops, a
newer watch replaces it, or its time is up; the client then resumes from the last position it received.

For interactive watchers, an excess stream replaces another: the peer with the most streams loses its oldest one and
reopens it. So all of them make progress, and no peer can starve the others by opening many streams.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import grpc

from hetpipe.clock import Clock
from hetpipe.errors import Busy, ResourceExhausted

T = TypeVar("T")

#: Seconds after which a server ends a stream.
STREAM_SECONDS = 30.0

#: Seconds after which a client gives up on a stream that its server should have ended.
STREAM_DEADLINE_SECONDS = STREAM_SECONDS + 10.0


#: Minimum lifetime of a stream before it may be replaced, so that each delivers something.
MIN_TURN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Viewer:
    """The client of a stream."""

    peer: str = ""
    """Its certificate, or its address."""
    group: str = ""
    """Its role; empty for a role without a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Sharing of streams when there are too many."""

    per_peer: int | None = None
    """Maximum streams of one peer with a certificate."""
    per_group: Mapping[str, int] = field(default_factory=dict)
    """Maximum streams of all peers of a group; the rest is reserved for others."""


class Watch:
    """A waiting stream. `wait` is called from the handler's thread, `end` from any."""

    def __init__(self, condition: threading.Condition, clock: Clock, seconds: float, viewer: Viewer) -> None:
        self._condition = condition
        self._clock = clock
        self.began = clock.monotonic()
        self._deadline = self.began + seconds
        self._ended = False
        self.viewer = viewer

    def end(self) -> None:
        """Wake the handler and let its `wait` return None."""
        with self._condition:
            self._ended = True
            self._condition.notify_all()

    def wait(self, ready: Callable[[], T | None], *, look_seconds: float = STREAM_SECONDS) -> T | None:
        """Block until `ready` returns a value; None when the watch has ended.

        `ready` runs with the condition's lock held: immediately, after every notification, and every `look_seconds`
        without one.
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

    def __init__(
        self, *, limit: int, what: str, condition: threading.Condition, clock: Clock, turns: Turns | None = None
    ) -> None:
        """Admit up to `limit` concurrent streams.

        Args:
            limit: at least 1, and less than the server's threads.
            what: what the streams watch, for error messages.
            condition: notified by the owner whenever the watched state may have changed.
            clock: bounds the duration of a watch.
            turns: the sharing of streams above the limit; None: excess streams are rejected.
        """
        self._turns = turns
        self._limit = limit
        self._what = what
        self._condition = condition
        self._clock = clock
        self._watches: set[Watch] = set()
        self._closed = False

    def __len__(self) -> int:
        """Number of open streams."""
        with self._condition:
            return len(self._watches)

    @contextmanager
    def watch(
        self, context: grpc.ServicerContext, *, seconds: float = STREAM_SECONDS, viewer: Viewer | None = None
    ) -> Iterator[Watch]:
        """Admit the stream of `context` for at most `seconds`.

        Raises:
            ResourceExhausted: the limit is reached.
            Busy: with `turns`, no stream is old enough to be replaced.
        """
        watch = Watch(self._condition, self._clock, seconds, viewer or Viewer())
        with self._condition:
            if self._turns is not None:
                self._make_room(watch, self._turns)
            elif len(self._watches) >= self._limit:
                raise ResourceExhausted(f"the limit of {self._limit} streams that watch {self._what} is reached")
            self._watches.add(watch)
            closed = self._closed
        try:
            if closed or not context.add_callback(watch.end):
                watch.end()
            yield watch
        finally:
            with self._condition:
                self._watches.discard(watch)

    def _make_room(self, new: Watch, turns: Turns) -> None:
        """End the oldest stream of the peer with the most streams in an overfull group, to make room for `new`.

        Raises:
            Busy: it is too young to be replaced.
        """
        viewer = new.viewer
        own = [watch for watch in self._watches if watch.viewer == viewer]
        group = [watch for watch in self._watches if watch.viewer.group == viewer.group]
        if viewer.group and turns.per_peer is not None and len(own) >= turns.per_peer:
            crowd, limit = own, turns.per_peer
        elif len(group) >= turns.per_group.get(viewer.group, self._limit):
            crowd, limit = group, turns.per_group.get(viewer.group, self._limit)
        elif len(self._watches) >= self._limit:
            crowd, limit = list(self._watches), self._limit
        else:
            return
        counts = Counter(watch.viewer for watch in crowd)
        most = max(counts.values())
        if most == len(own) and own:
            # No peer has more streams than the new one's.
            crowd = own
        oldest = min((watch for watch in crowd if counts[watch.viewer] == most), key=lambda watch: watch.began)
        if self._clock.monotonic() - oldest.began < MIN_TURN_SECONDS:
            raise Busy(f"the limit of {limit} streams that watch {self._what} is reached; retry later")
        self._watches.discard(oldest)
        oldest.end()

    def close(self) -> None:
        """End all streams, including future ones."""
        with self._condition:
            self._closed = True
            watches = tuple(self._watches)
        for watch in watches:
            watch.end()
