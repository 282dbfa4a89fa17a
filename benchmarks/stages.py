"""One virtual worker of 2 stages in 2 processes over the real gloo link: the runtime without command line and shards.

What the benchmarks of the pipeline and of the weight policies share: how the processes are made, how a stage is put
together around `AloneSynchroniser`, and what it did when.
"""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.queues import Queue
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from benchmarks.alone import AloneSynchroniser
from benchmarks.model import MICROBATCH, RandomTokens, loss, model
from benchmarks.protocol import peak_resident_bytes
from hetpipe.checkpoint.layout import stage_file
from hetpipe.checkpoint.stage_part import PartWriter
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.decide.schedule.catalogue import order_for
from hetpipe.decide.schedule.versions import VersionTable
from hetpipe.job.file import OptimizerSpec
from hetpipe.job.sections import DEFAULT_PREFETCH_FACTOR
from hetpipe.link.cut import Cut
from hetpipe.link.gloo import connect_gloo
from hetpipe.link.policy import Link, LinkLimits
from hetpipe.observe.history import HistoryWriter, NullHistory
from hetpipe.observe.metrics import MetricsWriter, NullMetrics
from hetpipe.observe.timeline import Activity, NullTimeline, TimelineWriter
from hetpipe.pipeline.callables import LossFunction, MapDataset
from hetpipe.pipeline.chain import Layer, chain_of, forget_weights
from hetpipe.pipeline.compute import Emulator, StageCompute
from hetpipe.pipeline.inbox import Inbox
from hetpipe.pipeline.layer_weights import filled, layout_of
from hetpipe.pipeline.reading import DataReader, InlineReader, MinibatchSource, WorkerOptions, WorkerReader
from hetpipe.pipeline.runner import StageRunner
from hetpipe.pipeline.setup import StageData, StageIdentity, StageParts
from hetpipe.values.ids import Clock, Incarnation, JobId, StageIndex, Term, VirtualWorkerIndex
from hetpipe.values.policies import Schedule, WeightPolicy
from hetpipe.values.requests import Requester
from hetpipe.values.run import DeviceConfig, StageReport
from hetpipe.values.sync import DataSpec, SyncSpec
from hetpipe.weights.allocator import keep_freed_memory
from hetpipe.weights.anchored import AnchoredWeights
from hetpipe.weights.direct import DirectWeights
from hetpipe.weights.flat import BufferPool, FlatBuffer
from hetpipe.weights.optimizer import StageOptimizer
from hetpipe.weights.policy import StageWeights

if TYPE_CHECKING:  # torch.distributed has this name, but only this module has its type
    from torch._C._distributed_c10d import TCPStore
else:
    from torch.distributed import TCPStore

T = TypeVar("T")

NUM_STAGES = 2
_SECONDS = timedelta(seconds=120)
_LONGEST_RUN_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Setting:
    """How the stages train."""

    minibatches_per_wave: int
    num_waves: int
    optimizer: OptimizerSpec
    weights: WeightPolicy = "wave"
    schedule: Schedule = "1f1b"
    has_shards: bool = True
    """Whether the stages compute as if parameter servers held the weights (then nothing newer is ever published)."""


@dataclass(slots=True)
class StageFigures:
    """What one stage did."""

    updates: list[tuple[int, float]] = field(default_factory=list)
    """The last minibatch of each update, and when it was made (seconds of a clock that all processes share)."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Activity → seconds in all."""
    activation_bytes: int = 0
    """Kept for backwards, at most at once."""
    weight_buffers: int = 0
    """Held between two actions, at most at once."""
    peak_resident_bytes: int = 0
    """Of the whole process."""

    @property
    def seconds_per_minibatch(self) -> float:
        """Forward and backward, in the mean."""
        return (self.seconds["FORWARD"] + self.seconds["BACKWARD"]) / self.updates[-1][0]

    def minibatches_per_second(self, first: int, last: int) -> float:
        """From the update after minibatch `first` to the update after minibatch `last`."""
        times = dict(self.updates)
        return (last - first) / (times[last] - times[first])


class Stamps(NullTimeline):
    """Fills in `StageFigures`; the timeline is where the runner says what it does."""

    def __init__(self, figures: StageFigures) -> None:
        self._figures = figures

    def record(
        self, activity: Activity, *, start_seconds: float, end_seconds: float, p: int | None = None, **args: Any
    ) -> None:
        """Add an activity."""
        seconds = self._figures.seconds
        seconds[activity.name] = seconds.get(activity.name, 0.0) + end_seconds - start_seconds
        if activity is Activity.STEP and p is not None:
            self._figures.updates.append((p, end_seconds))


def use_one_thread() -> None:
    """Once in each process, the same for all contenders, so that none is ahead by its threads or its allocator."""
    torch.set_num_threads(1)
    keep_freed_memory(one_heap=True)


def store_of(rank: int, port: int) -> TCPStore:
    """The key-value store through which the two processes meet."""
    return TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=_SECONDS)


def two_processes(target: Callable[..., T], *arguments: Any) -> list[T]:
    """Run `target(rank, port, *arguments)` as rank 0 and 1, each in a process; returns what they returned.

    Raises:
        RuntimeError: one of them failed; it has said why on standard error.
    """
    context = multiprocessing.get_context("spawn")
    results: Queue[tuple[int, T | None]] = context.Queue()
    port = _free_port()
    processes = [
        context.Process(target=_put, args=(target, rank, port, arguments, results), daemon=True)
        for rank in range(NUM_STAGES)
    ]
    for process in processes:
        process.start()
    try:
        found = sorted((results.get(timeout=_LONGEST_RUN_SECONDS) for _ in processes), key=itemgetter(0))
        returned = [value for _, value in found if value is not None]
        if len(returned) < NUM_STAGES:
            raise RuntimeError("a process of the benchmark failed; what it printed says why")
        return returned
    finally:
        for process in processes:
            process.join(20)
            process.kill()


def _put(target: Callable[..., Any], rank: int, port: int, arguments: tuple[Any, ...], results: Queue[Any]) -> None:
    found = None
    try:
        found = target(rank, port, *arguments)
    finally:
        results.put((rank, found))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def hetpipe_stage(rank: int, port: int, setting: Setting) -> StageFigures:
    """Train as one stage of the runtime, with `AloneSynchroniser`."""
    use_one_thread()
    limits = LinkLimits(incoming_frames=setting.minibatches_per_wave + 2)
    own, neighbour = (
        Requester(JobId("bench"), Term(1), VirtualWorkerIndex(0), Incarnation(0), StageIndex(index))
        for index in (rank, 1 - rank)
    )
    cut = Cut(own=own, neighbour=neighbour, limits=limits)
    link = connect_gloo(store_of(rank, port), cut, host="127.0.0.1", deadline_seconds=60.0)
    upstream, downstream = (None, link) if rank == 0 else (link, None)
    chain = chain_of(model())
    half = len(chain) // NUM_STAGES
    is_last = rank == NUM_STAGES - 1
    figures = StageFigures()
    stage = Stage(
        chain[rank * half : (rank + 1) * half],
        loss if is_last else None,
        RandomTokens(setting.minibatches_per_wave * setting.num_waves * MICROBATCH),
        MICROBATCH,
        Stamps(figures),
    )
    compute, runner = run_stage(setting, stage, upstream=upstream, downstream=downstream)
    figures.activation_bytes = compute.activation_bytes_peak
    figures.weight_buffers = runner.peak_buffers_at_rest
    figures.peak_resident_bytes = peak_resident_bytes(Path("/proc/self"))
    return figures


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage computes, and who watches it."""

    layers: tuple[Layer, ...]
    loss: LossFunction | None
    dataset: MapDataset
    batch_size: int
    timeline: TimelineWriter
    history: HistoryWriter = field(default_factory=NullHistory)
    metrics: MetricsWriter = field(default_factory=NullMetrics)
    num_workers: int = 0
    """Data workers."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where it computes."""


def run_stage(
    setting: Setting, stage: Stage, *, upstream: Link | None, downstream: Link | None
) -> tuple[StageCompute, StageRunner]:
    """Train to the end on this thread, with `AloneSynchroniser`; returns what has figures about it."""
    own, num_stages = (0 if upstream is None else 1), sum(link is not None for link in (upstream, downstream)) + 1
    layers = stage.layers
    pool = BufferPool(layout_of(layers, stage.device), stage.device)
    versions = VersionTable(setting.weights, own, num_stages, setting.minibatches_per_wave)
    first = filled(pool.take(), layers)
    weights = _weights(setting, pool, first, versions)
    compute = StageCompute(layers, vw=VirtualWorkerIndex(0), seed=0, device=stage.device, loss=stage.loss)
    forget_weights(layers)
    data = DataSpec(len(stage.dataset), stage.batch_size, 0, 1, None)
    synchroniser = AloneSynchroniser(data, pool, first if setting.has_shards else None, setting.num_waves)
    checkpoints: list[Path] = []
    inbox = Inbox(upstream, downstream, Clock(0))
    source = MinibatchSource(
        train=stage.dataset,
        evaluation=None,
        seed=0,
        vw=VirtualWorkerIndex(0),
        has_inputs=not own,
        has_target=own == num_stages - 1,
    )
    sockets = tempfile.TemporaryDirectory()
    reader: DataReader = InlineReader(source)
    if stage.num_workers:
        options = WorkerOptions(
            num_workers=stage.num_workers,
            prefetch_factor=DEFAULT_PREFETCH_FACTOR,
            timeout_seconds=60.0,
            on_start=lambda: None,
            on_close=sockets.cleanup,
            socket_folder=Path(sockets.name),
        )
        reader = WorkerReader(source, options)
    parts = StageParts(
        identity=StageIdentity(VirtualWorkerIndex(0), StageIndex(own), Incarnation(0), num_stages),
        sync=SyncSpec(setting.minibatches_per_wave, None, weights=setting.weights),
        layers=layers,
        compute=compute,
        emulator=Emulator(DeviceConfig("cpu"), SYSTEM_CLOCK, seed=0),
        versions=versions,
        weights=weights,
        has_shards=setting.has_shards,
        clipping=None,
        scales=None,
        replicas=None,
        pool=pool,
        order=order_for(setting.weights, setting.schedule),
        schedule=setting.schedule,
        data=StageData(data, stage.dataset, None, {}, reader),
        upstream=upstream,
        downstream=downstream,
        synchroniser=synchroniser,
        history=stage.history,
        metrics=stage.metrics,
        timeline=stage.timeline,
        report=_ignore,
        clock=SYSTEM_CLOCK,
        part_writer=PartWriter(
            lambda _clock: checkpoints[0], JobId("bench"), stage_file(VirtualWorkerIndex(0), StageIndex(own))
        ),
        guard=nullcontext(),
        stall_seconds=120.0,
        last_checkpoint_seconds=0.0,
    )
    runner = StageRunner(parts, inbox)
    reader.watch(inbox.ring)
    synchroniser.begin(inbox)
    with tempfile.TemporaryDirectory() as folder:  # the checkpoint of the last barrier: after the measured time
        checkpoints.append(Path(folder))
        runner.run()
    return compute, runner


def _weights(setting: Setting, pool: BufferPool, first: FlatBuffer, versions: VersionTable) -> StageWeights:
    if not setting.has_shards:
        optimizer = StageOptimizer(setting.optimizer, first, predicts=versions.is_predicting)
        return DirectWeights(pool, optimizer, first, versions)
    rho = pool.take().zero_()
    return AnchoredWeights(pool, StageOptimizer(setting.optimizer, rho, predicts=versions.is_predicting), rho, versions)


def _ignore(report: StageReport) -> None:
    del report
