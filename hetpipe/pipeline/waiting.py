"""Waits of the compute thread: how long, for what, and with which deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hetpipe.clock import Clock as TimeSource
from hetpipe.errors import DeadlineExceeded
from hetpipe.observe.timeline import Activity, TimelineWriter
from hetpipe.values.run import StageReport, StageWaiting

#: A wait longer than this is reported, and again after each further period of this length.
REPORT_AFTER_SECONDS = 5.0

#: Maximum sleep between two signs of life.
_WAKE_SECONDS = 1.0


class Waiter:
    """Waits on the inbox's condition for the compute thread, and accounts for the time.

    `waiting_seconds`: time in which a required clock was not published. `idle_seconds`: other time without work.
    """

    def __init__(
        self,
        who: str,
        condition: threading.Condition,
        *,
        report: Callable[[StageReport], None],
        timeline: TimelineWriter,
        clock: TimeSource,
        stall_seconds: float,
    ) -> None:
        self._who = who
        self._condition = condition
        self._report = report
        self._timeline = timeline
        self._clock = clock
        self._stall_seconds = stall_seconds
        self.waiting_seconds = 0.0
        self.idle_seconds = 0.0
        self._since: float | None = None
        self._reported_at = 0.0
        #: Called regularly during waits and long computations: a process without reports counts as hung.
        self.show_life: Callable[[], None] = lambda: None

    def sleep(
        self,
        reason: str,
        *,
        for_clock: bool,
        at_most_seconds: float = REPORT_AFTER_SECONDS,
        extra_seconds: float = 0.0,
    ) -> None:
        """Sleep until the condition is notified or a report is due; the lock must be held.

        Args:
            reason: what is waited for; completes "… waits for".
            for_clock: whether the time counts as waiting rather than idle.
            at_most_seconds: limits the sleep, for callers that poll.
            extra_seconds: added to `stall_seconds` for this wait.

        Raises:
            DeadlineExceeded: this wait has exceeded the sum of `stall_seconds` and `extra_seconds`.
        """
        now = self._clock.monotonic()
        if self._since is None:
            self._since = self._reported_at = now
        waited = now - self._since
        if waited > self._stall_seconds + extra_seconds:
            raise DeadlineExceeded(f"{self._who} waited {waited:.0f} s for {reason}")
        if now - self._reported_at > REPORT_AFTER_SECONDS:
            self._reported_at = now
            self._report(StageWaiting(f"{self._who} has waited {waited:.0f} s for {reason}", waited))
        self._condition.wait(min(at_most_seconds, _WAKE_SECONDS))
        after = self._clock.monotonic()
        self.show_life()
        if for_clock:
            self.waiting_seconds += after - now
        else:
            self.idle_seconds += after - now
        self._timeline.record(Activity.WAIT, start_seconds=now, end_seconds=after, reason=reason)

    def wait_until(self, is_over: Callable[[], bool], reason: Callable[[], str]) -> None:
        """Sleep until `is_over`; both functions are called with the lock held.

        Raises:
            DeadlineExceeded: as in `sleep`.
        """
        with self._condition:
            while not is_over():
                self.sleep(reason(), for_clock=False)
        self.proceed()

    def proceed(self) -> None:
        """End the current wait, because there is work."""
        self._since = None
