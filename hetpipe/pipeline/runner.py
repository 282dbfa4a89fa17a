"""One stage's life: start from published weights, run segment after segment, work at the barriers, end.

publish of the start ─► segment ─► barrier: publish, pull, buffers, evaluate, checkpoint ─► segment ─► … ─► done
"""

from __future__ import annotations

from hetpipe.pipeline.barrier import BarrierWork
from hetpipe.pipeline.inbox import Inbox
from hetpipe.pipeline.segment_run import SegmentRun
from hetpipe.pipeline.setup import StageParts
from hetpipe.pipeline.tally import Figures, Tally
from hetpipe.pipeline.waiting import Waiter
from hetpipe.spec.ids import Clock
from hetpipe.spec.run import StageDone
from hetpipe.sync.division import Block
from hetpipe.sync.segment import END, STOP, divide
from hetpipe.weights.flat import FlatBuffer


class StageRunner:
    """Runs one stage from the start clock to the end of the run, on the calling thread."""

    def __init__(self, parts: StageParts, inbox: Inbox) -> None:
        self._parts = parts
        self._inbox = inbox
        self._waiter = Waiter(
            str(parts.identity),
            inbox.bell,
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
        self._segment_start = Clock(0)
        self._barrier_work = BarrierWork(parts, inbox, self._waiter)

    @property
    def peak_buffers(self) -> int:
        """Weight buffers on the device, at most at once so far."""
        return self._parts.pool.peak

    @property
    def peak_buffers_at_rest(self) -> int:
        """The same between two actions: what the version store itself holds."""
        return self._parts.weights.peak_at_rest

    def run(self, start: Clock) -> StageDone:
        """Run until the barrier that ends the run.

        Raises:
            HetpipeError: whatever ended the run before that, as one sentence.
        """
        self._wait_for_publish(start)
        self._take_weights(start)
        clock = start
        while True:
            SegmentRun(self._parts, self._inbox, self._waiter, self._tally, clock, self._blocks(clock)).run()
            clock = self._reach_barrier()
            with self._inbox.bell:
                passed = self._inbox.log.passed
            assert passed is not None, "a barrier was reached"
            self._take_weights(clock)
            self._barrier_work.run(clock, passed.reason, passed.epoch)
            self._tally.tick(now=True)
            if {END, STOP} & set(passed.reason.split("+")):
                self._parts.synchroniser.drain(deadline_seconds=self._parts.stall_seconds)
                return StageDone(clock=clock, reason=passed.reason)
            self._wait_for_next_segment(clock)

    def _figures(self) -> Figures:
        parts = self._parts
        clipping = parts.clipping
        return Figures(
            weight_bytes=parts.pool.peak * parts.pool.layout.num_bytes,
            activation_bytes=parts.compute.activation_bytes_peak,
            learning_rate=parts.weights.optimizer.learning_rate,
            max_norm=None if clipping is None else clipping.max_norm,
        )

    # -- inside ------------------------------------------------------------------------------------------------------

    def _blocks(self, clock: Clock) -> tuple[Block, ...]:
        """This worker's minibatches of the segment that starts at `clock`."""
        identity = self._parts.identity
        if not (identity.is_first or identity.is_last):
            return ()
        progress = self._parts.synchroniser.progress()
        assert progress.clock == clock, f"the segment under way began at {progress.clock}, not at {clock}"
        with self._inbox.bell:
            members = sorted(self._inbox.log.committed)
        return divide(progress, self._parts.data.spec, members)[identity.vw]

    def _wait_for_publish(self, clock: Clock) -> None:
        with self._inbox.bell:
            while self._inbox.log.published < clock or self._inbox.log.barrier is None:
                self._inbox.collect(needs_frames=False)
                behind = self._inbox.log.behind(clock)
                who = f"virtual workers {behind} to commit" if behind else "the parameter servers"
                self._waiter.sleep(f"clock {clock} to be published, that is for {who}", for_clock=True)
        self._waiter.proceed()

    def _reach_barrier(self) -> Clock:
        """Wait until the next barrier is published; returns its clock. It may be set lower meanwhile."""
        with self._inbox.bell:
            while True:
                self._inbox.collect(needs_frames=False)
                log = self._inbox.log
                assert log.barrier is not None, "a segment has a barrier at its end"
                if log.passed is not None and log.passed.clock > self._segment_start:
                    self._waiter.proceed()
                    return log.passed.clock
                behind = log.behind(log.barrier.clock)
                who = f"virtual workers {behind} to commit" if behind else "the parameter servers to apply"
                reason = f"the barrier at clock {log.barrier.clock} ({log.barrier.reason}), that is for {who}"
                self._waiter.sleep(reason, for_clock=True)

    def _wait_for_next_segment(self, clock: Clock) -> None:
        with self._inbox.bell:
            while self._inbox.log.barrier is None or self._inbox.log.barrier.clock <= clock:
                self._inbox.collect(needs_frames=False)
                self._waiter.sleep("the clock shard to say where the next barrier is", for_clock=True)
        self._waiter.proceed()

    def _take_weights(self, clock: Clock) -> None:
        """Pull w^(clock), where parameter servers hold it, and begin from it."""
        self._segment_start = clock
        if not self._parts.has_shards:
            self._parts.weights.start(clock, None)
            return
        self._parts.synchroniser.fetch(clock, ahead=False)
        self._parts.weights.start(clock, self._fetched(clock))

    def _fetched(self, clock: Clock) -> FlatBuffer:
        with self._inbox.bell:
            while clock not in self._inbox.fetched:
                self._inbox.collect(needs_frames=False)
                self._waiter.sleep(f"w^({clock}) from the parameter servers", for_clock=False)
            self._waiter.proceed()
            found = self._inbox.fetched.pop(clock)
            # Before `found` comes to the device: one of them may be there.
            for left in list(self._inbox.fetched):
                self._parts.pool.release(self._inbox.fetched.pop(left))
            self._inbox.lost.clear()
            return found
