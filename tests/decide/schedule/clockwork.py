"""A small clockwork of a pipeline, on which orders are played with any timing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from hetpipe.decide.schedule.catalogue import order_for
from hetpipe.decide.schedule.in_flight import in_flight
from hetpipe.decide.schedule.policy import Action, Kind, Ready, StageView
from hetpipe.values.ids import Minibatch
from hetpipe.values.policies import POLICIES, WEIGHT_POLICIES, Schedule, WeightPolicy

#: In a turn, how likely it is that a stage is free to act (one of these for each), and that the gate is open.
_FREE, _OPEN = (0.1, 0.6, 1.0), 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is played. Prints as a test's name."""

    weights: WeightPolicy
    schedule: Schedule
    num_stages: int
    wave: int

    def __str__(self) -> str:
        """`stash-1f1b-K3-N4`."""
        return f"{self.weights}-{self.schedule}-K{self.num_stages}-N{self.wave}"

    @property
    def drains(self) -> bool:
        """Whether the pipeline is empty between waves."""
        return self.weights == "flush"

    @property
    def is_fixed(self) -> bool:
        """Whether each stage has one order, whatever comes when."""
        return self.schedule == "gpipe" or self.weights not in {"wave", "flush"}

    def limit(self, stage: int) -> int:
        """S_i."""
        return in_flight(
            stage=stage,
            num_stages=self.num_stages,
            minibatches_per_wave=self.wave,
            weights=self.weights,
            schedule=self.schedule,
        )


def every_setting(num_stages: tuple[int, ...] = (1, 2, 3, 4), waves: tuple[int, ...] = (1, 3, 4, 9)) -> list[Setting]:
    """Each policy under each of its schedules, where it is defined."""
    return [
        Setting(weights=weights, schedule=schedule, num_stages=k, wave=n)
        for weights in WEIGHT_POLICIES
        for schedule in POLICIES[weights].schedules
        for k in num_stages
        for n in waves
        if n >= POLICIES[weights].least_minibatches_per_wave(k)
    ]


@dataclass
class Stage:
    """What one stage of the clockwork has done and received."""

    setting: Setting
    index: int
    count: int
    forwarded: int = 0
    backwarded: int = 0
    forwards: list[tuple[int, int]] = field(default_factory=list)
    backwards: list[tuple[int, int]] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def view(self, *, is_open: bool) -> StageView:
        """As the stage sees itself; `is_open`: whether the gate lets a minibatch in, on the first stage."""
        flying, wave = self.forwarded - self.backwarded, self.setting.wave
        between_waves = self.setting.drains and self.forwarded % wave == 0 and flying > 0
        forward = self.forwards[0] if self.forwards else None
        if self.index == 0 and (between_waves or not is_open):
            forward = None
        backward = self.backwards[0] if self.backwards else None
        return StageView(
            self.setting.limit(self.index),
            flying,
            None if forward is None else Ready(Minibatch(forward[0]), forward[1]),
            None if backward is None else Ready(Minibatch(backward[0]), backward[1]),
            more_forwards=self.forwarded < self.count and not between_waves,
        )


def play(setting: Setting, count: int, rng: random.Random | None = None) -> list[list[str]]:
    """Run `count` minibatches: what each stage does, in order.

    Each turn every stage does one action that is ready. With `rng` some stages are slow, those that act in a turn do so
    in a random order, and the gate is sometimes closed.
    """
    return [stage.done for stage in stages_after(setting, count, rng)]


def stages_after(setting: Setting, count: int, rng: random.Random | None = None) -> list[Stage]:
    """The stages at the end of `play`."""
    *_, stages = turns(setting, count, rng)
    return stages


def turns(setting: Setting, count: int, rng: random.Random | None = None) -> Iterator[list[Stage]]:
    """The stages after each action of `play`; the same objects every time."""
    order = order_for(setting.weights, setting.schedule)
    stages = [Stage(setting, index, count) for index in range(setting.num_stages)]
    arrivals = iter(range(1, 1_000_000))
    stages[0].forwards = [(p, next(arrivals)) for p in range(1, count + 1)]
    free = [1.0 if rng is None else rng.choice(_FREE) for _ in stages]
    for _ in range(1000 * count * setting.num_stages):
        if all(stage.backwarded == count for stage in stages):
            return
        turn = [i for i in range(len(stages)) if rng is None or rng.random() < free[i]]
        if rng is not None:
            rng.shuffle(turn)
        is_open = rng is None or rng.random() < _OPEN
        decided = [(i, order.next_action(stages[i].view(is_open=is_open))) for i in turn]
        for i, action in decided:
            if isinstance(action, Action):
                _carry_out(stages, i, action, next(arrivals))
                yield stages
    pytest.fail(f"{setting}: no progress: {[stage.done for stage in stages]}")


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
