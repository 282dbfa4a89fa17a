"""A bound on the streams that wait, and a way to end them at once.

A streaming handler of a sync server holds a thread while its client watches. `Watchers` admits a limited number of
them, fewer than the pool has threads, so that ordinary calls always find one. A watch ends when its client goes away,
when the server stops, when a newer watch takes its place, or when its time is up; the client then opens the next one
from the last position it saw.

Where the watchers are people, one too many takes turns with the others: whoever has the most streams loses the oldest
of them, and opens it again. So all of them get on, and nobody keeps others out, however many streams it opens.
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

#: Seconds after which a server ends a stream by itself.
STREAM_SECONDS = 30.0

#: Seconds after which a client gives up on a stream that its server should have ended.
STREAM_DEADLINE_SECONDS = STREAM_SECONDS + 10.0


#: A stream that others make room for lasts at least so long, so that who takes turns gets something of each.
MIN_TURN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who opens a stream."""

    peer: str = ""
    """Its certificate, or its address."""
    group: str = ""
    """Its role; empty: it belongs to none that is bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """How those who are too many share the streams."""

    per_peer: int | None = None
    """Streams of one peer with a certificate."""
    per_group: Mapping[str, int] = field(default_factory=dict)
    """Streams of all peers of a group; the others are kept for the rest."""


class Watch:
    """One stream's wait. `wait` is called from the handler's thread, `end` from any."""

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

    def __init__(
        self, *, limit: int, what: str, condition: threading.Condition, clock: Clock, turns: Turns | None = None
    ) -> None:
        """Admit `limit` streams at a time.

        Args:
            limit: at least 1, and less than the server's threads.
            what: what the streams watch, for the refusal's sentence.
            condition: notified by the owner whenever what is watched may have changed.
            clock: bounds the length of a watch.
            turns: how those who are too many share the streams; None: one too many is refused.
        """
        self._turns = turns
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
    def watch(
        self, context: grpc.ServicerContext, *, seconds: float = STREAM_SECONDS, viewer: Viewer | None = None
    ) -> Iterator[Watch]:
        """Admit the stream of `context` for at most `seconds`.

        Raises:
            ResourceExhausted: there are too many already.
            Busy: where they take turns, nobody has had one that was long enough yet.
        """
        watch = Watch(self._condition, self._clock, seconds, viewer or Viewer())
        with self._condition:
            if self._turns is not None:
                self._make_room(watch, self._turns)
            elif len(self._watches) >= self._limit:
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

    def _make_room(self, new: Watch, turns: Turns) -> None:
        """End a stream if `new` is one too many: the oldest one of whoever has most, of those that must make room.

        Raises:
            Busy: it has just begun.
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
            # Nobody has more than the one who wants another.
            crowd = own
        oldest = min((watch for watch in crowd if counts[watch.viewer] == most), key=lambda watch: watch.began)
        if self._clock.monotonic() - oldest.began < MIN_TURN_SECONDS:
            raise Busy(f"{limit} streams watch {self._what}, which is the limit; ask again soon")
        self._watches.discard(oldest)
        oldest.end()

    def close(self) -> None:
        """End all streams, and every one to come at once."""
        with self._condition:
            self._closed = True
            watches = tuple(self._watches)
        for watch in watches:
            watch.end()
