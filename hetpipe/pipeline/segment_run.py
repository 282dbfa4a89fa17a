"""One stage between two barriers: the loop that carries out the schedule (`wsp.md` §3, §5).

The order decides from a `StageView`; this file knows what lies ready, and what forward and backward mean: which
weights, which frames, which history lines. It ends when the pipeline is drained and every wave below the barrier is
pushed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hetpipe.errors import ClockNotPublished, NonFiniteUpdate
from hetpipe.link.policy import Frame, FrameKind
from hetpipe.observe.timeline import Activity
from hetpipe.pipeline.chain import Values
from hetpipe.pipeline.data import read_minibatch
from hetpipe.pipeline.inbox import Inbox
from hetpipe.pipeline.setup import StageParts
from hetpipe.pipeline.tally import Tally
from hetpipe.pipeline.waiting import Waiter
from hetpipe.schedule.in_flight import in_flight
from hetpipe.schedule.policy import Action, Kind, Ready, StageView, Wait
from hetpipe.spec.ids import Clock, Minibatch, Wave
from hetpipe.sync.division import Block
from hetpipe.sync.gate import is_switch_point, local_through, required_clock

#: Longest time a frame may wait for room on its link.
SEND_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class _Version:
    """Which weights a minibatch uses: W* and v(p)."""

    clock: Clock
    local_through: Minibatch


class SegmentRun:
    """Runs the segment that starts at `start`; `blocks` are this worker's minibatches, on the first and last stage."""

    def __init__(
        self, parts: StageParts, inbox: Inbox, waiter: Waiter, tally: Tally, start: Clock, blocks: tuple[Block, ...]
    ) -> None:
        self._parts = parts
        self._inbox = inbox
        self._waiter = waiter
        self._tally = tally
        self._start = start
        self._blocks = blocks
        self._n = parts.sync.minibatches_per_wave
        identity = parts.identity
        self._limit = in_flight(stage=identity.stage, num_stages=identity.num_stages, minibatches_per_wave=self._n)
        #: Last minibatch whose forward began, whose forward ran, and whose backward ran here.
        self._begun = self._forwarded = self._backwarded = start * self._n
        #: The last minibatch of the segment, once the barrier's frame went by.
        self._last: int | None = None
        #: Waves closed here.
        self._closed = Wave(start)
        self._versions: dict[int, _Version] = {}
        #: The published clock in use, and the one chosen for the next switch point.
        self._clock = start
        self._chosen: tuple[int, Clock] | None = None
        #: Clocks that were asked for, and those of them of which nothing was heard.
        self._asked: set[Clock] = set()
        self._under_way: set[Clock] = set()
        self._opening_arrival: tuple[int, int] = (0, 0)
        self._wait_reason: tuple[str, bool] = ("", False)

    def run(self) -> None:
        """Compute until the barrier."""
        with self._inbox.bell:
            self._inbox.on_news = self._fetch_ahead
        try:
            self._compute()
        finally:
            with self._inbox.bell:
                self._inbox.on_news = None
        self._push_empty_waves()

    def _compute(self) -> None:
        while not self._drained():
            action = self._next_action()
            if action is None:
                continue
            self._waiter.proceed()
            if action.kind is Kind.FORWARD:
                self._forward(action.p)
            else:
                self._backward(action.p)
            self._tally.tick()

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _next_action(self) -> Action | None:
        """The next action, or None after a sleep or a barrier frame."""
        with self._inbox.bell:
            self._inbox.collect(needs_frames=True)
            self._fetch_ahead()
            forward = self._opening() if self._parts.identity.is_first else self._incoming()
            if forward is None and self._last is None and self._pass_barrier_on():
                return None
            decision = self._parts.order.next_action(
                StageView(self._limit, self._forwarded - self._backwarded, forward, self._gradient())
            )
            if isinstance(decision, Action):
                return decision
            self._sleep(decision)
            return None

    def _sleep(self, wait: Wait) -> None:
        reason, for_clock = self._wait_reason
        if self._forwarded - self._backwarded >= self._limit or not reason:
            p = self._backwarded + 1 if self._forwarded > self._backwarded else self._forwarded + 1
            neighbour = "the next stage" if self._forwarded > self._backwarded else "the previous stage"
            reason, for_clock = f"{wait.reason} (minibatch {p}, {neighbour})", False
        self._waiter.sleep(reason, for_clock=for_clock)

    def _opening(self) -> Ready | None:
        """First stage: the next minibatch, if it may start."""
        self._wait_reason = ("", False)
        p = self._forwarded + 1
        barrier = self._inbox.log.barrier
        if barrier is None or p > barrier.clock * self._n or p > self._start * self._n + len(self._blocks):
            return None
        if self._forwarded - self._backwarded >= self._limit or not self._clock_is_here(Minibatch(p)):
            return None
        if self._opening_arrival[0] != p:
            self._opening_arrival = (p, self._inbox.next_arrival())
        return Ready(Minibatch(p), self._opening_arrival[1])

    def _incoming(self) -> Ready | None:
        """Later stages: the next forward frame, if the weights it wants are here."""
        self._wait_reason = ("", False)
        head = self._inbox.head(FrameKind.FORWARD)
        if head is None:
            return None
        frame = head.frame
        if frame.clock != self._clock and not self._fetched(Clock(frame.clock)):
            return None
        return Ready(Minibatch(frame.minibatch), head.arrival)

    def _gradient(self) -> Ready | None:
        p = Minibatch(self._backwarded + 1)
        if self._parts.identity.is_last:
            return Ready(p, 0) if self._forwarded >= p else None
        queue = self._inbox.from_downstream
        return Ready(p, queue[0].arrival) if queue else None

    def _clock_is_here(self, p: Minibatch) -> bool:
        """First stage: whether the published clock that `p` will use is chosen and fetched."""
        if not is_switch_point(p, minibatches_per_wave=self._n, start=self._start):
            return True
        if p <= self._start * self._n + self._n:
            return True  # v(p) is the barrier: nothing newer can be used yet
        if self._chosen is None or self._chosen[0] != p:
            clock = self._choose(p)
            if clock is None:
                return False
            self._chosen = (p, clock)
        clock = self._chosen[1]
        return clock == self._clock or self._fetched(clock)

    def _choose(self, p: Minibatch) -> Clock | None:
        """W*(p): the required clock, or the newest published one; None and a reason if it is not published yet."""
        sync = self._parts.sync
        required = required_clock(p, minibatches_per_wave=self._n, staleness=sync.staleness, start=self._start)
        log = self._inbox.log
        if log.published < required:
            behind = ", ".join(str(vw) for vw in log.behind(required)) or "the parameter servers"
            who = f"virtual worker {behind}" if behind[0].isdigit() else behind
            self._wait_reason = (
                f"clock {required}, which minibatch {p} needs and {who} must finish first (published: {log.published})",
                True,
            )
            return None
        if sync.deterministic:
            return required
        try:
            clock, barrier = self._parts.synchroniser.hold(p // self._n)
        except ClockNotPublished:
            return None
        if log.barrier is None or log.barrier.clock != barrier:
            # The answer is ahead of what was read of the log: minibatches after `p` must know this barrier, too.
            self._wait_reason = (f"the record of the barrier at clock {barrier}", True)
            return None
        return clock if p <= barrier * self._n else None

    def _fetched(self, clock: Clock) -> bool:
        """Whether w^(clock) is here; asks for it if nobody did."""
        if clock in self._inbox.fetched:
            return True
        if clock in self._inbox.lost:
            self._inbox.lost.discard(clock)
            self._asked.discard(clock)
        self._ask(clock, ahead=False)
        self._wait_reason = (f"w^({clock}) from the parameter servers", False)
        return False

    def _ask(self, clock: Clock, *, ahead: bool) -> None:
        if clock not in self._asked:
            self._asked.add(clock)
            self._under_way.add(clock)
            self._parts.synchroniser.fetch(clock, ahead=ahead)

    def _fetch_ahead(self) -> None:
        """Ask for the weights of the next switch point as soon as they are published; the bell is held.

        A publish is heard in the middle of a computation, too: the weights then arrive while it lasts. One clock is
        fetched at a time, so that of several that are published close together only the newest is.
        """
        self._under_way -= self._inbox.fetched.keys() | self._inbox.lost
        if self._under_way:
            return
        sync, log = self._parts.sync, self._inbox.log
        switch = (self._begun // self._n + 1) * self._n
        if switch <= self._start * self._n + self._n:
            return
        newest = Clock(min(log.published, switch // self._n - 1))
        clock = newest
        if sync.deterministic:
            clock = required_clock(switch, minibatches_per_wave=self._n, staleness=sync.staleness, start=self._start)
        if self._clock < clock <= newest:
            self._ask(clock, ahead=True)

    # -- computing ---------------------------------------------------------------------------------------------------

    def _forward(self, p: Minibatch) -> None:
        parts, identity = self._parts, self._parts.identity
        version, values = self._take_forward(p)
        self._versions[p] = version
        self._begun = p
        if is_switch_point(p, minibatches_per_wave=self._n, start=self._start) and p > (self._start + 1) * self._n - 1:
            self._switch(p, version.clock)
        parts.history.forward(
            vw=identity.vw,
            incarnation=identity.incarnation,
            stage=identity.stage,
            p=p,
            clock=version.clock,
            local_through=version.local_through,
        )
        started = parts.clock.monotonic()
        with parts.guard:
            outputs = self._compute_forward(p, values)
        parts.emulator.stretch(Kind.FORWARD, started)
        self._tally.computed(Activity.FORWARD, p, started)
        if parts.downstream is not None:
            frame = Frame(FrameKind.FORWARD, p, version.clock, version.local_through, outputs)
            parts.downstream.send(frame, deadline_seconds=SEND_SECONDS)
        self._forwarded = p

    def _compute_forward(self, p: Minibatch, values: Values) -> Values:
        """Read what this stage reads of minibatch `p`, run its layers, and on the last stage the loss."""
        parts, identity = self._parts, self._parts.identity
        if not (identity.is_first or identity.is_last):
            return parts.compute.forward(p, parts.weights.version(p), values)
        assert parts.data.train is not None, "the first and last stage read the data"
        block = self._blocks[p - self._start * self._n - 1]
        batch = read_minibatch(parts.data.train, block, seed=parts.data.spec.seed, vw=identity.vw, p=p)
        outputs = parts.compute.forward(p, parts.weights.version(p), batch.inputs if identity.is_first else values)
        if identity.is_last:
            self._tally.loss(p, parts.compute.loss(p, outputs, batch.target), len(block))
        return outputs

    def _take_forward(self, p: Minibatch) -> tuple[_Version, Values]:
        if not self._parts.identity.is_first:
            with self._inbox.bell:
                frame = self._inbox.from_upstream.popleft().frame
            assert frame.minibatch == p, f"expected minibatch {p}, got {frame.minibatch}"
            values = tuple(tensor for tensor in frame.tensors if tensor is not None)
            return _Version(Clock(frame.clock), Minibatch(frame.local_through)), values
        clock = self._chosen[1] if self._chosen is not None and self._chosen[0] == p else self._clock
        v = local_through(p, minibatches_per_wave=self._n, start=self._start)
        return _Version(clock, v), ()

    def _switch(self, p: Minibatch, clock: Clock) -> None:
        if clock == self._clock:
            self._parts.weights.switch(p, clock, None)
            return
        with self._inbox.bell:
            for unused in [c for c in self._inbox.fetched if c < clock]:
                self._parts.pool.release(self._inbox.fetched.pop(unused))
            published = self._inbox.fetched[clock]
        self._parts.weights.switch(p, clock, published)
        with self._inbox.bell:
            # Only now: while it is there, no other fetched weights come to the device.
            del self._inbox.fetched[clock]
        self._clock = clock

    def _backward(self, p: Minibatch) -> None:
        parts, identity = self._parts, self._parts.identity
        version = self._versions.pop(p)
        parts.history.backward(
            vw=identity.vw,
            incarnation=identity.incarnation,
            stage=identity.stage,
            p=p,
            clock=version.clock,
            local_through=version.local_through,
        )
        gradients = self._compute_backward(p, version)
        started = parts.clock.monotonic()
        parts.weights.step(p, gradients)
        parts.history.step(vw=identity.vw, incarnation=identity.incarnation, stage=identity.stage, p=p)
        self._tally.computed(Activity.STEP, p, started)
        self._backwarded = p
        if p % self._n == 0 or p == self._last:
            self._close_wave(p)

    def _compute_backward(self, p: Minibatch, version: _Version) -> dict[str, Tensor | None]:
        """Run the layers backward and send the gradients of the inputs upstream; returns those of the weights."""
        parts = self._parts
        started = parts.clock.monotonic()
        found = parts.compute.backward(p, parts.weights.version(p), self._take_gradients(p))
        parts.emulator.stretch(Kind.BACKWARD, started)
        self._tally.computed(Activity.BACKWARD, p, started)
        if parts.upstream is not None:
            frame = Frame(FrameKind.BACKWARD, p, version.clock, version.local_through, found.inputs)
            parts.upstream.send(frame, deadline_seconds=SEND_SECONDS)
        return found.weights

    def _take_gradients(self, p: Minibatch) -> tuple[Tensor | None, ...] | None:
        """What the next stage sent back of minibatch `p`; None on the last stage, which starts from the loss."""
        if self._parts.identity.is_last:
            return None
        with self._inbox.bell:
            frame = self._inbox.from_downstream.popleft().frame
        assert frame.minibatch == p, f"expected the gradient of minibatch {p}, got {frame.minibatch}"
        return frame.tensors

    # -- waves and the barrier ---------------------------------------------------------------------------------------

    def _close_wave(self, last: Minibatch) -> None:
        parts = self._parts
        wave = self._closed
        try:
            update = parts.weights.close_wave(wave, last)
        except NonFiniteUpdate as error:
            raise NonFiniteUpdate(f"{parts.identity}: {error}{self._layer_of(str(error))}") from error
        parts.synchroniser.push_wave(wave, update, self._blocks_of(wave))
        self._closed = Wave(wave + 1)
        self._tally.wave_closed(self._closed)

    def _layer_of(self, sentence: str) -> str:
        name = sentence.rsplit(" ", 1)[-1]
        layer = next((layer for layer in self._parts.layers if name in layer.parameters.values()), None)
        return "" if layer is None else f" of layer {layer.index} ({layer.name})"

    def _blocks_of(self, wave: Wave) -> tuple[Block, ...] | None:
        if not self._parts.identity.is_first:
            return None
        first = (wave - self._start) * self._n
        return self._blocks[first : min(first + self._n, self._backwarded - self._start * self._n)]

    def _pass_barrier_on(self) -> bool:
        """If no more forwards will come in this segment, say so downstream; returns whether that happened now."""
        if self._parts.identity.is_first:
            barrier = self._inbox.log.barrier
            p = self._forwarded + 1
            if barrier is None or p <= min(barrier.clock * self._n, self._start * self._n + len(self._blocks)):
                return False
        elif self._inbox.head(FrameKind.BARRIER) is None:
            return False
        else:
            self._inbox.from_upstream.popleft()
        self._last = self._forwarded
        if self._parts.downstream is not None:
            frame = Frame(FrameKind.BARRIER, self._forwarded, self._start, self._forwarded)
            self._parts.downstream.send(frame, deadline_seconds=SEND_SECONDS)
        if self._last == self._backwarded and self._backwarded > self._closed * self._n:
            self._close_wave(Minibatch(self._last))
        return True

    def _drained(self) -> bool:
        return self._last is not None and self._backwarded == self._last

    def _push_empty_waves(self) -> None:
        with self._inbox.bell:
            # The last wave may be committed by now, this segment's barrier passed and the next one announced.
            passed = self._inbox.log.passed
            is_over = passed is not None and passed.clock > self._start
            barrier = passed if is_over else self._inbox.log.barrier
        assert barrier is not None, "a drained segment has a barrier"
        while self._closed < barrier.clock:
            empty = () if self._parts.identity.is_first else None
            self._parts.synchroniser.push_wave(self._closed, None, empty)
            self._closed = Wave(self._closed + 1)
