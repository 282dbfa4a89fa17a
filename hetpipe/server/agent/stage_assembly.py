"""Builds one stage from its `StageConfig`: the user's code, the layers of its stage, weights, data, and its runner.

`Wiring` has what differs between a stage in its own process and one in a test's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hetpipe.checkpoint.layout import LOSS_SCALE, stage_file
from hetpipe.checkpoint.stage_part import PartWriter, RestoreTargets, restore
from hetpipe.checkpoint.store import store_of
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.clock import Clock as TimeSource
from hetpipe.decide.elastic.caching import CacheFolders, caches_samples, wants_cache
from hetpipe.decide.elastic.script import building_line, memory_changes, predecessor, scripted_cut
from hetpipe.decide.schedule.catalogue import order_for
from hetpipe.decide.schedule.loss_scale import LossScales
from hetpipe.decide.schedule.versions import VersionTable
from hetpipe.job.file import Job
from hetpipe.link.policy import Link
from hetpipe.observe.history import HistoryWriter
from hetpipe.observe.log import get_logger
from hetpipe.observe.metrics import MetricsWriter, NullMetrics
from hetpipe.observe.timeline import NullTimeline, TimelineWriter
from hetpipe.phases import report_phase
from hetpipe.pipeline.callables import (
    LossFunction,
    MapDataset,
    WeightedLosses,
    build_datasets,
    build_model,
    epoch_order,
    load_callable,
    load_loss,
    load_metrics,
    load_minibatch_weight,
)
from hetpipe.pipeline.chain import Layer, forget_weights, freeze, state_names
from hetpipe.pipeline.compute import Emulator, StageCompute
from hetpipe.pipeline.cuda import use_device
from hetpipe.pipeline.fresh_layers import built_anew
from hetpipe.pipeline.frozen_cache import FrozenCache
from hetpipe.pipeline.frozen_prefix import FrozenPrefix
from hetpipe.pipeline.handover import States
from hetpipe.pipeline.host_link import host_link
from hetpipe.pipeline.inbox import Inbox
from hetpipe.pipeline.layer_memory import LayerMemory
from hetpipe.pipeline.layer_weights import filled, layout_of
from hetpipe.pipeline.layering import layers_of_job, on_output
from hetpipe.pipeline.model_file import (
    ModelFile,
    ModelFileUnusable,
    construct,
    one_at_a_time,
    open_model_file,
)
from hetpipe.pipeline.moving import BuiltStage, Rebuild
from hetpipe.pipeline.reading import DataReader, InlineReader, MinibatchSource, WorkerOptions, WorkerReader
from hetpipe.pipeline.runner import StageRunner
from hetpipe.pipeline.setup import Clipping, Replicas, StageData, StageIdentity, StageParts, Watch
from hetpipe.server.agent.private_folder import PrivateFolder
from hetpipe.server.parent_death import die_with_parent
from hetpipe.server.shard.client import ShardClient
from hetpipe.server.shard.relayed_log import RelayedLog
from hetpipe.values.cluster import node_of
from hetpipe.values.ids import Clock
from hetpipe.values.memory import LayerPolicy, policies_of
from hetpipe.values.requests import Requester
from hetpipe.values.rewinds import MODEL_FILE, first_folder
from hetpipe.values.run import StageConfig, StageReport
from hetpipe.weights.anchored import AnchoredWeights
from hetpipe.weights.direct import DirectWeights
from hetpipe.weights.flat import BufferPool, FlatBuffer
from hetpipe.weights.optimizer import StageOptimizer
from hetpipe.wire.call import Calls

_log = get_logger(__name__)

#: Timeout of every wait of a stage.
STALL_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Wiring:
    """The dependencies of a stage."""

    shards: Sequence[Calls]
    clock_shard: Calls
    upstream: Link | None
    downstream: Link | None
    history: HistoryWriter
    report: Callable[[StageReport], None]
    timeline: TimelineWriter = field(default_factory=NullTimeline)
    metrics: MetricsWriter = field(default_factory=NullMetrics)
    clock: TimeSource = SYSTEM_CLOCK
    guard: AbstractContextManager[object] = field(default_factory=nullcontext)
    replicas: Replicas | None = None
    """Replicas of this stage, if the job averages gradients over them."""
    cache: CacheFolders | None = None
    """Of this node, for what enters the layers behind frozen ones; None: there is none."""
    emulator: Emulator | None = None
    """Replaces the device's own emulation."""
    watch: Watch = lambda *_: None
    stall_seconds: float = STALL_SECONDS
    relayed: RelayedLog | None = None
    """The decision log from the agent; None: the stage follows the clock shard itself."""


@dataclass(frozen=True, slots=True)
class UserCode:
    """The objects made by the user's callables for this stage, before anything is connected."""

    layers: tuple[Layer, ...]
    data: StageData
    loss: Any
    state_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names in the model's `state_dict` of tensors that have several, or another one."""


def identity_of(config: StageConfig) -> StageIdentity:
    """The identity of this stage."""
    num_stages = len(config.plan.virtual_workers[config.vw].stages)
    return StageIdentity(config.vw, config.stage, config.incarnation, num_stages)


def requester_of(config: StageConfig) -> Requester:
    """The identity of this stage in requests to shards."""
    return Requester(config.plan.job_id, config.plan.term, config.vw, config.incarnation, config.stage)


def load_user_code(job: Job, config: StageConfig) -> UserCode:
    """Import the user's code and cut out this stage.

    Raises:
        CallableError: the user's code cannot be used.
    """
    import_path = Path(config.import_path)
    identity = identity_of(config)
    train = evaluation = reader = None
    order_of: Callable[[int], Sequence[int] | None] | None = _shuffled if job.data.is_shuffled else None
    if identity.is_first or identity.is_last:
        train, evaluation = build_datasets(job, import_path)
        # Before the model is built: data workers are forked, and share this process's current memory.
        reader = _reader(job, identity, train, evaluation)
        order_of = epoch_order(job, import_path, train) or order_of
    code = _stage_code(job, config)
    num_samples = len(train) if train is not None else 0
    return UserCode(
        code.layers,
        StageData(
            job.data_spec(num_samples, config.homes),
            train,
            evaluation,
            code.metrics,
            reader,
            order_of,
            evaluate_every_waves=job.evaluate.every_waves,
            max_evaluation_batches=job.evaluate.max_batches,
            weight=load_minibatch_weight(job, import_path) if identity.is_last else None,
            losses=code.losses,
        ),
        code.loss,
        code.state_names,
    )


@dataclass(frozen=True, slots=True)
class _StageCode:
    """The part of the user's code that depends on the cut."""

    layers: tuple[Layer, ...]
    loss: Any
    metrics: Mapping[str, LossFunction]
    losses: WeightedLosses | None
    state_names: Mapping[str, Sequence[str]]


def _stage_code(job: Job, config: StageConfig, *, frozen: int = 0, is_filled: bool = True) -> _StageCode:
    """Build the model, and cut this stage out; its first `frozen` layers are frozen.

    Without `is_filled` the caller replaces the contents of all tensors of the stage's layers.

    Raises:
        CallableError: the user's code cannot be used.
    """
    import_path = Path(config.import_path)
    identity = identity_of(config)
    found = _known_chain(job, config, is_filled=is_filled) or _own_chain(job, config)
    chain = found.layers
    given = load_loss(job, import_path) if identity.is_last else None
    stage = config.plan.stage(config.vw, config.stage)
    loss = on_output(chain, given) if identity.is_last else None
    metrics = {} if loss is None else {"loss": loss}
    losses = given if isinstance(given, WeightedLosses) else None
    if losses is not None:
        metrics |= {name: on_output(chain, each) for name, each in losses.functions.items()}
    if identity.is_last:
        metrics |= {name: on_output(chain, metric) for name, metric in load_metrics(job, import_path).items()}
    layers = freeze(chain, stage.first_layer, stage.last_layer, frozen, job.freeze.mode)
    return _StageCode(layers, loss, metrics, losses, found.state_names)


def _shuffled(epoch: int) -> None:
    """The default order of samples: shuffled."""
    del epoch


def _reader(job: Job, identity: StageIdentity, train: MapDataset, evaluation: MapDataset | None) -> DataReader:
    """The reader of a stage that reads data; with workers, these are running."""
    source = MinibatchSource(
        train=train,
        evaluation=evaluation,
        seed=job.seed,
        vw=identity.vw,
        has_inputs=identity.is_first,
        has_target=identity.is_last,
    )
    data = job.data
    if not data.num_workers:
        return InlineReader(source, pin_memory=data.pin_memory)
    report_phase(f"starting {data.num_workers} data workers")
    assert data.prefetch_factor is not None, "it has a default if there are workers"
    folder = PrivateFolder("hetpipe-data-")
    return WorkerReader(
        source,
        WorkerOptions(
            num_workers=data.num_workers,
            prefetch_factor=data.prefetch_factor,
            pin_memory=data.pin_memory,
            timeout_seconds=job.patience.data.total_seconds(),
            on_start=die_with_parent,
            on_close=folder.close,
            socket_folder=folder.path,
        ),
    )


@dataclass(frozen=True, slots=True)
class _Chain:
    """The layers of the whole model, with the tensors of one stage."""

    layers: tuple[Layer, ...]
    state_names: Mapping[str, Sequence[str]]
    """As `UserCode.state_names`."""


def _known_chain(job: Job, config: StageConfig, *, is_filled: bool) -> _Chain | None:
    """The layers recorded by the inspection, with the tensors of this stage only.

    Without `is_filled` their contents are unspecified. None if this stage has to record them: the inspection wrote no
    file, or it cannot be read here.

    Raises:
        CallableError: the model cannot be built.
    """
    if not config.plan.model_digest:
        return None
    build = partial(build_model, job, Path(config.import_path))
    stage = config.plan.stage(config.vw, config.stage)
    try:
        file = _model_file(config)
        with _turn(config) if file.construction == "whole" else nullcontext():
            model = construct(build, file.construction)
            names = state_names(model)
            chain = file.chain(model, precision=job.precision)
            own, device = chain[stage.first_layer : stage.last_layer], torch.device(config.device.torch_device)
            file.take(own, device, is_filled=is_filled)
    except ModelFileUnusable as error:
        _log.warning("model_file_unusable", reason=str(error), consequence="the stage builds and records the model")
        return None
    return _Chain(chain, names)


def _model_file(config: StageConfig) -> ModelFile:
    """The model file of the inspection; after a rewind, the new folder may have none.

    Raises:
        ModelFileUnusable: it does not exist.
    """
    own, first = Path(config.run_dir) / MODEL_FILE, Path(first_folder(config.run_dir)) / MODEL_FILE
    return open_model_file(own if own.exists() else first, config.plan.model_digest)


def _own_chain(job: Job, config: StageConfig) -> _Chain:
    """Build and record the whole model here; the other stages' layers keep only frozen weights and buffers.

    Raises:
        CallableError: the user's code cannot be used.
    """
    import_path = Path(config.import_path)
    stage = config.plan.stage(config.vw, config.stage)
    with _turn(config):
        model = build_model(job, import_path)
        names = state_names(model)
        chain = layers_of_job(job, import_path, model)
        forget_weights([*chain[: stage.first_layer], *chain[stage.last_layer :]])
    return _Chain(chain, names)


def _layers_anew(job: Job, config: StageConfig, clock: Clock, layers: Collection[int]) -> States:
    """`built_anew`, by one stage of the node at a time.

    Raises:
        CallableError: the user's code cannot be used.
    """
    with _turn(config):
        return built_anew(job, Path(config.import_path), clock, layers)


def _turn(config: StageConfig) -> AbstractContextManager[None]:
    """A lock of the node: only one stage at a time has a whole model in memory."""
    report_phase("waiting for other stages of this node, which build the model one at a time")
    path = Path(config.run_dir) / f"building-{config.host}.lock"
    return one_at_a_time(path, SYSTEM_CLOCK, deadline_seconds=STALL_SECONDS)


def restore_targets(
    layers: Sequence[Layer], optimizer: StageOptimizer, scales: LossScales | None = None
) -> RestoreTargets:
    """The restore targets of a stage of these layers."""

    def load(state: Mapping[str, Mapping[str, Any]]) -> None:
        optimizer.load_state(state)
        if scales is not None:
            scales.load_state(state.get(LOSS_SCALE, {}))

    parts = [(layer.module, layer) for layer in layers]
    return RestoreTargets(
        weights=[(name, m.get_parameter(local)) for m, layer in parts for local, name in layer.parameters.items()],
        buffers=[
            *((name, m.get_parameter(local)) for m, layer in parts for local, name in layer.frozen.items()),
            *((name, m.get_buffer(local)) for m, layer in parts for local, name in layer.buffers.items()),
        ],
        load_optimizer=load,
    )


def policies_in(job: Job, config: StageConfig, layers: Sequence[Layer]) -> tuple[LayerPolicy, ...]:
    """The memory policies of the stage's layers: those of its plan, else the job's."""
    stage = config.plan.stage(config.vw, config.stage)
    return stage.memory or policies_of(job.memory, [layer.name for layer in layers])


def _built(
    job: Job,
    config: StageConfig,
    code: UserCode | _StageCode,
    versions: VersionTable,
    clock: TimeSource,
    *,
    frozen: int = 0,
) -> BuiltStage:
    """Create the stage with its layers, the first `frozen` of the chain frozen, without loading weights."""
    device = torch.device(config.device.torch_device)
    stage = config.plan.stage(config.vw, config.stage)
    policies = policies_in(job, config, code.layers)
    changes = memory_changes(job, config.vw)
    swaps = "swap" in {*policies, *(change.policy for change in changes)}
    link = host_link(device, clock, job.cluster.host_bytes_per_second) if swaps else None
    memory = LayerMemory(code.layers, policies, link, changes)
    compute = StageCompute(code.layers, vw=config.vw, seed=job.seed, device=device, loss=code.loss, memory=memory)
    pool = BufferPool(layout_of(code.layers, device), device)
    target = pool.take().zero_()
    optimizer = _optimizer(job, config, target, versions)
    kind = AnchoredWeights if job.has_shards else DirectWeights
    data = code.data if isinstance(code, UserCode) else code
    return BuiltStage(
        layers=code.layers,
        compute=compute,
        pool=pool,
        target=target,
        weights=kind(pool, optimizer, target, versions),
        slices=tuple(piece for piece in config.plan.slices_of_stage(stage) if piece.layer >= frozen),
        metrics=data.metrics,
        losses=data.losses,
    )


def assemble(job: Job, config: StageConfig, code: UserCode, wiring: Wiring) -> tuple[StageRunner, ShardClient]:
    """Connect a stage; returns its runner, and the shard client, to be closed after the run."""
    identity = identity_of(config)
    use_device(torch.device(config.device.torch_device), deterministic=job.sync.deterministic)
    sync = job.sync_spec(config.plan.virtual_workers[config.vw])
    versions = versions_of(job, identity, sync.minibatches_per_wave)
    built = _built(job, config, code, versions, wiring.clock)
    scales = LossScales() if job.precision == "fp16" else None
    targets = restore_targets(code.layers, built.weights.optimizer, scales)
    start = restore(config, targets, job.sync.traits, storage=job.storage)
    inbox = Inbox(wiring.upstream, wiring.downstream, start, built.pool, life=(config.vw, config.incarnation))
    if code.data.reader is not None:
        code.data.reader.watch(inbox.ring)
    client = ShardClient(
        requester_of(config),
        built.slices,
        built.pool,
        shards=wiring.shards,
        clock_shard=wiring.clock_shard,
        listener=inbox,
        clock=wiring.clock,
        timeline=wiring.timeline,
        compression=sync.compress_pushes,
        relayed=wiring.relayed,
    )
    client.start()
    checkpoints = store_of(config.run_dir, job.storage)
    if not job.has_shards:
        filled(built.target, code.layers)
    parts = StageParts(
        identity=identity,
        sync=sync,
        layers=code.layers,
        compute=built.compute,
        emulator=wiring.emulator or _emulator(job, config, built.compute.memory.policies, wiring.clock),
        versions=versions,
        weights=built.weights,
        has_shards=job.has_shards,
        clipping=_clipping(job),
        scales=scales,
        replicas=wiring.replicas,
        pool=built.pool,
        order=order_for(job.weights, job.order),
        schedule=job.order,
        data=code.data,
        upstream=wiring.upstream,
        downstream=wiring.downstream,
        synchroniser=client,
        history=wiring.history,
        timeline=wiring.timeline,
        metrics=wiring.metrics,
        report=wiring.report,
        clock=wiring.clock,
        part_writer=PartWriter(
            checkpoints.folder,
            config.plan.job_id,
            stage_file(config.vw, config.stage),
            code.state_names,
            checkpoints if checkpoints.is_remote else None,
        ),
        guard=wiring.guard,
        stall_seconds=wiring.stall_seconds,
        last_checkpoint_seconds=job.patience.last_checkpoint.total_seconds(),
        run_dir=Path(config.run_dir),
        bounds=config.plan.virtual_workers[config.vw].bounds,
        predecessor=lambda segment: predecessor(
            job, config.plan, config.vw, segment.start, [member.vw for member in segment.left]
        ),
        prefix=_prefix(job, config, wiring),
        watch=wiring.watch,
        tells_norms=job.freeze.alpha is not None,
    )

    def build(bounds: tuple[int, ...], frozen: int) -> BuiltStage:
        moved = replace(config, plan=config.plan.with_bounds(config.vw, bounds))
        code = _stage_code(job, moved, frozen=frozen, is_filled=False)
        return _built(job, moved, code, versions, wiring.clock, frozen=frozen)

    rebuild = Rebuild(
        build,
        partial(building_line, job, config.vw),
        partial(scripted_cut, job, config.vw),
        partial(_layers_anew, job, config),
    )
    return StageRunner(parts, inbox, rebuild), client


def _prefix(job: Job, config: StageConfig, wiring: Wiring) -> FrozenPrefix | None:
    nodes = [node_of(stage.device) for worker in config.plan.virtual_workers for stage in worker.stages]
    if wiring.cache is None or not wants_cache(job, nodes):
        return None
    stages = config.plan.virtual_workers[config.vw].stages
    return FrozenPrefix(
        FrozenCache(wiring.cache, config.plan.term),
        job.freeze.cache,
        config.vw,
        tuple(node_of(stage.device) for stage in stages),
        config.stage,
        job.epochs,
        wiring.clock,
        of_samples=caches_samples(job),
    )


def _optimizer(job: Job, config: StageConfig, target: FlatBuffer, versions: VersionTable) -> StageOptimizer:
    """The optimizer of `target`: ρ, or the weights themselves without parameter servers."""
    return StageOptimizer(
        job.optimizer,
        target,
        job.lr_schedule,
        predicts=versions.is_predicting,
        include_decay=job.prediction.include_decay,
        load=partial(load_callable, import_path=Path(config.import_path)),
    )


def _emulator(job: Job, config: StageConfig, policies: Sequence[LayerPolicy], clock: TimeSource) -> Emulator:
    seed = job.seed + 1000 * config.vw + config.stage
    emulator = Emulator(config.device, clock, seed=seed, emulation=config.emulation)
    stage = config.plan.stage(config.vw, config.stage)
    emulator.cover(stage.first_layer, stage.last_layer, policies=policies)
    return emulator


def _clipping(job: Job) -> Clipping | None:
    gradients = job.gradients
    return None if gradients.max_norm is None else Clipping(gradients.max_norm, gradients.clip == "global")


def versions_of(job: Job, identity: StageIdentity, minibatches_per_wave: int) -> VersionTable:
    """The weight versions of this stage's minibatches."""
    return VersionTable(
        job.weights,
        stage=identity.stage,
        num_stages=identity.num_stages,
        minibatches_per_wave=minibatches_per_wave,
        accumulate=job.gradients.accumulate,
    )
