"""Streams that wait without a thread: what their clients get, and when they end."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import pytest

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import ResourceExhausted, StaleTerm
from hetpipe.wire import feeds as feeds_module
from hetpipe.wire.caller import Caller
from hetpipe.wire.calls import LeaveRequest
from hetpipe.wire.feeds import Feeds, Outlet
from hetpipe.wire.server import Server, ServerConfig
from hetpipe.wire.serving import Context, Handlers
from tests.polling import wait_until
from tests.wire.echo import REPEAT, SAY, SERVICE, echo, repeat, say, serving, text_of

SECONDS = 5.0


class Board:
    """A list that grows, and the feeds of its entries from the first on."""

    def __init__(self, *, limit: int = 8) -> None:
        self.condition = threading.Condition()
        self.entries: list[str] = []
        self.error: Exception | None = None
        self.feeds: Feeds[LeaveRequest] = Feeds(
            limit=limit, what="the board", condition=self.condition, clock=SYSTEM_CLOCK, look_seconds=SECONDS
        )

    def open(self, request: LeaveRequest, context: Context, outlet: Outlet[LeaveRequest]) -> None:
        position = 0

        def take() -> LeaveRequest | None:
            nonlocal position
            if self.error is not None:
                raise self.error
            if position == len(self.entries):
                return None
            position += 1
            return text_of(self.entries[position - 1])

        self.feeds.open(context, outlet, take, key=request.member_id or None)

    def write(self, *entries: str) -> None:
        with self.condition:
            self.entries += entries
            self.condition.notify_all()

    @contextmanager
    def serving(self) -> Iterator[Caller]:
        """One thread for all calls."""
        server, handlers = Server(ServerConfig(num_threads=1)), Handlers()
        handlers.on(SAY, echo)
        handlers.on_feed(REPEAT, self.open)
        handlers.add_to(server, SERVICE)
        server.on_stop(self.feeds.close)
        with serving(server) as caller:
            yield caller


def test_many_wait_and_leave_the_only_thread_to_calls() -> None:
    board = Board()
    with board.serving() as caller:
        streams = [repeat(caller, "") for _ in range(5)]
        board.write("a")
        assert [next(stream) for stream in streams] == ["a"] * 5
        assert say(caller) == "hello"
        board.write("b", "c")
        assert [list(islice(stream, 2)) for stream in streams] == [["b", "c"]] * 5
        for stream in streams:
            stream.close()  # type: ignore[attr-defined]
        wait_until(lambda: not len(board.feeds), timeout_seconds=SECONDS, what="the end of feeds without clients")


def test_an_error_ends_it_before_and_after_its_first_reply() -> None:
    board = Board()
    with board.serving() as caller:
        board.write("a")
        stream = repeat(caller)
        assert next(stream) == "a"
        board.error = StaleTerm("term 1 is older than 2")
        board.write("b")
        for broken in (stream, repeat(caller)):
            with pytest.raises(StaleTerm, match="term 1 is older than 2"):
                next(broken)
        assert not len(board.feeds)


def test_the_newest_of_a_follower_replaces_the_older_and_others_are_limited() -> None:
    board = Board(limit=1)
    with board.serving() as caller:
        board.write("a")
        older, newer = repeat(caller, "me"), repeat(caller, "me")
        assert (next(older), next(newer)) == ("a", "a")
        assert list(older) == []
        with pytest.raises(ResourceExhausted, match="the limit of 1 streams that watch the board is reached"):
            next(repeat(caller, "you", deadline_seconds=0.2))


def test_closing_ends_all_and_what_comes_later() -> None:
    board = Board()
    with board.serving() as caller:
        stream = repeat(caller)
        board.write("a")
        assert next(stream) == "a"
        board.feeds.close()
        assert list(stream) == []
        assert list(repeat(caller)) == []


def test_it_ends_when_its_time_is_up() -> None:
    """However rarely feeds are asked without a notification."""
    board = Board()
    opened, lives = board.feeds.open, iter((60.0, 0.02, 0.02))
    board.feeds.open = lambda *given, **named: opened(*given, **named, seconds=next(lives))  # type: ignore[method-assign]
    with board.serving() as caller:
        board.write("a")
        long = repeat(caller)
        assert next(long) == "a"
        for _ in range(2):
            assert list(repeat(caller, "")) == ["a"]


class Stalled:
    """The call of a client that takes nothing."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.sent: list[LeaveRequest] = []

    def add_callback(self, _: object) -> bool:
        return True

    def cancel(self) -> None:
        self.cancelled.set()

    def send(self, reply: LeaveRequest) -> None:
        self.sent.append(reply)
        assert self.cancelled.wait(SECONDS)


def test_one_that_takes_no_reply_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds_module, "STALLED_SECONDS", -1.0)
    board, stalled = Board(), Stalled()
    board.open(text_of(""), stalled, Outlet(stalled.send, lambda _: None))  # type: ignore[arg-type]
    board.write("a")
    wait_until(lambda: len(stalled.sent) == 1, timeout_seconds=SECONDS, what="a reply that is not taken")
    board.write("b")
    assert stalled.cancelled.wait(SECONDS)
    assert not len(board.feeds)
    board.feeds.close()


@pytest.mark.parametrize(("pace_seconds", "replies_per_second"), [(60.0, math.inf), (0.001, 1 / 60.0)])
def test_replies_are_paced_unless_they_are_urgent(pace_seconds: float, replies_per_second: float) -> None:
    """Of a hundred changes in a row, each far from the next by less than the pace, a follower gets few messages."""
    condition, urgent = threading.Condition(), threading.Event()
    feeds: Feeds[int] = Feeds(
        limit=1,
        what="a number",
        condition=condition,
        clock=SYSTEM_CLOCK,
        pace_seconds=pace_seconds,
        replies_per_second=replies_per_second,
        is_urgent=urgent.is_set,
    )
    number, seen, sent = 0, 0, list[int]()

    def take() -> int | None:
        nonlocal seen
        fresh, seen = number - seen, number
        return number if fresh else None

    call = Stalled()
    feeds.open(call, Outlet(sent.append, lambda _: None), take)  # type: ignore[arg-type]
    for _ in range(100):
        with condition:
            number += 1
            condition.notify_all()
    wait_until(lambda: bool(sent), timeout_seconds=SECONDS, what="the first reply")
    with condition:
        number += 1
        urgent.set()
        condition.notify_all()
    wait_until(lambda: sent[-1] == 101, timeout_seconds=SECONDS, what="an urgent reply")
    assert len(sent) <= 3
    feeds.close()
