"""Flow control of a link by credit: who receives says how many frames may come. Pure.

A receiver with room for n frames grants n at the start, and one more for every frame that is taken from its queue; so
what comes always has room. Grants need no message each: they are held back while the sender has credit for at least
half of the room, and it never runs out of credit while some is held back.
"""

from __future__ import annotations

from hetpipe.errors import MalformedFrame


class Window:
    """The receiver's books. Not thread-safe."""

    def __init__(self, frames: int) -> None:
        """Begin with room for `frames`, all of it granted.

        Args:
            frames: at least 1.
        """
        self._frames = frames
        #: Frames that the sender may still send.
        self._open = frames
        #: Frames taken from the queue and not granted again yet.
        self._taken = 0

    def arrive(self) -> None:
        """A frame begins to arrive.

        Raises:
            MalformedFrame: the sender has no credit for it.
        """
        if self._open == 0:
            raise MalformedFrame(f"a frame comes without credit: {self._frames} wait already")
        self._open -= 1

    def take(self) -> None:
        """A frame was taken from the queue."""
        self._taken += 1

    @property
    def is_due(self) -> bool:
        """Whether there is credit that the sender should have now."""
        return self._taken > 0 and 2 * self._open < self._frames

    def grant(self) -> int:
        """Everything that may be granted: it counts as granted from now on."""
        granted, self._taken = self._taken, 0
        self._open += granted
        return granted
