"""The graceful termination of an agent: its virtual workers drain and leave.

At the agent's request the coordinator drains every virtual worker with a stage here, and they leave at the next
barrier: their work counts, and no failure detection is needed. A worker that exceeds the grace period is killed, and
then evicted like any dead one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hetpipe.clock import Clock
from hetpipe.errors import HetpipeError, UnknownMember
from hetpipe.observe.log import get_logger
from hetpipe.values.commands import StageKey

_log = get_logger(__name__)


class Departure:
    """The progress of a departure, and its deadline. Not thread-safe."""

    def __init__(
        self, *, request: Callable[[], None], stages: Callable[[], Sequence[StageKey]], clock: Clock, seconds: float
    ) -> None:
        """Start the departure now.

        Args:
            request: requests the departure from the coordinator; idempotent. Raises `UnknownMember` if the agent has to
            register again, another `HetpipeError` if the coordinator is unreachable.
            stages: returns the live stages.
            clock: for the deadline.
            seconds: timeout.
        """
        self._request_departure = request
        self._stages = stages
        self._clock = clock
        self._seconds = seconds
        self._until = clock.monotonic() + seconds
        #: Whether the coordinator has accepted the departure.
        self.is_accepted = False
        self._num_left = -1

    def is_over(self) -> bool:
        """Check once; True if no stages are left, or the timeout has expired."""
        stages = self._stages()
        if not stages:
            _log.info("no_stages_left")
            return True
        seconds_left = self._until - self._clock.monotonic()
        if seconds_left <= 0.0:
            late = [str(stage) for stage in stages]
            _log.warning("stages_did_not_leave_in_time", seconds=self._seconds, stages=late)
            return True
        if not self.is_accepted and not self._request():
            return True
        if len(stages) != self._num_left:
            self._num_left = len(stages)
            _log.info("stages_to_leave", count=len(stages), seconds_left=round(seconds_left, 1))
        return False

    def _request(self) -> bool:
        """Request the departure, unless the agent must register first; True if the coordinator answers."""
        try:
            self._request_departure()
        except UnknownMember as error:
            _log.info("departure_not_told_yet", reason=str(error))
        except HetpipeError as error:
            _log.warning("departure_not_told", error=type(error).__name__, reason=str(error))
            return False
        else:
            self.is_accepted = True
        return True
