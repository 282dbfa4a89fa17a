"""One stage between two barriers: the loop that executes the schedule (`wsp.md` §3, §5).

The scheduling order decides on the basis of a `StageView`; this module maintains that view and defines what forward and
backward do: which weights, which frames, which history lines. It ends when the pipeline is drained, every gradient is
in an update and every wave below the barrier is pushed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from torch import Tensor

from hetpipe import failpoints
from hetpipe.decide.schedule.in_flight import in_flight
from hetpipe.decide.schedule.policy import Action, Kind, Ready, StageView, Wait
from hetpipe.decide.sync.division import Block
from hetpipe.decide.sync.gate import Gate
from hetpipe.errors import NonFiniteUpdate
from hetpipe.link.policy import Frame, FrameKind
from hetpipe.model.user_errors import failures_after_cut
from hetpipe.observe.log import bind_context, get_logger
from hetpipe.observe.timeline import Activity
from hetpipe.pipeline.chain import Values
from hetpipe.pipeline.clock_use import ClockUse
from hetpipe.pipeline.data import Batch
from hetpipe.pipeline.evaluation import EvaluationsWithinEpochs
from hetpipe.pipeline.frozen_prefix import AtBorder, Crossed, FrozenLayers, FrozenPrefix
from hetpipe.pipeline.inbox import Inbox
from hetpipe.pipeline.live_move import LiveMove, Moment
from hetpipe.pipeline.moving import ONE_CUT, BuiltStage, Rebuild, own_layers
from hetpipe.pipeline.reading import Request
from hetpipe.pipeline.remapping import Remapping
from hetpipe.pipeline.setup import SEND_SECONDS, StageParts
from hetpipe.pipeline.tally import MinibatchLoss, Tally
from hetpipe.pipeline.updates import Updates
from hetpipe.pipeline.waiting import Waiter
from hetpipe.values.ids import Clock, Minibatch, Wave
from hetpipe.values.memory import policies_text
from hetpipe.weights.flat import FlatBuffer
from hetpipe.weights.policy import Version

_log = get_logger(__name__)

#: Tensors of a frame of a forward. Between stages with frozen layers that use a cache the last one is a note, or None.
_Sent: TypeAlias = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A minibatch between forward and backward."""

    clock: Clock
    """W*."""
    scale_exponent: int = 0
    """Of the scale of its loss."""
    weight: int = 0
    """In means over several; last stage only, which tells the others with the gradients."""
    tells_norms: bool = False
    """Whether norms of its gradients may decide what freezes."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """The stage by one version of the plan."""

    parts: StageParts
    updates: Updates


@dataclass(frozen=True, slots=True)
class _FrozenLayers(FrozenLayers):
    """The frozen layers of a stage, for one minibatch."""

    parts: StageParts
    p: Minibatch

    def run(self, values: Values, first: int, last: int) -> Values:
        return self.parts.compute.run_frozen(self.p, values, first, last)

    def is_repeatable(self, values: Values, first: int, last: int) -> bool:
        return self.parts.compute.is_repeatable(self.p, values, first, last)

    def rows_of_samples(self, values: Values, first: int, last: int, num_samples: int) -> tuple[bool, ...] | None:
        return self.parts.compute.rows_of_samples(self.p, values, first, last, num_samples)

    def seconds_of(self, first: int, last: int, taken: float) -> float:
        return self.parts.emulator.seconds_of(first, last, taken)


class SegmentRun:
    """Runs the segment that starts at `start`, in `epoch`.

    `blocks` are this worker's minibatches, for the first and last stage. Where layers move while minibatches are in
    flight, `rebuild` builds the stage by another cut.
    """

    def __init__(  # noqa: PLR0913 - all that a segment differs in
        self,
        parts: StageParts,
        inbox: Inbox,
        waiter: Waiter,
        tally: Tally,
        evaluations: EvaluationsWithinEpochs,
        start: Clock,
        blocks: tuple[Block, ...],
        *,
        epoch: int = 0,
        rebuild: Rebuild = ONE_CUT,
    ) -> None:
        self._parts = parts
        self._rebuild = rebuild
        self._inbox = inbox
        self._waiter = waiter
        self._tally = tally
        self._evaluations = evaluations
        self._start = start
        self._blocks = blocks
        self._epoch = epoch
        self._n = parts.sync.minibatches_per_wave
        self._gate = Gate(parts.sync, start)
        identity = parts.identity
        self._limit = in_flight(
            stage=identity.stage,
            num_stages=identity.num_stages,
            minibatches_per_wave=self._n,
            weights=parts.sync.weights,
            schedule=parts.schedule,
        )
        #: Last minibatch whose forward began, whose forward completed, and whose backward completed here.
        self._begun = self._forwarded = self._backwarded = start * self._n
        #: The last minibatch of the segment, known once the barrier's frame has passed.
        self._last: int | None = None
        #: The clock of that barrier as read by the first stage: the same for all stages of the pipeline.
        self._agreed_end: Clock | None = None
        #: Waves closed here.
        self._closed = Wave(start)
        self._flying: dict[int, _InFlight] = {}
        #: Last stage, on a GPU: reports the loss of the minibatch whose backward has not been computed yet.
        self._pending_loss: Callable[[], None] | None = None
        self._clocks = ClockUse(parts, inbox, start)
        #: The stage by the newest version of the plan that computes here, and by the one before while it is needed.
        self._newest = _Stage(parts, Updates(parts, tally, self._updated, start * self._n))
        self._oldest = self._newest
        #: The move of layers that has begun or comes next.
        self._move: LiveMove | None = None
        self._num_moves = 0
        #: What has been built for a move that is not announced yet, with the index of the record that has asked for it.
        self._prepared: tuple[int, tuple[int, ...], BuiltStage | None] = (0, (), None)
        self._opening_arrival: tuple[int, int] = (0, 0)
        self._reads = identity.is_first or identity.is_last

    def run(self) -> None:
        """Compute until the barrier."""
        bind_context(wave=self._closed)
        with self._inbox.condition:
            self._inbox.on_arrival = self._fetch_ahead
            end = self._end
        if self._reads:
            # A barrier that was planned before the end of the epoch is known by now.
            count = len(self._blocks) if end is None else max(end - self._start, 0) * self._n
            first = self._start * self._n + 1
            last = first + min(count, len(self._blocks))
            self._parts.reader.begin([self._request(Minibatch(p)) for p in range(first, last)])
        try:
            self._compute()
            self._close_empty_waves()
        finally:
            if self._reads:
                self._parts.reader.begin(())  # if the barrier was moved to a lower clock
            with self._inbox.condition:
                self._inbox.on_arrival = None

    def _compute(self) -> None:
        while not (self._drained() and self._is_settled):
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
        """The next action; None after a sleep, a barrier frame, a frame about a norm, or a step of a move alone."""
        with self._inbox.condition:
            self._inbox.collect(needs_frames=True)
            num_rings = self._inbox.num_rings
            self._fetch_ahead()
            frame = self._arrived_norms()
        if frame is not None:
            self._receive_norm(frame)
            return None
        has_advanced = self._advance_move()
        with self._inbox.condition:
            self._clocks.wait_reason = ("", False)
            forward = self._opening() if self._parts.identity.is_first else self._incoming()
            passed_on = forward is None and self._last is None and self._pass_barrier_on()
            if not passed_on:
                decision = self._parts.order.next_action(
                    StageView(
                        self._limit,
                        self._forwarded - self._backwarded,
                        forward,
                        self._gradient(),
                        more_forwards=self._last is None and not self._drains_before(self._forwarded + 1),
                    )
                )
                if isinstance(decision, Action):
                    return decision
                if not has_advanced and num_rings == self._inbox.num_rings:
                    self._sleep(decision)
                return None
        self._finish_last_wave()
        return None

    def _fetch_ahead(self) -> None:
        move = self._move
        self._clocks.fetch_ahead(
            self._begun, below=math.inf if move is None or not move.changes_layers else move.first_own
        )

    def _arrived_norms(self) -> Frame | None:
        """A frame about the norm of a gradient, if it is the next one from a neighbour.

        While layers move, also one behind others: what is before it may wait for the update that needs the norm.
        """
        if self._move is not None:
            for queue, kind in (
                (self._inbox.from_downstream, FrameKind.SQUARES),
                (self._inbox.from_upstream, FrameKind.NORM),
            ):
                for arrived in queue:
                    p = arrived.frame.minibatch
                    if arrived.frame.kind is kind and p <= self._backwarded and not self._stage_of(p).updates.is_held:
                        queue.remove(arrived)
                        return arrived.frame
            return None
        behind = self._inbox.from_downstream
        if behind and behind[0].frame.kind is FrameKind.SQUARES:
            return behind.popleft().frame
        if self._inbox.head(FrameKind.NORM) is not None:
            return self._inbox.from_upstream.popleft().frame
        return None

    def _receive_norm(self, frame: Frame) -> None:
        updates = self._stage_of(frame.minibatch).updates
        if frame.kind is FrameKind.SQUARES:
            updates.add_squares(frame)
        else:
            updates.apply_norm(frame)

    def _drains_before(self, p: int) -> bool:
        """Whether the minibatches in flight must complete before `p` may start."""
        return self._forwarded > self._backwarded and self._gate.starts_drained(p)

    def _sleep(self, wait: Wait) -> None:
        reason, for_clock = self._clocks.wait_reason
        if self._forwarded - self._backwarded >= self._limit or not reason:
            p = self._backwarded + 1 if self._forwarded > self._backwarded else self._forwarded + 1
            neighbour = "the next stage" if self._forwarded > self._backwarded else "the previous stage"
            reason, for_clock = f"{wait.reason} (minibatch {p + self._parts.shift}, {neighbour})", False
        self._waiter.sleep(reason, for_clock=for_clock)

    @property
    def _end(self) -> Clock | None:
        """The clock of this segment's barrier; None if it is not known yet.

        If a barrier is moved to a lower clock, all waves of this worker may be committed before it reads that record;
        the same batch of records then contains the passing of that barrier and the announcement of the next one.
        """
        segment, barrier = self._inbox.log.segment, self._inbox.log.barrier
        if segment is not None and segment.start > self._start:
            return segment.start
        return None if barrier is None else barrier.clock

    def _opening(self) -> Ready | None:
        """First stage: the next minibatch, if it may start."""
        p = Minibatch(self._forwarded + 1)
        end = self._end
        if end is None or p > end * self._n or p > self._start * self._n + len(self._blocks):
            return None
        if self._forwarded - self._backwarded >= self._limit or not self._has_weights(p) or not self._has_data():
            return None
        if not self._has_layers(p):
            return None
        if not self._clocks.opens(p):
            return None
        if self._opening_arrival[0] != p:
            self._opening_arrival = (p, self._inbox.next_arrival())
        return Ready(p, self._opening_arrival[1])

    def _has_weights(self, p: Minibatch) -> bool:
        """First stage: whether the updates that `p` requires are made, and the pipeline is empty if necessary."""
        seen = self._parts.versions.forward_through(p, start=self._start)
        if self._drains_before(p):
            return False
        if self._stage_of(seen).updates.through < seen:
            self._clocks.wait_reason = (f"the norm of the gradient of minibatch {seen}", False)
            return False
        return True

    def _has_data(self) -> bool:
        """First and last stage: whether the next minibatch has been read."""
        reader = self._parts.reader
        if reader.is_ready():
            return True
        self._clocks.wait_reason = (reader.reason, False)
        return False

    def _incoming(self) -> Ready | None:
        """Later stages: the next forward, if the weights and data it requires are available.

        Frames of an evaluation precede those of a forward and take its position in the order: when that forward may
        run, its weights, which are those to evaluate, are available. Frames of a barrier's evaluation arrive after all
        stages have completed the segment.
        """
        head = self._inbox.head(FrameKind.FORWARD) or self._inbox.head(FrameKind.EVALUATE)
        if head is None or not self._has_layers(Minibatch(self._forwarded + 1), head.frame.version):
            return None
        if not self._is_here(head.frame):
            return None
        if self._reads and head.frame.kind is FrameKind.FORWARD and not self._has_data():
            return None
        return Ready(Minibatch(self._forwarded + 1), head.arrival)

    def _is_here(self, frame: Frame) -> bool:
        """Whether the weights required by a frame from the previous stage are available."""
        is_own = frame.kind is FrameKind.EVALUATE and not self._parts.has_shards
        return is_own or self._clocks.is_here(Clock(frame.clock))

    def _gradient(self) -> Ready | None:
        p = Minibatch(self._backwarded + 1)
        if self._move is not None and not self._move.may_backward(p):
            self._clocks.wait_reason = (self._move.awaited, False)
            return None
        if self._parts.identity.is_last:
            return Ready(p, 0) if self._forwarded >= p else None
        queue = self._inbox.from_downstream
        # The next stage may hand layers over already, where this one still closes empty waves.
        is_gradient = bool(queue) and queue[0].frame.kind is FrameKind.BACKWARD
        return Ready(p, queue[0].arrival) if is_gradient else None

    # -- layers that move while minibatches are in flight ------------------------------------------------------------

    def _stage_of(self, p: int) -> _Stage:
        """The stage by the version of the plan that computes minibatch `p`."""
        move = self._move
        return self._oldest if move is not None and p <= move.last else self._newest

    @property
    def _is_settled(self) -> bool:
        return self._newest.updates.is_settled and self._oldest.updates.is_settled

    def _has_layers(self, p: Minibatch, version: int = 0) -> bool:
        """Whether this stage can compute `p`, which the previous stage computed by `version`."""
        move = self._move
        if move is not None and not move.may_forward(p):
            self._clocks.wait_reason = (move.awaited, False)
            return False
        if version > self._stage_of(p).parts.plan_version:
            self._clocks.wait_reason = (f"the record of version {version} of the plan", False)
            return False
        return True

    def _advance_move(self) -> bool:
        """Do what a move can do now, outside of the lock; returns whether that was anything."""
        if self._move is None and not self._find_move():
            return self._prepare_move()
        move = self._move
        assert move is not None, "found above"
        if move.is_due(self._forwarded):
            _, bounds, prepared = self._prepared
            move.build(self._rebuild, prepared if bounds == move.record.bounds else None)
            self._prepared = (self._prepared[0], (), None)
            assert move.new is not None, "just built"
            updates = Updates(move.new, self._tally, self._updated, move.last)
            if move.changes_layers:
                updates.hold()
            self._newest = _Stage(move.new, updates)
            return True
        at = Moment(self._forwarded, self._backwarded, self._oldest.updates.through, self._closed)
        has_done = move.advance(at, self._lent_on, self._switch_lender)
        if move.is_complete:
            self._oldest, self._move = self._newest, None
            self._adopt(self._newest.parts)
            if move.changes_layers:
                with self._inbox.condition:
                    self._clocks.forget_requests()
                self._newest.updates.release()
                self._finish_last_wave()
            # Before anything else is computed: weights that the next version needs are not fetched for this one.
            self._find_move()
        return has_done

    def _find_move(self) -> bool:
        """Whether another move is announced in this segment."""
        identity = self._parts.identity
        with self._inbox.condition:
            own = self._inbox.log.moves_of(identity.vw, identity.incarnation)
            # The log may be at a later segment already.
            segment = self._inbox.log.segment
            if segment is None or segment.start != self._start or len(own) <= self._num_moves:
                return False
            self._move = LiveMove(self._newest.parts, self._inbox, own[self._num_moves], self._start)
            self._num_moves += 1
        return True

    def _prepare_move(self) -> bool:
        """Build the stage by the cut of a move that is announced once all stages have done that; whether there is one.

        Nothing of it is used before the announcement.
        """
        parts, identity = self._newest.parts, self._parts.identity
        with self._inbox.condition:
            segment, record = self._inbox.log.segment, self._inbox.log.preparations.get(identity.vw)
            if segment is None or segment.start != self._start or record is None:
                return False
        if record.incarnation != identity.incarnation or record.index <= self._prepared[0]:
            return False
        built, can = None, True
        self._prepared = (record.index, (), None)  # its memory is free for the one to be built
        failpoints.reach("repartition.to_prepare")
        if own_layers(record.bounds, identity.stage) != own_layers(parts.bounds, identity.stage):
            assert self._rebuild.build is not None, "a stage of a run whose plans change knows how it is built"
            try:
                with parts.guard:
                    built = self._rebuild.build(record.bounds, 0)
            except Exception as error:  # noqa: BLE001 - whatever it is, layers can move at a barrier
                _log.warning("not_prepared_to_move", bounds=list(record.bounds), reason=repr(error))
                can = False
        self._prepared = (record.index, record.bounds, built)
        self._parts.synchroniser.prepared(record.index, can=can)
        failpoints.reach("repartition.prepared")
        return True

    def _lent_on(self, p: Minibatch) -> tuple[Clock, FlatBuffer | None] | None:
        """The clock of minibatch `p` beyond the last one before a move, and its weights unless it is in use.

        None: it is not known yet, or the weights are not here. Stages behind the first know the clock of the last
        minibatch before the move once that has arrived, which they may compute later.
        """
        assert self._move is not None, "a move asks"
        last = self._move.last
        with self._inbox.condition:
            used: Clock | None = self._clocks.in_use
            if self._forwarded < last:
                used = next((Clock(frame.clock) for frame in self._forwards_here() if frame.minibatch == last), None)
            clock = None if used is None else self._clocks.foretold(p, last, used)
            if clock is None:
                return None
            return clock, None if clock == self._clocks.in_use else self._inbox.fetched[clock]

    def _forwards_here(self) -> Iterator[Frame]:
        """The forwards that have arrived."""
        found = (arrived.frame for arrived in self._inbox.from_upstream)
        return (frame for frame in found if frame.kind is FrameKind.FORWARD)

    def _switch_lender(self, p: Minibatch, clock: Clock) -> None:
        if clock != self._clocks.in_use:
            self._switch(self._oldest.parts, p, clock)

    def _adopt(self, new: StageParts) -> None:
        """Let the rest of the stage see the new version, as the old one has nothing left to do."""
        parts = self._parts
        parts.layers, parts.compute, parts.pool, parts.weights = new.layers, new.compute, new.pool, new.weights
        parts.plan_version, parts.bounds, parts.data = new.plan_version, new.bounds, new.data

    def _emulate(self, stage: _Stage) -> None:
        """Let passes take the time of the layers that this version has."""
        parts = stage.parts
        if self._oldest is not self._newest:
            parts.cover(parts.compute.memory.policies)

    # -- computing ---------------------------------------------------------------------------------------------------

    def _forward(self, p: Minibatch) -> None:
        """Run the forward of `p`, or the rest of an evaluation that precedes it."""
        if (frame := self._taken_evaluation()) is not None:
            self._evaluations.take(frame, self._evaluated_weights(p, Clock(frame.clock)))
            return
        stage = self._stage_of(p)
        parts = stage.parts
        flying, tensors = self._take_forward(p)
        if parts.identity.is_first:
            self._evaluate_if_due(p, flying.clock)
        self._flying[p] = flying
        self._begun = p
        if flying.clock != self._clocks.in_use:
            self._switch(parts, p, flying.clock)
        version = parts.weights.forward(p)
        identity = parts.identity
        if (p - 1) % self._n == 0:
            self._begin_wave(p)
        parts.history.forward(
            vw=identity.vw,
            incarnation=identity.incarnation,
            stage=identity.stage,
            p=p + parts.shift,
            clock=flying.clock,
            local_through=version.through + parts.shift,
            version=parts.plan_version,
            frozen=parts.frozen,
            inactive=parts.left_out,
        )
        parts.watch(parts, Minibatch(p + parts.shift), flying.clock, version.weights)
        self._emulate(stage)
        started = parts.clock.monotonic()
        with parts.guard:
            outputs, skipped = self._compute_forward(p, version, tensors)
        parts.weights.forwarded(p)
        if not identity.is_last:  # there the backward follows at once
            parts.compute.finish()
        parts.emulator.stretch(Kind.FORWARD, started, skipped=skipped)
        self._tally.computed(Activity.FORWARD, p, started)
        if parts.downstream is not None:
            frame = Frame(
                FrameKind.FORWARD,
                p,
                flying.clock,
                version.through,
                outputs,
                scale_exponent=flying.scale_exponent,
                version=parts.plan_version,
                tells_norms=flying.tells_norms,
            )
            parts.downstream.send(frame, deadline_seconds=SEND_SECONDS)
        self._forwarded = p

    def _begin_wave(self, p: Minibatch) -> None:
        """Apply the memory policies of the wave that begins with `p`."""
        parts, identity = self._stage_of(p).parts, self._parts.identity
        own = p + parts.shift
        policies = parts.compute.memory.begin_wave(own, self._gate.wave_of(p))
        if policies is not None:
            first = parts.layers[0].index
            parts.cover(policies)
            parts.history.memory(
                vw=identity.vw, incarnation=identity.incarnation, stage=identity.stage, p=own, policies=policies
            )
            _log.info("memory_policies", minibatch=own, policies=policies_text(policies, first) or "keep")

    def _compute_forward(self, p: Minibatch, version: Version, tensors: _Sent) -> tuple[_Sent, range]:
        """Read this stage's data of minibatch `p`, run its layers, and on the last stage the loss.

        Returns:
            What is sent to the next stage, and the layers that the cache has spared.
        """
        parts, identity = self._stage_of(p).parts, self._parts.identity
        if not self._reads:
            return self._run_layers(p, version, tensors)
        # An evaluation in between may have taken the place of what was read.
        self._waiter.wait_until(parts.reader.is_ready, lambda: parts.reader.reason)
        batch = parts.reader.take(self._request(p))
        outputs, skipped = self._run_layers(p, version, batch.inputs if identity.is_first else tensors)
        if identity.is_last:
            self._compute_loss(p, tuple(output for output in outputs if output is not None), batch)
        return outputs, skipped

    def _request(self, p: Minibatch) -> Request:
        return Request(p + self._parts.shift, self._blocks[p - self._start * self._n - 1], epoch=self._epoch)

    def _compute_loss(self, p: Minibatch, outputs: Values, batch: Batch) -> None:
        """Last stage: the loss of `p`; none if nothing in it counts, for the mean of nothing is not a number."""
        parts = self._stage_of(p).parts
        weight = parts.data.weight_of(batch.target, batch.num_samples)
        self._flying[p] = replace(self._flying[p], weight=weight)
        if not weight:
            parts.compute.skip_loss(p)
            self._tally.loss(p, MinibatchLoss(0.0, 0, batch.num_samples))
            return
        exponent = self._flying[p].scale_exponent
        value = parts.compute.loss(p, outputs, batch.target, scale=2.0**exponent)
        each = {} if parts.data.losses is None else dict(parts.data.losses.values)
        self._pending_loss = partial(self._report_loss, p, value, exponent, weight, batch.num_samples, each)
        if not parts.compute.is_asynchronous:
            self._loss_is_known()

    def _loss_is_known(self) -> None:
        """Report the last computed loss, once. On a GPU this happens after its backward."""
        report, self._pending_loss = self._pending_loss, None
        if report is not None:
            report()

    def _report_loss(
        self,
        p: Minibatch,
        value: Tensor,
        exponent: int,
        weight: int,
        num_samples: int,
        each: Mapping[str, float],
    ) -> None:
        loss = float(value)
        if not math.isfinite(loss):
            if not exponent:
                own = p + self._parts.shift
                raise NonFiniteUpdate(f"the loss of minibatch {own} is {loss}", minibatch=own)
            # Its update will most likely be skipped, and a mean with it would say nothing.
            self._tally.loss(p, MinibatchLoss(0.0, 0, num_samples))
            return
        self._tally.loss(p, MinibatchLoss(loss, weight, num_samples, each))

    def _run_layers(self, p: Minibatch, version: Version, tensors: _Sent) -> tuple[_Sent, range]:
        parts = self._stage_of(p).parts
        prefix = parts.prefix if parts.prefix is not None and parts.prefix.is_used else None
        saving = Remapping(version.weights) if parts.versions.is_predicting else None
        with failures_after_cut(f"the forward of minibatch {p + parts.shift} on {parts.identity}"):
            arrived = None if prefix is None else prefix.enter(tensors)
            if prefix is None or arrived is None:
                values = tuple(tensor for tensor in tensors if tensor is not None)
                outputs = parts.compute.forward(p, version.weights, values, saving)
                return (*outputs, None) if prefix is not None and prefix.sends_note else outputs, range(0)
            crossed = self._cross_frozen(prefix, p, arrived)
            behind = crossed.arrived
            outputs = parts.compute.forward(p, version.weights, behind.values, saving, first=behind.border)
            own = parts.layers[0].index
            last = min(behind.border, parts.layers[-1].index + 1)
            skipped = range(own, last) if crossed.computed[0] == last else range(own, crossed.computed[0])
            return (*outputs, behind.note()) if prefix.sends_note else outputs, skipped

    def _cross_frozen(self, prefix: FrozenPrefix, p: Minibatch, arrived: AtBorder) -> Crossed:
        """Take minibatch `p` past the frozen layers of this stage, which its cache may spare."""
        parts, identity = self._parts, self._parts.identity
        since = parts.clock.monotonic()
        crossed = prefix.cross(arrived, _FrozenLayers(parts, p))
        parts.history.crossed(
            vw=identity.vw,
            incarnation=identity.incarnation,
            stage=identity.stage,
            p=p + parts.shift,
            cache=prefix.cache.name,
            read=crossed.read_at or 0,
            computed=crossed.computed,
            kept=crossed.kept,
            since=since,
            units=[unit.hex() for unit in crossed.arrived.units],
        )
        return crossed

    def _take_forward(self, p: Minibatch) -> tuple[_InFlight, _Sent]:
        if self._parts.identity.is_first:
            exponent = self._newest.updates.scale_exponent(p)
            return _InFlight(self._clocks.chosen(p), exponent, tells_norms=self._tells_norms(p)), ()
        with self._inbox.condition:
            frame = self._inbox.from_upstream.popleft().frame
        assert frame.minibatch == p, f"expected minibatch {p}, got {frame.minibatch}"
        return _InFlight(Clock(frame.clock), frame.scale_exponent, tells_norms=frame.tells_norms), frame.tensors

    def _tells_norms(self, p: Minibatch) -> bool:
        """First stage: whether norms of the gradients of `p` may decide what freezes at the segment's planned end.

        They do if it is of this worker's last wave before that. A barrier that is set at a lower clock meanwhile is
        none at which norms decide: it is neither the end of an epoch nor at a multiple of `freeze.waves`, both of which
        are planned.
        """
        if not self._parts.tells_norms:
            return False
        with self._inbox.condition:
            end = self._end
        assert end is not None, "no minibatch starts before the barrier behind it is known"
        last = min(end * self._n, self._start * self._n + len(self._blocks))
        return self._gate.wave_of(p) == self._gate.wave_of(last)

    def _taken_evaluation(self) -> Frame | None:
        """Later stages: the next frame from the previous stage, if it belongs to an evaluation."""
        with self._inbox.condition:
            if self._inbox.head(FrameKind.EVALUATE) is None:
                return None
            return self._inbox.from_upstream.popleft().frame

    def _evaluate_if_due(self, p: Minibatch, clock: Clock) -> None:
        """First stage: evaluate the weights of `clock`; without parameter servers, the stage's own weights for `p`.

        The latter count for the newest clock all of whose waves they contain; under policies whose later stages use
        newer updates, those stages evaluate with theirs.
        """
        if not self._parts.has_shards:
            clock = Clock(self._parts.versions.forward_through(p, start=self._start) // self._n)
        if self._evaluations.is_due(clock):
            self._evaluations.run(clock, self._evaluated_weights(p, clock))

    def _evaluated_weights(self, p: Minibatch, clock: Clock) -> FlatBuffer:
        """Weights for an evaluation of `clock` before minibatch `p`."""
        published = None
        if self._parts.has_shards and clock != self._clocks.in_use:
            published = self._parts.pool.to_device(self._fetched(clock))
            with self._inbox.condition:
                self._inbox.fetched[clock] = published
        return self._parts.weights.evaluated(p, published)

    def _fetched(self, clock: Clock) -> FlatBuffer:
        """Take w^(clock), which is available, and drop older ones."""
        with self._inbox.condition:
            for unused in [c for c in self._inbox.fetched if c < clock]:
                self._parts.pool.release(self._inbox.fetched.pop(unused))
            return self._inbox.fetched[clock]

    def _switch(self, parts: StageParts, p: Minibatch, clock: Clock) -> None:
        parts.weights.switch(p, clock, self._fetched(clock))
        with self._inbox.condition:
            # Not earlier: while this entry exists, no other fetched weights are moved to the device.
            del self._inbox.fetched[clock]
        self._clocks.in_use = clock

    def _backward(self, p: Minibatch) -> None:
        stage = self._stage_of(p)
        parts, identity = stage.parts, self._parts.identity
        flying = self._flying.pop(p)
        version = parts.weights.backward(p)
        if not parts.is_frozen:  # else the frame without tensors tells only that the minibatch is done
            parts.history.backward(
                vw=identity.vw,
                incarnation=identity.incarnation,
                stage=identity.stage,
                p=p + parts.shift,
                clock=flying.clock,
                local_through=version.through + parts.shift,
                version=parts.plan_version,
                frozen=parts.frozen,
                inactive=parts.left_out,
            )
        received, weight = self._take_gradients(p, flying)
        self._emulate(stage)
        gradients = self._compute_backward(p, replace(flying, weight=weight), version, received)
        self._backwarded = p
        stage.updates.add(p, gradients, weight, flying.scale_exponent, tells_norms=flying.tells_norms)
        if p == self._last:
            stage.updates.flush()

    def _compute_backward(
        self, p: Minibatch, flying: _InFlight, version: Version, gradients: tuple[Tensor | None, ...] | None
    ) -> dict[str, Tensor | None]:
        """Run the backward and send the gradients of the inputs upstream; returns those of the weights."""
        parts = self._stage_of(p).parts
        started = parts.clock.monotonic()
        # Recomputation draws from the process's generators again.
        with parts.guard, failures_after_cut(f"the backward of minibatch {p + parts.shift} on {self._parts.identity}"):
            found = parts.compute.backward(p, version.weights, gradients)
        parts.weights.backwarded(p)
        parts.compute.finish()
        self._loss_is_known()
        parts.emulator.stretch(Kind.BACKWARD, started)
        self._tally.computed(Activity.BACKWARD, p, started)
        if parts.upstream is not None:
            frame = Frame(
                FrameKind.BACKWARD,
                p,
                flying.clock,
                version.through,
                found.inputs,
                flying.weight,
                version=parts.plan_version,
            )
            parts.upstream.send(frame, deadline_seconds=SEND_SECONDS)
        return found.weights

    def _take_gradients(self, p: Minibatch, flying: _InFlight) -> tuple[tuple[Tensor | None, ...] | None, int]:
        """Gradients of the outputs of minibatch `p` from the next stage, None on the last one; and its weight."""
        if self._parts.identity.is_last:
            return None, flying.weight
        with self._inbox.condition:
            frame = self._inbox.from_downstream.popleft().frame
        assert frame.minibatch == p, f"expected the gradient of minibatch {p}, got {frame.minibatch}"
        return frame.tensors, frame.weight

    # -- waves and the barrier ---------------------------------------------------------------------------------------

    def _updated(self, p: Minibatch) -> None:
        """Handle a completed update, the last minibatch of which is `p`."""
        if p % self._n == 0 or p == self._last:
            self._close_wave(p)

    def _close_wave(self, last: Minibatch) -> None:
        stage = self._stage_of(last)
        parts, wave = stage.parts, self._closed
        update = parts.weights.close_wave(wave, last)
        identity = parts.identity
        parts.history.wave_computed(
            vw=identity.vw,
            incarnation=identity.incarnation,
            stage=identity.stage,
            wave=wave,
            p=last + parts.shift,
            version=parts.plan_version,
            frozen=parts.frozen,
            inactive=parts.left_out,
        )
        squares = stage.updates.take_squares(last)
        parts.synchroniser.push_wave(wave, update, self._blocks_of(wave), segment=self._start, squares=squares)
        self._closed = Wave(wave + 1)
        self._tally.wave_closed(self._closed, last)
        bind_context(wave=self._closed)

    def _blocks_of(self, wave: Wave) -> tuple[Block, ...] | None:
        if not self._parts.identity.is_first:
            return None
        first = (wave - self._start) * self._n
        return self._blocks[first : min(first + self._n, self._backwarded - self._start * self._n)]

    def _pass_barrier_on(self) -> bool:
        """If no more forwards follow in this segment, notify the next stage; returns whether that happened now."""
        if self._parts.identity.is_first:
            end = self._end
            p = Minibatch(self._forwarded + 1)
            if end is None or p <= min(end * self._n, self._start * self._n + len(self._blocks)):
                return False
            if self._parts.replicas is not None and p <= end * self._n and not self._clocks.opens(p):
                return False  # replicas must not skip the wave in which this one has no minibatch
        elif self._inbox.head(FrameKind.BARRIER) is None:
            return False
        else:
            end = Clock(self._inbox.from_upstream.popleft().frame.clock)
        self._last, self._agreed_end = self._forwarded, end
        if self._parts.downstream is not None:
            frame = Frame(FrameKind.BARRIER, self._forwarded, end, self._forwarded)
            self._parts.downstream.send(frame, deadline_seconds=SEND_SECONDS)
        return True

    def _finish_last_wave(self) -> None:
        """Complete the updates that would wait for minibatches beyond the barrier, now that it is known."""
        if self._last != self._backwarded:
            return
        updates = self._stage_of(self._last).updates
        updates.flush()
        if updates.through == self._last > self._closed * self._n:
            self._close_wave(Minibatch(self._last))

    def _drained(self) -> bool:
        return self._last is not None and self._backwarded == self._last

    def _close_empty_waves(self) -> None:
        with self._inbox.condition:
            ends = (self._agreed_end, self._end)
        # This stage may read the record of the barrier later than the first stage did: replicas must not wait for a
        # wave that the others never start.
        end = min(clock for clock in ends if clock is not None)
        while self._closed < end:
            wave = self._closed
            self._newest.updates.join_empty_wave(Minibatch((wave + 1) * self._n))
            while not self._is_settled:
                self._next_action()
            if self._closed == wave:
                empty = () if self._parts.identity.is_first else None
                self._parts.synchroniser.push_wave(wave, None, empty, segment=self._start)
                self._closed = Wave(wave + 1)
