"""Shared transfer resources: network cards and PCIe roots, each direction separately.

A *flow* has one sender and one receiver (a stage and its neighbour, a stage and a shard) and transfers one message at a
time, as the runtime's sender threads do. Messages of different flows share a resource *fairly*: each of n messages at a
network card gets 1/n of it. This approximates TCP streams and DMA engines: a large push slows concurrent activations
down but does not block them until it is complete, as first come, first served would.

A message that uses several resources is served by each at its own rate and arrives when the slowest is done (never
before the uncontended time of its link). This is exact with a single bottleneck; with two competing resources it is
optimistic at worst, because capacity that one leaves unused at the other is not redistributed.

Progress is counted in whole ticks, rounded down each time a message joins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from hetpipe.decide.simulator.engine import Engine


class SharedResource:
    """One direction of a network card or PCIe root.

    Invariant: while there are messages and none has joined at this instant, exactly one scheduled event has the time
    `_due`. A message that joins at the instant at which others are complete does not change that.
    """

    __slots__ = ("_due", "_engine", "_is_joined", "_messages", "_progress", "_updated")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        #: Ticks of work done for each message present since the start, and the time of that value.
        self._progress = 0
        self._updated = 0
        #: Of each message: progress at which it is complete, its flow's rank, its flow.
        self._messages: list[tuple[int, int, Flow]] = []
        self._due = -1
        #: Whether `_schedule` is to be called, as messages have joined.
        self._is_joined = False

    def admit(self, flow: Flow, work_ticks: int) -> None:
        """Start serving the message of `flow`; `Flow.served` is called when it is complete."""
        messages = self._messages
        now = self._engine.now
        if messages:
            self._progress += (now - self._updated) // len(messages)
        self._updated = now
        heappush(messages, (self._progress + work_ticks, flow.rank, flow))
        if not self._is_joined:
            self._is_joined = True
            self._engine.after(self._schedule)

    def _schedule(self) -> None:
        self._is_joined = False
        messages = self._messages
        if not messages:
            return  # those that joined were complete at the same instant as others
        due = self._updated + (messages[0][0] - self._progress) * len(messages)
        if due != self._due:
            self._due = due
            self._engine.at(due, self._depart, due)

    def _depart(self, due: int) -> bool:
        if due != self._due:
            return False  # a message joined in the meantime, so the first one takes longer
        messages = self._messages
        self._progress = progress = messages[0][0]
        self._updated = due
        while messages and messages[0][0] == progress:
            heappop(messages)[2].served()
        if messages:
            self._schedule()
        else:
            self._due = -1
        return True


class Flow:
    """Messages of one size from one sender to one receiver, in order."""

    __slots__ = (
        "_alone_ticks",
        "_deliver",
        "_engine",
        "_is_busy",
        "_latency_ticks",
        "_log",
        "_pending",
        "_queue",
        "_shares",
        "_started",
        "rank",
    )

    def __init__(
        self,
        engine: Engine,
        rank: int,
        *,
        alone_ticks: int,
        latency_ticks: int,
        shares: Sequence[tuple[SharedResource, int]],
        deliver: Callable[[int], None],
        log: Callable[[int, int, int], None] | None,
    ) -> None:
        """Create an idle flow.

        Args:
            engine: provides the time.
            rank: unique number of the flow.
            alone_ticks: uncontended time of a message, including latency.
            latency_ticks: the part of it in which the last byte is in transit and occupies no resource.
            shares: resources used by a message, with the ticks of work at each; empty: no contention.
            deliver: called with the number of each message when it has arrived.
            log: called with number, start and end of each message.
        """
        self._engine = engine
        self.rank = rank
        self._alone_ticks = alone_ticks
        self._latency_ticks = latency_ticks
        self._shares = shares
        self._deliver = deliver
        self._log = log
        self._queue: deque[int] = deque()
        self._is_busy = False
        self._started = 0
        #: Resources still serving the current message.
        self._pending = 0

    def send(self, number: int) -> None:
        """Send message `number` after all previous ones have arrived."""
        self._queue.append(number)
        if not self._is_busy:
            self._begin()

    def served(self) -> None:
        """Record that a resource has served the current message."""
        self._pending -= 1
        if not self._pending:
            engine = self._engine
            end = max(engine.now + self._latency_ticks, self._started + self._alone_ticks)
            engine.at(end, self._arrived, self._queue[0])

    def _begin(self) -> None:
        self._is_busy = True
        self._started = now = self._engine.now
        shares = self._shares
        if not shares:
            self._engine.at(now + self._alone_ticks, self._arrived, self._queue[0])
            return
        self._pending = len(shares)
        for resource, work_ticks in shares:
            resource.admit(self, work_ticks)

    def _arrived(self, number: int) -> None:
        queue = self._queue
        queue.popleft()
        if self._log is not None:
            self._log(number, self._started, self._engine.now)
        if queue:
            self._begin()
        else:
            self._is_busy = False
        self._deliver(number)
