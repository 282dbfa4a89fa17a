"""How much memory does a stage really use? The runtime's own loop, run for one stage with everything around it made up.

`SegmentRun` computes real minibatches on real weight versions with the real optimizer, in this thread. The neighbours
always have the next frame ready, so as many minibatches are in flight as the schedule lets in, and the published
weights in use are as old as the staleness bound allows, as if another virtual worker were slow. Pushes and pulls take
no time: the weights of the next switch point are there as soon as they may be.

What counts is what a device must have room for. The weight buffers are counted by their pool, which makes a buffer when
one more is needed and never gives one back; host memory on the way to and from the shards is counted apart. All other
tensors count while they live. On the CPU, where both are the same memory, no other way could tell them apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetpipe.checkpoint.stage_part import PartWriter
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.decide.schedule.catalogue import order_for
from hetpipe.decide.schedule.versions import VersionTable
from hetpipe.decide.sync.records import BarrierRecord, SegmentMember, SegmentRecord
from hetpipe.observe.history import NullHistory
from hetpipe.observe.metrics import NullMetrics
from hetpipe.observe.timeline import NullTimeline
from hetpipe.pipeline.chain import Layer, Values, run_layers
from hetpipe.pipeline.compute import Emulator, Gradients, StageCompute
from hetpipe.pipeline.evaluation import EvaluationsWithinEpochs
from hetpipe.pipeline.host_link import EmulatedHostLink, Transfer
from hetpipe.pipeline.inbox import Inbox
from hetpipe.pipeline.layer_memory import LayerMemory
from hetpipe.pipeline.layer_weights import filled, layout_of
from hetpipe.pipeline.reading import InlineReader, MinibatchSource
from hetpipe.pipeline.remapping import Remapping
from hetpipe.pipeline.segment_run import SegmentRun
from hetpipe.pipeline.setup import StageData, StageIdentity, StageParts
from hetpipe.pipeline.tally import Figures, Tally
from hetpipe.pipeline.waiting import Waiter
from hetpipe.profiler.live_bytes import LiveBytes
from hetpipe.profiler.subject import VIRTUAL_WORKER, Subject
from hetpipe.values.ids import Clock, Incarnation, JobId, Minibatch, StageIndex
from hetpipe.values.memory import LayerPolicy
from hetpipe.values.run import DeviceConfig
from hetpipe.values.sync import SyncSpec
from hetpipe.weights.anchored import AnchoredWeights
from hetpipe.weights.flat import BufferPool, FlatBuffer, FlatLayout
from hetpipe.weights.optimizer import StageOptimizer
from tests.profiler.surroundings import NextStage, PreviousStage, Shards

#: Waves after which the oldest allowed clock moves on with each wave; by then every kind of buffer was in use.
_SETTLED_WAVES = 2

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Around:
    """What the stage is connected to."""

    inbox: Inbox
    before: PreviousStage | None
    behind: NextStage | None
    initial_weights: FlatBuffer
    """Of the stage, on the shards."""
    pool: BufferPool
    live: LiveBytes
    memory: LayerMemory


@dataclass(frozen=True, slots=True)
class StagePeak:
    """The memory of one stage, in bytes of live tensors. The parts do not add up to the peak: activations are left."""

    peak_bytes: int
    """At most, all together, but for `module_bytes` and host memory."""
    num_buffers: int
    """Weight buffers on the device, at most at once: what the pool has made there."""
    num_host_buffers: int
    """Weight buffers in host memory, at most at once: ũ, and fetched weights beyond the next ones."""
    buffer_bytes: int
    """Size of each: the stage's parameters, each rounded up to 64 bytes."""
    optimizer_bytes: int
    """The optimizer's state."""
    module_bytes: int
    """The modules' own parameters and buffers. The unused initial weights stay where they were made."""


class _SeenCompute(StageCompute):
    """What links received counts from when it is copied to the device, or would be."""

    def __init__(self, layers: Sequence[Layer], live: LiveBytes, **arguments: Any) -> None:
        super().__init__(layers, **arguments)
        self._live = live

    def forward(
        self,
        p: Minibatch,
        weights: Mapping[str, Tensor],
        values: Values,
        saving: Remapping | None = None,
        *,
        first: int = 0,
    ) -> Values:
        """See `StageCompute.forward`."""
        self._live.count(values)
        return super().forward(p, weights, values, saving, first=first)

    def backward(
        self, p: Minibatch, weights: Mapping[str, Tensor], gradients: Sequence[Tensor | None] | None
    ) -> Gradients:
        """See `StageCompute.backward`."""
        self._live.count(gradient for gradient in gradients or () if gradient is not None)
        return super().backward(p, weights, gradients)


class _UnseenPool(BufferPool):
    """Its buffers are counted by the pool itself."""

    def __init__(self, layout: FlatLayout, live: LiveBytes) -> None:
        super().__init__(layout, _CPU)
        self._live = live

    def take(self) -> FlatBuffer:
        """See `BufferPool.take`."""
        with self._live.unseen():
            return super().take()

    def take_on_host(self) -> FlatBuffer:
        """See `BufferPool.take_on_host`."""
        with self._live.unseen():
            return super().take_on_host()


class _UnseenHost(EmulatedHostLink):
    """What is in host memory is not on the device."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__(SYSTEM_CLOCK)
        self._live = live

    def take_out(self, source: Tensor) -> Transfer:
        """See `HostLink.take_out`."""
        with self._live.unseen():
            return super().take_out(source)


def measure_stage_peak(
    subject: Subject,
    counts: Sequence[int],
    stage: StageIndex,
    *,
    minibatches_per_wave: int,
    staleness: int = 0,
    policies: Sequence[LayerPolicy] | None = None,
) -> StagePeak:
    """Run stage `stage` of one virtual worker on the CPU and watch its tensors.

    Args:
        subject: the job's code.
        counts: layers per stage, first stage first.
        stage: which one.
        minibatches_per_wave: N.
        staleness: D; the published weights in use are as old as it allows.
        policies: memory policy of each layer of the stage; None: all are kept.
    """
    first = sum(counts[:stage])
    layers = subject.chain[first : first + counts[stage]]
    sync = SyncSpec(minibatches_per_wave, staleness, deterministic=True, weights=subject.job.weights)
    num_minibatches = (staleness + _SETTLED_WAVES) * minibatches_per_wave
    identity = StageIdentity(VIRTUAL_WORKER, stage, Incarnation(0), len(counts))
    initial_weights = filled(FlatBuffer(layout_of(layers, _CPU), _CPU), layers)
    live = LiveBytes()
    before = PreviousStage(_input_of(subject, first), sync, num_minibatches, live.unseen) if stage else None
    behind = NextStage(live.unseen) if stage + 1 < len(counts) else None
    pool = _UnseenPool(initial_weights.layout, live)
    inbox = Inbox(before, behind, Clock(0), pool)
    for neighbour in (before, behind):
        if neighbour is not None:
            neighbour.inbox = inbox
    memory = LayerMemory(layers, policies, _UnseenHost(live) if policies is not None and "swap" in policies else None)
    around = _Around(inbox, before, behind, initial_weights, pool, live, memory)
    with torch.enable_grad(), live:
        parts = _parts(subject, layers, identity, sync, around)
        _run(parts, inbox, num_minibatches)
    state = parts.weights.optimizer.state().values()
    module = [tensor for layer in layers for tensor in (*layer.module.parameters(), *layer.module.buffers())]
    return StagePeak(
        peak_bytes=live.peak_bytes + pool.peak * pool.layout.num_bytes,
        num_buffers=pool.peak,
        num_host_buffers=pool.host_peak,
        buffer_bytes=pool.layout.num_bytes,
        optimizer_bytes=sum(value.nbytes for entry in state for value in entry.values() if isinstance(value, Tensor)),
        module_bytes=sum(tensor.nbytes for tensor in module),
    )


def _parts(
    subject: Subject, layers: Sequence[Layer], identity: StageIdentity, sync: SyncSpec, around: _Around
) -> StageParts:
    """The stage, put together as `server.agent.stage_assembly` does it."""
    job = subject.job
    pool = around.pool
    rho = pool.take().zero_()
    versions = VersionTable(
        sync.weights,
        stage=identity.stage,
        num_stages=identity.num_stages,
        minibatches_per_wave=sync.minibatches_per_wave,
        accumulate=job.gradients.accumulate,
    )
    optimizer = StageOptimizer(job.optimizer, rho, predicts=versions.is_predicting)
    source = MinibatchSource(
        train=subject.train,
        evaluation=None,
        seed=0,
        vw=identity.vw,
        has_inputs=identity.is_first,
        has_target=identity.is_last,
    )
    reader = InlineReader(source)
    return StageParts(
        identity=identity,
        sync=sync,
        layers=tuple(layers),
        compute=_SeenCompute(
            layers,
            around.live,
            vw=identity.vw,
            seed=job.seed,
            device=_CPU,
            loss=subject.loss if identity.is_last else None,
            memory=around.memory,
        ),
        emulator=Emulator(DeviceConfig("cpu"), SYSTEM_CLOCK, seed=0),
        versions=versions,
        weights=AnchoredWeights(pool, optimizer, rho, versions),
        has_shards=True,
        clipping=None,
        scales=None,
        replicas=None,
        pool=pool,
        order=order_for(job.weights, job.order),
        schedule=job.order,
        data=StageData(job.data_spec(len(subject.train)), subject.train, None, {}, reader),
        upstream=around.before,
        downstream=around.behind,
        synchroniser=Shards(pool, around.initial_weights, around.inbox),
        history=NullHistory(),
        timeline=NullTimeline(),
        metrics=NullMetrics(),
        report=lambda _: None,
        clock=SYSTEM_CLOCK,
        part_writer=PartWriter(lambda _: Path(), JobId(""), ""),
        guard=nullcontext(),
        stall_seconds=0.0,
        last_checkpoint_seconds=0.0,
    )


def _run(parts: StageParts, inbox: Inbox, num_minibatches: int) -> None:
    """One segment from clock 0 on; every minibatch reads the same samples."""
    waiter = Waiter(
        str(parts.identity),
        inbox.condition,
        report=parts.report,
        timeline=parts.timeline,
        clock=parts.clock,
        stall_seconds=0.0,
    )
    tally = Tally(
        inbox,
        waiter,
        parts.synchroniser,
        report=parts.report,
        timeline=parts.timeline,
        clock=parts.clock,
        measure=lambda: Figures(0, 0, None, None),
        metrics=parts.metrics,
    )
    num_waves = num_minibatches // parts.sync.minibatches_per_wave
    member = SegmentMember(parts.identity.vw, parts.identity.incarnation, parts.identity.num_stages, joined=True)
    start = SegmentRecord(0, Clock(0), (), 0, (member,))
    inbox.on_records([start, BarrierRecord(1, Clock(num_waves), "end", 0)])
    parts.synchroniser.fetch(Clock(0), ahead=False)
    parts.weights.start(Clock(0), inbox.fetched.pop(Clock(0)))
    block = tuple(range(parts.data.spec.batch_size))
    evaluations = EvaluationsWithinEpochs(parts, inbox, waiter, Clock(0))
    SegmentRun(parts, inbox, waiter, tally, evaluations, Clock(0), (block,) * num_minibatches).run()


@torch.no_grad()
def _input_of(subject: Subject, first: int) -> Values:
    """What reaches the layer at position `first`."""
    before = subject.chain[:first]
    weights = {name: x.module.get_parameter(local) for x in before for local, name in x.parameters.items()}
    return run_layers(before, weights, subject.batch.inputs)
