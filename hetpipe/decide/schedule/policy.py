"""Interface of schedules, the order in which a stage computes; each implementation is one sibling file.

An `Order` is a pure function from the state of a stage and its ready inputs to its next action, or to the reason why it
waits. Every implementation guarantees that forwards run in the order of p, backwards run in the order of p, at most S_i
minibatches are in flight, and there are no circular waits, hence no deadlock.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from hetpipe.values.ids import Minibatch

_ACTION = re.compile(r"([FB])([1-9][0-9]*)")


class Kind(Enum):
    """Direction of an action."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Action:
    """One computation. Prints and parses as `F12`, `B9`."""

    kind: Kind
    p: Minibatch

    def __str__(self) -> str:
        """`F12`."""
        return f"{self.kind.value}{self.p}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Inverse of `str`.

        >>> Action.parse("F12")
        Action(kind=<Kind.FORWARD: 'F'>, p=12)
        """
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not an action; write F or B and a minibatch number, for example F12")
        return cls(Kind(match[1]), Minibatch(int(match[2])))


@dataclass(frozen=True, slots=True)
class Ready:
    """A computation with its inputs available, and the number of their arrival."""

    p: Minibatch
    arrival: int


@dataclass(frozen=True, slots=True)
class StageView:
    """Inputs of an order."""

    limit: int
    """S_i."""
    num_in_flight: int
    forward: Ready | None
    """The next forward, if its inputs are available."""
    backward: Ready | None
    """The next backward, if its gradient is available."""
    more_forwards: bool = True
    """Whether another forward follows before the pipeline drains: at the next barrier, under `flush` after the wave."""


@dataclass(frozen=True, slots=True)
class Wait:
    """No action is possible, with the reason."""

    reason: str


class Order(Protocol):
    """Selects the next action of a stage."""

    def next_action(self, view: StageView) -> Action | Wait:
        """Select an action; deterministic in the view."""
        ...


def nothing_ready(view: StageView) -> Wait:
    """The reason why neither direction can run."""
    if view.num_in_flight >= view.limit or not view.more_forwards:
        return Wait("a gradient from the next stage")
    return Wait("activations from the previous stage" if view.num_in_flight == 0 else "activations or gradients")
