"""The orders, played on a small clockwork of a pipeline: golden grids, and rules that hold for any timing."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from hetpipe.schedule.catalogue import ORDERS, order_named
from hetpipe.schedule.fifo import Fifo
from hetpipe.schedule.in_flight import in_flight
from hetpipe.schedule.one_forward_one_backward import OneForwardOneBackward
from hetpipe.schedule.policy import Action, Kind, Order, Ready, StageView, Wait
from hetpipe.spec.ids import Minibatch


@dataclass
class Stage:
    """What one stage of the clockwork has done and received."""

    limit: int
    forwarded: int = 0
    backwarded: int = 0
    forwards: list[tuple[int, int]] = field(default_factory=list)
    backwards: list[tuple[int, int]] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def view(self) -> StageView:
        forward = self.forwards[0] if self.forwards else None
        backward = self.backwards[0] if self.backwards else None
        return StageView(
            self.limit,
            self.forwarded - self.backwarded,
            None if forward is None else Ready(Minibatch(forward[0]), forward[1]),
            None if backward is None else Ready(Minibatch(backward[0]), backward[1]),
        )


def play(order: Order, num_stages: int, wave: int, count: int, rng: random.Random | None = None) -> list[list[str]]:
    """Run `count` minibatches; each turn every stage (in a random order, if given) does one action that is ready."""
    limits = [in_flight(stage=i, num_stages=num_stages, minibatches_per_wave=wave) for i in range(num_stages)]
    stages = [Stage(limit) for limit in limits]
    arrivals = iter(range(1, 1_000_000))
    stages[0].forwards = [(p, next(arrivals)) for p in range(1, count + 1)]
    for _ in range(100 * count * num_stages):
        if all(stage.backwarded == count for stage in stages):
            return [stage.done for stage in stages]
        turn = list(range(num_stages))
        if rng is not None:
            rng.shuffle(turn)
            turn = turn[: rng.randint(1, num_stages)]
        actions = [(i, order.next_action(stages[i].view())) for i in turn]
        for i, action in actions:
            if isinstance(action, Action):
                _carry_out(stages, i, action, next(arrivals))
    pytest.fail(f"no progress: {[stage.done for stage in stages]}")


def _carry_out(stages: list[Stage], i: int, action: Action, arrival: int) -> None:
    stage = stages[i]
    stage.done.append(str(action))
    if action.kind is Kind.FORWARD:
        stage.forwards.pop(0)
        stage.forwarded = action.p
        receiver = stage.backwards if i + 1 == len(stages) else stages[i + 1].forwards
        receiver.append((action.p, arrival))
    else:
        stage.backwards.pop(0)
        stage.backwarded = action.p
        if i > 0:
            stages[i - 1].backwards.append((action.p, arrival))


def test_1f1b_of_three_stages_is_the_papers_picture() -> None:
    grid = play(OneForwardOneBackward(), num_stages=3, wave=3, count=5)
    assert grid == [
        ["F1", "F2", "F3", "B1", "F4", "B2", "F5", "B3", "B4", "B5"],
        ["F1", "F2", "B1", "F3", "B2", "F4", "B3", "F5", "B4", "B5"],
        ["F1", "B1", "F2", "B2", "F3", "B3", "F4", "B4", "F5", "B5"],
    ]


@pytest.mark.parametrize("name", sorted(ORDERS))
@pytest.mark.parametrize(("num_stages", "wave"), [(1, 1), (1, 4), (2, 1), (2, 4), (3, 2), (4, 4), (4, 9)])
def test_every_order_computes_everything_once_in_order_within_its_credits(
    name: str, num_stages: int, wave: int
) -> None:
    for seed in range(20):
        grid = play(order_named(name), num_stages, wave, 12, random.Random(seed))
        for i, done in enumerate(grid):
            actions = [Action.parse(text) for text in done]
            for kind in Kind:
                assert [a.p for a in actions if a.kind is kind] == list(range(1, 13))
            flying = 0
            for action in actions:
                flying += 1 if action.kind is Kind.FORWARD else -1
                assert 0 <= flying <= in_flight(stage=i, num_stages=num_stages, minibatches_per_wave=wave)
        last = grid[-1]
        assert last == [f"{kind}{p}" for p in range(1, 13) for kind in "FB"], "on the last stage, one task"


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


@pytest.mark.parametrize("order", [Fifo(), OneForwardOneBackward()])
def test_a_wait_says_why(order: Order) -> None:
    empty = order.next_action(StageView(2, 0, None, None))
    full = order.next_action(StageView(2, 2, Ready(Minibatch(3), 1), None))
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
    def row(num_stages: int, wave: int) -> list[int]:
        return [in_flight(stage=i, num_stages=num_stages, minibatches_per_wave=wave) for i in range(num_stages)]

    assert row(4, 1) == [1, 1, 1, 1]
    assert row(4, 3) == [3, 3, 2, 1]
    assert row(4, 4) == [4, 3, 2, 1]
    assert row(4, 8) == [8, 5, 3, 1]
    assert row(2, 5) == [5, 1]
    assert row(1, 5) == [1]
