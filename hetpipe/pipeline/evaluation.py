"""Evaluations as one stage computes them: at barriers, and within epochs (job key `evaluate`).

An evaluation is sent through the pipeline as frames of its own, numbered from 1, followed by a final one with number 0.
The last stage adds up the values and reports them. An evaluation has no side effects: weights, buffers, training flags
and random generators are restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hetpipe.decide.sync.division import Block, blocks_of_evaluation
from hetpipe.errors import CallableError
from hetpipe.link.policy import Frame, FrameKind
from hetpipe.observe.timeline import Activity
from hetpipe.pipeline.chain import Values
from hetpipe.pipeline.compute import metric_values
from hetpipe.pipeline.data import Batch
from hetpipe.pipeline.inbox import Inbox
from hetpipe.pipeline.reading import Request
from hetpipe.pipeline.seeds import preserved_generators
from hetpipe.pipeline.setup import SEND_SECONDS, StageParts
from hetpipe.pipeline.waiting import Waiter
from hetpipe.values.ids import Clock, Minibatch, VirtualWorkerIndex
from hetpipe.values.run import RatioSums, StageEvaluation
from hetpipe.values.sync import Progress
from hetpipe.weights.flat import FlatBuffer


class EvaluationPass:
    """One evaluation of the weights of a clock, on one stage.

    Attributes:
        sums: metric name → Σ of value × weight; last stage only.
        ratios: metric name → its sums, of metrics that are a ratio.
        weight: Σ of the weights of the minibatches; None: their samples.
    """

    def __init__(self, parts: StageParts, waiter: Waiter, clock: Clock, blocks: tuple[Block, ...]) -> None:
        """Start the evaluation.

        Args:
            parts: the stage.
            waiter: reports that the stage is alive.
            clock: clock whose weights are evaluated.
            blocks: the evaluation minibatches; unused on stages that read no data.
        """
        self._parts = parts
        self._waiter = waiter
        self._clock = clock
        self._requests = [Request(number, block, is_evaluation=True) for number, block in enumerate(blocks, start=1)]
        if parts.identity.is_first or parts.identity.is_last:
            parts.reader.insert(self._requests)
        self.sums: dict[str, float] = {}
        self.ratios: dict[str, RatioSums] = {}
        self.weight = None if parts.data.weight is None else 0

    @property
    def num_samples(self) -> int:
        """Number of samples in all minibatches."""
        return sum(len(request.samples) for request in self._requests)

    def run(self, weights: FlatBuffer) -> None:
        """First stage: read and compute all minibatches."""
        for request in self._requests:
            batch = self._read(request.number)
            self._compute(request.number, batch.inputs, weights, batch)
        self._pass_end_on()

    def take(self, frame: Frame, weights: FlatBuffer) -> bool:
        """Later stages: process the next frame from the previous stage; returns whether it was the last one."""
        if frame.minibatch == 0:
            self._pass_end_on()
            return True
        self._compute(frame.minibatch, tuple(tensor for tensor in frame.tensors if tensor is not None), weights)
        return False

    # -- inside ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        with self._parts.guard, preserved_generators(self._parts.pool.device):
            yield

    def _compute(self, number: int, values: Values, weights: FlatBuffer, batch: Batch | None = None) -> None:
        """Compute one minibatch; on the only stage of a virtual worker, `batch` is what was read of it."""
        parts = self._parts
        with parts.timeline.span(Activity.EVALUATE, p=number), self._undisturbed():
            outputs = parts.compute.evaluate(number, weights.views, values)
        self._waiter.show_life()
        if parts.downstream is not None:
            self._send(number, outputs)
            return
        batch = batch or self._read(number)
        with self._undisturbed(), parts.compute.autocast():
            weight = parts.data.weight_of(batch.target, batch.num_samples)
            target = parts.compute.to_device(batch.target)
            found = metric_values(outputs, target, functions=parts.data.metrics)
        if self.weight is not None:
            self.weight += weight
        for name, value in found.items():
            if isinstance(value, RatioSums):
                self._add_ratio(name, value)
            else:
                # The mean of nothing is NaN.
                self.sums[name] = self.sums.get(name, 0.0) + (value * weight if weight else 0.0)

    def _add_ratio(self, name: str, found: RatioSums) -> None:
        before = self.ratios.get(name)
        if before is not None and len(before.numerators) != len(found.numerators):
            raise CallableError(
                f"metrics.{name}: returned a Ratio of {len(found.numerators)} entries, and of {len(before.numerators)} "
                "for an earlier minibatch; return as many for every minibatch, 0 / 0 for what does not occur"
            )
        self.ratios[name] = found if before is None else before + found

    def _read(self, number: int) -> Batch:
        """The part of a minibatch that this stage needs."""
        reader = self._parts.reader
        self._waiter.wait_until(reader.is_ready, lambda: reader.reason)
        with self._undisturbed():
            return reader.take(self._requests[number - 1])

    def _pass_end_on(self) -> None:
        if self._parts.downstream is not None:
            self._send(0, ())

    def _send(self, number: int, outputs: Values) -> None:
        assert self._parts.downstream is not None, "the last stage has no next stage"
        frame = Frame(FrameKind.EVALUATE, number, self._clock, number, outputs)
        self._parts.downstream.send(frame, deadline_seconds=SEND_SECONDS)


class EvaluationsWithinEpochs:
    """The evaluations of one stage between barriers, over all segments of its virtual worker.

    The virtual worker of the lowest index makes them alone, before the forward of the first minibatch on the weights of
    the next multiple of `evaluate.every_waves`, or newer ones. Its first stage decides; on later stages the frames of
    the evaluation precede those of that minibatch.
    """

    def __init__(self, parts: StageParts, inbox: Inbox, waiter: Waiter, start: Clock) -> None:
        """Start at the barrier at clock `start`."""
        self._parts = parts
        self._inbox = inbox
        self._waiter = waiter
        #: Clocks up to this one are no longer evaluated: minibatches have used newer weights, or the evaluation at a
        #: barrier covered them. Whether the clock of a checkpoint was evaluated is unknown when starting from it; the
        #: collector of evaluations deduplicates by clock.
        self._passed = Clock(max(start - 1, 0))
        self._progress: Progress | None = None
        self._division: Mapping[VirtualWorkerIndex, tuple[Block, ...]] = {}
        self._per_wave: Mapping[VirtualWorkerIndex, int] = {}
        #: The evaluation in progress.
        self._under_way: EvaluationPass | None = None

    def begin(
        self,
        progress: Progress,
        division: Mapping[VirtualWorkerIndex, tuple[Block, ...]],
        per_wave: Mapping[VirtualWorkerIndex, int],
    ) -> None:
        """First and last stage: start a segment in which the virtual workers compute `division`.

        Args:
            progress: at its start.
            division: member → its minibatches.
            per_wave: member → N_v.
        """
        self._progress, self._division, self._per_wave = progress, division, per_wave
        if not any(progress.used):  # after an epoch, evaluated at its barrier, or at the start of training
            self._passed = max(self._passed, progress.clock)

    def is_due(self, clock: Clock) -> bool:
        """First stage: whether to evaluate before the next minibatch, on the weights of `clock`. Not idempotent."""
        every, before = self._parts.data.evaluate_every_waves, self._passed
        self._passed = max(self._passed, clock)
        if every is None or clock // every <= before // every:
            return False
        with self._inbox.condition:
            return self._parts.identity.vw == min(self._inbox.log.members, default=None)

    def run(self, clock: Clock, weights: FlatBuffer) -> None:
        """First stage: evaluate `weights`, the weights of `clock`."""
        evaluation = EvaluationPass(self._parts, self._waiter, clock, self._blocks())
        evaluation.run(weights)
        self._report(clock, evaluation)

    def take(self, frame: Frame, weights: FlatBuffer) -> None:
        """Later stages: process a frame of an evaluation; `weights` are this stage's weights of the frame's clock."""
        clock = Clock(frame.clock)
        if self._under_way is None:
            self._under_way = EvaluationPass(self._parts, self._waiter, clock, self._blocks())
        if self._under_way.take(frame, weights):
            self._report(clock, self._under_way)
            self._under_way = None

    # -- inside ------------------------------------------------------------------------------------------------------

    def _blocks(self) -> tuple[Block, ...]:
        data = self._parts.data
        if data.evaluation is None:
            return ()
        blocks = blocks_of_evaluation(len(data.evaluation), data.spec.batch_size, place=0, num_members=1)
        return blocks[: data.max_evaluation_batches]

    def _report(self, clock: Clock, evaluation: EvaluationPass) -> None:
        parts = self._parts
        if not parts.identity.is_last:
            return
        assert self._progress is not None and parts.data.evaluation is not None, "the last stage has data and a segment"
        waves = clock - self._progress.clock
        done = sum(min(waves * self._per_wave[vw], len(blocks)) for vw, blocks in self._division.items())
        minibatches = Minibatch(self._progress.minibatches + done)
        parts.report(
            StageEvaluation(
                clock,
                self._progress.epoch + 1,
                evaluation.num_samples,
                evaluation.sums,
                minibatches,
                within_epoch=True,
                whole=evaluation.num_samples == len(parts.data.evaluation),
                weight=evaluation.weight,
                ratios=evaluation.ratios,
            )
        )
