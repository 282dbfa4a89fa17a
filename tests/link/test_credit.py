"""Credit: never more than there is room for, never held back from a sender who needs it."""

from __future__ import annotations

import random

import pytest

from hetpipe.errors import MalformedFrame
from hetpipe.link.credit import Window


def test_a_frame_without_credit_is_refused() -> None:
    window = Window(2)
    window.arrive()
    window.arrive()
    with pytest.raises(MalformedFrame, match="without credit: 2 are queued already"):
        window.arrive()


def test_credit_is_held_back_while_half_of_it_is_left() -> None:
    window = Window(4)
    due = []
    for _ in range(3):
        window.arrive()
        window.take()
        due.append(window.is_due)
    assert due == [False, False, True]
    assert window.grant() == 3
    assert not window.is_due


@pytest.mark.parametrize("frames", [1, 2, 3, 10])
def test_a_sender_without_credit_always_has_a_full_queue_before_it(frames: int) -> None:
    dice, window = random.Random(frames), Window(frames)
    credit, queued = frames, 0
    for _ in range(2000):
        if dice.random() < 0.5 and credit:
            window.arrive()
            credit, queued = credit - 1, queued + 1
        elif queued:
            window.take()
            queued -= 1
        if window.is_due:
            credit += window.grant()
        assert credit + queued <= frames
        assert credit > 0 or queued == frames
