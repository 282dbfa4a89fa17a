"""Flows: messages from one sender to one or more receivers, in order.

A *flow* transfers one message at a time, as the runtime's sender, push and pull threads do: activations to a neighbour,
or a wave's update to all shards and a clock's weights from them. The parts of a message start together, and the next
message starts when all of them have arrived.

A part that uses several resources is served by each at its own rate and arrives when the slowest is done (never before
the uncontended time of its link). This is exact with a single bottleneck; with two competing resources it is optimistic
at worst, because capacity that one leaves unused at the other is not redistributed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetpipe.decide.simulator.engine import Engine
from hetpipe.decide.simulator.resources import SharedResource


@dataclass(frozen=True, slots=True)
class Part:
    """Part of each message of a flow: bytes to one receiver."""

    alone_ticks: int
    """Its uncontended time, including latency."""
    latency_ticks: int
    """The part of it in which the last byte is in transit and occupies no resource."""
    shares: Sequence[tuple[SharedResource, int]]
    """Resources that it uses, with the ticks of work at each; empty: no contention."""


class Flow:
    """Messages of the same parts, in order."""

    __slots__ = ("_bundles", "_deliver", "_engine", "_num_pending", "_queue")

    def __init__(self, engine: Engine, deliver: Callable[[int], None]) -> None:
        """Create an idle flow without parts; `deliver` is called with each number whose parts have all arrived."""
        self._engine = engine
        self._deliver = deliver
        self._bundles: list[_Bundle] = []
        self._queue: deque[int] = deque()
        self._num_pending = 0

    def add(self, part: Part, log: Callable[[int, int, int], None] | None) -> None:
        """Add a part; `log` is called with number, start and end of each.

        Parts without a log that take the same latency are bundled: only the arrival of the last of them is an event.
        """
        if log is None:
            for bundle in self._bundles:
                if bundle.is_joined_by(part):
                    bundle.add(part)
                    return
        bundle = _Bundle(self._engine, part, self._arrived, log)
        self._bundles.append(bundle)

    def send(self, number: int) -> None:
        """Send message `number` after all previous ones have arrived."""
        if not self._bundles:
            self._deliver(number)
            return
        self._queue.append(number)
        if not self._num_pending:
            self._begin(number)

    def _begin(self, number: int) -> None:
        self._num_pending = len(self._bundles)
        for bundle in self._bundles:
            bundle.begin(number)

    def _arrived(self, number: int) -> None:
        self._num_pending -= 1
        if self._num_pending:
            return
        queue = self._queue
        queue.popleft()
        if queue:
            self._begin(queue[0])
        self._deliver(number)


class _Bundle:
    """Parts of the same latency, of which only the arrival of the last one matters.

    The bundle waits for one of the resources at a time, until its part has left there; others whose parts have left by
    then are not waited for. So it looks after a resource when that would be done if nothing else joined it. That is
    never too late, and it looks again where something has joined in the meantime.
    """

    __slots__ = (
        "_alone_ticks",
        "_arrived",
        "_counts",
        "_engine",
        "_finishes",
        "_latency_ticks",
        "_log",
        "_number",
        "_shares",
        "_started",
    )

    def __init__(
        self, engine: Engine, part: Part, arrived: Callable[[int], None], log: Callable[[int, int, int], None] | None
    ) -> None:
        self._engine = engine
        self._arrived = arrived
        self._log = log
        self._latency_ticks = part.latency_ticks
        self._alone_ticks = 0
        #: Resource and work of a part there → number of parts; and the same as a list, the most loaded resource last.
        self._counts: dict[tuple[SharedResource, int], int] = {}
        self._shares: list[tuple[SharedResource, int, int]] = []
        self._number = self._started = 0
        #: Finishes of the current message at these resources, without those at the end where it has left.
        self._finishes: list[int] = []
        self.add(part)

    def is_joined_by(self, part: Part) -> bool:
        """Whether `part` arrives with this bundle."""
        return (
            self._log is None and self._latency_ticks == part.latency_ticks and bool(self._counts) == bool(part.shares)
        )

    def add(self, part: Part) -> None:
        """Add a part, with which `is_joined_by` is true."""
        self._alone_ticks = max(self._alone_ticks, part.alone_ticks)
        for share in part.shares:
            self._counts[share] = self._counts.get(share, 0) + 1

    def begin(self, number: int) -> None:
        """Start message `number`."""
        engine = self._engine
        self._number = number
        self._started = now = engine.now
        if not self._counts:
            engine.at(now + self._alone_ticks, self._arrive, number)
            return
        if not self._shares:
            shares = [(resource, work, count) for (resource, work), count in self._counts.items()]
            self._shares = sorted(shares, key=lambda share: share[1] * share[2])
        self._finishes = [resource.admit(now, work, count) for resource, work, count in self._shares]
        engine.after(self._look)

    def _look(self, _: int = 0) -> bool:
        """Wait for a resource that still serves the message; once there is none, for the arrival."""
        engine, finishes, shares = self._engine, self._finishes, self._shares
        now = engine.now
        while finishes:
            resource = shares[len(finishes) - 1][0]
            if resource.due <= now:
                resource.advance(now)
            if resource.progress < finishes[-1]:
                engine.at(resource.departure(finishes[-1]), self._look, 0)
                return False
            finishes.pop()
        end = max(now + self._latency_ticks, self._started + self._alone_ticks)
        engine.at(end, self._arrive, self._number)
        return False

    def _arrive(self, number: int) -> None:
        if self._log is not None:
            self._log(number, self._started, self._engine.now)
        self._arrived(number)
