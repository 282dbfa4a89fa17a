"""Streams that wait are bounded, and end when told to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

import grpc
import pytest

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import Busy, ResourceExhausted
from hetpipe.wire.watchers import MIN_TURN_SECONDS, Turns, Viewer, Watch, Watchers
from tests.support.fake_clock import FakeClock


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
            pytest.raises(ResourceExhausted, match="the limit of 2 streams that watch clocks is reached"),
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


class TestTurns:
    """Streams of people: nobody keeps others out."""

    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    def viewers(self, condition: threading.Condition, clock: FakeClock, *, limit: int = 8) -> Watchers:
        turns = Turns(per_peer=4, per_group={"monitor": 6})
        return Watchers(limit=limit, what="jobs", condition=condition, clock=clock, turns=turns)

    def open(self, stack: ExitStack, watchers: Watchers, clock: FakeClock, viewer: Viewer) -> Watch:
        clock.advance(MIN_TURN_SECONDS)
        return stack.enter_context(watchers.watch(context(), seconds=1e9, viewer=viewer))

    def ended(self, watch: Watch) -> bool:
        return watch._ended

    def test_who_has_the_most_makes_room_for_who_has_none(
        self, condition: threading.Condition, clock: FakeClock
    ) -> None:
        watchers = self.viewers(condition, clock)
        with ExitStack() as stack:
            first, second = Viewer("operator a", "operator"), Viewer("operator b", "operator")
            of_first = [self.open(stack, watchers, clock, first) for _ in range(4)]
            of_second = [self.open(stack, watchers, clock, second) for _ in range(4)]
            submit = self.open(stack, watchers, clock, Viewer("operator c", "operator"))
            assert [self.ended(watch) for watch in of_first] == [True, False, False, False]
            assert not any(map(self.ended, [*of_second, submit]))
            assert len(watchers) == 8
        assert len(watchers) == 0

    def test_a_peer_has_no_more_than_its_own(self, condition: threading.Condition, clock: FakeClock) -> None:
        watchers = self.viewers(condition, clock)
        with ExitStack() as stack:
            mine = [self.open(stack, watchers, clock, Viewer("operator a", "operator")) for _ in range(6)]
            assert [self.ended(watch) for watch in mine] == [True, True, False, False, False, False]

    def test_monitors_leave_streams_to_operators_whatever_they_do(
        self, condition: threading.Condition, clock: FakeClock
    ) -> None:
        watchers = self.viewers(condition, clock)
        with ExitStack() as stack:
            for number in range(32):
                self.open(stack, watchers, clock, Viewer(f"monitor {number}", "monitor"))
            assert len(watchers) == 6
            submit = self.open(stack, watchers, clock, Viewer("operator a", "operator"))
            for number in range(32):
                self.open(stack, watchers, clock, Viewer(f"monitor {number}", "monitor"))
            assert not self.ended(submit)

    def test_one_box_without_tls_takes_turns(self, condition: threading.Condition, clock: FakeClock) -> None:
        watchers, box = self.viewers(condition, clock, limit=32), Viewer("ipv4:127.0.0.1")
        with ExitStack() as stack:
            watches = [self.open(stack, watchers, clock, box) for _ in range(32)]
            submit = self.open(stack, watchers, clock, box)
            assert [self.ended(watch) for watch in watches].count(True) == 1
            assert not self.ended(submit)

    def test_a_turn_has_a_length(self, condition: threading.Condition, clock: FakeClock) -> None:
        watchers, box = self.viewers(condition, clock, limit=1), Viewer("ipv4:127.0.0.1")
        with watchers.watch(context(), viewer=box) as watch:
            with pytest.raises(Busy, match="the limit of 1 streams that watch jobs is reached; retry later"):
                watchers.watch(context(), viewer=box).__enter__()
            assert not self.ended(watch)
