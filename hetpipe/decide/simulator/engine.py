"""Discrete-event engine: a heap of events, processed instant by instant.

All events of an instant are processed first; only then does the model *settle*, that is, decide what starts. The order
of two events at one instant therefore cannot affect any decision, and a run depends on times only.

What depends on all messages of an instant, such as the time at which one of them would leave a network card that others
join, is decided once, after all of them (`after`).
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class Engine:
    """The clock and the pending events of a simulated run."""

    __slots__ = ("_after", "_heap", "_num_scheduled", "now", "num_events")

    def __init__(self) -> None:
        #: The current instant, in ticks.
        self.now = 0
        #: Number of effective events so far.
        self.num_events = 0
        self._num_scheduled = 0
        self._heap: list[tuple[int, int, Callable[[int], object], int]] = []
        self._after: list[Callable[[], object]] = []

    def at(self, ticks: int, handler: Callable[[int], object], argument: int) -> None:
        """Call `handler(argument)` at `ticks`, which must not be in the past.

        A handler returns False if its event is obsolete; then it is not counted.
        """
        self._num_scheduled = number = self._num_scheduled + 1
        heappush(self._heap, (ticks, number, handler, argument))

    def after(self, schedule: Callable[[], object]) -> None:
        """Call `schedule` after the events of this instant that are scheduled already, or after it has settled."""
        self._after.append(schedule)

    def run(self, settle: Callable[[], None]) -> None:
        """Process all events; `settle` is called at 0 and at the end of every instant."""
        heap = self._heap
        settle()
        self._schedule()
        while heap:
            self.now = now = heap[0][0]
            while heap and heap[0][0] == now:
                while heap and heap[0][0] == now:
                    _, _, handler, argument = heappop(heap)
                    if handler(argument) is not False:
                        self.num_events += 1
                self._schedule()
            settle()
            self._schedule()

    def _schedule(self) -> None:
        after = self._after
        for schedule in after:
            schedule()
        after.clear()
