"""The conditions of one process, as it raises and clears them (`values.conditions`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.values.bounds import cut
from hetpipe.values.conditions import Condition, ConditionKind


class Conditions:
    """The conditions raised by a process for one job. Thread-safe.

    Their number is bounded by the kinds and the monitored objects.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        """Start without conditions.

        Args:
            clock: source of their timestamps.
        """
        self._clock = clock
        self._lock = threading.Lock()
        self._found: dict[tuple[ConditionKind, str], Condition] = {}
        self._listener: Callable[[], None] = lambda: None

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener`, from any thread, when a condition is raised or cleared. There is one listener."""
        self._listener = listener

    def raise_(self, kind: ConditionKind, who: str, sentence: str) -> None:
        """Raise a condition; if it is raised already, the first cause is kept."""
        with self._lock:
            before = self._found.get((kind, who), Condition(kind, who, cleared=0.0))
            again = replace(before, times=before.times + 1)
            if not before.holds:
                now = self._clock.wall()
                again = replace(again, sentence=cut(sentence), since=now, cleared=None, clearance="")
            self._found[kind, who] = again
        if not before.holds:
            self._listener()

    def clear(self, kind: ConditionKind, who: str, sentence: str) -> None:
        """Clear a condition; `sentence` describes the recovery."""
        with self._lock:
            before = self._found.get((kind, who))
            if before is not None and not before.holds:
                return
            known = before or Condition(kind, who)
            self._found[kind, who] = replace(known, cleared=self._clock.wall(), clearance=cut(sentence))
        self._listener()

    def active(self) -> tuple[Condition, ...]:
        """The newest state of all conditions that were ever raised."""
        with self._lock:
            return tuple(self._found.values())
