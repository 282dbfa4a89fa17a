"""Whoever watches a job waits for a coordinator that goes away, and says so once; its job may go on without it.

No wait is endless: for one that does not answer, one that does not know the job, and one at which nobody leads the job
(`Contact`, and the watches of `CoordinatorClient`) there is a bound each, after which the watch ends with a sentence.
"""

from __future__ import annotations

from collections.abc import Callable

from hetpipe.clock import Clock
from hetpipe.errors import NobodyLeads, Unavailable, UnknownJob
from hetpipe.values.events import JobStatus
from hetpipe.wire.coordinator_client import SILENT_SECONDS

#: How long a broken connection is mended before the coordinator counts as lost, and the pause between two attempts.
MEND_SECONDS = 600.0
_PAUSE_SECONDS = 0.5

#: How long a coordinator may know nothing of a job. A new one gives up later whoever nobody tells it of (`Patience`).
UNKNOWN_SECONDS = 90.0


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
        #: Since when the coordinator answers that it does not know the job.
        self._unknown_since: float | None = None
        self._has_said = False

    def whole(self) -> None:
        """The coordinator has answered."""
        self._was_whole = True
        if self._has_said and self._broken_since is not None:
            seconds = self._clock.monotonic() - self._broken_since
            self._say(f"the coordinator is there again after {seconds:.0f} s")
        self._broken_since = self._unknown_since = None
        self._has_said = False

    def broke(self, error: Unavailable | UnknownJob) -> None:
        """Rest; returns when it is time for the next attempt. What the second one mends is not worth a word.

        Raises:
            Unavailable, UnknownJob: `error`, because there will be none.
        """
        if not self._was_whole or self._is_over():
            raise error
        now = self._clock.monotonic()
        if not isinstance(error, UnknownJob):
            self._unknown_since = None
        elif self._unknown_since is None:
            self._unknown_since = now
        if self._unknown_since is not None and (waited := now - self._unknown_since) >= UNKNOWN_SECONDS:
            raise UnknownJob(
                f"{error}; the coordinator answers, and has not known the job for {waited:.0f} s"
            ) from error
        if self._broken_since is None:
            self._broken_since = now
        elif self._unknown_since is None and (waited := now - self._broken_since) >= MEND_SECONDS:
            raise type(error)(f"{error}; it has not answered for {waited:.0f} s") from error
        elif not self._has_said:
            self._has_said = True
            what = "does not answer" if self._unknown_since is None else "does not know the job yet"
            self._say(f"the coordinator {what}; trying again until it is there")
        self._clock.sleep(_PAUSE_SECONDS)


class Contact:
    """One watch that looks at a job's status again and again. Not thread-safe."""

    def __init__(self, clock: Clock) -> None:
        """Begin with a job that somebody leads."""
        self._clock = clock
        self._led = clock.monotonic()

    def saw(self, status: JobStatus) -> None:
        """The coordinator has told the status of the job.

        Raises:
            NobodyLeads: nobody has led it for too long.
        """
        now = self._clock.monotonic()
        if status.is_led:
            self._led = now
        elif (waited := now - self._led) >= SILENT_SECONDS:
            raise NobodyLeads(f"for {waited:.0f} s nobody has led job {status.job_id}: {status.failure}")
