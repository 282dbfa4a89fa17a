"""The number that says which coordinator leads: calls carry it, and whoever has seen a higher one refuses.

Every lead that a store gives has a higher number than all before it (`storage.store.Lead.fence`). A coordinator
that was paused, or cut off, while another one took over does not know that; what it orders then must not happen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc

from hetpipe.errors import ProtocolViolation, StaleTerm
from hetpipe.values.counters import FENCES

#: Name of the number among a call's metadata. It is no identity: who calls is proved by the certificate.
FENCE_KEY = "hetpipe-fence"

#: Gives the metadata of a call.
Metadata = Callable[[], tuple[tuple[str, str], ...]]

_MAX_DIGITS = 18


def fence_metadata(fence: Callable[[], int]) -> Metadata:
    """Metadata with the number that `fence` gives at the time of the call."""
    return lambda: ((FENCE_KEY, str(fence())),)


def fence_of(context: grpc.ServicerContext) -> int:
    """The number that a call carries; 0 without one.

    Raises:
        ProtocolViolation: it is none.
    """
    for key, value in context.invocation_metadata():
        if key == FENCE_KEY:
            text = str(value)
            if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
                raise ProtocolViolation(f"{FENCE_KEY} must be a number, not {text!r:.40}")
            return int(text)
    return 0


class FenceGuard:
    """The highest number seen. Thread-safe."""

    def __init__(self, highest: int = 0, *, keep: Callable[[int], None] | None = None) -> None:
        """Begin with what was seen before.

        Args:
            highest: the highest number that an earlier process saw.
            keep: makes a higher one outlive this process; called before anything is done under it.
        """
        self._lock = threading.Lock()
        self._highest = highest
        self._keep = keep

    @property
    def highest(self) -> int:
        """The highest number seen so far."""
        with self._lock:
            return self._highest

    def check(self, fence: int) -> None:
        """Let a coordinator act, unless a later one has acted.

        Raises:
            StaleTerm: a later one has, or there can be no such number: whoever took it would obey nobody any more.
        """
        if fence >= FENCES.limit:
            raise StaleTerm(f"no coordinator leads with the number {fence}; they stay below {FENCES.limit}")
        with self._lock:
            if fence < self._highest:
                raise StaleTerm(
                    f"this coordinator leads no more: its number is {fence}, and one with number {self._highest} has "
                    "acted since"
                )
            if fence > self._highest:
                if self._keep is not None:
                    self._keep(fence)
                self._highest = fence
