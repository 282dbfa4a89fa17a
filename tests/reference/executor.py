"""The reference executor: what a deterministic run must compute, in one process, one thread and one order.

It judges the distributed runtime bit for bit, so it is written from the formulas of `wsp.md` (§2, §3, §5) and the
equations of `policies.md`, and imports none of what it judges: no gate, no schedule, no weight policy, no shard. Speed
and memory are no aims of it.

A run is a sequence of *segments*, each between two barriers. In a segment all virtual workers do minibatch p in turn,
then all do p + 1: when the last one has closed wave W, w^(W + 1) can be written down, and by then nobody needs more.
A segment starts from a `ReferenceState` and ends in one, so a resumed run is the same computation as an uninterrupted
one. The caller sets `torch.set_num_threads(1)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from hetpipe.decide.sync.division import Block, shuffled
from hetpipe.pipeline.chain import SeedKey, run_layers
from hetpipe.pipeline.layering import on_output
from hetpipe.pipeline.modes import enter_evaluation
from hetpipe.pipeline.seeds import (
    evaluation_fetch_seed,
    evaluation_layer_seed,
    fresh_seed,
    preserved_generators,
    seed_generators,
)
from hetpipe.values.ids import Clock, Minibatch, VirtualWorkerIndex
from tests.reference.gradients import all_reduced
from tests.reference.local_weights import added
from tests.reference.optimizer import OptimizerMemory, ReferenceOptimizer
from tests.reference.policies import POLICIES
from tests.reference.values import (
    MapDataset,
    MinibatchRecord,
    ReferenceEvaluation,
    ReferenceResult,
    ReferenceRun,
    ReferenceScale,
    ReferenceState,
    ScalarCallable,
    Tensors,
)
from tests.reference.worker import (
    ReferenceWorker,
    autocast,
    buffers_of,
    layers_for,
    load_buffers,
    moved,
    output_of,
    parameters_of,
    read_block,
)

__all__ = [
    "MinibatchRecord",
    "ReferenceEvaluation",
    "ReferenceResult",
    "ReferenceRun",
    "ReferenceState",
    "evaluate",
    "initial_state",
    "run_reference",
]

Records = dict[tuple[VirtualWorkerIndex, Minibatch], MinibatchRecord]


def initial_state(run: ReferenceRun) -> ReferenceState:
    """The state at clock 0: the model as built under the run's seed, fresh optimizers, no sample used."""
    with preserved_generators():
        layers = layers_for(run, _built(run))
    weights = parameters_of(layers)
    fresh, num_workers = ReferenceOptimizer(run, weights).memory(), run.num_virtual_workers
    return ReferenceState(
        clock=Clock(0),
        epoch=0,
        used=frozenset(),
        minibatches=0,
        samples=0,
        weights=weights,
        buffers=buffers_of(layers),
        optimizers=(fresh.state,) * num_workers,
        updates=(fresh.updates,) * num_workers,
        last_gradients=(fresh.last_gradients,) * num_workers,
        scales=(ReferenceScale(),) * num_workers,
    )


def run_reference(run: ReferenceRun, start: ReferenceState | None = None) -> ReferenceResult:
    """Compute `run`, from `start` (a barrier's state of an earlier run of the same kind) or from the beginning.

    The process's random generators are used, and left as they were found.

    Raises:
        ValueError: the optimizer is unknown or cannot be predicted, the stages do not have the model's layers, a sample
            is malformed, or `start` has another number of virtual workers.
    """
    state = initial_state(run) if start is None else start
    if len(state.optimizers) != run.num_virtual_workers:
        raise ValueError(f"start has {len(state.optimizers)} virtual workers, the run {run.num_virtual_workers}")
    records: Records = {}
    barriers = {state.clock: state}
    with preserved_generators():
        workers = [ReferenceWorker(VirtualWorkerIndex(vw), run, _built(run)) for vw in range(run.num_virtual_workers)]
        while not _is_finished(run, state):
            state = _segment(run, workers, state, records)
            barriers[state.clock] = state
    return ReferenceResult(state, barriers, records)


def _built(run: ReferenceRun) -> nn.Module:
    seed_generators(run.seed)
    return run.model()


def _is_finished(run: ReferenceRun, state: ReferenceState) -> bool:
    if run.stop_at_clock is not None and state.clock >= run.stop_at_clock:
        return True
    if run.epochs is not None:
        return state.epoch >= run.epochs
    return run.total_minibatches is not None and state.minibatches >= run.total_minibatches


def _division(run: ReferenceRun, state: ReferenceState) -> Mapping[VirtualWorkerIndex, tuple[Block, ...]]:
    """The unused samples of the epoch, permuted or in the run's own order, and dealt (`wsp.md` §5, Data)."""
    unused = [index for index in range(len(run.train)) if index not in state.used]
    if run.order is None:
        order = shuffled(unused, seed=run.seed, epoch=state.epoch, barrier=state.clock)
    else:
        order = [index for index in run.order(state.epoch) if index not in state.used]
    members = run.members(state.clock)
    limit = None if run.total_minibatches is None else run.total_minibatches - state.minibatches
    blocks = [tuple(order[i : i + run.batch_size]) for i in range(0, len(order), run.batch_size)]
    per_wave = {vw: run.num_in_wave(vw, state.clock) for vw in members}
    if run.homes:
        blocks = _at_home(run, blocks, _dealt(blocks, per_wave))
    return {vw: tuple(own) for vw, own in _dealt(blocks[:limit], per_wave).items()}


def _at_home(
    run: ReferenceRun, blocks: Sequence[Block], dealt: Mapping[VirtualWorkerIndex, Sequence[Block]]
) -> list[Block]:
    """The blocks, with samples of their members' nodes (`caching.md` §5).

    The first node has the first samples in an order that all epochs share, as many as it is dealt; then the next one.
    """
    node = {block: run.homes[vw] for vw, own in dealt.items() for block in own}
    samples = [sample for block in blocks for sample in block]
    every = shuffled(range(len(run.train)), seed=run.seed, epoch=-1, barrier=Clock(0))
    shared = sorted(samples, key=every.index)
    found: list[tuple[int, Block]] = []
    for home in sorted(set(run.homes)):
        num = sum(len(block) for block in blocks if node[block] == home)
        own, shared = set(shared[:num]), shared[num:]
        left = [sample for sample in samples if sample in own]
        for place, block in enumerate(blocks):
            if node[block] == home:
                mine, left = tuple(left[: len(block)]), left[len(block) :]
                found.append((place, mine))
    return [mine for _, mine in sorted(found)]


def _dealt(
    blocks: Sequence[Block], per_wave: Mapping[VirtualWorkerIndex, int]
) -> dict[VirtualWorkerIndex, list[Block]]:
    """Each block goes to whoever would complete it first if waves took equally long (`wsp.md` §10).

    Member v has then spent (own blocks + 1) / N_v of a wave; of several the lowest index.
    """
    dealt: dict[VirtualWorkerIndex, list[Block]] = {vw: [] for vw in per_wave}
    for block in blocks:
        dealt[min(dealt, key=lambda vw: (Fraction(len(dealt[vw]) + 1, per_wave[vw]), vw))].append(block)
    return dealt


def _next_barrier(run: ReferenceRun, start: Clock, waves: int) -> Clock:
    """The first barrier above `start`, where `waves` are the most that one virtual worker was dealt."""
    clocks = [start + waves, *run.extra_barriers, *run.membership, *run.plans, *run.waves, *run.frozen, *run.inactive]
    if run.checkpoint_every_waves is not None:
        clocks.append((start // run.checkpoint_every_waves + 1) * run.checkpoint_every_waves)
    if run.stop_at_clock is not None:
        clocks.append(run.stop_at_clock)
    return Clock(min(clock for clock in clocks if clock > start))


def _segment(
    run: ReferenceRun, everybody: Sequence[ReferenceWorker], state: ReferenceState, records: Records
) -> ReferenceState:
    """Run from the barrier `state` to the next one and return the state there; adds to `records`."""
    state = _renewed(run, state)
    blocks = _division(run, state)
    workers = [everybody[vw] for vw in run.members(state.clock)]
    start = state.clock
    barrier = _next_barrier(run, start, max(-(-len(own) // run.num_in_wave(vw, start)) for vw, own in blocks.items()))
    published: dict[Clock, Tensors] = {start: state.weights}
    done: list[Block] = []
    for worker in workers:
        n = run.num_in_wave(worker.index, start)
        worker.begin(state, last=min(start * n + len(blocks[worker.index]), barrier * n))
    for wave in range(start, barrier):
        for place in range(max(run.num_in_wave(worker.index, start) for worker in workers)):
            for worker in workers:
                own, n = blocks[worker.index], run.num_in_wave(worker.index, start)
                position = (wave - start) * n + place
                if place < n and position < len(own):
                    p = Minibatch(run.numbered_before(worker.index, wave) + place + 1)
                    record = worker.minibatch(p, own[position], published)
                    records[record.vw, record.p] = record
                    done.append(record.samples)
        if run.sync == "allreduce":
            gradients = all_reduced([worker.take_group() for worker in workers])
            for worker in workers:
                worker.update((wave + 1) * run.num_in_wave(worker.index, start), gradients)
        closed = [worker.close_wave(wave) for worker in workers]
        members = [worker.index for worker in workers]
        published[Clock(wave + 1)] = _published(run, members, published[Clock(wave)], closed, start)
        oldest = min(worker.clock for worker in workers)
        published = {clock: weights for clock, weights in published.items() if clock >= oldest}
    used = state.used.union(*done)
    memories, taken = _memories(run, workers, state, barrier), run.taken_over.get(barrier, {})
    is_epoch_over = len(used) == len(run.train)
    return ReferenceState(
        clock=barrier,
        epoch=state.epoch + 1 if is_epoch_over else state.epoch,
        used=frozenset() if is_epoch_over else used,
        minibatches=state.minibatches + len(done),
        samples=state.samples + sum(len(block) for block in done),
        weights=published[barrier],
        buffers=_merged_buffers([worker.buffers() for worker in workers]),
        optimizers=tuple(memory.state for memory in memories),
        updates=tuple(memory.updates for memory in memories),
        last_gradients=tuple(memory.last_gradients for memory in memories),
        scales=tuple(
            next((worker.scale for worker in workers if worker.index == taken.get(vw, vw)), kept)
            for vw, kept in enumerate(state.scales)
        ),
    )


def _renewed(run: ReferenceRun, state: ReferenceState) -> ReferenceState:
    """The state with which the segment behind a barrier begins: that of the barrier, but for what is built anew there.

    Optimizers keep nothing of that, as at the start of a run; their schedules go on.
    """
    if not run.fresh.get(state.clock):
        return state
    seed_generators(fresh_seed(run.seed, state.clock))
    layers = [layer for layer in layers_for(run, run.model()) if layer.index in run.fresh[state.clock]]
    weights, buffers = parameters_of(layers), buffers_of(layers)
    unused = ReferenceOptimizer(run, {**state.weights, **weights}).memory()
    forgotten = {name: unused.state[name] for name in weights}
    return replace(
        state,
        weights={**state.weights, **weights},
        buffers={**state.buffers, **buffers},
        optimizers=tuple({**each, **forgotten} for each in state.optimizers),
        last_gradients=tuple(
            {name: gradient for name, gradient in each.items() if name not in weights} for each in state.last_gradients
        ),
    )


def _memories(
    run: ReferenceRun, workers: Sequence[ReferenceWorker], state: ReferenceState, barrier: Clock
) -> list[OptimizerMemory]:
    """What everybody's optimizer keeps at a barrier: of who was away, what it left with.

    Who comes back there takes its place in the schedule: the largest number of updates among those who were there.
    """
    memories = [
        OptimizerMemory(*each) for each in zip(state.optimizers, state.updates, state.last_gradients, strict=True)
    ]
    for worker in workers:
        memories[worker.index] = worker.optimizer_memory()
    newest = max(memories[worker.index].updates for worker in workers)
    for vw in set(run.members(barrier)) - {worker.index for worker in workers}:
        source = run.taken_over.get(barrier, {}).get(vw, vw)
        memories[vw] = replace(memories[source], updates=newest)
    return memories


def _published(
    run: ReferenceRun,
    members: Sequence[VirtualWorkerIndex],
    previous: Tensors,
    closed: Sequence[Tensors | None],
    start: Clock,
) -> Tensors:
    """w^(W+1), from w^(W) and what the virtual workers closed wave W with.

    With shards ((w^(W) + ũ_0) + ũ_1) + … in the order of the virtual workers; each ũ × its factor first with `mean`.
    Without, the first one's weights, which are everyone's.
    """
    if run.sync != "wsp":
        assert closed[0] is not None, "without shards a virtual worker always has the weights"
        return closed[0]
    weights = previous
    for vw, update in zip(members, closed, strict=True):
        if update is None:
            continue
        term = update if run.compress_pushes == "none" else _in_bfloat16(update)
        if run.combine == "mean":
            factor = _factor(run, members, vw, start)
            term = {name: tensor.mul(factor) for name, tensor in term.items()}
        weights = added(weights, term)
    return weights


def _in_bfloat16(update: Tensors) -> Tensors:
    """Each `float32` element rounded to the nearest number of `bfloat16`, ties to even."""
    return {
        name: tensor.to(torch.bfloat16).to(torch.float32) if tensor.dtype == torch.float32 else tensor
        for name, tensor in update.items()
    }


def _factor(run: ReferenceRun, members: Sequence[VirtualWorkerIndex], vw: VirtualWorkerIndex, start: Clock) -> float:
    """What `mean` multiplies ũ of `vw` by, so that every sample counts alike (`wsp.md` §10).

    An average over the N_v minibatches of a wave counts N_v times; N_v updates count one each.
    """
    if POLICIES[run.weights].once_per_wave:
        return run.num_in_wave(vw, start) / sum(run.num_in_wave(member, start) for member in members)
    return 1 / len(members)


def _merged_buffers(buffers: Sequence[Tensors]) -> Tensors:
    """Floating buffers: their mean, added in the order of the virtual workers, then × 1/V. Others: the maximum.

    Where all have the same values, these stay as they are.
    """
    same = {name for name, tensor in buffers[0].items() if all(torch.equal(own[name], tensor) for own in buffers[1:])}
    merged = dict(buffers[0])
    for own in buffers[1:]:
        for name, tensor in merged.items():
            merged[name] = tensor + own[name] if tensor.is_floating_point() else torch.maximum(tensor, own[name])
    return {
        name: buffers[0][name]
        if name in same
        else tensor.mul(1 / len(buffers))
        if tensor.is_floating_point()
        else tensor
        for name, tensor in merged.items()
    }


def _seed_evaluation(run: ReferenceRun, vw: VirtualWorkerIndex, number: int, key: SeedKey) -> None:
    seed_generators(evaluation_layer_seed(run.seed, vw, number, key), torch.device(run.device))


def evaluate(
    run: ReferenceRun,
    *,
    weights: Tensors,
    buffers: Tensors,
    dataset: MapDataset,
    metrics: Mapping[str, ScalarCallable] | None = None,
) -> ReferenceEvaluation:
    """Loss and metrics of `weights` on `dataset`, in eval mode and without gradients.

    Blocks of the run's `batch_size`, in the order of the indices, are dealt round-robin to its virtual workers; each
    adds value × weight over its blocks, the sums are added in the order of the virtual workers and divided once.

    Args:
        run: gives the model, the loss, the batch size and V.
        weights: published weights.
        buffers: merged buffers.
        dataset: what to evaluate on; not empty.
        metrics: name → (output, target) → scalar mean.
    """
    given: dict[str, ScalarCallable | None] = {"loss": run.loss, **(metrics or {})}
    num_samples = len(dataset)
    blocks = [range(i, min(i + run.batch_size, num_samples)) for i in range(0, num_samples, run.batch_size)]
    totals = dict.fromkeys(given, 0.0)
    weights_of = dict.fromkeys(map(VirtualWorkerIndex, range(run.num_virtual_workers)), 0)
    with preserved_generators(), torch.no_grad():
        layers = layers_for(run, _built(run))
        functions = {name: on_output(layers, function) for name, function in given.items()}
        enter_evaluation(mode for layer in layers for mode in layer.modes)
        load_buffers(layers, buffers)
        for vw in map(VirtualWorkerIndex, range(run.num_virtual_workers)):
            sums = dict.fromkeys(given, 0.0)
            for number, block in enumerate(blocks[vw :: run.num_virtual_workers], start=1):
                seed_generators(evaluation_fetch_seed(run.seed, vw, number))
                inputs, target = moved(read_block(dataset, block), run.device)
                seed = partial(_seed_evaluation, run, vw, number)
                output = output_of(run_layers(layers, weights, inputs, seed=seed))
                weight = len(block) if run.weigh is None else run.weigh(target)
                weights_of[vw] += weight
                for name, function in functions.items():
                    if weight:
                        with autocast(run.precision, run.device):
                            value = function(output, target)
                        sums[name] += float(cast("Tensor", value)) * weight
            totals = {name: total + sums[name] for name, total in totals.items()}
    divisor = sum(weights_of.values())
    return ReferenceEvaluation(num_samples, {name: total / divisor for name, total in totals.items()})
