"""Reconnecting to a coordinator while following a job, which may continue without it; each outage is reported once.

Every wait has a deadline: for a coordinator that does not answer, for one to which the job is unknown, and for one
without a leader of the job (`Contact`, and the watches of `CoordinatorClient`).
"""

from __future__ import annotations

from collections.abc import Callable

from hetpipe.clock import Clock
from hetpipe.errors import NobodyLeads, Unavailable, UnknownJob
from hetpipe.values.events import JobStatus
from hetpipe.wire.coordinator_client import SILENT_SECONDS

#: Time after which an unreachable coordinator counts as lost, and the pause between two attempts.
RECONNECT_SECONDS = 600.0
_PAUSE_SECONDS = 0.5

#: Time for which a job may be unknown to a coordinator. A new one fails unreported jobs later (`Patience`).
UNKNOWN_SECONDS = 90.0


class Reconnection:
    """The connection state of one watch on a coordinator. Not thread-safe."""

    def __init__(
        self, clock: Clock, *, say: Callable[[str], None], is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Start before the first answer of the coordinator, until which nothing is retried.

        Args:
            clock: for timeouts.
            say: called with each change of the connection, as one sentence.
            is_over: whether the run has ended, and with it a local coordinator.
        """
        self._clock = clock
        self._say = say
        self._is_over = is_over
        self._was_whole = False
        #: Start of the outage, in monotonic seconds; None without one.
        self._broken_since: float | None = None
        #: Time since which the job is unknown to the coordinator.
        self._unknown_since: float | None = None
        self._has_said = False

    def succeeded(self) -> None:
        """Record an answer of the coordinator."""
        self._was_whole = True
        if self._has_said and self._broken_since is not None:
            seconds = self._clock.monotonic() - self._broken_since
            self._say(f"the coordinator is reachable again after {seconds:.0f} s")
        self._broken_since = self._unknown_since = None
        self._has_said = False

    def failed(self, error: Unavailable | UnknownJob) -> None:
        """Back off; returns when the next attempt is due. An outage that ends with the second attempt is not reported.

        Raises:
            Unavailable, UnknownJob: `error`, if there will be no further attempt.
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
                f"{error}; the coordinator answers, but the job has been unknown to it for {waited:.0f} s"
            ) from error
        if self._broken_since is None:
            self._broken_since = now
        elif self._unknown_since is None and (waited := now - self._broken_since) >= RECONNECT_SECONDS:
            raise type(error)(f"{error}; it has not answered for {waited:.0f} s") from error
        elif not self._has_said:
            self._has_said = True
            what = "does not answer" if self._unknown_since is None else "does not know the job yet"
            self._say(f"the coordinator {what}; retrying")
        self._clock.sleep(_PAUSE_SECONDS)


class Contact:
    """Polling of a job's status. Not thread-safe."""

    def __init__(self, clock: Clock) -> None:
        """Start with a job that has a leader."""
        self._clock = clock
        self._led = clock.monotonic()

    def saw(self, status: JobStatus) -> None:
        """Process a status of the job.

        Raises:
            NobodyLeads: it had no leader for too long.
        """
        now = self._clock.monotonic()
        if status.is_led:
            self._led = now
        elif (waited := now - self._led) >= SILENT_SECONDS:
            raise NobodyLeads(f"job {status.job_id} has had no leader for {waited:.0f} s: {status.failure}")
