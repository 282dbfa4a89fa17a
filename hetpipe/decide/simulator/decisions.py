"""Precomputed decisions of a scheduling order.

The simulator decides millions of times. An `Order` is pure, and its decision depends only on whether more forwards
follow before the pipeline drains, on the number of minibatches in flight, and on which inputs are available and which
arrived first. The numbers of minibatches and arrivals do not matter, so the few distinct decisions are tabulated.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from hetpipe.decide.schedule.policy import Action, Kind, Order, Ready, StageView
from hetpipe.values.ids import Minibatch


class Inputs(IntEnum):
    """The inputs available at a stage."""

    NONE = 0
    FORWARD = 1
    BACKWARD = 2
    FORWARD_FIRST = 3
    """Both; the activations arrived first."""
    BACKWARD_FIRST = 4
    """Both; the gradient arrived first, or at the same instant."""


#: Available inputs → the forward and the backward of a view.
_READY: dict[Inputs, tuple[Ready | None, Ready | None]] = {
    Inputs.NONE: (None, None),
    Inputs.FORWARD: (Ready(Minibatch(2), 1), None),
    Inputs.BACKWARD: (None, Ready(Minibatch(1), 1)),
    Inputs.FORWARD_FIRST: (Ready(Minibatch(2), 1), Ready(Minibatch(1), 2)),
    Inputs.BACKWARD_FIRST: (Ready(Minibatch(2), 2), Ready(Minibatch(1), 1)),
}

#: [minibatches in flight][Inputs] → what to compute; None: wait.
Answers = tuple[tuple[Kind | None, ...], ...]


class StageAnswers(NamedTuple):
    """All decisions of an order at one stage."""

    filling: Answers
    """While more forwards follow before the pipeline drains."""
    draining: Answers
    """While none follows."""


def answers(order: Order, limit: int) -> StageAnswers:
    """All decisions of `order` at a stage with at most `limit` minibatches in flight (S_i).

    >>> from hetpipe.decide.schedule.static_1f1b import StaticOneForwardOneBackward
    >>> of = answers(StaticOneForwardOneBackward(), 2)
    >>> [[kind and kind.value for kind in some[1]] for some in (of.filling, of.draining)]
    [[None, 'F', None, 'F', 'F'], [None, None, 'B', 'B', 'B']]
    """

    def table(*, more_forwards: bool) -> Answers:
        return tuple(
            tuple(_answer(order, _view(limit, held, inputs, more_forwards=more_forwards)) for inputs in Inputs)
            for held in range(limit + 1)
        )

    return StageAnswers(filling=table(more_forwards=True), draining=table(more_forwards=False))


def inputs_of(forward: int | None, backward: int | None) -> Inputs:
    """The available inputs, given the arrival times of activations and gradient (None: not arrived).

    >>> inputs_of(3, 3)
    <Inputs.BACKWARD_FIRST: 4>
    """
    if forward is None:
        return Inputs.NONE if backward is None else Inputs.BACKWARD
    if backward is None:
        return Inputs.FORWARD
    return Inputs.FORWARD_FIRST if forward < backward else Inputs.BACKWARD_FIRST


def _view(limit: int, num_in_flight: int, inputs: Inputs, *, more_forwards: bool) -> StageView:
    forward, backward = _READY[inputs]
    return StageView(limit, num_in_flight, forward, backward, more_forwards)


def _answer(order: Order, view: StageView) -> Kind | None:
    decision = order.next_action(view)
    return decision.kind if isinstance(decision, Action) else None
