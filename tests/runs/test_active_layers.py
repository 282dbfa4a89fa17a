"""Which layers of a run are inactive, and since when, by its plan and the facts of its start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetpipe.runs.active_layers import InactiveSince, inactive_of, read_inactive
from hetpipe.runs.status import inactive_lines
from hetpipe.values.activation import Activation
from hetpipe.values.ids import Clock

ACTIVATIONS = (Activation(Clock(0), (2, 3)), Activation(Clock(4), (1,)), Activation(Clock(8), ()))
NEW_JOB: dict[str, Any] = {"layers": ["stem", "a", "b1", "b2"], "start": {"clock": 0, "inactive": []}}


def test_those_of_the_clocks_that_are_reached() -> None:
    first = InactiveSince(0, (2, 3), ("b1", "b2"))
    assert inactive_of(ACTIVATIONS, NEW_JOB, None) == (first,)
    assert inactive_of(ACTIVATIONS, NEW_JOB, 3) == (first,)
    assert [one.clock for one in inactive_of(ACTIVATIONS, NEW_JOB, 4)] == [0, 4]
    assert [*inactive_lines(inactive_of(ACTIVATIONS, NEW_JOB, 9))] == [
        "inactive: layers 2-3 (b1, b2) from clock 0 on; layer 1 (a) from clock 4 on; none from clock 8 on"
    ]


def test_a_resumed_run_begins_with_those_of_its_checkpoint() -> None:
    resumed = NEW_JOB | {"start": {"clock": 4, "inactive": [1]}}
    assert inactive_of(ACTIVATIONS, resumed, 5) == (InactiveSince(4, (1,), ("a",)),)
    assert [one.layers for one in inactive_of(ACTIVATIONS, resumed, 8)] == [(1,), ()]


def test_nothing_is_said_where_all_layers_have_been_active() -> None:
    assert inactive_of((), NEW_JOB, 9) == ()
    assert inactive_of((Activation(Clock(4), (1,)),), NEW_JOB, 3) == ()
    assert [*inactive_lines(())] == []


def test_layers_that_are_built_anew_are_named() -> None:
    changes = (Activation(Clock(4), (1,), (3,)),)
    assert [*inactive_lines(inactive_of(changes, NEW_JOB, 9))] == [
        "inactive: none from clock 0 on; layer 1 (a) from clock 4 on, with layer 3 (b2) built anew"
    ]
    resumed = NEW_JOB | {"start": {"clock": 4, "inactive": [], "fresh": [2]}}
    assert inactive_of((), resumed, 5) == (InactiveSince(4, (), (), (2,), ("b1",)),)


def test_many_layers_are_not_all_named() -> None:
    named = InactiveSince(0, tuple(range(10)), tuple(f"l{index}" for index in range(10)))
    assert named.layers_text == "layers 0-9 (l0, l1, l2, l3, l4, l5, l6, l7, and 2 more)"


def test_a_folder_without_a_plan(tmp_path: Path) -> None:
    assert read_inactive(tmp_path, 3) == ()
    assert inactive_of(ACTIVATIONS, {}, 0) == (InactiveSince(0, (2, 3), ()),)
