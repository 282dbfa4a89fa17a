"""Server-side streams that wait for a state to change, without a thread each.

A streaming handler of a sync server occupies a thread while its client waits (`wire.watchers`). The handler of a *feed*
opens it and returns. One thread then waits for the condition that guards the state, and asks every feed for its next
reply; a few threads send the replies. A feed ends when its client disconnects or takes no replies, the server stops, a
newer feed of the same follower replaces it, its state is over, or its time is up; the client then resumes from the last
position it received.

gRPC's own health service streams in this way: `experimental_non_blocking` of grpcio's `_server.py`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import grpc

from hetpipe.clock import Clock
from hetpipe.errors import ResourceExhausted
from hetpipe.observe.log import get_logger
from hetpipe.wire.watchers import STREAM_SECONDS

ReplyT = TypeVar("ReplyT")
HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])

_log = get_logger(__name__)

#: Threads that send replies: sending blocks until gRPC has passed a reply to the connection.
_NUM_SENDERS = 8

#: Seconds after which a feed is cut off whose client takes no reply, so that its sender is free again.
STALLED_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Outlet(Generic[ReplyT]):
    """The way to the client of one feed. Thread-safe; calls after the end have no effect."""

    send: Callable[[ReplyT], None]
    """Send a reply; blocks until the connection has taken it."""
    end: Callable[[Exception | None], None]
    """End the call, with an error or without; does not block."""


@dataclass(eq=False, slots=True)
class _Feed(Generic[ReplyT]):
    outlet: Outlet[ReplyT]
    cancel: Callable[[], object]
    take: Callable[[], ReplyT | None]
    key: Hashable
    deadline: float
    is_sending: bool = False
    """Whether it waits for a sender, or has one."""
    began: float | None = None
    """When the reply was passed to gRPC that the connection has not taken yet."""
    is_behind: bool = False
    """Whether the state changed while a reply was being sent."""


@dataclass(frozen=True, slots=True)
class _Step(Generic[ReplyT]):
    """What a feed does next: send a reply or, without one, end."""

    reply: ReplyT | None
    error: Exception | None = None


def feed_opener(handle: HandlerT) -> HandlerT:
    """Mark a handler that opens a feed: it is called with an `Outlet` as well."""
    cast("Any", handle).opens_feed = True
    return handle


def opens_feed(handle: Callable[..., Any]) -> bool:
    """Whether a handler is marked by `feed_opener`."""
    return getattr(handle, "opens_feed", False)


def _never() -> bool:
    return False


class Feeds(Generic[ReplyT]):
    """The feeds of one kind. Thread-safe."""

    def __init__(
        self,
        *,
        limit: int,
        what: str,
        condition: threading.Condition,
        clock: Clock,
        look_seconds: float = STREAM_SECONDS,
        pace_seconds: float = 0.0,
        replies_per_second: float = math.inf,
        is_urgent: Callable[[], bool] = _never,
    ) -> None:
        """Start without feeds.

        Args:
            limit: maximum number of concurrent feeds.
            what: what they follow, for error messages.
            condition: notified by the owner whenever the state may have changed. Its lock guards the feeds, too.
            clock: bounds the duration of a feed.
            look_seconds: interval after which feeds are asked without a notification.
            pace_seconds: interval between two rounds of replies, in which changes are gathered.
            replies_per_second: to all feeds together; a round of many makes the interval longer.
            is_urgent: whether a round must not wait for that interval; called with the lock held.
        """
        self._limit = limit
        self._what = what
        self._condition = condition
        self._clock = clock
        self._look_seconds = look_seconds
        self._pace_seconds = pace_seconds
        self._replies_per_second = replies_per_second
        self._is_urgent = is_urgent
        self._feeds: dict[_Feed[ReplyT], None] = {}
        self._by_key: dict[Hashable, _Feed[ReplyT]] = {}
        self._senders: ThreadPoolExecutor | None = None
        #: When the feeds are asked next, without a notification.
        self._wakes_at = clock.monotonic()
        self._closed = False

    def __len__(self) -> int:
        """Number of open feeds."""
        with self._condition:
            return len(self._feeds)

    def open(
        self,
        context: grpc.ServicerContext,
        outlet: Outlet[ReplyT],
        take: Callable[[], ReplyT | None],
        *,
        key: Hashable = None,
        seconds: float = STREAM_SECONDS,
    ) -> None:
        """Open a feed for the call of `context`, for at most `seconds`.

        Args:
            context: of the call.
            outlet: the way to its client.
            take: its next reply, or None if there is none yet; called with the lock held. An error ends the feed. Of
                paced feeds, a reply has all there is.
            key: of the follower, whose older feed ends; None: it may have any number.
            seconds: its duration.

        Raises:
            ResourceExhausted: the limit is reached.
            Exception: what `take` raises at once.
        """
        now = self._clock.monotonic()
        feed = _Feed(outlet, context.cancel, take, key, now + seconds)
        with self._condition:
            older = None if key is None else self._by_key.get(key)
            if older is None and len(self._feeds) >= self._limit:
                raise ResourceExhausted(f"the limit of {self._limit} streams that watch {self._what} is reached")
            first = take()
            if older is not None and self._remove(older):
                older.outlet.end(None)
            if self._closed:
                outlet.end(None)
                return
            self._feeds[feed] = None
            if key is not None:
                self._by_key[key] = feed
            senders = self._pool()
            if feed.deadline < self._wakes_at:
                self._condition.notify_all()
            if first is not None:
                feed.is_sending = True
                senders.submit(self._send, feed, _Step(first))
        if not context.add_callback(lambda: self._discard(feed)):
            self._discard(feed)

    def close(self) -> None:
        """End all feeds, including future ones."""
        with self._condition:
            self._closed = True
            feeds, senders = list(self._feeds), self._senders
            self._feeds.clear()
            self._by_key.clear()
            self._condition.notify_all()
        for feed in feeds:
            feed.outlet.end(None)
        if senders is not None:
            senders.shutdown(wait=False)

    # -- inside, with the lock held ----------------------------------------------------------------------------------

    def _pool(self) -> ThreadPoolExecutor:
        if self._senders is None:
            self._senders = ThreadPoolExecutor(_NUM_SENDERS, thread_name_prefix="feed")
            threading.Thread(target=self._run, name="feeds", daemon=True).start()
        return self._senders

    def _remove(self, feed: _Feed[ReplyT]) -> bool:
        """Forget a feed; returns whether it was there, so that it is ended once."""
        if feed not in self._feeds:
            return False
        del self._feeds[feed]
        if feed.key is not None:
            del self._by_key[feed.key]
        return True

    def _next(self, feed: _Feed[ReplyT], now: float) -> _Step[ReplyT] | None:
        if feed not in self._feeds:
            return None
        try:
            reply = feed.take()
        except Exception as error:  # noqa: BLE001 - sent to the client, as the error of its call
            return _Step(None, error)
        if reply is not None:
            return _Step(reply)
        return _Step(None) if now >= feed.deadline else None

    def _round(self) -> int:
        """Ask every feed, and pass its next step to a sender; returns how many had one."""
        assert self._senders is not None, "it was started with the thread that calls this"
        now, num_sent = self._clock.monotonic(), 0
        for feed in list(self._feeds):
            if feed.is_sending:
                feed.is_behind = True
                seconds = 0.0 if feed.began is None else now - feed.began
                if feed.began is not None and seconds > STALLED_SECONDS and self._remove(feed):
                    _log.warning("feed_cut_off", what=self._what, seconds=seconds)
                    feed.cancel()
                continue
            step = self._next(feed, now)
            if step is not None:
                feed.is_sending = True
                num_sent += 1
                self._senders.submit(self._send, feed, step)
        return num_sent

    # -- threads -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Ask the feeds, in at most half of the time however many there are."""
        next_round = self._clock.monotonic()
        with self._condition:
            while not self._closed:
                began = self._clock.monotonic()
                if began < next_round and not self._is_urgent():
                    self._condition.wait(next_round - began)
                    continue
                num_sent = self._round()
                ended = self._clock.monotonic()
                pace = max(self._pace_seconds, num_sent / self._replies_per_second) if num_sent else 0.0
                next_round = ended + max(ended - began, pace)
                # One that is sending is asked by its sender, or cut off.
                ends = (ended + STALLED_SECONDS if feed.is_sending else feed.deadline for feed in self._feeds)
                self._wakes_at = min([ended + self._look_seconds, *ends])
                self._condition.wait(max(0.0, self._wakes_at - ended))

    def _send(self, feed: _Feed[ReplyT], step: _Step[ReplyT] | None) -> None:
        while step is not None:
            if step.reply is None:
                with self._condition:
                    is_open = self._remove(feed)
                if is_open:
                    feed.outlet.end(step.error)
                return
            feed.began = self._clock.monotonic()
            try:
                feed.outlet.send(step.reply)
            except Exception:  # noqa: BLE001 - of one client; the sender goes on with the others
                _log.exception("feed_failed", what=self._what)
                self._discard(feed)
                feed.cancel()
                return
            with self._condition:
                asks_again = feed.is_behind or not self._pace_seconds
                feed.began, feed.is_behind = None, False
                step = self._next(feed, self._clock.monotonic()) if asks_again else None
                feed.is_sending = step is not None
                if step is None and feed.deadline < self._wakes_at:
                    self._condition.notify_all()

    def _discard(self, feed: _Feed[Any]) -> None:
        with self._condition:
            self._remove(feed)
