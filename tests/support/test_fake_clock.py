"""The fake clock moves only when told to."""

from __future__ import annotations

import threading

import pytest

from hetpipe.clock import Clock
from tests.support.fake_clock import FakeClock


def test_it_is_a_clock_that_stands_still() -> None:
    clock: Clock = FakeClock(monotonic=5.0, wall=1000.0)
    assert [clock.monotonic(), clock.monotonic()] == [5.0, 5.0]
    assert clock.wall() == 1000.0


def test_advance_moves_both_times() -> None:
    clock = FakeClock(wall=1000.0)
    clock.advance(2.5)
    assert (clock.monotonic(), clock.wall()) == (2.5, 1002.5)
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1)


def test_the_wall_clock_may_jump() -> None:
    clock = FakeClock(wall=1000.0)
    clock.jump_wall(-600)
    assert (clock.monotonic(), clock.wall()) == (0.0, 400.0)


def test_sleepers_wake_in_their_order() -> None:
    clock = FakeClock()
    woken: list[int] = []

    def run(seconds: int) -> None:
        clock.sleep(seconds)
        woken.append(seconds)

    threads = [threading.Thread(target=run, args=(seconds,)) for seconds in (2, 1)]
    for thread in threads:
        thread.start()
    assert clock.wait_sleepers(2)
    clock.advance(1)
    threads[1].join(5)
    assert woken == [1]
    assert not clock.wait_sleepers(2, timeout_seconds=0.01)
    clock.advance(1)
    threads[0].join(5)
    assert woken == [1, 2]


def test_auto_advance_never_blocks() -> None:
    clock = FakeClock(auto_advance=True)
    clock.sleep(30)
    assert clock.monotonic() == 30
