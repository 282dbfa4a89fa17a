"""All inputs of a stage from other threads, behind one lock and condition.

The compute thread waits on the condition; links, the log follower and the fetcher notify it. The inbox sorts inputs and
numbers arrivals, so that a scheduling order can compare arrival times.
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
    """State modified by background threads. The `SyncListener` of the synchroniser.

    Methods of the compute thread require the condition's lock to be held, except `wait`.
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
        """Receive from the links of a stage in a run that starts at clock `start`.

        Args:
            upstream: link to the previous stage.
            downstream: link to the next stage.
            start: clock at which the run starts.
            pool: moves fetched weights to the device; None leaves them in host memory.
            life: virtual worker and incarnation of the stage, whose eviction is an error; None: no eviction is.
        """
        self.condition = threading.Condition()
        self.log = LogView(start)
        #: Whether any record of the decision log was read.
        self.follows = False
        self._pool = pool
        self._life = life
        #: clock → w^(clock) of this stage, not yet used. At most one is on the device, which bounds memory and avoids
        #: a copy at the switch; further ones stay in host memory.
        self.fetched: dict[Clock, FlatBuffer] = {}
        #: Clocks that were freed before they could be prefetched.
        self.lost: set[Clock] = set()
        #: Frames from the previous stage, in order: forwards, barriers, evaluations.
        self.from_upstream: deque[Arrived] = deque()
        #: Backward frames from the next stage, in order.
        self.from_downstream: deque[Arrived] = deque()
        #: Frames about layers that move without a barrier: they belong to no place in the order of the others. With
        #: whether they come from the previous stage.
        self.about_moves: deque[tuple[bool, Frame]] = deque()
        #: Called after records or fetched weights arrived, on the background thread, with the lock held.
        self.on_arrival: Callable[[], None] | None = None
        #: Links whose other end is still connected.
        self._links = {"upstream": upstream, "downstream": downstream}
        #: The orderly closure of a neighbour's link; an error only if frames are still needed.
        self._closed: LinkClosed | None = None
        self._num_arrivals = 0
        #: How often waiting threads were notified: none may sleep on what it knew before the last time.
        self.num_rings = 0
        self._error: Exception | None = None
        for link in (upstream, downstream):
            if link is not None:
                link.watch(self.ring)

    # -- from other threads ------------------------------------------------------------------------------------------

    def ring(self) -> None:
        """Notify waiting threads of a possible change."""
        with self.condition:
            self._wake()

    def on_records(self, records: Sequence[Record]) -> None:
        """Process new records of the decision log and wake waiting threads."""
        with self.condition:
            self.log.follow(records)
            self.follows = True
            self._check_own_end(records)
            self._notify()

    def on_fetched(self, clock: Clock, published: FlatBuffer | None) -> None:
        """Store pulled weights, or record that the clock was freed. Called by one thread only."""
        if published is not None and self._pool is not None:
            with self.condition:
                is_next = all(waiting.on_host for waiting in self.fetched.values())
            if is_next:
                published = self._pool.to_device(published)
        with self.condition:
            if published is None:
                self.lost.add(clock)
            else:
                self.fetched[clock] = published
            self._notify()

    def on_error(self, error: Exception) -> None:
        """Record an error of a background thread; the first one is kept."""
        with self.condition:
            self._error = self._error or error
            self._wake()

    def _check_own_end(self, records: Sequence[Record]) -> None:
        for record in records:
            if isinstance(record, EvictRecord) and (record.vw, record.incarnation) == self._life:
                self._error = self._error or StaleIncarnation(
                    f"virtual worker {record.vw} (incarnation {record.incarnation}) was evicted at clock {record.clock}"
                )

    def _notify(self) -> None:
        if self.on_arrival is not None:
            self.on_arrival()
        self._wake()

    def _wake(self) -> None:
        self.num_rings += 1
        self.condition.notify_all()

    # -- from the compute thread, with the condition held -------------------------------------------------------------

    def next_arrival(self) -> int:
        """A number greater than all earlier ones."""
        self._num_arrivals += 1
        return self._num_arrivals

    def collect(self, *, needs_frames: bool) -> None:
        """Collect the frames that have arrived.

        Args:
            needs_frames: whether the orderly closure of a neighbour's link is an error. After the last frame of a run,
                neighbours may close in any order.

        Raises:
            Exception: the error of a background thread, or `LinkClosed`.
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
                if frame.kind is FrameKind.MOVE:
                    self.about_moves.append((name == "upstream", frame))
                    continue
                queue.append(Arrived(frame, self.next_arrival()))
        except LinkClosed as error:
            if not error.orderly:
                raise
            self._links[name] = None
            self._closed = error

    def change_pool(self, pool: BufferPool) -> None:
        """Drop fetched weights, which are those of the old layers, and move later ones to the device with `pool`."""
        for clock in list(self.fetched):
            left = self.fetched.pop(clock)
            if self._pool is not None:
                self._pool.release(left)
        self._pool = pool

    def head(self, kind: FrameKind) -> Arrived | None:
        """The next frame from the previous stage, if it is of this kind; not removed."""
        queue = self.from_upstream
        return queue[0] if queue and queue[0].frame.kind is kind else None
