"""Which fetched weights come to the device before a stage asks for them?"""

from __future__ import annotations

import torch

from hetpipe.pipeline.inbox import Inbox
from hetpipe.values.ids import Clock
from hetpipe.weights.flat import BufferPool, FlatLayout


def test_one_is_on_the_device_the_others_wait_in_host_memory() -> None:
    pool = BufferPool(FlatLayout([("w", (4,), "float32")]), torch.device("cpu"))
    inbox = Inbox(None, None, Clock(0), pool)

    for clock in (1, 2, 3):
        inbox.on_fetched(Clock(clock), pool.take_on_host())
    assert {clock: fetched.on_host for clock, fetched in inbox.fetched.items()} == {1: False, 2: True, 3: True}
    assert (pool.peak, pool.host_alive) == (1, 2)

    pool.release(inbox.fetched.pop(Clock(1)))
    inbox.on_fetched(Clock(4), pool.take_on_host())
    inbox.on_fetched(Clock(5), None)
    assert {clock: fetched.on_host for clock, fetched in inbox.fetched.items()} == {2: True, 3: True, 4: False}
    assert (pool.peak, inbox.lost) == (1, {5})


def test_weights_of_layers_that_moved_away_are_dropped() -> None:
    layout = FlatLayout([("a", (2,), "float32")])
    old, new = BufferPool(layout, torch.device("cpu")), BufferPool(layout, torch.device("cpu"))
    inbox = Inbox(None, None, Clock(0), old)
    inbox.on_fetched(Clock(3), old.take_on_host())
    with inbox.condition:
        inbox.change_pool(new)
        assert not inbox.fetched
    assert old.alive == old.host_alive == 0
    inbox.on_fetched(Clock(4), new.take_on_host())
    with inbox.condition:
        assert (list(inbox.fetched), new.alive) == ([4], 1)
