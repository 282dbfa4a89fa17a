"""Every step of a virtual worker's table, and no other; and when it pays to start it anew."""

from __future__ import annotations

import pytest

from hetpipe.decide.elastic.virtual_workers import TABLE, LifeStep, VirtualWorker
from hetpipe.errors import InvalidTransition
from hetpipe.values.ids import Clock
from hetpipe.values.ids import VirtualWorkerIndex as Vw
from hetpipe.values.life_state import LifeState

LEGAL = {
    ("starting", "got_ready", "ready"),
    ("starting", "got_done", "done"),
    ("starting", "lost", "ending"),
    ("starting", "drain_asked", "ending"),
    ("starting", "given_up", "out"),
    ("ready", "got_done", "done"),
    ("ready", "lost", "ending"),
    ("ready", "drain_asked", "leaving"),
    ("leaving", "got_done", "done"),
    ("leaving", "lost", "ending"),
    ("leaving", "left", "awaiting"),
    ("ending", "ended", "awaiting"),
    ("ending", "given_up", "out"),
    ("awaiting", "returns", "admitting"),
    ("awaiting", "given_up", "out"),
    ("admitting", "admitted", "starting"),
    ("admitting", "drain_asked", "ending"),
    ("admitting", "given_up", "out"),
    ("out", "add_asked", "awaiting"),
}


def test_exactly_these_steps_are_legal() -> None:
    assert set(TABLE) == set(LifeState)
    assert {(state, step, after) for state, row in TABLE.items() for step, after in row.items()} == LEGAL


@pytest.mark.parametrize("state", LifeState)
@pytest.mark.parametrize("step", LifeStep)
def test_an_illegal_step_raises_and_changes_nothing(state: LifeState, step: LifeStep) -> None:
    worker = VirtualWorker(Vw(1), 0.0, state=state)
    if step in TABLE[state]:
        worker.take(step, now=3.0)
        assert (worker.state, worker.since) == (TABLE[state][step], 3.0)
    else:
        with pytest.raises(InvalidTransition, match=f"virtual worker 1 cannot take {step} in state {state} "):
            worker.take(step, now=3.0)
        assert (worker.state, worker.since) == (state, 0.0)


def test_only_lives_without_a_wave_count_as_crashes() -> None:
    worker = VirtualWorker(Vw(0), 0.0)
    for clocks, crashes in (([], 1), ([7], 2), ([7, 7], 3), ([7, 8, 8], 0), ([9], 1)):
        worker.begin_incarnation()
        for clock in clocks:
            worker.on_clock(Clock(clock))
        worker.count_death()
        assert worker.crashes == crashes
    assert worker.deaths == 5
