"""One minibatch of a run again, in this process, with the same bits: `hetpipe debug`, `hetpipe.replay`.

The weights of some minibatches are known: those of a barrier that has a checkpoint, or the first ones. These are the
weights of the first minibatches after the barrier, as many as the weight policy lets compute without an own update, and
of the first wave at most: a newer published clock needs the wave that the minibatch belongs to. The weights of all
others existed only in the run. A run that computes the same when it is repeated is repeated from the nearest barrier
(`rerun`); minibatches of others are refused.

The samples of a committed wave are those of the history: a run that lost a virtual worker has dealt them otherwise than
an undisturbed one. Of other waves, or without a history, they are those of an undisturbed run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from hetpipe.checkpoint.export import read_checkpoint_state
from hetpipe.checkpoint.manifest import MANIFEST, read_manifest
from hetpipe.decide.elastic.freezing import freezing_of
from hetpipe.decide.elastic.script import member_changes, wave_changes
from hetpipe.decide.schedule.versions import VersionTable
from hetpipe.decide.sync.division import Block
from hetpipe.decide.sync.segment import ScriptedChanges, first_progress, planned_segments
from hetpipe.errors import CheckpointError, UserError
from hetpipe.job.file import Job
from hetpipe.observe.clock_curve import clock_shard_file
from hetpipe.observe.metrics import metrics_path
from hetpipe.observe.segments import read_lines
from hetpipe.pipeline.callables import MapDataset, build_model, build_train_data, epoch_order, load_loss
from hetpipe.pipeline.chain import Layer, freeze
from hetpipe.pipeline.compute import StageCompute
from hetpipe.pipeline.cuda import use_device
from hetpipe.pipeline.data import read_minibatch
from hetpipe.pipeline.fresh_layers import built_anew
from hetpipe.pipeline.hugging_face import load_strictly
from hetpipe.pipeline.layering import layers_of_job, on_output
from hetpipe.pipeline.seeds import preserved_generators
from hetpipe.runs.rerun import Start, weights_of, why_not_again
from hetpipe.runs.run_folder import RunFolder
from hetpipe.values import wire
from hetpipe.values.activation import started_with
from hetpipe.values.ids import Clock, Minibatch, VirtualWorkerIndex
from hetpipe.values.plan import Plan
from hetpipe.values.rewinds import run_folders
from hetpipe.values.storage_url import is_url
from hetpipe.values.suggest import join_names
from hetpipe.values.sync import DataSpec, Progress

#: Calls the computation, possibly under a debugger.
Around = Callable[[Callable[[], "Replayed"]], "Replayed"]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of the minibatch."""

    loss: float
    gradients: dict[str, Tensor | None]
    """Parameter name → gradient before clipping; None if the minibatch did not use the parameter."""
    indices: tuple[int, ...]
    """Of its samples in the training data."""
    clock: int
    """W* of its weights; without parameter servers that of the barrier before it."""


@dataclass(frozen=True, slots=True)
class _Barrier:
    """A barrier with known weights, and the minibatches of one virtual worker that use them."""

    start: Start
    origin: int
    """The last minibatch before it."""
    blocks: tuple[Block, ...]
    """The samples of the minibatches from `origin` + 1 on."""
    epoch: int
    inactive: tuple[int, ...]
    """Layers that are left out."""

    @property
    def text(self) -> str:
        """`97 to 100 (the checkpoint at clock 24)`."""
        numbers = f"{self.origin + 1}" + (f" to {self.origin + len(self.blocks)}" if len(self.blocks) > 1 else "")
        return f"{numbers} ({self.source})"

    @property
    def source(self) -> str:
        """Where the weights are from."""
        clock = self.start.progress.clock
        return "the first weights" if self.start.checkpoint is None else f"the checkpoint at clock {clock}"


def replay_minibatch(
    run_dir: Path,
    job: Job,
    import_path: Path,
    *,
    vw: int,
    p: int,
    restored_from: Path | None = None,
    around: Around = lambda compute: compute(),
) -> Replayed:
    """Compute forward, loss and backward of a minibatch on the CPU, with all layers in one stage.

    Args:
        run_dir: of the run, with those of its rewinds.
        job: the run's.
        import_path: the first folder to import user code from.
        vw: virtual worker.
        p: minibatch, from 1.
        restored_from: the checkpoint that the run began with.
        around: is given the computation, and returns its result.

    Raises:
        UserError: the weights of the minibatch are not known; it says which ones are.
        CallableError, CheckpointError: the user's code or the checkpoint cannot be used.
    """
    if not 0 <= vw < job.num_ever:
        raise UserError(f"there is no virtual worker {vw}; the run has {job.num_ever}, numbered from 0")
    if job.freeze.compress:
        raise UserError(
            "the virtual workers of the run change as layers freeze (freeze.compress), so that its minibatches are not "
            "those of the job alone; replay one of a run with the script that its decisions.jsonl makes"
        )
    if job.precision == "fp16":
        raise UserError("the run scaled its losses for fp16, by factors that are not kept; replay runs in fp32 or bf16")
    use_device(torch.device("cpu"), deterministic=job.sync.deterministic)
    with preserved_generators():
        dataset = build_train_data(job, import_path)
        used = _used_by(run_dir, job, import_path, dataset, VirtualWorkerIndex(vw), p, restored_from)
        layers = used.layers
        compute = StageCompute(
            layers,
            vw=VirtualWorkerIndex(vw),
            seed=job.seed,
            device=torch.device("cpu"),
            loss=on_output(layers, load_loss(job, import_path)),
        )
        compute.leave_out(used.inactive)
        batch = read_minibatch(
            dataset, used.block, seed=job.seed, vw=VirtualWorkerIndex(vw), p=Minibatch(p), epoch=used.epoch
        )
        leaves = {
            name: layer.module.get_parameter(local).detach().clone().requires_grad_()
            for layer in layers
            for local, name in layer.parameters.items()
            if layer.module.get_parameter(local).requires_grad
        }

        def replayed() -> Replayed:
            outputs = compute.forward(Minibatch(p), leaves, batch.inputs)
            loss = compute.loss(Minibatch(p), outputs, batch.target)
            gradients = compute.backward(Minibatch(p), leaves, None)
            return Replayed(float(loss), gradients.weights, tuple(used.block), used.clock)

        return around(replayed)


def replay_of_run(folder: RunFolder, current: Path, *, vw: int, p: int, around: Around | None = None) -> Replayed:
    """Replay a minibatch of the run in `folder`, as `replay_minibatch` does.

    User code is imported from the folder that the run imported it from; from `current` where that does not exist.

    Raises:
        UserError: the weights of the minibatch are not known, or the checkpoints of the run are not in its folder.
    """
    job, restored = folder.read_job(), folder.read_record().restored_from
    if folder.checkpoints_url or (restored is not None and is_url(restored)):
        raise UserError(f"{folder.path}: its checkpoints are in an object store; replay reads those in folders")
    return replay_minibatch(
        folder.path,
        job,
        folder.import_path(current),
        vw=vw,
        p=p,
        restored_from=None if restored is None else Path(restored),
        around=around or _plainly,
    )


def _plainly(compute: Callable[[], Replayed]) -> Replayed:
    return compute()


@dataclass(frozen=True, slots=True)
class _Used:
    """What a minibatch has computed with."""

    layers: tuple[Layer, ...]
    """All layers, with its weights and buffers."""
    inactive: tuple[int, ...]
    block: Block
    epoch: int
    clock: int


def _used_by(
    run_dir: Path,
    job: Job,
    import_path: Path,
    dataset: MapDataset,
    vw: VirtualWorkerIndex,
    p: int,
    restored_from: Path | None,
) -> _Used:
    """What minibatch `p` has computed with; that of the newest rewind, if there are several.

    Raises:
        UserError: it is not known, and the run cannot be repeated.
    """
    barriers = list(_barriers(run_dir, job, import_path, dataset, vw, restored_from))
    for barrier in barriers:
        if barrier.origin < p <= barrier.origin + len(barrier.blocks):
            model, progress = build_model(job, import_path), barrier.start.progress
            if barrier.start.checkpoint is not None:
                load_strictly(model, read_checkpoint_state(str(barrier.start.checkpoint)))
            chain = layers_of_job(job, import_path, model, dataset)
            for layer, state in built_anew(job, import_path, progress.clock, progress.fresh).items():
                _load(chain[layer], {**state.weights, **state.buffers})
            layers = freeze(chain, 0, len(chain), _frozen_layers(job, barrier.start), job.freeze.mode)
            block = barrier.blocks[p - barrier.origin - 1]
            return _Used(layers, barrier.inactive, block, barrier.epoch, progress.clock)
    return _repeated(run_dir, job, import_path, dataset, vw, p, barriers)


def _frozen_layers(job: Job, start: Start) -> int:
    """The leading layers of the chain that are frozen from a barrier on (freezing.md §1)."""
    freezing, progress = freezing_of(job, start.plan), start.progress
    if freezing is None:
        return 0
    after = Clock(progress.clock - 1)
    return freezing.levels[freezing.frozen_at(progress.frozen, after=after, upto=progress.clock, epoch=progress.epoch)]


def _repeated(
    run_dir: Path,
    job: Job,
    import_path: Path,
    dataset: MapDataset,
    vw: VirtualWorkerIndex,
    p: int,
    barriers: Sequence[_Barrier],
) -> _Used:
    """The same of a minibatch whose weights only the run had, by repeating the run from the nearest barrier.

    Raises:
        UserError: the run has not committed the minibatch, or cannot be repeated.
    """
    texts = join_names([barrier.text for barrier in reversed(barriers) if barrier.blocks], "and") or "none"
    where, wave = _wave_of(run_dir, vw, p)
    if wave is None:
        raise UserError(
            f"virtual worker {vw} has not committed minibatch {p} in this run; these can be replayed: {texts}"
        )
    start = next((barrier for barrier in barriers if barrier.origin < p), None)
    reason = "there is no checkpoint before it" if start is None else why_not_again(run_dir, job)
    if reason or start is None:
        raise UserError(
            f"minibatch {p} of virtual worker {vw} used weights that only the run had, and the run cannot be repeated: "
            f"{reason}; these can be replayed: {texts}; checkpoint.every_waves: 1 with a larger checkpoint.keep makes "
            "more of them known"
        )
    blocks = _committed(where, vw, wave.number, job.batch_size, wave.minibatches)
    if not blocks:
        raise UserError(f"the run has no history of the samples of minibatch {p} (`history: off`), which it needs")
    with TemporaryDirectory(prefix="hetpipe-replay-") as scratch:
        seen = weights_of(
            where,
            job,
            import_path,
            start=start.start,
            vw=vw,
            p=p,
            wave=wave.number,
            scratch=Path(scratch),
        )
    chain = layers_of_job(job, import_path, build_model(job, import_path), dataset)
    for layer in chain:
        _load(layer, seen.tensors)
    layers = freeze(chain, 0, len(chain), seen.frozen, job.freeze.mode)
    return _Used(layers, seen.inactive, blocks[p - wave.first], wave.epoch, seen.clock)


@torch.no_grad()
def _load(layer: Layer, tensors: Mapping[str, Tensor]) -> None:
    """Load weights and buffers by their names in the model."""
    for local, name in (*layer.parameters.items(), *layer.frozen.items()):
        layer.module.get_parameter(local).copy_(tensors[name])
    for local, name in layer.buffers.items():
        layer.module.get_buffer(local).copy_(tensors[name])


@dataclass(frozen=True, slots=True)
class _Wave:
    """A wave that a run has recorded."""

    number: int
    first: int
    """Its first minibatch."""
    minibatches: int
    epoch: int
    """From 0."""


def _wave_of(run_dir: Path, vw: VirtualWorkerIndex, p: int) -> tuple[Path, _Wave | None]:
    """The newest folder of the run in which minibatch `p` was committed, and its wave; None if it was in none."""
    for where in reversed(run_folders(run_dir)):
        epochs = {}
        for line in read_lines(clock_shard_file(where)):
            if b'"used"' in line and line.endswith(b"}\n"):
                values = json.loads(line)
                if (values["event"], values["vw"]) == ("used", vw):
                    epochs[values["wave"]] = values["epoch"]
        for line in read_lines(metrics_path(where, vw)):
            values = json.loads(line) if line.endswith(b"}\n") else {}
            count, last, number = (values.get(key, 0) for key in ("minibatches", "p", "wave"))
            if last - count < p <= last and number in epochs:
                return where, _Wave(number, last - count + 1, count, epochs[number])
    return run_dir, None


def _barriers(
    run_dir: Path,
    job: Job,
    import_path: Path,
    dataset: MapDataset,
    vw: VirtualWorkerIndex,
    restored_from: Path | None,
) -> Iterator[_Barrier]:
    """The barriers with known weights, newest first."""
    order_of = epoch_order(job, import_path, dataset) or (lambda _: None)
    for where, checkpoint, progress in _known(run_dir, job, len(dataset), restored_from):
        plan: Plan = wire.from_json(Plan, (where / "plan.json").read_bytes())
        homes = json.loads((where / "facts.json").read_bytes()).get("homes", ())
        data = job.data_spec(len(dataset), tuple(homes))
        known = _with_known_weights(job, data, vw, len(plan.virtual_workers[vw].stages), progress, order_of)
        if known is not None:
            origin, planned, epoch = known
            blocks = _committed(where, vw, progress.clock, job.batch_size, len(planned)) or planned
            inactive = started_with(plan.activations, progress.inactive, progress.clock)
            yield _Barrier(Start(plan, data, progress, checkpoint), origin, blocks, epoch, inactive)


def _known(
    run_dir: Path, job: Job, num_samples: int, restored_from: Path | None
) -> Iterator[tuple[Path, Path | None, Progress]]:
    """Folder of the run or a rewind, checkpoint, progress; newest first."""
    for where in reversed(run_folders(run_dir)):
        for folder in sorted((where / "checkpoints").glob("clock-*"), reverse=True):
            if (folder / MANIFEST).exists():
                try:
                    yield where, folder, read_manifest(folder).progress
                except CheckpointError:
                    continue
    if restored_from is not None:
        yield run_dir, restored_from, read_manifest(restored_from).progress
    else:
        yield run_dir, None, first_progress(job.data_spec(num_samples))


def _committed(where: Path, vw: VirtualWorkerIndex, wave: int, batch_size: int, count: int) -> tuple[Block, ...]:
    """The samples of the first `count` minibatches of a committed wave, by the history; empty if it has none."""
    for line in read_lines(clock_shard_file(where)):
        if b'"used"' not in line or not line.endswith(b"}\n"):  # torn by the end of its writer
            continue
        values = json.loads(line)
        event, worker, number = (values[key] for key in ("event", "vw", "wave"))
        if (event, worker, number) == ("used", vw, wave):
            indices = values["indices"]
            blocks = (tuple(indices[at * batch_size : (at + 1) * batch_size]) for at in range(count))
            return tuple(block for block in blocks if block)
    return ()


def _with_known_weights(
    job: Job,
    data: DataSpec,
    vw: VirtualWorkerIndex,
    num_stages: int,
    progress: Progress,
    order_of: Callable[[int], Sequence[int] | None],
) -> tuple[int, tuple[Block, ...], int] | None:
    """Origin, samples and epoch of the minibatches that use the weights of a barrier; None: nothing follows it."""
    workers = [VirtualWorkerIndex(index) for index in range(job.num_ever)]
    waves = progress.waves
    per_wave = {one: waves[one].minibatches_per_wave if one in waves else job.minibatches_of(one) for one in workers}
    n = per_wave[vw]
    origin = waves[vw].origin if vw in waves else progress.clock * n
    segments = planned_segments(
        progress,
        data,
        per_wave=per_wave,
        checkpoint_every_waves=job.checkpoint.every_waves,
        plan_clocks=job.elastic.clocks,
        scripted=ScriptedChanges(wave_changes(job), member_changes(job)),
        plan_every_waves=job.freeze.waves,
        order_of=order_of,
    )
    segment, blocks = next(segments, (None, {}))
    if segment is None:
        return None
    tables = [VersionTable(job.weights, stage, num_stages, n, job.gradients.accumulate) for stage in range(num_stages)]
    known: list[Block] = []
    for local, block in enumerate(blocks.get(vw, ())[:n], start=1):
        if not all(table.is_of_the_barrier(local) for table in tables):
            break
        known.append(block)
    return origin, tuple(known), segment.epoch
