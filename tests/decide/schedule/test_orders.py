"""The orders, played on a small clockwork of a pipeline: golden grids, and rules that hold for any timing."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import astuple
from typing import Any

import pytest

from hetpipe.decide.schedule.fifo import Fifo
from hetpipe.decide.schedule.gpipe import GPipe
from hetpipe.decide.schedule.in_flight import in_flight
from hetpipe.decide.schedule.one_forward_one_backward import OneForwardOneBackward
from hetpipe.decide.schedule.policy import Action, Kind, Order, Ready, StageView, Wait
from hetpipe.decide.schedule.static_1f1b import StaticOneForwardOneBackward
from hetpipe.values.ids import Minibatch
from hetpipe.values.policies import Schedule, WeightPolicy
from tests.decide.schedule.clockwork import Setting, every_setting, play
from tests.pairwise import all_pairs

SETTINGS = every_setting()
SEEDS = range(10)
MINIBATCHES = 14
"""No multiple of most waves, so that the last one is short."""

THREE_STAGES = [
    ["F1", "F2", "F3", "B1", "F4", "B2", "F5", "B3", "B4", "B5"],
    ["F1", "F2", "B1", "F3", "B2", "F4", "B3", "F5", "B4", "B5"],
    ["F1", "B1", "F2", "B2", "F3", "B3", "F4", "B4", "F5", "B5"],
]


def met(settings: Iterable[Setting]) -> list[Any]:
    """Every two values of a setting in `make test`."""
    return all_pairs([(setting,) for setting in settings], by=astuple, name=str)


def grid(weights: WeightPolicy, schedule: Schedule, num_stages: int, wave: int, count: int) -> list[str]:
    return [
        " ".join(done)
        for done in play(Setting(weights=weights, schedule=schedule, num_stages=num_stages, wave=wave), count)
    ]


@pytest.mark.parametrize("weights", ["wave", "stash", "vertical", "double_buffer", "predict", "spectrain"])
def test_1f1b_of_three_stages_is_the_papers_picture(weights: WeightPolicy) -> None:
    assert grid(weights, "1f1b", num_stages=3, wave=3, count=5) == [" ".join(done) for done in THREE_STAGES]


def test_gpipe_is_the_papers_picture() -> None:
    """PipeDream-2BW, Figures 1a and 3: every stage computes a batch forwards, then the same batch backwards."""
    assert grid("flush", "gpipe", num_stages=2, wave=4, count=8) == 2 * [
        "F1 F2 F3 F4 B1 B2 B3 B4 F5 F6 F7 F8 B5 B6 B7 B8",
    ]


def test_pipedream_flush_is_the_papers_picture() -> None:
    """PipeDream-2BW, Figure 3: as GPipe, but with no more in flight than there are stages."""
    assert grid("flush", "1f1b", num_stages=2, wave=4, count=8) == [
        "F1 F2 B1 F3 B2 F4 B3 B4 F5 F6 B5 F7 B6 F8 B7 B8",
        "F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 F8 B8",
    ]


def test_2bw_fills_the_pipeline_once() -> None:
    """PipeDream-2BW, Figure 2: four workers, m = 4."""
    assert grid("double_buffer", "1f1b", num_stages=4, wave=4, count=8) == [
        "F1 F2 F3 F4 B1 F5 B2 F6 B3 F7 B4 F8 B5 B6 B7 B8",
        "F1 F2 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 F8 B6 B7 B8",
        "F1 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 F8 B7 B8",
        "F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 F8 B8",
    ]


def test_a_short_last_wave_of_gpipe() -> None:
    assert grid("flush", "gpipe", num_stages=3, wave=4, count=6) == 3 * ["F1 F2 F3 F4 B1 B2 B3 B4 F5 F6 B5 B6"]


@pytest.mark.parametrize("setting", met(SETTINGS))
def test_every_order_computes_everything_once_in_order_within_its_credits(setting: Setting) -> None:
    for seed in SEEDS:
        for i, done in enumerate(play(setting, MINIBATCHES, random.Random(seed))):
            actions = [Action.parse(text) for text in done]
            for kind in Kind:
                assert [a.p for a in actions if a.kind is kind] == list(range(1, MINIBATCHES + 1))
            flying = 0
            for action in actions:
                flying += 1 if action.kind is Kind.FORWARD else -1
                assert 0 <= flying <= setting.limit(i)


@pytest.mark.parametrize("setting", met([s for s in SETTINGS if s.schedule != "gpipe"]))
def test_a_forward_and_its_backward_are_one_task_on_the_last_stage(setting: Setting) -> None:
    *_, last = play(setting, MINIBATCHES, random.Random(0))
    assert last == [f"{kind}{p}" for p in range(1, MINIBATCHES + 1) for kind in "FB"]


@pytest.mark.parametrize("setting", met([s for s in SETTINGS if s.is_fixed]))
def test_a_fixed_order_does_not_depend_on_timing(setting: Setting) -> None:
    in_step = play(setting, MINIBATCHES)
    for seed in SEEDS:
        assert play(setting, MINIBATCHES, random.Random(seed)) == in_step


@pytest.mark.parametrize("schedule", ["1f1b", "fifo"])
def test_other_orders_go_by_what_is_there(schedule: Schedule) -> None:
    """So that the test before says something: with this timing they do differ."""
    setting = Setting(weights="wave", schedule=schedule, num_stages=3, wave=4)
    assert len({str(play(setting, MINIBATCHES, random.Random(seed))) for seed in SEEDS}) > 1


@pytest.mark.parametrize("setting", met([s for s in SETTINGS if s.drains]))
def test_flush_empties_every_stage_between_waves(setting: Setting) -> None:
    for seed in SEEDS:
        for done in play(setting, MINIBATCHES, random.Random(seed)):
            for first in range(1, MINIBATCHES + 1, setting.wave):
                assert set(done[: 2 * (first - 1)]) == {f"{kind}{p}" for p in range(1, first) for kind in "FB"}


def test_fifo_takes_what_came_first() -> None:
    def view(forward: int, backward: int) -> StageView:
        return StageView(4, 2, Ready(Minibatch(3), forward), Ready(Minibatch(1), backward))

    assert str(Fifo().next_action(view(forward=7, backward=9))) == "F3"
    assert str(Fifo().next_action(view(forward=9, backward=7))) == "B1"
    assert str(OneForwardOneBackward().next_action(view(forward=9, backward=7))) == "F3"


@pytest.mark.parametrize("order", [Fifo(), OneForwardOneBackward()])
def test_a_backward_never_waits_for_a_forward_that_cannot_run(order: Order) -> None:
    assert str(order.next_action(StageView(4, 2, None, Ready(Minibatch(1), 1)))) == "B1"
    assert str(order.next_action(StageView(2, 2, Ready(Minibatch(3), 1), Ready(Minibatch(1), 2)))) == "B1"


@pytest.mark.parametrize("order", [GPipe(), StaticOneForwardOneBackward()])
def test_in_a_fixed_order_a_backward_waits_for_the_forward_that_is_due(order: Order) -> None:
    backward = Ready(Minibatch(1), 1)
    assert isinstance(order.next_action(StageView(4, 2, None, backward)), Wait)
    assert str(order.next_action(StageView(4, 2, None, backward, more_forwards=False))) == "B1"


@pytest.mark.parametrize("order", [Fifo(), GPipe(), OneForwardOneBackward(), StaticOneForwardOneBackward()])
def test_a_wait_says_why(order: Order) -> None:
    empty = order.next_action(StageView(2, 0, None, None))
    full = order.next_action(StageView(2, 2, None, None, more_forwards=False))
    assert isinstance(empty, Wait)
    assert "previous stage" in empty.reason
    assert isinstance(full, Wait)
    assert "gradient" in full.reason


@pytest.mark.parametrize("text", ["F12", "B9", "F1"])
def test_actions_print_and_parse(text: str) -> None:
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["F0", "X1", "F", "12", "F-1", "F1 "])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="F12"):
        Action.parse(text)


def test_in_flight_is_the_policies_table() -> None:
    def row(num_stages: int, wave: int, weights: WeightPolicy = "wave", schedule: Schedule = "1f1b") -> list[int]:
        return [
            in_flight(stage=i, num_stages=num_stages, minibatches_per_wave=wave, weights=weights, schedule=schedule)
            for i in range(num_stages)
        ]

    assert row(4, 1) == [1, 1, 1, 1]
    assert row(4, 3) == [3, 3, 2, 1]
    assert row(4, 4) == [4, 3, 2, 1]
    assert row(4, 8) == [8, 5, 3, 1]
    assert row(2, 5) == [5, 1]
    assert row(1, 5) == [1]
    assert row(4, 2, "flush") == [2, 2, 2, 1]
    assert row(4, 9, "flush") == [4, 3, 2, 1]
    assert row(4, 9, "flush", "gpipe") == [9, 9, 9, 9]
    for weights in ("stash", "vertical", "double_buffer", "predict", "spectrain"):
        assert row(4, 9, weights) == [4, 3, 2, 1]


@pytest.mark.parametrize(
    "setting", [s for s in SETTINGS if s.is_fixed or (s.schedule == "1f1b" and s.wave <= s.num_stages)], ids=str
)
def test_no_credit_is_given_in_vain(setting: Setting) -> None:
    """Each stage has S_i in flight at some time: where timing cannot change what is in flight, the bound is tight."""
    for i, done in enumerate(play(setting, 3 * MINIBATCHES)):
        flying = most = 0
        for text in done:
            flying += 1 if text.startswith("F") else -1
            most = max(most, flying)
        assert most == setting.limit(i)
