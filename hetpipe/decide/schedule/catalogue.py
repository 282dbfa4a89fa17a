"""The orders by the name they have in a job file; which policy may use which is in `spec.policies`."""

from __future__ import annotations

from hetpipe.decide.schedule.fifo import Fifo
from hetpipe.decide.schedule.gpipe import GPipe
from hetpipe.decide.schedule.one_forward_one_backward import OneForwardOneBackward
from hetpipe.decide.schedule.policy import Order
from hetpipe.decide.schedule.static_1f1b import StaticOneForwardOneBackward
from hetpipe.values.policies import Schedule, WeightPolicy

#: Policies whose versions depend on the number of a minibatch alone, so that no order must be kept for their sake.
_ANY_ORDER = ("wave", "flush")


def order_for(weights: WeightPolicy, schedule: Schedule) -> Order:
    """The order in which the stages of a policy compute; `schedule` is one that it can use (`schedule_of`)."""
    if schedule == "gpipe":
        return GPipe()
    if schedule == "fifo":
        return Fifo()
    return OneForwardOneBackward() if weights in _ANY_ORDER else StaticOneForwardOneBackward()
