"""The lifecycle of one stage: enter the run, alternate segments and barriers, end.

entry (the start of the run, or a barrier) ─► segment ─► barrier: publish, pull, buffers, evaluate, checkpoint
─► segment ─► … ─► done

It ends at the barrier that ends the run, or at the one at which its virtual worker, being drained, leaves.
"""

from __future__ import annotations

from dataclasses import replace

from hetpipe.decide.sync.division import Block
from hetpipe.decide.sync.records import SegmentMember, SegmentRecord
from hetpipe.decide.sync.segment import DRAIN, divide, ends_run
from hetpipe.errors import NonFiniteUpdate
from hetpipe.pipeline.barrier import BarrierWork
from hetpipe.pipeline.entry import Entry
from hetpipe.pipeline.evaluation import EvaluationsWithinEpochs
from hetpipe.pipeline.inbox import Inbox
from hetpipe.pipeline.moving import ONE_CUT, LayerMover, Rebuild
from hetpipe.pipeline.non_finite import explained, known_data
from hetpipe.pipeline.segment_run import SegmentRun
from hetpipe.pipeline.setup import StageParts
from hetpipe.pipeline.tally import Figures, Tally
from hetpipe.pipeline.waiting import Waiter
from hetpipe.values.barrier_reasons import BarrierReasons
from hetpipe.values.ids import Clock, VirtualWorkerIndex, virtual_workers_text
from hetpipe.values.run import StageDone
from hetpipe.values.sync import Progress
from hetpipe.weights.flat import FlatBuffer


class StageRunner:
    """Runs one stage from its entry to the end of the run, on the calling thread."""

    def __init__(
        self,
        parts: StageParts,
        inbox: Inbox,
        rebuild: Rebuild = ONE_CUT,
    ) -> None:
        """Run with `parts`.

        Args:
            parts: of the stage.
            inbox: its frames and records.
            rebuild: how it is built by another cut.
        """
        self._parts = parts
        self._inbox = inbox
        self._waiter = Waiter(
            str(parts.identity),
            inbox.condition,
            report=parts.report,
            timeline=parts.timeline,
            clock=parts.clock,
            stall_seconds=parts.stall_seconds,
        )
        self._tally = Tally(
            inbox,
            self._waiter,
            parts.synchroniser,
            report=parts.report,
            timeline=parts.timeline,
            clock=parts.clock,
            measure=self._figures,
            metrics=parts.metrics,
        )
        self._entry = Entry(parts, inbox, self._waiter)
        self._barrier_work = BarrierWork(parts, inbox, self._waiter)
        self._rebuild = rebuild
        self._mover = LayerMover(parts, inbox, self._waiter, rebuild)

    @property
    def peak_buffers(self) -> int:
        """Peak number of weight buffers on the device so far."""
        return self._parts.pool.peak

    @property
    def peak_buffers_at_rest(self) -> int:
        """Peak number between two actions: the buffers held by the version store itself."""
        return self._parts.weights.peak_at_rest

    def run(self) -> StageDone:
        """Run until the barrier that ends the run, or the one at which the virtual worker, being drained, leaves.

        Returns immediately if the run ended before this stage entered.

        Raises:
            HetpipeError: the reason the stage ended early, as one sentence.
        """
        try:
            return self._run()
        finally:
            if self._parts.data.reader is not None:
                self._parts.data.reader.close()

    def _run(self) -> StageDone:
        segment, identity = self._entry.wait(), self._parts.identity
        if identity.in_segment(segment) is not None:
            self._tally.begin(segment.start)
            evaluations = EvaluationsWithinEpochs(self._parts, self._inbox, self._waiter, segment.start)
            while not self._cross(segment):
                self._wait_for_next_barrier(segment.start)
                blocks: tuple[Block, ...] = ()
                epoch = 0
                if identity.is_first or identity.is_last:
                    progress, division = self._division(segment)
                    evaluations.begin(progress, division, self._per_wave(segment))
                    blocks, epoch = division[identity.vw], progress.epoch
                try:
                    SegmentRun(
                        self._parts,
                        self._inbox,
                        self._waiter,
                        self._tally,
                        evaluations,
                        segment.start,
                        blocks,
                        epoch=epoch,
                        rebuild=self._rebuild,
                    ).run()
                except NonFiniteUpdate as error:
                    parts = self._parts
                    first = segment.start * parts.sync.minibatches_per_wave + 1 + parts.shift
                    dealt = self._division(segment)[1][identity.vw] if self._parts.data.order_of else ()
                    raise explained(error, self._parts, dealt, first=first, epoch=epoch) from error
                self._prepare_move(segment.start)
                segment = self._reach_barrier(segment.start)
            self._parts.synchroniser.drain(deadline_seconds=self._parts.stall_seconds)
        return StageDone(segment.start, DRAIN if identity.leaves_at(segment) else str(BarrierReasons(segment.reasons)))

    def _cross(self, segment: SegmentRecord) -> bool:
        """Start a segment from its weights, after the work at the barrier before it; returns whether the run is over.

        There is no work at the start of the run. A stage that leaves pulls no weights. The barrier's work is done by
        the old version of the plan; then layers move.
        """
        leaves = self._parts.identity.leaves_at(segment)
        member = self._parts.identity.in_segment(segment)
        if member is not None:
            self._change_waves(segment.start, member)
            if member.joined and segment.reasons:
                self._parts.leave_out(segment.inactive_before)  # it has a share of the barrier's evaluation
                self._entry.take_over(segment)
        if not leaves:
            self._take_weights(segment.start)
        if segment.reasons:
            self._barrier_work.run(segment)
            self._tally.tick(now=True)
        if leaves or ends_run(segment.reasons):
            return True
        if member is not None:
            self._mover.move(segment, member)
            self._parts.plan_version = member.version
            self._form_group(segment)
            if self._parts.prefix is not None and segment.frozen_layers:
                epoch = self._parts.synchroniser.progress().epoch
                self._parts.prefix.begin(self._parts.bounds, segment.frozen_layers, epoch)
        return False

    def _form_group(self, segment: SegmentRecord) -> None:
        """Average gradients with the members of the segment from here on, if replicas do; all start from one's weights.

        That comes last at a barrier: before, members have written what a newcomer waits for.
        """
        replicas = self._parts.replicas
        if replicas is not None:
            replicas.regroup(segment.start, [member.vw for member in segment.members])
            if not segment.reasons:
                replicas.copy_first_(list(self._parts.weights.at_barrier.regions))

    def _change_waves(self, start: Clock, member: SegmentMember) -> None:
        """Number the minibatches of the segment from `start` on by the N and the origin of its record."""
        parts = self._parts
        n = member.minibatches_per_wave or parts.sync.minibatches_per_wave
        if n != parts.sync.minibatches_per_wave:
            parts.sync = replace(parts.sync, minibatches_per_wave=n)
            parts.versions = replace(parts.versions, minibatches_per_wave=n)
        parts.shift = 0 if member.origin is None else member.origin - start * n
        parts.weights.number_by(parts.versions, parts.shift)
        parts.compute.shift = self._tally.shift = parts.shift

    def _figures(self) -> Figures:
        parts = self._parts
        clipping, scales = parts.clipping, parts.scales
        return Figures(
            weight_bytes=parts.pool.peak * parts.pool.layout.num_bytes,
            activation_bytes=parts.compute.activation_bytes_peak,
            learning_rate=parts.weights.optimizer.learning_rate,
            max_norm=None if clipping is None else clipping.max_norm,
            loss_scale=None if scales is None else float(1 << scales.newest.exponent),
            skipped_updates=0 if scales is None else scales.skipped_updates,
            memory=parts.compute.memory.policies,
            cache=None if parts.prefix is None else parts.prefix.use,
        )

    # -- inside ------------------------------------------------------------------------------------------------------

    def _division(self, segment: SegmentRecord) -> tuple[Progress, dict[VirtualWorkerIndex, tuple[Block, ...]]]:
        """Progress at the start of a segment, and its minibatches, divided among its members."""
        progress = self._parts.synchroniser.progress()
        assert progress.clock == segment.start, f"the current segment began at {progress.clock}, not {segment.start}"
        per_wave = self._per_wave(segment)
        order_of = self._parts.data.order_of
        assert order_of is not None, "only stages that read data divide them"
        with self._parts.guard:
            order = order_of(progress.epoch)
        return progress, divide(progress, known_data(self._parts), tuple(per_wave), per_wave, order=order)

    def _per_wave(self, segment: SegmentRecord) -> dict[VirtualWorkerIndex, int]:
        return segment.per_wave(self._parts.sync.minibatches_per_wave)

    def _reach_barrier(self, start: Clock) -> SegmentRecord:
        """Wait until the barrier that ends the segment from `start` is passed; returns the segment after it.

        The barrier may be moved to a lower clock meanwhile. If this virtual worker leaves there, the others may already
        be further.
        """
        identity = self._parts.identity
        with self._inbox.condition:
            while True:
                self._inbox.collect(needs_frames=False)
                log = self._inbox.log
                assert log.barrier is not None, "a segment has a barrier at its end"
                if log.segment is not None and log.segment.start > start:
                    self._waiter.proceed()
                    return log.left.get((identity.vw, identity.incarnation), log.segment)
                behind = log.behind(log.barrier.clock)
                who = f"{virtual_workers_text(behind)} to commit" if behind else "the parameter servers to apply"
                reason = f"the barrier at clock {log.barrier.clock} ({log.barrier.reason}), that is for {who}"
                self._waiter.sleep(reason, for_clock=True)

    def _prepare_move(self, start: Clock) -> None:
        """Use the wait for the barrier that ends the segment from `start` for what is known to happen there."""
        with self._inbox.condition:
            segment, barrier = self._inbox.log.segment, self._inbox.log.barrier
        if segment is not None and segment.start == start and barrier is not None:  # else it is passed already
            self._mover.prepare(start, barrier)

    def _wait_for_next_barrier(self, start: Clock) -> None:
        """Wait until the end of the segment from `start` is known."""
        with self._inbox.condition:
            while self._inbox.log.barrier is None or self._inbox.log.barrier.clock <= start:
                self._inbox.collect(needs_frames=False)
                self._waiter.sleep("the clock shard to set the next barrier", for_clock=True)
        self._waiter.proceed()

    def _take_weights(self, clock: Clock) -> None:
        """Pull w^(clock), if there are parameter servers, and load it."""
        if not self._parts.has_shards:
            self._parts.weights.start(clock, None)
            return
        self._parts.synchroniser.fetch(clock, ahead=False)
        self._parts.weights.start(clock, self._fetched(clock))

    def _fetched(self, clock: Clock) -> FlatBuffer:
        with self._inbox.condition:
            while clock not in self._inbox.fetched:
                self._inbox.collect(needs_frames=False)
                self._waiter.sleep(f"w^({clock}) from the parameter servers", for_clock=False)
            self._waiter.proceed()
            found = self._inbox.fetched.pop(clock)
            # Before `found` is moved to the device, which may hold one of the others.
            for left in list(self._inbox.fetched):
                self._parts.pool.release(self._inbox.fetched.pop(left))
            self._inbox.lost.clear()
            return found
