"""One parameter server: its shard, on the first one the clock shard too, and how it follows the log and restarts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from hetpipe.decide.sync.records import Record
from hetpipe.errors import HetpipeError, Unavailable
from hetpipe.values.ids import ShardIndex
from hetpipe.values.requests import PullHeader, PushHeader
from tests.simulation.clock_part import ClockPart
from tests.simulation.scheduler import Process, Violation
from tests.simulation.shard_part import ShardPart, Weights

if TYPE_CHECKING:
    from tests.simulation.run import Run


class Server(Process):
    """A process that serves one shard."""

    def __init__(self, world: Run, index: int) -> None:
        super().__init__(f"shard {index}")
        self._world = world
        self.index = ShardIndex(index)
        self.shard = ShardPart(world.job, index, world.promises)
        self.clock: ClockPart | None = None
        #: Records that there were when it last asked; None: it has not asked since its start, and serves nobody yet.
        self._known: int | None = 0
        #: Whether a call to follow the own log is under way.
        self._is_following = False

    def start(self) -> None:
        """Begin."""
        self.open()
        self._follow()

    def open(self) -> None:
        """Have the decision log, on the clock shard."""
        world = self._world
        if self.index == 0 and self.clock is None:
            self.clock = ClockPart(world.job, world.scheduler, world.promises, self._ring)

    # -- what it serves ----------------------------------------------------------------------------------------------

    def push(self, header: PushHeader, parts: Weights) -> object:
        """See `ShardPart.push`."""
        self._check_ready()
        return self.shard.push(header, parts)

    def pull(self, header: PullHeader) -> Weights:
        """See `ShardPart.pull`."""
        self._check_ready()
        return self.shard.pull(header)

    @property
    def clock_part(self) -> ClockPart:
        """The clock shard."""
        assert self.clock is not None, "shard 0 is the clock shard"
        return self.clock

    def _check_ready(self) -> None:
        if self._known is None or self.shard.state.followed < self._known:
            raise Unavailable(f"{self} catches up with the log")

    # -- the log -----------------------------------------------------------------------------------------------------

    def _ring(self) -> None:
        self._world.network.ring(self)
        self._follow()

    def _follow(self) -> None:
        world = self._world
        if self.index > 0:
            first, position = world.servers[0], self.shard.state.followed
            world.network.call(
                self, first, "follow", lambda: first.clock_part.follow(position), self._on_records, self._fail
            )
        elif not self._is_following:
            self._is_following = True
            world.scheduler.at(1, self._follow_own, self)

    def _follow_own(self) -> None:
        self._is_following = False
        records = self.clock_part.log.records_from(self.shard.state.followed)
        self._take(records)
        self.clock_part.decide("acknowledge", self.index, self.shard.state.followed, self.shard.durable)

    def _on_records(self, answer: object) -> None:
        _, records = cast("tuple[int, tuple[Record, ...]]", answer)
        self._take(records)
        self._acknowledge()
        self._follow()

    def _acknowledge(self) -> None:
        first, followed, durable = self._world.servers[0], self.shard.state.followed, self.shard.durable

        def serve() -> int:
            first.clock_part.decide("acknowledge", self.index, followed, durable)
            return first.clock_part.log.num_records

        self._world.network.call(self, first, "acknowledge", serve, self._on_length, self._fail)

    def _on_length(self, answer: object) -> None:
        """After a restart it is behind until it has read as many records as there were when it asked."""
        if self._known is None:
            self._known = cast("int", answer)

    def _take(self, records: Sequence[Record]) -> None:
        self.shard.follow(records)
        if self._world.scheduler.random.random() < self._world.snapshots:
            self.shard.take_snapshot()

    def _fail(self, error: HetpipeError) -> None:
        raise Violation(f"{self} was refused by the clock shard: {error}")

    # -- crash and restart -------------------------------------------------------------------------------------------

    def crash(self, *, power: bool = False) -> None:
        """It is killed, or its machine loses power."""
        self.end()
        if power:
            self.shard.disk.lose_power(self._world.scheduler.random)
            if self.clock is not None:
                self.clock.disk.lose_power(self._world.scheduler.random)
        self._world.network.forget(self)

    def restart(self) -> None:
        """It is started again, on what is on its disk."""
        self.alive = True
        self._known = None if self.index > 0 else 0
        self._is_following = False
        if self.clock is not None:
            self.clock.restart()
        self.shard.restart()
        if self.clock is not None:
            self._take(self.clock.log.records_from(self.shard.state.followed))
        else:
            self._acknowledge()
        self._follow()
