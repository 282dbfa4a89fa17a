"""Whoever watches a job waits for a coordinator that goes away, and says so once; its job may go on without it."""

from __future__ import annotations

from collections.abc import Callable

from hetpipe.clock import Clock
from hetpipe.errors import Unavailable

#: How long a broken connection is mended before the coordinator counts as lost, and the pause between two attempts.
MEND_SECONDS = 600.0
_PAUSE_SECONDS = 0.5


class Mending:
    """One watch on a coordinator. Not thread-safe."""

    def __init__(
        self, clock: Clock, *, say: Callable[[str], None], is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Begin with a coordinator that has not answered yet: without a first answer nothing is mended.

        Args:
            clock: measures how long.
            say: hears what becomes of the connection, in one sentence each.
            is_over: whether there is nothing left to watch: a local coordinator ends with its run.
        """
        self._clock = clock
        self._say = say
        self._is_over = is_over
        self._was_whole = False
        #: Since when it is broken, in monotonic seconds; None while it is not.
        self._broken_since: float | None = None
        self._has_said = False

    def whole(self) -> None:
        """The coordinator has answered."""
        self._was_whole = True
        if self._has_said and self._broken_since is not None:
            seconds = self._clock.monotonic() - self._broken_since
            self._say(f"the coordinator is there again after {seconds:.0f} s")
        self._broken_since = None
        self._has_said = False

    def broke(self, error: Unavailable) -> None:
        """Rest; returns when it is time for the next attempt. What the second one mends is not worth a word.

        Raises:
            Unavailable: `error`, because there will be none.
        """
        if not self._was_whole or self._is_over():
            raise error
        now = self._clock.monotonic()
        if self._broken_since is None:
            self._broken_since = now
        elif now - self._broken_since >= MEND_SECONDS:
            raise error
        elif not self._has_said:
            self._has_said = True
            self._say("the coordinator does not answer; trying again until it is there")
        self._clock.sleep(_PAUSE_SECONDS)
