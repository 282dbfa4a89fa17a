"""Reports queued for the coordinator, in numbered batches.

A batch keeps its number and content until it is confirmed, so that a resent batch counts once. During an outage of the
coordinator the outbox is bounded: of a stage's progress, waits and conditions, and of an inspection's steps, only the
newest report is kept.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from hetpipe.clock import Clock
from hetpipe.values.commands import AgentReport, InspectionPhase, InspectionStep, KeyedStageReport
from hetpipe.values.members import Registration
from hetpipe.values.run import StageConditions, StagePhase, StageProgress, StageWaiting

#: Longest delay of a report for batching, in seconds.
BATCH_SECONDS = 0.5

#: Maximum number of reports in one batch.
MAX_BATCH = 200

#: Limit of pending reports; beyond it the oldest are dropped. Few reports of a stage cannot be replaced by newer ones.
MAX_WAITING = 10_000


@dataclass(frozen=True, slots=True)
class ReportBatch:
    """Reports that are sent together."""

    registration: Registration
    number: int
    """1, 2, … within the registration."""
    reports: tuple[AgentReport, ...]


class Outbox:
    """The reports of one agent. Any thread may put; one thread takes and confirms."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: list[AgentReport] = []
        #: Arrival time of the oldest pending report; undefined if none is pending.
        self._oldest = 0.0
        self._urgent = False
        self._closed = False
        self._registration = Registration("")
        self._last_number = 0
        self._unconfirmed: ReportBatch | None = None

    def put(self, report: AgentReport) -> None:
        """Add a report; progress, waits, conditions and steps replace pending earlier ones."""
        with self._changed:
            if not self._waiting:
                self._oldest = self._clock.monotonic()
            if _replaceable(report):
                # The newer report takes the older one's position: otherwise frequent reports would never be sent.
                self._waiting = [old for old in self._waiting if not _replaces(report, old)]
            else:
                self._urgent = True
            self._waiting = [*self._waiting[-(MAX_WAITING - 1) :], report]
            self._changed.notify_all()

    def take(self, *, timeout_seconds: float) -> ReportBatch | None:
        """The batch to send: the unconfirmed one, or a new one once due; None if none is due.

        Urgent reports (all but progress, waits, conditions and steps) are due immediately, others after
        `BATCH_SECONDS`.
        """
        deadline = self._clock.monotonic() + timeout_seconds
        with self._changed:
            while not self._closed:
                if self._unconfirmed is not None:
                    return self._unconfirmed
                now = self._clock.monotonic()
                due = self._oldest + BATCH_SECONDS if self._waiting else deadline
                if self._waiting and (self._urgent or now >= due):
                    return self._new_batch()
                if now >= deadline:
                    return None
                self._changed.wait(min(due, deadline) - now)
        return None

    def confirm(self, batch: ReportBatch) -> None:
        """Record that the coordinator has received `batch`."""
        with self._changed:
            if self._unconfirmed is batch:
                self._unconfirmed = None
                self._changed.notify_all()

    def wait_empty(self, *, timeout_seconds: float) -> bool:
        """Wait until everything is confirmed; False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and self._unconfirmed is None, timeout_seconds)

    def restart(self, registration: Registration) -> None:
        """Start a new registration: numbers begin again.

        Unconfirmed reports are sent under it, as the children survive; duplicates are harmless (`JobMachine`).
        """
        with self._changed:
            self._registration = registration
            if self._unconfirmed is not None:
                self._waiting = [*self._unconfirmed.reports, *self._waiting][-MAX_WAITING:]
                self._urgent = True
                self._unconfirmed = None
            self._last_number = 0

    def close(self) -> None:
        """Wake `take`, which returns None from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _new_batch(self) -> ReportBatch:
        self._last_number += 1
        taken, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
        self._urgent = self._urgent and bool(self._waiting)
        self._unconfirmed = ReportBatch(self._registration, self._last_number, tuple(taken))
        return self._unconfirmed


def _replaceable(report: AgentReport) -> bool:
    of_stages = StagePhase | StageProgress | StageWaiting | StageConditions
    is_stages = isinstance(report, KeyedStageReport) and isinstance(report.report, of_stages)
    return is_stages or isinstance(report, InspectionStep | InspectionPhase)


def _replaces(new: AgentReport, old: AgentReport) -> bool:
    if isinstance(new, KeyedStageReport) and isinstance(old, KeyedStageReport):
        return new.key == old.key and type(new.report) is type(old.report)
    is_inspections = isinstance(new, InspectionStep | InspectionPhase)
    return is_inspections and type(new) is type(old) and new.job_id == old.job_id
