"""Transfer of a stage's weights to or from all shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hetpipe.decide.simulator.resources import Flow


class Exchange:
    """Transfers one wave's update, or one clock's weights, at a time, with all parts in parallel.

    Like the runtime's push and pull threads: the next transfer starts when all parts of this one are complete.
    """

    __slots__ = ("_done", "_flows", "_num_pending", "_queue")

    def __init__(self, done: Callable[[int], None]) -> None:
        """Create an exchange without shards; `done` is called with each number whose parts have all arrived."""
        self._done = done
        self._flows: list[Flow] = []
        self._queue: deque[int] = deque()
        self._num_pending = 0

    def add(self, flow: Flow) -> None:
        """Add a shard; the flow must deliver to `arrived`."""
        self._flows.append(flow)

    def begin(self, number: int) -> None:
        """Transfer `number` after all previous ones."""
        if not self._flows:
            self._done(number)
            return
        self._queue.append(number)
        if not self._num_pending:
            self._send(number)

    def arrived(self, number: int) -> None:
        """Record the arrival of one part of `number`."""
        self._num_pending -= 1
        if self._num_pending:
            return
        self._queue.popleft()
        if self._queue:
            self._send(self._queue[0])
        self._done(number)

    def _send(self, number: int) -> None:
        self._num_pending = len(self._flows)
        for flow in self._flows:
            flow.send(number)
