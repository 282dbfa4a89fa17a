"""A stage's weights on their way to all shards, or from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hetpipe.decide.simulator.resources import Flow


class Exchange:
    """Moves one wave's update, or one clock's weights, at a time; the parts of it side by side.

    As the runtime's push and pull threads do: the next one begins when every shard is through with this one.
    """

    __slots__ = ("_done", "_flows", "_num_pending", "_queue")

    def __init__(self, done: Callable[[int], None]) -> None:
        """Make an exchange without shards; `done` is called with each number whose parts are all there."""
        self._done = done
        self._flows: list[Flow] = []
        self._queue: deque[int] = deque()
        self._num_pending = 0

    def add(self, flow: Flow) -> None:
        """One more shard; the flow must deliver to `arrived`."""
        self._flows.append(flow)

    def begin(self, number: int) -> None:
        """Move `number` after all before it."""
        if not self._flows:
            self._done(number)
            return
        self._queue.append(number)
        if not self._num_pending:
            self._send(number)

    def arrived(self, number: int) -> None:
        """One part of `number` is there."""
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
