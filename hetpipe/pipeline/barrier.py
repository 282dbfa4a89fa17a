"""What a stage does at a barrier, once w^(c) is here: buffers, evaluation, checkpoint (`wsp.md` §5)."""

from __future__ import annotations

import torch

from hetpipe.link.policy import Frame, FrameKind
from hetpipe.observe.timeline import Activity
from hetpipe.pipeline.chain import Values
from hetpipe.pipeline.checkpoint import file_name, save_part
from hetpipe.pipeline.compute import metric_sums
from hetpipe.pipeline.data import read_batch
from hetpipe.pipeline.inbox import Inbox
from hetpipe.pipeline.setup import SEND_SECONDS, StageParts
from hetpipe.pipeline.waiting import Waiter
from hetpipe.spec.ids import Clock
from hetpipe.spec.run import StageEvaluation
from hetpipe.sync.division import Block, blocks_of_evaluation
from hetpipe.sync.segment import CHECKPOINT, END, EPOCH, STOP
from hetpipe.weights.flat import FlatBuffer, FlatLayout

#: Reasons at whose barrier a checkpoint is written, and the evaluation runs.
_CHECKPOINTS = {CHECKPOINT, EPOCH, END, STOP}
_EVALUATIONS = {EPOCH, END}


class BarrierWork:
    """One stage's work at barriers. The pipeline is drained; the weights are the anchor of `parts.weights`."""

    def __init__(self, parts: StageParts, inbox: Inbox, waiter: Waiter) -> None:
        self._parts = parts
        self._inbox = inbox
        self._waiter = waiter

    def run(self, clock: Clock, reason: str, epoch: int) -> None:
        """Do what the barrier's reasons ask for."""
        reasons = set(reason.split("+"))
        self._average_buffers(clock)
        if reasons & _EVALUATIONS:
            self._evaluate(clock, epoch)
        if reasons & _CHECKPOINTS:
            self._checkpoint(clock)

    # -- buffers -----------------------------------------------------------------------------------------------------

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {
            name: buffer
            for layer in self._parts.layers
            for local, buffer in layer.module.named_buffers()
            if (name := layer.buffers.get(local)) is not None
        }

    def _average_buffers(self, clock: Clock) -> None:
        """Floating buffers become their mean over the virtual workers, integer ones the maximum."""
        buffers = self._buffers()
        if not buffers or self._parts.identity.num_workers == 1:
            return
        layout = FlatLayout(
            [(name, tuple(b.shape), str(b.dtype).removeprefix("torch.")) for name, b in buffers.items()]
        )
        mine = FlatBuffer(layout, torch.device("cpu"))
        for name, buffer in buffers.items():
            mine.views[name].copy_(buffer)
        combined = self._parts.synchroniser.exchange_buffers(clock, mine, deadline_seconds=self._parts.stall_seconds)
        for name, buffer in buffers.items():
            buffer.copy_(combined.views[name])

    # -- evaluation --------------------------------------------------------------------------------------------------

    def _evaluate(self, clock: Clock, epoch: int) -> None:
        """Run this worker's share of the evaluation data through the pipeline; the last stage reports sums."""
        identity, data = self._parts.identity, self._parts.data
        blocks: tuple[Block, ...] = ()
        if data.evaluation is not None:
            blocks = blocks_of_evaluation(
                len(data.evaluation), data.spec.batch_size, vw=identity.vw, num_workers=identity.num_workers
            )
        sums = dict.fromkeys(data.metrics, 0.0)
        if identity.is_first:
            for number, block in enumerate(blocks, start=1):
                assert data.evaluation is not None, "blocks come from the evaluation data"
                self._pass_on(number, clock, read_batch(data.evaluation, block).inputs, block, sums)
            self._send_end(clock)
        else:
            while (frame := self._receive()).minibatch > 0:
                values = tuple(tensor for tensor in frame.tensors if tensor is not None)
                block = blocks[frame.minibatch - 1] if blocks else ()
                self._pass_on(frame.minibatch, clock, values, block, sums)
            self._send_end(clock)
        if identity.is_last and blocks:
            samples = sum(len(block) for block in blocks)
            self._parts.report(StageEvaluation(clock=clock, epoch=epoch, samples=samples, sums=sums))

    def _pass_on(self, number: int, clock: Clock, values: Values, block: Block, sums: dict[str, float]) -> None:
        parts = self._parts
        with parts.timeline.span(Activity.EVALUATE, p=number):
            outputs = parts.compute.evaluate(parts.weights.at_barrier.views, values)
        if parts.downstream is not None:
            frame = Frame(FrameKind.EVALUATE, number, clock, number, outputs)
            parts.downstream.send(frame, deadline_seconds=SEND_SECONDS)
            return
        assert parts.data.evaluation is not None, "the last stage has the evaluation data"
        target = parts.compute.to_device(read_batch(parts.data.evaluation, block).target)
        found = metric_sums(outputs, target, functions=parts.data.metrics, num_samples=len(block))
        for name, value in found.items():
            sums[name] += value

    def _send_end(self, clock: Clock) -> None:
        if self._parts.downstream is not None:
            end = Frame(FrameKind.EVALUATE, 0, clock, 0)
            self._parts.downstream.send(end, deadline_seconds=SEND_SECONDS)

    def _receive(self) -> Frame:
        """The next evaluation frame."""
        with self._inbox.bell:
            while True:
                self._inbox.collect(needs_frames=True)
                head = self._inbox.head(FrameKind.EVALUATE)
                if head is not None:
                    self._waiter.proceed()
                    return self._inbox.from_upstream.popleft().frame
                self._waiter.sleep("evaluation activations from the previous stage", for_clock=False)

    # -- checkpoint --------------------------------------------------------------------------------------------------

    def _checkpoint(self, clock: Clock) -> None:
        parts, identity = self._parts, self._parts.identity
        keeps_weights = identity.vw == 0
        with parts.timeline.span(Activity.CHECKPOINT, clock=clock):
            path = save_part(
                parts.checkpoint_dir(clock),
                file_name(identity.vw, identity.stage),
                weights=parts.weights.at_barrier.views if keeps_weights else {},
                buffers={**self._buffers(), **self._frozen()} if keeps_weights else {},
                optimizer=parts.weights.optimizer.state(),
            )
            parts.synchroniser.report_checkpoint(clock, path)

    def _frozen(self) -> dict[str, torch.Tensor]:
        return {
            name: layer.module.get_parameter(local).detach()
            for layer in self._parts.layers
            for local, name in layer.frozen.items()
        }
