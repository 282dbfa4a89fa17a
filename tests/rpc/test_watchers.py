"""Streams that wait are bounded, and end when told to."""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc
import pytest

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import ResourceExhausted
from hetpipe.rpc.watchers import Watchers
from hetpipe.testing.fake_clock import FakeClock


class Context:
    """As much of a servicer context as a watch needs."""

    def __init__(self, *, gone: bool = False) -> None:
        self._gone = gone
        self.callbacks: list[Callable[[], None]] = []

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self.callbacks.append(callback)
        return not self._gone


def context(*, gone: bool = False) -> grpc.ServicerContext:
    return Context(gone=gone)  # type: ignore[return-value]


@pytest.fixture
def condition() -> threading.Condition:
    return threading.Condition()


@pytest.fixture
def watchers(condition: threading.Condition) -> Watchers:
    return Watchers(limit=2, what="clocks", condition=condition, clock=SYSTEM_CLOCK)


def test_one_too_many_is_refused_and_leaving_makes_room(watchers: Watchers) -> None:
    with watchers.watch(context()), watchers.watch(context()):
        assert len(watchers) == 2
        with (
            pytest.raises(ResourceExhausted, match="2 streams already watch clocks, which is the limit"),
            watchers.watch(context()),
        ):
            pass
    with watchers.watch(context()):
        assert len(watchers) == 1


def test_what_is_ready_is_given_at_once(watchers: Watchers) -> None:
    with watchers.watch(context()) as watch:
        assert watch.wait(lambda: 7) == 7


def wait_in_thread(
    watchers: Watchers, ready: Callable[[], int | None]
) -> tuple[threading.Thread, list[int | None], Context]:
    asked = threading.Event()
    answers: list[int | None] = []
    caller = Context()

    def look() -> int | None:
        asked.set()
        return ready()

    def run() -> None:
        with watchers.watch(caller) as watch:  # type: ignore[arg-type]
            answers.append(watch.wait(look))

    thread = threading.Thread(target=run)
    thread.start()
    assert asked.wait(5.0)
    return thread, answers, caller


def test_a_notification_is_a_reason_to_look_again(watchers: Watchers, condition: threading.Condition) -> None:
    values: list[int] = []
    thread, answers, _ = wait_in_thread(watchers, lambda: values[0] if values else None)
    with condition:
        values.append(3)
        condition.notify_all()
    thread.join(5.0)
    assert answers == [3]


def test_a_client_that_goes_away_ends_its_watch(watchers: Watchers) -> None:
    thread, answers, caller = wait_in_thread(watchers, lambda: None)
    for callback in caller.callbacks:
        callback()
    thread.join(5.0)
    assert answers == [None]
    assert len(watchers) == 0


def test_closing_ends_all_and_what_comes_later(watchers: Watchers) -> None:
    thread, answers, _ = wait_in_thread(watchers, lambda: None)
    watchers.close()
    thread.join(5.0)
    assert answers == [None]
    with watchers.watch(context()) as watch:
        assert watch.wait(lambda: 7) is None


def test_a_client_that_was_gone_before_ends_at_once(watchers: Watchers) -> None:
    with watchers.watch(context(gone=True)) as watch:
        assert watch.wait(lambda: 7) is None


def test_a_watch_ends_when_its_time_is_up(condition: threading.Condition) -> None:
    clock = FakeClock()
    watchers = Watchers(limit=1, what="clocks", condition=condition, clock=clock)
    with watchers.watch(context(), seconds=30.0) as watch:
        clock.advance(30.0)
        assert watch.wait(lambda: None) is None
        assert watch.wait(lambda: 7) == 7


def test_an_error_of_the_question_goes_to_the_handler(watchers: Watchers) -> None:
    def broken() -> int | None:
        raise ResourceExhausted("no")

    with pytest.raises(ResourceExhausted), watchers.watch(context()) as watch:
        watch.wait(broken)
    assert len(watchers) == 0
