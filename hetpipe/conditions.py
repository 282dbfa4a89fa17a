"""The conditions of one process, as it raises and clears them; see `values.conditions`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.values.bounds import cut
from hetpipe.values.conditions import Condition, ConditionKind


class Conditions:
    """The conditions that a process has raised for one job. Thread-safe.

    Every process raises few: their number is bounded by the kinds and by the monitored objects.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        """Nothing is known yet.

        Args:
            clock: dates them.
        """
        self._clock = clock
        self._lock = threading.Lock()
        self._found: dict[tuple[ConditionKind, str], Condition] = {}
        self._listener: Callable[[], None] = lambda: None

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener`, from any thread, when a condition begins or ends. There is one listener."""
        self._listener = listener

    def raise_(self, kind: ConditionKind, who: str, sentence: str) -> None:
        """Raise a condition, possibly again; its reported cause is the first one since it was clear."""
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

    def told(self) -> tuple[Condition, ...]:
        """All conditions raised or checked, with their newest state."""
        with self._lock:
            return tuple(self._found.values())
