"""Model of one stage, which computes in the order of its schedule, like the runtime's `pipeline.segment_run`.

Transfers overlap with computation: a frame is sent when it is computed and the stage continues immediately; pushes and
pulls never block. A stage is re-evaluated (`advance`) after every relevant event: it prefetches weights, even during a
computation, and between computations its order selects the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hetpipe.decide.schedule.policy import Kind
from hetpipe.decide.simulator.clocks import Clocks
from hetpipe.decide.simulator.decisions import StageAnswers, inputs_of
from hetpipe.decide.simulator.durations import Durations
from hetpipe.decide.simulator.engine import Engine
from hetpipe.decide.simulator.flow import Flow
from hetpipe.decide.simulator.result import ActivityKind
from hetpipe.decide.sync.gate import Gate

#: Called with each computation: kind, minibatch, start, end.
ComputationLog = Callable[[ActivityKind, int, int, int], None]


class Worker:
    """State shared by the stages of one virtual worker."""

    __slots__ = ("chosen", "histogram", "index", "num_minibatches", "wave_ends")

    def __init__(self, index: int, num_minibatches: int) -> None:
        self.index = index
        self.num_minibatches = num_minibatches
        #: W* from each switch point on, as chosen by the first stage.
        self.chosen: list[int] = []
        #: c_v − W* → number of minibatches started.
        self.histogram: dict[int, int] = {}
        #: Times at which the last gradient of each wave had passed the whole pipeline.
        self.wave_ends: list[int] = []


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Position and decisions of a stage."""

    index: int
    num_stages: int
    limit: int
    """S_i."""
    answers: StageAnswers
    durations: Durations
    log: ComputationLog | None
    start_ticks: int = 0
    """Time before which nothing is computed."""


class Stage:
    """One stage of one virtual worker.

    Invariants: 0 ≤ forwarded − backwarded ≤ S_i; both directions run in the order of p.
    """

    __slots__ = (
        "_answers",
        "_backwarded",
        "_clock",
        "_clocks",
        "_downstream",
        "_draining",
        "_drains_after",
        "_durations",
        "_engine",
        "_fetched",
        "_filling",
        "_first_switch",
        "_forwarded",
        "_forwards",
        "_gate",
        "_gradients",
        "_idle_since",
        "_is_awake",
        "_is_computing",
        "_is_first",
        "_is_last",
        "_limit",
        "_log",
        "_minibatches_per_wave",
        "_next_switch",
        "_opened",
        "_opened_at",
        "_pull",
        "_push",
        "_requested",
        "_start_ticks",
        "_to_advance",
        "_under_way",
        "_upstream",
        "_waits_for_clock",
        "_worker",
        "busy_ticks",
        "idle_ticks",
        "waiting_ticks",
    )

    def __init__(
        self, engine: Engine, clocks: Clocks, gate: Gate, worker: Worker, place: StagePlace, to_advance: list[Stage]
    ) -> None:
        """Create a stage without any computation; `connect` must follow.

        Args:
            engine: provides the time.
            clocks: published and committed clocks.
            gate: the run's gate.
            worker: the virtual worker.
            place: its position.
            to_advance: queue of the stages whose `advance` is called at the end of this instant.
        """
        self._engine = engine
        self._clocks = clocks
        self._gate = gate
        self._minibatches_per_wave = gate.sync.minibatches_per_wave
        self._first_switch = gate.first_switch
        self._worker = worker
        self._to_advance = to_advance
        self._is_first = place.index == 0
        self._is_last = place.index == place.num_stages - 1
        self._limit = place.limit
        self._filling, self._draining = place.answers
        #: The decisions that currently apply.
        self._answers = self._filling
        #: The minibatch whose forward is the last before the pipeline drains.
        self._drains_after = gate.drains_after(1, worker.num_minibatches)
        self._durations = place.durations
        self._log = place.log
        self._start_ticks = place.start_ticks
        #: Minibatches whose forward, and whose backward, has ended at this stage.
        self._forwarded = self._backwarded = 0
        #: Arrival times of unused activations and gradients, in the order of p.
        self._forwards: deque[int] = deque()
        self._gradients: deque[int] = deque()
        #: First stage: the next minibatch that may start, and the time since when it may.
        self._opened = self._opened_at = 0
        #: Current W*, the next switch point, requested clocks, the number of those outstanding, and those that arrived
        #: before their switch point.
        self._clock = 0
        self._next_switch: int = self._first_switch
        self._requested: set[int] = set()
        self._under_way = 0
        self._fetched: set[int] = set()
        self._is_computing = False
        self._is_awake = False
        self._idle_since = 0
        self._waits_for_clock = False
        self.busy_ticks = self.waiting_ticks = self.idle_ticks = 0
        self._downstream: Flow | None = None
        self._upstream: Flow | None = None
        self._push = self._pull = Flow(engine, self._arrived_nowhere)

    @staticmethod
    def _arrived_nowhere(_: int) -> None:
        raise AssertionError("a stage moved weights before it was connected")

    def connect(self, *, downstream: Flow | None, upstream: Flow | None, push: Flow, pull: Flow) -> None:
        """Connect the stage's outputs; it computes from then on."""
        self._downstream, self._upstream, self._push, self._pull = downstream, upstream, push, pull
        if self._start_ticks:
            self._engine.at(self._start_ticks, self._start, 0)
        else:
            self.wake()

    @property
    def num_pulls(self) -> int:
        """Number of clocks whose weights it has requested."""
        return len(self._requested)

    @property
    def is_done(self) -> bool:
        """Whether its last gradient is computed."""
        return self._backwarded == self._worker.num_minibatches

    def _start(self, _: int) -> None:
        self.wake()

    # -- events ------------------------------------------------------------------------------------------------------

    def receive_activations(self, _: int) -> None:
        """Receive the previous stage's outputs for the next minibatch."""
        self._forwards.append(self._engine.now)
        self.wake()

    def receive_gradients(self, _: int) -> None:
        """Receive the next stage's gradients."""
        self._gradients.append(self._engine.now)
        self.wake()

    def receive_weights(self, clock: int) -> None:
        """Receive this stage's part of w^(clock)."""
        self._fetched.add(clock)
        self._under_way -= 1
        self.notify()

    def wake(self) -> None:
        """Schedule `advance` after an event that matters only between computations."""
        if not self._is_computing:
            self.notify()

    def notify(self) -> None:
        """Schedule `advance` after a publication or the arrival of weights, also during a computation."""
        if not (self._is_awake or self.is_done):
            self._is_awake = True
            self._to_advance.append(self)

    # -- deciding ----------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Prefetch weights, then start the computation selected by the order, or keep waiting."""
        self._is_awake = False
        self._fetch_ahead()
        if self._is_computing:
            return
        now = self._engine.now
        self._account(now)
        self._waits_for_clock = False
        forward = self._opening(now) if self._is_first else self._incoming()
        in_flight = self._forwarded - self._backwarded
        kind = self._answers[in_flight][inputs_of(forward, self._arrived_gradient(in_flight))]
        if kind is Kind.FORWARD:
            self._begin_forward(now)
        elif kind is Kind.BACKWARD:
            self._begin_backward(now)

    def _account(self, now: int) -> None:
        if self._waits_for_clock:
            self.waiting_ticks += now - self._idle_since
        else:
            self.idle_ticks += now - self._idle_since
        self._idle_since = now

    def _fetch_ahead(self) -> None:
        """Request the weights of the next switch point as soon as they are published, one clock at a time."""
        published = self._clocks.published
        if not self._under_way and published > self._clock and self._next_switch <= self._worker.num_minibatches:
            clock = self._gate.fetched_ahead(self._next_switch, in_use=self._clock, published=published)
            if clock is not None:
                self._fetch(clock)

    def _fetch(self, clock: int) -> None:
        if clock not in self._requested:
            self._requested.add(clock)
            self._under_way += 1
            self._pull.send(clock)

    def _opening(self, now: int) -> int | None:
        """First stage: the time since when the next minibatch may start; None if it may not."""
        p = self._forwarded + 1
        in_flight = self._forwarded - self._backwarded
        if p > self._worker.num_minibatches or in_flight >= self._limit:
            return None
        if in_flight and self._gate.starts_drained(p):
            return None
        if p == self._next_switch and not self._has_chosen(p):
            return None
        if self._opened != p:
            self._opened, self._opened_at = p, now
        return self._opened_at

    def _has_chosen(self, p: int) -> bool:
        """First stage: whether W*(p) is chosen and has arrived."""
        chosen = self._worker.chosen
        position = (p - self._first_switch) // self._minibatches_per_wave
        if position == len(chosen):
            clock = self._gate.chosen(p, in_use=self._clock, published=self._clocks.published)
            if clock is None:
                self._waits_for_clock = True
                return False
            chosen.append(clock)
        return self._is_here(chosen[position])

    def _incoming(self) -> int | None:
        """Later stages: arrival time of the next activations; None if they, or the weights they need, are missing."""
        if not self._forwards:
            return None
        p = self._forwarded + 1
        if p == self._next_switch:
            position = (p - self._first_switch) // self._minibatches_per_wave
            if not self._is_here(self._worker.chosen[position]):
                return None
        return self._forwards[0]

    def _arrived_gradient(self, in_flight: int) -> int | None:
        """Arrival time of the next gradient; the last stage creates its own, with priority over other inputs."""
        if self._is_last:
            return -1 if in_flight else None
        return self._gradients[0] if self._gradients else None

    def _is_here(self, clock: int) -> bool:
        if clock == self._clock or clock in self._fetched:
            return True
        self._fetch(clock)
        return clock in self._fetched

    # -- computing ---------------------------------------------------------------------------------------------------

    def _begin_forward(self, now: int) -> None:
        p = self._forwarded + 1
        if p == self._next_switch:
            self._switch(p)
        if self._is_first:
            distance = self._clocks.committed[self._worker.index] - self._clock
            histogram = self._worker.histogram
            histogram[distance] = histogram.get(distance, 0) + 1
        else:
            self._forwards.popleft()
        self._is_computing = True
        self._engine.at(now + self._durations.forward(), self._forward_ended, now)

    def _switch(self, p: int) -> None:
        self._clock = clock = self._worker.chosen[(p - self._first_switch) // self._minibatches_per_wave]
        self._next_switch = p + self._minibatches_per_wave
        self._fetched = {later for later in self._fetched if later > clock}

    def _forward_ended(self, started: int) -> None:
        self._forwarded = p = self._forwarded + 1
        if p == self._drains_after:
            self._answers = self._draining
        self._computed(ActivityKind.FORWARD, p, started)
        if self._downstream is not None:
            self._downstream.send(p)

    def _begin_backward(self, now: int) -> None:
        if not self._is_last:
            self._gradients.popleft()
        self._is_computing = True
        self._engine.at(now + self._durations.backward(), self._backward_ended, now)

    def _backward_ended(self, started: int) -> None:
        p = self._backwarded + 1
        self._backwarded = p
        if p == self._drains_after:
            self._drains_after = self._gate.drains_after(p + 1, self._worker.num_minibatches)
            self._answers = self._filling
        self._computed(ActivityKind.BACKWARD, p, started)
        if self._upstream is not None:
            self._upstream.send(p)
        if p % self._minibatches_per_wave == 0 or p == self._worker.num_minibatches:
            if self._is_first:
                self._worker.wave_ends.append(self._engine.now)
            self._push.send((p - 1) // self._minibatches_per_wave)

    def _computed(self, kind: ActivityKind, p: int, started: int) -> None:
        now = self._engine.now
        self.busy_ticks += now - started
        self._is_computing = False
        self._idle_since = now
        if self._log is not None:
            self._log(kind, p, started, now)
        self.wake()
