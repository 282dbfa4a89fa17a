"""Waiting, made visible: how long, for whom, and why; and its end when patience runs out."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hetpipe.clock import Clock as TimeSource
from hetpipe.errors import DeadlineExceeded
from hetpipe.observe.timeline import Activity, TimelineWriter
from hetpipe.values.run import StageReport, StageWaiting

#: A wait longer than this is said aloud, and again after each further stretch of it.
SAY_AFTER_SECONDS = 5.0

#: Longest sleep between two signs of life.
_WAKE_SECONDS = 1.0


class Waiter:
    """Sleeps on a bell for the compute thread and keeps the accounts.

    `waiting_seconds`: a wanted clock was not published yet. `idle_seconds`: nothing at all to compute.
    """

    def __init__(
        self,
        who: str,
        bell: threading.Condition,
        *,
        report: Callable[[StageReport], None],
        timeline: TimelineWriter,
        clock: TimeSource,
        stall_seconds: float,
    ) -> None:
        self._who = who
        self._bell = bell
        self._report = report
        self._timeline = timeline
        self._clock = clock
        self._stall_seconds = stall_seconds
        self.waiting_seconds = 0.0
        self.idle_seconds = 0.0
        self._since: float | None = None
        self._said_at = 0.0
        #: Called by whoever waits or works for long: a process that reports nothing counts as hung.
        self.show_life: Callable[[], None] = lambda: None

    def sleep(
        self,
        reason: str,
        *,
        for_clock: bool,
        at_most_seconds: float = SAY_AFTER_SECONDS,
        extra_seconds: float = 0.0,
    ) -> None:
        """Sleep until the bell rings or it is time to speak; the bell is held.

        Args:
            reason: ends "… waits for".
            for_clock: how the time is counted.
            at_most_seconds: ends the sleep earlier, for who has to look around now and then.
            extra_seconds: added to `stall_seconds` for this wait.

        Raises:
            DeadlineExceeded: this wait has lasted for `stall_seconds` and `extra_seconds`.
        """
        now = self._clock.monotonic()
        if self._since is None:
            self._since = self._said_at = now
        waited = now - self._since
        if waited > self._stall_seconds + extra_seconds:
            raise DeadlineExceeded(f"{self._who} waited {waited:.0f} s for {reason}")
        if now - self._said_at > SAY_AFTER_SECONDS:
            self._said_at = now
            self._report(StageWaiting(f"{self._who} has waited {waited:.0f} s for {reason}", waited))
        self._bell.wait(min(at_most_seconds, _WAKE_SECONDS))
        after = self._clock.monotonic()
        self.show_life()
        if for_clock:
            self.waiting_seconds += after - now
        else:
            self.idle_seconds += after - now
        self._timeline.record(Activity.WAIT, start_seconds=now, end_seconds=after, reason=reason)

    def proceed(self) -> None:
        """The wait is over: there is something to do."""
        self._since = None
