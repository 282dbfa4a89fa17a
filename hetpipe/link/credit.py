"""Credit-based flow control of a link: the receiver grants the number of frames that may be sent. Pure.

A receiver with a buffer of n frames grants n at the start, and one more for every frame taken from its queue, so
arriving frames always fit. Grants are batched: they are withheld while the sender has credit for at least half of the
buffer, so it never runs out of credit while some is withheld.
"""

from __future__ import annotations

from hetpipe.errors import MalformedFrame


class Window:
    """The receiver's credit accounting. Not thread-safe."""

    def __init__(self, frames: int) -> None:
        """Start with a buffer of `frames`, fully granted.

        Args:
            frames: at least 1.
        """
        self._frames = frames
        #: Frames that the sender may still send.
        self._open = frames
        #: Frames taken from the queue and not yet granted again.
        self._taken = 0

    def arrive(self) -> None:
        """Record the arrival of a frame.

        Raises:
            MalformedFrame: the sender has no credit for it.
        """
        if self._open == 0:
            raise MalformedFrame(f"a frame arrives without credit: {self._frames} are queued already")
        self._open -= 1

    def take(self) -> None:
        """Record that a frame was taken from the queue."""
        self._taken += 1

    @property
    def is_due(self) -> bool:
        """Whether there is credit to be sent now."""
        return self._taken > 0 and 2 * self._open < self._frames

    def grant(self) -> int:
        """Return all credit to be sent, which counts as granted from now on."""
        granted, self._taken = self._taken, 0
        self._open += granted
        return granted
