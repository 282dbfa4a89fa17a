"""The orders by the name they have in a job file; which policy may use which is in `values.policies`."""

from __future__ import annotations

from hetpipe.decide.schedule.fifo import Fifo
from hetpipe.decide.schedule.gpipe import GPipe
from hetpipe.decide.schedule.one_forward_one_backward import OneForwardOneBackward
from hetpipe.decide.schedule.policy import Order
from hetpipe.decide.schedule.static_1f1b import StaticOneForwardOneBackward
from hetpipe.values.policies import POLICIES, Schedule, WeightPolicy


def order_for(weights: WeightPolicy, schedule: Schedule) -> Order:
    """The order in which the stages of a policy compute; `schedule` is one that it can use (`Policy.schedules`)."""
    if schedule == "gpipe":
        return GPipe()
    if schedule == "fifo":
        return Fifo()
    return StaticOneForwardOneBackward() if POLICIES[weights].strict_order else OneForwardOneBackward()
