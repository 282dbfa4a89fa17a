"""The work of a stage at a barrier once w^(c) is available: buffers, evaluation, checkpoint (`wsp.md` §5).

All members from the barrier on take part, including those that join there. A member that leaves there shares its
buffers, because it trained with them, and writes its part of the checkpoint, but does not evaluate.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

import torch

from hetpipe.checkpoint.layout import LOSS_SCALE
from hetpipe.checkpoint.stage_part import StageCheckpoints, StageContent, keepers_of
from hetpipe.decide.sync.division import Block, blocks_of_evaluation
from hetpipe.decide.sync.records import SegmentRecord
from hetpipe.decide.sync.segment import CHECKPOINTS, END, EPOCH, ends_run
from hetpipe.link.policy import Frame, FrameKind
from hetpipe.observe.timeline import Activity
from hetpipe.pipeline.chain import constants_of, dtype_name
from hetpipe.pipeline.evaluation import EvaluationPass
from hetpipe.pipeline.inbox import Inbox
from hetpipe.pipeline.setup import StageParts
from hetpipe.pipeline.waiting import Waiter
from hetpipe.values.ids import Clock
from hetpipe.values.run import StageEvaluation
from hetpipe.weights.flat import FlatBuffer, FlatLayout

#: Barrier reasons that trigger an evaluation.
_EVALUATIONS = {EPOCH, END}

#: Key of the update number, sent with the buffers when a virtual worker joins; no model buffer can have this name.
_NUM_UPDATES = ".num_updates"


def _buffers(parts: StageParts) -> dict[str, torch.Tensor]:
    """The buffers of the stage, and its frozen parameters that the forward writes (a momentum encoder)."""
    buffers = {
        name: buffer
        for layer in parts.layers
        for local, buffer in layer.module.named_buffers()
        if (name := layer.buffers.get(local)) is not None
    }
    written = {
        name: layer.module.get_parameter(local).detach()
        for layer in parts.layers
        if layer.cut is not None
        for local, name in layer.frozen.items()
        if name in layer.cut.description.rewritten
    }
    return {**buffers, **written}


def stage_checkpoints(parts: StageParts, inbox: Inbox, waiter: Waiter) -> StageCheckpoints:
    """The checkpointing of one stage."""

    def content() -> StageContent:
        frozen = {
            name: layer.module.get_parameter(local).detach()
            for layer in parts.layers
            for local, name in layer.frozen.items()
        }
        return StageContent(
            weights={} if parts.has_shards else {**parts.weights.at_barrier.views, **constants_of(parts.layers)},
            buffers={**_buffers(parts), **frozen},
            optimizer=parts.weights.optimizer.state()
            | ({} if parts.scales is None else {LOSS_SCALE: parts.scales.state()}),
        )

    def rest(reason: str, *, seconds: float, extra_seconds: float) -> None:
        with inbox.condition:
            waiter.sleep(reason, for_clock=False, at_most_seconds=seconds, extra_seconds=extra_seconds)

    return StageCheckpoints(
        parts.part_writer,
        content,
        report=parts.synchroniser.report_checkpoint,
        rest=rest,
        clock=parts.clock,
        last_checkpoint_seconds=parts.last_checkpoint_seconds,
    )


class BarrierWork:
    """Work of one stage at barriers. Precondition: the pipeline is drained, and `parts.weights` holds the anchor."""

    def __init__(self, parts: StageParts, inbox: Inbox, waiter: Waiter) -> None:
        self._parts = parts
        self._inbox = inbox
        self._waiter = waiter
        self._checkpoints = stage_checkpoints(parts, inbox, waiter)

    def run(self, segment: SegmentRecord) -> None:
        """Do the work required by the barrier's reasons; `segment` starts at it and lists its members."""
        clock, reasons = segment.start, set(segment.reasons)
        vw, leaves = self._parts.identity.vw, self._parts.identity.leaves_at(segment)
        self._exchange(segment)
        if reasons & _EVALUATIONS and not leaves:
            members = [member.vw for member in segment.members]
            self._evaluate(clock, segment.epoch + 1, self._share_of_evaluation(members.index(vw), len(members)))
        if reasons & CHECKPOINTS:
            is_keeper = vw in keepers_of(member.vw for member in segment.present)
            # Without shards, whoever takes over its state needs its weights, too.
            is_keeper = is_keeper or (leaves and not self._parts.has_shards)
            with self._parts.timeline.span(Activity.CHECKPOINT, clock=clock):
                self._checkpoints.run(clock, is_keeper=is_keeper, is_last=ends_run(reasons), leaves=leaves)
            self._waiter.proceed()

    # -- buffers and the place in the schedule -----------------------------------------------------------------------

    def _exchange(self, segment: SegmentRecord) -> None:
        """Load the averaged buffers and, as a newcomer, the others' number of updates.

        A single virtual worker sends its buffers as well: its next incarnation receives them after a restart.
        """
        parts, optimizer = self._parts, self._parts.weights.optimizer
        own = parts.identity.in_segment(segment)
        joins = own is not None and own.joined
        updates = self._estimated_updates(segment) if joins else optimizer.num_updates
        values = _buffers(parts) if parts.has_shards or len(segment.present) > 1 else {}
        is_mixed = len({member.joined for member in segment.present}) > 1
        if is_mixed:
            values[_NUM_UPDATES] = torch.tensor([updates])
        if values:
            combined = self._combined(segment.start, values)
            for name, value in values.items():
                value.copy_(combined.views[name])
        if joins:
            optimizer.go_to(int(values[_NUM_UPDATES]) if is_mixed else updates)

    def _estimated_updates(self, segment: SegmentRecord) -> int:
        """Number of updates of a member, assuming equal progress of all; never less than this stage's own."""
        minibatches = self._parts.synchroniser.progress().minibatches
        share = ceil(minibatches / len(segment.members) / self._parts.versions.minibatches_per_update)
        return max(share, self._parts.weights.optimizer.num_updates)

    def _combined(self, clock: Clock, values: Mapping[str, torch.Tensor]) -> FlatBuffer:
        layout = FlatLayout([(name, tuple(value.shape), dtype_name(value.dtype)) for name, value in values.items()])
        mine = FlatBuffer(layout, torch.device("cpu"))
        for name, value in values.items():
            mine.views[name].copy_(value)
        return self._parts.synchroniser.exchange_buffers(clock, mine, deadline_seconds=self._parts.stall_seconds)

    # -- evaluation --------------------------------------------------------------------------------------------------

    def _share_of_evaluation(self, place: int, num_members: int) -> tuple[Block, ...]:
        """Evaluation minibatches of the member at position `place` among all members."""
        data = self._parts.data
        if data.evaluation is None:
            return ()
        return blocks_of_evaluation(len(data.evaluation), data.spec.batch_size, place=place, num_members=num_members)

    def _evaluate(self, clock: Clock, epoch: int, blocks: tuple[Block, ...]) -> None:
        """Run `blocks` of the evaluation data through the pipeline; the last stage reports the sums."""
        parts, identity = self._parts, self._parts.identity
        evaluation = EvaluationPass(parts, self._waiter, clock, blocks)
        weights = parts.weights.at_barrier
        if identity.is_first:
            evaluation.run(weights)
        else:
            while not evaluation.take(self._receive(), weights):
                pass
        if identity.is_last and blocks:
            minibatches = parts.synchroniser.progress().minibatches
            parts.report(
                StageEvaluation(
                    clock,
                    epoch,
                    evaluation.num_samples,
                    evaluation.sums,
                    minibatches,
                    weight=evaluation.weight,
                    ratios=evaluation.ratios,
                )
            )

    def _receive(self) -> Frame:
        """Wait for the next evaluation frame."""
        with self._inbox.condition:
            while True:
                self._inbox.collect(needs_frames=True)
                head = self._inbox.head(FrameKind.EVALUATE)
                if head is not None:
                    self._waiter.proceed()
                    return self._inbox.from_upstream.popleft().frame
                self._waiter.sleep("evaluation activations from the previous stage", for_clock=False)
