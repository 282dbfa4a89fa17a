"""A history that an earlier process began: what it wrote is not written again.

A restarted process plays what it kept once more, and writes history as it goes. Lines that are there already are left
out, one for one; so the history gets the lines that it lacks, and none twice (`wsp.md` §7).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

from hetpipe.errors import HistoryIncomplete
from hetpipe.observe.history import HistoryWriter, Value


class Retelling(HistoryWriter):
    """Writes to another history, but for what that has since a certain position."""

    def __init__(self, history: HistoryWriter, since: int) -> None:
        """Read what is there.

        Args:
            history: the history.
            since: a `position` of it from which on lines may come again.
        """
        self._history = history
        self._told = Counter(_key(event, fields) for event, fields in history.since(since) if event != "pull")

    def position(self) -> int:
        """See `HistoryWriter.position`."""
        return self._history.position()

    def on_alarm(self, listener: Callable[[HistoryIncomplete], None]) -> None:
        """See `HistoryWriter.on_alarm`."""
        self._history.on_alarm(listener)

    def write(self, event: str, **fields: Value) -> None:
        """See `HistoryWriter.write`; left out if it is there."""
        if self._told and event != "pull":
            key = _key(event, fields)
            if self._told[key] > 0:
                self._told[key] -= 1
                return
        self._history.write(event, **fields)

    def is_up_to_date(self) -> None:
        """From here on everything is new."""
        self._told = Counter()


def _key(event: str, fields: dict[str, Value]) -> str:
    return event + json.dumps(fields, sort_keys=True)
