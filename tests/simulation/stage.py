"""One stage process as far as the protocol goes: what `pipeline.segment_run`, `clock_use` and `server.shard.client` do.

It joins, follows the log, waits for a segment of which it is a member, starts minibatches when the gate allows it
(first stage) or when frames come, pushes and reports its waves in order, and leaves when the run is over or when it
hears that its life is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from hetpipe.decide.schedule.in_flight import in_flight
from hetpipe.decide.sync.decision_log import FROM_NEWEST_SEGMENT
from hetpipe.decide.sync.division import Block
from hetpipe.decide.sync.log_view import LogView
from hetpipe.decide.sync.records import EvictRecord, Record, SegmentRecord
from hetpipe.decide.sync.segment import divide
from hetpipe.errors import HetpipeError, ProtocolViolation
from hetpipe.values.ids import Clock
from hetpipe.values.requests import PullHeader, SliceHeader
from hetpipe.values.sync import Progress
from tests.simulation.clock_choice import ClockChoice
from tests.simulation.job import requester
from tests.simulation.pusher import Pusher
from tests.simulation.scheduler import Process, Violation

if TYPE_CHECKING:
    from tests.simulation.run import Run


class Stage(Process):
    """A stage of one life of a virtual worker."""

    def __init__(self, world: Run, vw: int, incarnation: int, index: int, num_stages: int) -> None:
        super().__init__(f"stage {vw}.{incarnation}/{index}")
        self.world = world
        self.job = world.job
        self.vw, self.incarnation, self.index, self.num_stages = vw, incarnation, index, num_stages
        self.requester = requester(self.job.id, vw, incarnation, index, self.job.term)
        #: Whether it left in order.
        self.is_done = False
        #: Whether it has found its neighbours, and counts from the next barrier on.
        self.has_joined = False
        #: The class of the error that it ended with; empty if none did.
        self.error = ""
        self.log = LogView(self.job.progress.clock)
        self._position = FROM_NEWEST_SEGMENT if incarnation else 0
        #: The segment it works in; None before the first one.
        self.segment: SegmentRecord | None = None
        self._is_waiting = True
        self._is_attending = False
        #: First stage: its minibatches of the segment; None until it knows them.
        self.blocks: tuple[Block, ...] | None = None
        #: Last minibatch begun, and completed.
        self.begun = self.completed = 0
        #: Minibatches completed in its life.
        self.minibatches = 0
        #: Last minibatch of the segment, once that is known.
        self._last: int | None = None
        #: Waves closed.
        self._closed = 0
        #: clock → its weights; those that came, and those that are under way.
        self.fetched: dict[int, set[int]] = {}
        self._fetching: set[int] = set()
        #: Later stages: frames (minibatch, clock) that came; without a clock, the segment's last minibatch went by.
        self._frames: list[tuple[int, int | None]] = []
        self._busy_until = 0
        self._choice = ClockChoice(self)
        self.pusher = Pusher(self)
        self._limit = in_flight(
            stage=0, num_stages=num_stages, minibatches_per_wave=self.job.n, weights=self.job.weights
        )

    # -- calls -------------------------------------------------------------------------------------------------------

    def ask(
        self,
        shard: int,
        name: str,
        serve: Callable[[], object],
        done: Callable[[object], None],
        failed: Callable[[HetpipeError], None] | None = None,
        *,
        retries: bool = True,
    ) -> None:
        """Call a shard. A refusal that nobody expects ends this stage, or, if it is a member, the simulation."""
        refused = failed if failed is not None else (lambda error: self.refused(name, error))
        self.world.network.call(self, self.world.servers[shard], name, serve, done, refused, retries=retries)

    def decide(self, name: str, *args: object, **kwargs: object) -> object:
        """At shard 0: an event of the log."""
        return self.world.servers[0].clock_part.decide(name, *args, **kwargs)

    def refused(self, name: str, error: HetpipeError) -> None:
        """A call was refused for good."""
        if not isinstance(error, ProtocolViolation) or not self.world.is_gone(self.vw, self.incarnation):
            raise Violation(f"{self}: {name} was refused: {error!r}")
        self.leave(f"ends, refused: {error}", type(error).__name__)

    def headers(self, shard: int) -> tuple[SliceHeader, ...]:
        """What it holds of a shard."""
        return self.world.headers(self, shard)

    # -- beginning and end -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join, and follow the log."""
        if self.incarnation == 0 and self.world.has_met(self):
            self._join(ready=True, then=self._joined)
        else:  # the run goes on without it until it has found its neighbours
            self._join(ready=False, then=self._meet)

    def _meet(self) -> None:
        if self.world.has_met(self):
            self._join(ready=True, then=self._joined)
        else:
            self.world.scheduler.at(2, self._meet, self)

    def _join(self, *, ready: bool, then: Callable[[], None]) -> None:
        who = self.requester
        self.ask(
            0, "join", lambda: self.decide("join", who.vw, who.incarnation, who.stage, ready=ready), lambda _: then()
        )

    def _joined(self) -> None:
        self.has_joined = True
        self._follow()
        self._make_weights()

    def _make_weights(self) -> None:
        """Make the initial weights, if its virtual worker shall; who makes them may die, so that another one shall."""
        if self.segment is not None:
            return
        if self.world.makes_weights(self.vw):
            self.pusher.push_initial_weights()
        else:
            self.world.scheduler.at(10, self._make_weights, self)

    def leave(self, why: str, error: str = "", *, in_order: bool = False) -> None:
        """End; `error`: the class of the error that ended it."""
        self.world.scheduler.trace(self, why)
        self.is_done, self.error = in_order, error
        self.end()
        if not in_order:
            self.world.close_links(self)

    def _follow(self) -> None:
        position, first = self._position, self.world.servers[0]
        jumps = self.segment is None
        self.ask(
            0, "follow", lambda: first.clock_part.follow(position, jumps=jumps), self._on_records, self._cannot_follow
        )

    def _cannot_follow(self, error: HetpipeError) -> None:
        """Nobody waits for who leaves to read that it has: two barriers later it cannot any more."""
        if self.world.servers[0].clock_part.log.has_left(self.requester.vw, self.requester.incarnation):
            self.leave("ends: it left long ago", "StaleIncarnation")
        else:
            self.refused("follow", error)

    def _on_records(self, answer: object) -> None:
        first, records = cast("tuple[int, tuple[Record, ...]]", answer)
        self._position = first + len(records)
        self.log.follow(records)
        if any(isinstance(r, EvictRecord) and (r.vw, r.incarnation) == (self.vw, self.incarnation) for r in records):
            self.leave("ends: it is evicted", "StaleIncarnation")
            return
        self._follow()
        self.look()

    # -- what can be done now ----------------------------------------------------------------------------------------

    def look(self) -> None:
        """Do whatever has become possible."""
        if self._is_waiting and not self._enter_segment():
            return
        assert self.segment is not None
        if self.segment.start not in self.fetched and self._choice.clock == self.segment.start:
            return
        if self.log.is_over:
            self.leave("ends: the run is over", in_order=True)
            return
        if self.index == 0:
            self._open()
        else:
            self._forward()

    def _enter_segment(self) -> bool:
        """Begin the next segment, if there is one of which it is a member."""
        record = self.log.segment
        if record is None or (self.segment is not None and record.index == self.segment.index):
            return False
        life = (self.vw, self.incarnation)
        if life not in {(m.vw, m.incarnation) for m in record.members}:
            if self.log.is_over:
                self.leave("ends: the run is over", in_order=True)
            elif life in self.log.left:
                self._attend()
            return False
        self.segment = record
        self._is_waiting = False
        self.begun = self.completed = record.start * self.job.n
        self._last, self._closed = None, record.start
        self.fetched = {}
        self._choice.restart(record.start)
        self.fetch(record.start)
        self.blocks = None
        if self.index == 0:
            self.ask(0, "progress", lambda: self.world.servers[0].clock_part.log.progress, self._on_progress)
        return True

    def _attend(self) -> None:
        """Do its part of the work at the barrier at which it leaves; then it ends."""
        who = self.requester
        if self._is_attending:
            return
        self._is_attending = True

        def attend() -> None:
            self.world.servers[0].clock_part.log.check_stage(who.vw, who.incarnation, who.stage)

        self.ask(0, "attend", attend, lambda _: self.leave("ends: it leaves", in_order=True))

    def _on_progress(self, answer: object) -> None:
        progress, segment = cast("Progress", answer), self.segment
        assert segment is not None
        if progress.clock != segment.start:
            if not self.world.is_gone(self.vw, self.incarnation):
                raise Violation(f"{self} is in the segment from {segment.start}, the log in that from {progress.clock}")
            return
        self.blocks = divide(progress, self.job.data, [m.vw for m in segment.members])[self.requester.vw]
        self.look()

    def fetch(self, clock: int) -> None:
        """Pull w^(clock), if nobody did."""
        if clock in self.fetched or clock in self._fetching:
            return
        self._fetching.add(clock)
        parts: dict[int, tuple[int, ...]] = {}
        shards = [shard for shard in self.job.slices if self.headers(shard)]

        def came(shard: int, answer: object) -> None:
            parts[shard] = cast("tuple[int, ...]", answer)
            if len(parts) == len(shards):
                self._fetching.discard(clock)
                self.fetched[clock] = {value for values in parts.values() for value in values}
                self.world.promises.check_weights(clock, self.fetched[clock], str(self))
                self.look()

        for shard in shards:
            self._pull(shard, clock, came)

    def _pull(self, shard: int, clock: int, came: Callable[[int, object], None]) -> None:
        headers = self.headers(shard)
        header, server = PullHeader(self.requester, Clock(clock), headers), self.world.servers[shard]
        self.ask(shard, f"pull {clock}", lambda: server.pull(header), lambda answer: came(shard, answer))

    # -- computing ---------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """First stage: begin every minibatch that may begin."""
        segment, end = self.segment, self.end_of_segment()
        assert segment is not None
        if self.blocks is None or self._last is not None or end is None:
            return
        while True:
            n, p = self.job.n, self.begun + 1
            if p > min(end * n, segment.start * n + len(self.blocks)):
                self._pass_barrier_on(self.begun)
                return
            if self.begun - self.completed >= self._limit or not self._choice.opens(p):
                return
            clock = self._choice.clock
            self.begun = p
            self.world.scheduler.trace(self, f"begins minibatch {p} with w^({clock})")
            self.world.promises.begin(self.vw, self.incarnation, p, clock)
            self._pass_on(p, clock)

    def _forward(self) -> None:
        """Later stages: compute the frames whose weights are here."""
        while self._frames:
            p, clock = self._frames[0]
            if clock is None:
                self._frames.pop(0)
                self._pass_barrier_on(p)
                return
            if clock != self._choice.clock and clock not in self.fetched:
                self.fetch(clock)
                return
            self._choice.clock = clock
            self._frames.pop(0)
            self._pass_on(p, clock)
        self._finish()

    def _pass_on(self, p: int, clock: int) -> None:
        if self.index + 1 < self.num_stages:
            self.world.send_frame(self, self.index + 1, lambda stage: stage.on_frame(p, clock))
        else:
            self._busy_until = max(self._busy_until, self.world.scheduler.now) + self.world.compute_ticks()
            self.world.scheduler.at(self._busy_until - self.world.scheduler.now, lambda: self._complete(p), self)

    def on_frame(self, p: int, clock: int | None) -> None:
        """The previous stage sent a minibatch, or, with no clock, says that it was the last of the segment."""
        self._frames.append((p, clock))
        self.look()

    def _complete(self, p: int) -> None:
        """Its backward is done here."""
        self.completed = p
        self.minibatches += 1
        if self.index > 0:
            self.world.send_frame(self, self.index - 1, lambda stage: stage.on_gradient(p))
        if p % self.job.n == 0:
            self._close_wave()
        self._finish()
        self.look()

    def on_gradient(self, p: int) -> None:
        """The next stage sent one back."""
        self._complete(p)

    def _pass_barrier_on(self, last: int) -> None:
        self._last = last
        if self.index + 1 < self.num_stages:
            self.world.send_frame(self, self.index + 1, lambda stage: stage.on_frame(last, None))
        self._finish()

    # -- waves -------------------------------------------------------------------------------------------------------

    @property
    def next_wave(self) -> int:
        """The first that is not closed."""
        return self._closed

    def end_of_segment(self) -> int | None:
        """The clock at which the segment ends, as far as this stage has read; None before it knows."""
        newest, barrier, segment = self.log.segment, self.log.barrier, self.segment
        assert newest is not None and segment is not None
        if newest.index > segment.index:
            return newest.start
        return None if barrier is None or barrier.clock <= segment.start else barrier.clock

    def _close_wave(self) -> None:
        segment, wave = self.segment, self._closed
        assert segment is not None
        blocks = None
        if self.blocks is not None:
            first = (wave - segment.start) * self.job.n
            blocks = self.blocks[first : min(first + self.job.n, self.completed - segment.start * self.job.n)]
        self._closed += 1
        self.pusher.push(wave, segment.start, blocks, is_empty=False)

    def _finish(self) -> None:
        """If the segment is computed, close what is left of its waves and wait for the next one."""
        segment = self.segment
        if self._is_waiting or self._last is None or self.completed < self._last or segment is None:
            return
        if self._last > self._closed * self.job.n:
            self._close_wave()
        end = self.end_of_segment()
        if end is None:
            return  # a later stage, which has not read as far as the first one
        while self._closed < end:
            self.pusher.push(self._closed, segment.start, () if self.index == 0 else None, is_empty=True)
            self._closed += 1
        self._is_waiting = True
        self.look()
