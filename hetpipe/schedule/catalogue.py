"""The orders by the name they have in a job file."""

from __future__ import annotations

from hetpipe.schedule.fifo import Fifo
from hetpipe.schedule.one_forward_one_backward import OneForwardOneBackward
from hetpipe.schedule.policy import Order

ORDERS: dict[str, type[Order]] = {"1f1b": OneForwardOneBackward, "fifo": Fifo}

#: What `auto` means for `wave`.
DEFAULT_ORDER = "1f1b"


def order_named(name: str) -> Order:
    """The order called `name`, or the default for `auto`."""
    return ORDERS[DEFAULT_ORDER if name == "auto" else name]()
