"""Fencing tokens: orders carry the fence of the coordinator's lead, and receivers reject those below the highest seen.

Every lead granted by a store has a higher fence than all before it (`storage.store.Lead.fence`). A coordinator that was
paused or partitioned while another one took over cannot detect that by itself; its orders must have no effect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc

from hetpipe.errors import ProtocolViolation, StaleTerm
from hetpipe.values.counters import FENCES

#: Metadata key of the fence. It is not an identity: callers are authenticated by their certificates.
FENCE_KEY = "hetpipe-fence"

#: Produces the metadata of a call.
Metadata = Callable[[], tuple[tuple[str, str], ...]]

_MAX_DIGITS = 18


def fence_metadata(fence: Callable[[], int]) -> Metadata:
    """Metadata with the value of `fence` at the time of the call."""
    return lambda: ((FENCE_KEY, str(fence())),)


def fence_of(context: grpc.ServicerContext) -> int:
    """The fence of a call; 0 without one.

    Raises:
        ProtocolViolation: it is not a number.
    """
    for key, value in context.invocation_metadata():
        if key == FENCE_KEY:
            text = str(value)
            if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
                raise ProtocolViolation(f"{FENCE_KEY} must be a number, not {text!r:.40}")
            return int(text)
    return 0


class FenceGuard:
    """The highest fence seen. Thread-safe."""

    def __init__(self, highest: int = 0, *, keep: Callable[[int], None] | None = None) -> None:
        """Start from the fence stored by an earlier process.

        Args:
            highest: the highest fence seen before.
            keep: persists a higher fence; called before anything is executed under it.
        """
        self._lock = threading.Lock()
        self._highest = highest
        self._keep = keep

    @property
    def highest(self) -> int:
        """The highest fence seen so far."""
        with self._lock:
            return self._highest

    def check(self, fence: int) -> None:
        """Accept an order unless a later coordinator has given one.

        Raises:
            StaleTerm: a later one has, or the fence is above the limit: accepting it would lock out every coordinator.
        """
        if fence >= FENCES.limit:
            raise StaleTerm(f"{fence} is not a valid fence of a coordinator; fences are below {FENCES.limit}")
        with self._lock:
            if fence < self._highest:
                raise StaleTerm(
                    f"this coordinator has lost the lead: its fence is {fence}, and a coordinator with fence "
                    f"{self._highest} has acted since"
                )
            if fence > self._highest:
                if self._keep is not None:
                    self._keep(fence)
                self._highest = fence
