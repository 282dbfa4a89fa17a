"""Entry of a stage into the run: it polls the clock shard until a segment lists its virtual worker as a member.

A founding member waits for the start of the run; a newcomer or a restarted virtual worker for the next barrier. The
clock shard selects the stages that provide the initial weights: usually those of virtual worker 0, which may however be
lost before the run starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetpipe import failpoints
from hetpipe.checkpoint.layout import LOSS_SCALE, stage_file
from hetpipe.checkpoint.stage_part import RestoreTargets, take_over
from hetpipe.decide.sync.log_view import LogView
from hetpipe.decide.sync.records import SegmentMember, SegmentRecord
from hetpipe.errors import CheckpointNotWritten, LinkClosed, ProtocolViolation
from hetpipe.observe.log import get_logger
from hetpipe.pipeline.chain import forget_weights
from hetpipe.pipeline.inbox import Inbox
from hetpipe.pipeline.layer_weights import filled
from hetpipe.pipeline.setup import StageParts
from hetpipe.pipeline.waiting import Waiter
from hetpipe.values.ids import Clock, StageIndex, virtual_workers_text

#: Poll interval at the clock shard: the delay before a stage learns that its incarnation ended or its help is needed.
CALL_SECONDS = 0.5

#: Poll interval while waiting for the last checkpoint.
_PAUSE_SECONDS = 0.05

_log = get_logger(__name__)


class Entry:
    """Entry of one stage into the run. Until it has entered, the layers hold their own weights."""

    def __init__(self, parts: StageParts, inbox: Inbox, waiter: Waiter) -> None:
        self._parts = parts
        self._inbox = inbox
        self._waiter = waiter
        self._made_weights = False
        #: The newest published clock that was seen while waiting.
        self._seen: Clock | None = None

    def wait(self) -> SegmentRecord:
        """Wait until the virtual worker is a member; returns its first segment, or the end of the run.

        Raises:
            StaleIncarnation: the incarnation ended before it joined.
            ProtocolViolation: the run continues without parameter servers, which would provide the weights.
            CheckpointNotWritten: the run is over, and no stage is left to write its last checkpoint.
        """
        self._wait_for_log()
        while (segment := self._found_or_sleep()) is None:
            self._call()
        self._waiter.proceed()
        forget_weights(self._parts.layers)
        self._check(segment)
        return segment

    def take_over(self, segment: SegmentRecord) -> None:
        """Load the state of the virtual worker that this one follows where it joins (plan-versions.md §7).

        The decision log has whether that one has left its state behind. If not, the state begins anew, as that of any
        newcomer. Without shards the weights are among it, which cannot begin anew.

        Raises:
            DeadlineExceeded: the log did not have it in time.
            CheckpointError: its parts of the barrier's checkpoint are corrupted.
            LinkClosed: it has ended, and only its stages had the weights.
        """
        parts, identity = self._parts, self._parts.identity
        source = parts.predecessor(segment)
        left = next((member for member in segment.left if member.vw == source), None)
        if left is None or parts.part_writer.remote is not None:
            return
        failpoints.reach("takeover.record_read")
        is_whole = self._is_handed_over(left, segment.start)
        parts.history.takeover(
            vw=identity.vw,
            incarnation=identity.incarnation,
            stage=identity.stage,
            clock=segment.start,
            source=left.vw,
            whole=is_whole,
        )
        if not is_whole and not parts.has_shards:
            raise LinkClosed(
                f"{identity} cannot join at clock {segment.start}: virtual worker {left.vw}, whose weights it was to "
                "take over, ended before it had written them",
                orderly=False,
            )
        if not is_whole:
            sentence = (
                f"{identity} begins with a new state: virtual worker {left.vw}, whose state it was to take over at "
                f"clock {segment.start}, ended before it had written it"
            )
            _log.warning("state_not_taken_over", sentence=sentence)
            return
        folder = parts.part_writer.folder(segment.start)
        files = [folder / stage_file(left.vw, StageIndex(stage)) for stage in range(left.num_stages)]
        shared = [] if parts.has_shards else files
        views = parts.weights.at_barrier.views if shared else {}
        modules = [(layer.module, layer) for layer in parts.layers]

        def load(state: Mapping[str, Mapping[str, Any]]) -> None:
            parts.weights.optimizer.load_state(state)
            if parts.scales is not None:
                parts.scales.load_state(state.get(LOSS_SCALE, {}))

        targets = RestoreTargets(
            weights=[
                (name, views.get(name, m.get_parameter(local)))
                for m, layer in modules
                for local, name in layer.parameters.items()
            ],
            buffers=[
                *((name, m.get_parameter(local)) for m, layer in modules for local, name in layer.frozen.items()),
                *((name, m.get_buffer(local)) for m, layer in modules for local, name in layer.buffers.items()),
            ],
            load_optimizer=load,
        )
        take_over(files, shared, targets)
        failpoints.reach("takeover.loaded")

    def _is_handed_over(self, left: SegmentMember, clock: Clock) -> bool:
        """Wait until the decision log has whether all of the state of one that left at `clock` is written."""
        reason = f"virtual worker {left.vw} to write its state at clock {clock}, which it takes over"
        with self._inbox.condition:
            while (found := self._inbox.log.handovers.get((left.vw, left.incarnation))) is None:
                self._inbox.collect(needs_frames=False)
                self._waiter.sleep(reason, for_clock=True)
        self._waiter.proceed()
        return found

    def _check(self, segment: SegmentRecord) -> None:
        identity = self._parts.identity
        if identity.incarnation > 0 and segment.reasons and not self._parts.has_shards:
            raise ProtocolViolation(
                f"{identity} cannot rejoin the run: its weights were in its stages only; resume from the last "
                "checkpoint"
            )
        with self._inbox.condition:
            is_deserted = not self._inbox.log.members
        if is_deserted and identity.in_segment(segment) is None:
            self._await_last_checkpoint(segment.start)

    def _await_last_checkpoint(self, clock: Clock) -> None:
        """Wait for the last checkpoint: no stage that reached the end of the run is left to write it."""
        parts, remote = self._parts, self._parts.part_writer.remote
        started = parts.clock.monotonic()

        def is_complete() -> bool:
            if remote is not None:
                return remote.is_complete(clock)
            return parts.synchroniser.is_complete(parts.part_writer.folder(clock))

        while not is_complete():
            if parts.clock.monotonic() - started > parts.last_checkpoint_seconds:
                raise CheckpointNotWritten(
                    f"{parts.identity} was restarted after the run had ended at clock {clock}, and no stage is left to "
                    "write the last checkpoint; resume from the newest complete one"
                )
            parts.clock.sleep(_PAUSE_SECONDS)

    def _wait_for_log(self) -> None:
        """Wait for the first records: from then on no event of this virtual worker is missed."""
        with self._inbox.condition:
            while not self._inbox.follows:
                self._inbox.collect(needs_frames=False)
                self._waiter.sleep("the decision log of the clock shard", for_clock=False)
        self._call()

    def _call(self) -> None:
        """Register with the clock shard, and push initial weights if requested."""
        parts = self._parts
        failpoints.reach("takeover.before_ready")
        if not parts.synchroniser.join() or self._made_weights:
            return
        self._made_weights = True
        first = filled(parts.pool.take_on_host(), parts.layers)
        try:
            parts.synchroniser.push_initial_weights(first)
        finally:
            parts.pool.release(first)

    def _found_or_sleep(self) -> SegmentRecord | None:
        with self._inbox.condition:
            self._inbox.collect(needs_frames=False)
            log = self._inbox.log
            segment = log.segment
            if segment is not None and (log.is_over or self._parts.identity.in_segment(segment) is not None):
                return segment
            if log.published != self._seen:
                # The run goes on: one that a script adds later waits for as long as that takes.
                self._seen = log.published
                self._waiter.proceed()
            self._waiter.sleep(_awaited(log), for_clock=True, at_most_seconds=CALL_SECONDS)
            return None


def _awaited(log: LogView) -> str:
    """The condition that a virtual worker waits for before it is a member, as text."""
    if log.segment is None:
        return "the run to begin, that is for all virtual workers to join, and for the initial weights"
    if log.barrier is None:
        return "the clock shard to set the next barrier"
    behind = log.behind(log.barrier.clock)
    who = f"{virtual_workers_text(behind)} to commit" if behind else "the parameter servers and all of its own stages"
    return f"the barrier at clock {log.barrier.clock} ({log.barrier.reason}), to join there, that is for {who}"
