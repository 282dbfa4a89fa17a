"""The last seconds of an agent that is told to end: its virtual workers finish what they have begun, and leave.

The coordinator is told, drains every virtual worker with a stage here, and they leave at the next barrier: what they
have computed counts, and nobody has to find out that they are gone. Who takes longer than there is time is killed, and
then evicted like anybody who dies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hetpipe.clock import Clock
from hetpipe.errors import HetpipeError, UnknownMember
from hetpipe.observe.log import get_logger
from hetpipe.values.commands import StageKey

_log = get_logger(__name__)


class Departure:
    """What is waited for, and until when. Belongs to one thread."""

    def __init__(
        self, *, ask: Callable[[], None], stages: Callable[[], Sequence[StageKey]], clock: Clock, seconds: float
    ) -> None:
        """Begin now.

        Args:
            ask: asks the coordinator to let the agent's stages leave; repeatable. Raises `UnknownMember` where it has
                forgotten the agent, which then registers again; another `HetpipeError` where there is nobody to ask.
            stages: the live ones.
            clock: says when the time is over.
            seconds: how long to wait at most.
        """
        self._ask = ask
        self._stages = stages
        self._clock = clock
        self._seconds = seconds
        self._until = clock.monotonic() + seconds
        #: Whether the coordinator has heard that the agent is to end.
        self.is_told = False
        self._num_left = -1

    def is_over(self) -> bool:
        """Look once; whether there is nothing left to wait for, or no time."""
        stages = self._stages()
        if not stages:
            _log.info("no_stages_left")
            return True
        seconds_left = self._until - self._clock.monotonic()
        if seconds_left <= 0.0:
            late = [str(stage) for stage in stages]
            _log.warning("stages_did_not_leave_in_time", seconds=self._seconds, stages=late)
            return True
        if not self.is_told and not self._asks():
            return True
        if len(stages) != self._num_left:
            self._num_left = len(stages)
            _log.info("stages_to_leave", count=len(stages), seconds_left=round(seconds_left, 1))
        return False

    def _asks(self) -> bool:
        """Ask, or find that the coordinator must hear of the agent first; returns whether somebody is there."""
        try:
            self._ask()
        except UnknownMember as error:
            _log.info("departure_not_told_yet", reason=str(error))
        except HetpipeError as error:
            _log.warning("departure_not_told", error=type(error).__name__, reason=str(error))
            return False
        else:
            self.is_told = True
        return True
