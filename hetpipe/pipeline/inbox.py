"""Everything that reaches a stage from other threads, behind one lock and one bell.

The compute thread sleeps on the bell; links, the log follower and the fetcher ring it. The inbox sorts what came and
numbers arrivals, so that an order can tell what was here first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetpipe.decide.sync.log_view import LogView
from hetpipe.decide.sync.records import EvictRecord, Record
from hetpipe.errors import LinkClosed, StaleIncarnation
from hetpipe.link.policy import Frame, FrameKind, Link
from hetpipe.values.ids import Clock, Incarnation, VirtualWorkerIndex
from hetpipe.weights.flat import BufferPool, FlatBuffer


@dataclass(frozen=True, slots=True)
class Arrived:
    """A frame and its arrival number."""

    frame: Frame
    arrival: int


class Inbox:
    """The state that background threads change. A `Listener` of the synchroniser.

    Methods called by the compute thread expect the bell's lock to be held, except `wait`.
    """

    def __init__(
        self,
        upstream: Link | None,
        downstream: Link | None,
        start: Clock,
        pool: BufferPool | None = None,
        *,
        life: tuple[VirtualWorkerIndex, Incarnation] | None = None,
    ) -> None:
        """Watch the links of a stage of a run that starts at clock `start`.

        Args:
            upstream: to the previous stage.
            downstream: to the next stage.
            start: the clock.
            pool: brings fetched weights to the device; None leaves them where they are.
            life: of the stage's own virtual worker, whose eviction is an error; None: nobody's is.
        """
        self.bell = threading.Condition()
        self.log = LogView(start)
        #: Whether something of the decision log was read.
        self.follows = False
        self._pool = pool
        self._life = life
        #: clock → w^(clock) of this stage, not yet used. At most one is on the device, so that memory has a bound and a
        #: switch needs no copy; if more come before the switch, they stay in host memory.
        self.fetched: dict[Clock, FlatBuffer] = {}
        #: Clocks that were freed before a fetch ahead of need reached them.
        self.lost: set[Clock] = set()
        #: Frames from the previous stage, in order: forwards, barriers, evaluations.
        self.from_upstream: deque[Arrived] = deque()
        #: Backward frames from the next stage, in order.
        self.from_downstream: deque[Arrived] = deque()
        #: Called whenever a record or fetched weights arrived, on the thread that brought them, with the bell held.
        self.on_news: Callable[[], None] | None = None
        #: Links whose other end is still there.
        self._links = {"upstream": upstream, "downstream": downstream}
        #: The good-bye of a neighbour that closed in order; an error only for who still needs frames.
        self._closed: LinkClosed | None = None
        self._num_arrivals = 0
        self._error: Exception | None = None
        for link in (upstream, downstream):
            if link is not None:
                link.watch(self.ring)

    # -- from other threads ------------------------------------------------------------------------------------------

    def ring(self) -> None:
        """Something may have changed."""
        with self.bell:
            self.bell.notify_all()

    def on_records(self, records: Sequence[Record]) -> None:
        """Process new records of the decision log and wake waiting threads."""
        with self.bell:
            self.log.follow(records)
            self.follows = True
            self._look_for_own_end(records)
            self._tell()

    def on_fetched(self, clock: Clock, published: FlatBuffer | None) -> None:
        """Store pulled weights, or record that the clock was freed. Called by one thread only."""
        if published is not None and self._pool is not None:
            with self.bell:
                is_next = all(waiting.on_host for waiting in self.fetched.values())
            if is_next:
                published = self._pool.to_device(published)
        with self.bell:
            if published is None:
                self.lost.add(clock)
            else:
                self.fetched[clock] = published
            self._tell()

    def on_error(self, error: Exception) -> None:
        """Record an error of a background thread; the first one is kept."""
        with self.bell:
            self._error = self._error or error
            self.bell.notify_all()

    def _look_for_own_end(self, records: Sequence[Record]) -> None:
        for record in records:
            if isinstance(record, EvictRecord) and (record.vw, record.incarnation) == self._life:
                self._error = self._error or StaleIncarnation(
                    f"virtual worker {record.vw} (incarnation {record.incarnation}) was evicted at clock {record.clock}"
                )

    def _tell(self) -> None:
        if self.on_news is not None:
            self.on_news()
        self.bell.notify_all()

    # -- from the compute thread, with the bell held -----------------------------------------------------------------

    def next_arrival(self) -> int:
        """A number above all earlier ones."""
        self._num_arrivals += 1
        return self._num_arrivals

    def collect(self, *, needs_frames: bool) -> None:
        """Take in the frames that are there.

        Args:
            needs_frames: whether a neighbour that closed its link in order is missed. After the last frame of a run
                neighbours may leave in any order.

        Raises:
            Exception: what a background thread could not get over, or `LinkClosed`.
        """
        if self._error is not None:
            raise self._error
        self._drain("upstream", self.from_upstream)
        self._drain("downstream", self.from_downstream)
        if needs_frames and self._closed is not None and not (self.from_upstream or self.from_downstream):
            raise self._closed

    def _drain(self, name: str, queue: deque[Arrived]) -> None:
        link = self._links[name]
        try:
            while link is not None and (frame := link.try_receive()) is not None:
                queue.append(Arrived(frame, self.next_arrival()))
        except LinkClosed as error:
            if not error.orderly:
                raise
            self._links[name] = None
            self._closed = error

    def head(self, kind: FrameKind) -> Arrived | None:
        """The next frame from the previous stage, if it is of this kind."""
        queue = self.from_upstream
        return queue[0] if queue and queue[0].frame.kind is kind else None
