"""Simulated time: a heap of what ends when, taken instant by instant.

At each instant everything that ends there ends first; only then does the model *settle*, that is decide what begins.
So the order of two events of one instant cannot be seen by any decision, and a run depends on times alone.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class Engine:
    """The clock of a simulated run and what is going to happen."""

    __slots__ = ("_heap", "_num_scheduled", "now", "num_events")

    def __init__(self) -> None:
        #: The instant under way, in ticks.
        self.now = 0
        #: Events that changed something so far.
        self.num_events = 0
        self._num_scheduled = 0
        self._heap: list[tuple[int, int, Callable[[int], object], int]] = []

    def at(self, ticks: int, handler: Callable[[int], object], argument: int) -> None:
        """Call `handler(argument)` at `ticks`, which is not in the past.

        A handler that finds its event overtaken returns False, and the event does not count.
        """
        self._num_scheduled = number = self._num_scheduled + 1
        heappush(self._heap, (ticks, number, handler, argument))

    def run(self, settle: Callable[[], None]) -> None:
        """Go on until nothing is left to happen; `settle` is called at 0 and at the end of every instant."""
        heap = self._heap
        settle()
        while heap:
            self.now = now = heap[0][0]
            while heap and heap[0][0] == now:
                _, _, handler, argument = heappop(heap)
                if handler(argument) is not False:
                    self.num_events += 1
            settle()
