"""Shared transfer resources: network cards and PCIe roots, each direction separately.

Messages share a resource *fairly*: each of n messages at a network card gets 1/n of it. This approximates TCP streams
and DMA engines: a large push slows concurrent activations down but does not block them until it is complete, as first
come, first served would.

Progress is counted in whole ticks, rounded down each time a message joins.

A resource is brought up to date only when something asks for it, because most departures affect nothing: with shards on
hundreds of nodes, of the hundreds of messages of a push only the last one counts (`flow`). Between two joins departures
follow from a closed form: a message leaves once each message present has got as much as that one, or all that it needs.
"""

from __future__ import annotations

from heapq import heappop, heappush

#: Later than any event.
_NEVER = 1 << 90


class SharedResource:
    """One direction of a network card or PCIe root.

    A message is identified by the progress at which it is complete, its *finish*. It has left once `progress` has
    reached that, after `advance`.
    """

    __slots__ = ("_counts", "_finishes", "_largest", "_num_present", "_sum", "_updated", "due", "progress")

    def __init__(self) -> None:
        #: Ticks of work done for each message present since the start, and the time of that value.
        self.progress = 0
        self._updated = 0
        #: Finishes of the messages present, as a heap of distinct ones, with the number of messages of each.
        self._finishes: list[int] = []
        self._counts: dict[int, int] = {}
        #: Messages present, and the sum of their finishes.
        self._num_present = self._sum = 0
        #: The largest finish so far.
        self._largest = 0
        #: Time of the next departure if nothing joins before.
        self.due = _NEVER

    def admit(self, now: int, work_ticks: int, count: int) -> int:
        """Start serving `count` messages of `work_ticks` each; their finish."""
        if self.due <= now:
            self.advance(now)
        present, progress = self._num_present, self.progress
        if present:
            self.progress = progress = progress + (now - self._updated) // present
        finish = progress + work_ticks
        counts = self._counts
        if finish in counts:
            counts[finish] += count
        else:
            counts[finish] = count
            heappush(self._finishes, finish)
            if finish > self._largest:  # noqa: PLR1730 - `max` takes twice as long, for each of millions of messages
                self._largest = finish
        self._num_present = present = present + count
        self._sum += count * finish
        self._updated = now
        self.due = now + (self._finishes[0] - progress) * present
        return finish

    def advance(self, now: int) -> None:
        """Let all messages depart that are complete at `now`."""
        finishes, counts = self._finishes, self._counts
        progress, updated, present = self.progress, self._updated, self._num_present
        due = self.due
        while due <= now:
            first = heappop(finishes)
            count = counts.pop(first)
            progress, updated = first, due
            present -= count
            self._sum -= count * first
            due = updated + (finishes[0] - progress) * present if present else _NEVER
        self.progress, self._updated, self._num_present, self.due = progress, updated, present, due

    def departure(self, finish: int) -> int:
        """When a message that is present departs if nothing joins before; never later than it does."""
        if finish >= self._largest:
            work = self._sum
        else:
            work = sum(count * min(other, finish) for other, count in self._counts.items())
        return self._updated + work - self._num_present * self.progress
