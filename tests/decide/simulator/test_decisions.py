"""Answers that are looked up are those that the order gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpipe.decide.schedule.fifo import Fifo
from hetpipe.decide.schedule.gpipe import GPipe
from hetpipe.decide.schedule.one_forward_one_backward import OneForwardOneBackward
from hetpipe.decide.schedule.policy import Action, Order, Ready, StageView
from hetpipe.decide.schedule.static_1f1b import StaticOneForwardOneBackward
from hetpipe.decide.simulator.decisions import answers, inputs_of
from hetpipe.values.ids import Minibatch


@pytest.mark.parametrize("order", [Fifo(), GPipe(), OneForwardOneBackward(), StaticOneForwardOneBackward()])
@given(data=st.data())
def test_the_numbers_of_minibatches_and_arrivals_do_not_matter(order: Order, data: st.DataObject) -> None:
    limit = data.draw(st.integers(1, 6))
    num_in_flight = data.draw(st.integers(0, limit))
    backwarded = data.draw(st.integers(0, 100))
    arrivals = data.draw(st.lists(st.integers(0, 1000), min_size=2, max_size=2, unique=True))
    forward, backward = (data.draw(st.sampled_from([arrival, None])) for arrival in arrivals)
    more_forwards = data.draw(st.booleans())

    decision = order.next_action(
        StageView(
            limit,
            num_in_flight,
            None if forward is None else Ready(Minibatch(backwarded + num_in_flight + 1), forward),
            None if backward is None else Ready(Minibatch(backwarded + 1), backward),
            more_forwards,
        )
    )

    of = answers(order, limit)
    kind = (of.filling if more_forwards else of.draining)[num_in_flight][inputs_of(forward, backward)]
    assert kind == (decision.kind if isinstance(decision, Action) else None)
