"""A new cut of a virtual worker whose stages deviate from their planned times. Pure.

The devices and their order stay the same; the cuts between them move. The time of a layer on a device is the planned
one, multiplied by the deviation of that device's stage. Without a forecast (the job specifies its own cut), the fastest
time so far of each stage is divided over its layers by their sizes; this cannot be transferred to another type of
device, so such a virtual worker is only replanned if all its devices are alike.

The cut is the planner's: the smallest largest stage time, transfers and memory counted (`planner/cuts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from hetpipe.decide.lifecycle.known_cluster import cluster_of
from hetpipe.decide.lifecycle.planning import PlannedRun, options_of
from hetpipe.decide.planner.active_profile import active_profile
from hetpipe.decide.planner.costs import TICKS_PER_MS, Costs, MemoryModel, minibatches_per_tick
from hetpipe.decide.planner.cuts import NO_LINK, ReachTables, least_cuts
from hetpipe.decide.planner.frozen_profile import cached_profile
from hetpipe.decide.planner.optimizer_slots import slots_of
from hetpipe.decide.planner.partition import layer_cost
from hetpipe.errors import HetpipeError
from hetpipe.job.file import Job
from hetpipe.values.activation import Activation, ActivationCut
from hetpipe.values.cluster import Cluster, LinkSpec, node_of
from hetpipe.values.freezing import FreezeCut
from hetpipe.values.ids import AgentId, DeviceId, LayerIndex, VirtualWorkerIndex
from hetpipe.values.plan import LayerReport, Plan, StagePlan, TensorSpec, VirtualWorkerPlan
from hetpipe.values.profile import LayerProfile, Profile
from hetpipe.values.run import AgentInfo, StageEmulation

_TICKS_PER_SECOND = 1000 * TICKS_PER_MS

#: Bytes of an element of an activation, where only the number of elements is known.
_ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Basis:
    """Data for replanning the virtual workers of a job."""

    profile: Profile
    """Without a forecast its times are sizes only, used to divide a stage's time over its layers."""
    cluster: Cluster
    names: Mapping[tuple[AgentId, DeviceId], DeviceId]
    """The cluster's name for a device of an agent."""
    memory: MemoryModel
    is_forecast: bool
    """Whether the times of the profile are those used for the plan."""
    frozen_layers: int = 0
    """The first so many layers are frozen."""
    is_cached: bool = False
    """Whether what enters the layer behind them is read from a cache."""
    per_wave: Mapping[VirtualWorkerIndex, int] = field(default_factory=dict)
    """N_v of the first virtual workers; empty: that of `memory`, the same for all."""

    def num_in_wave(self, worker: VirtualWorkerPlan) -> int:
        """N_v."""
        return worker.minibatches_per_wave or self.per_wave.get(worker.index, self.memory.minibatches_per_wave)

    def of(self, worker: VirtualWorkerPlan) -> Basis:
        """A copy with the memory for N_v."""
        return replace(self, memory=replace(self.memory, minibatches_per_wave=self.num_in_wave(worker)))

    @property
    def costs(self) -> Costs:
        """The profile on the cluster."""
        profile = cached_profile(self.profile, self.frozen_layers) if self.is_cached else self.profile
        return Costs(profile, self.cluster, self.frozen_layers)

    def knows(self, worker: VirtualWorkerPlan) -> bool:
        """Whether all devices of a virtual worker are described."""
        return all((stage.agent, stage.device) in self.names for stage in worker.stages)

    def kind(self, stage: StagePlan) -> str:
        """The type of a stage's device."""
        return self.cluster.devices[self.names[stage.agent, stage.device]]

    def link(self, stage: StagePlan, other: StagePlan) -> LinkSpec:
        """The link between two stages."""
        here, there = (node_of(self.names[one.agent, one.device]) for one in (stage, other))
        return self.cluster.link(here, there)


@dataclass(frozen=True, slots=True)
class Expected:
    """Reference for a stage."""

    alike: Hashable
    """Equal for stages that should take the same time."""
    seconds: float | None = None
    """Forecast per minibatch; None without one."""


@dataclass(frozen=True, slots=True)
class Recut:
    """A new cut of a virtual worker, with its expected times."""

    worker: VirtualWorkerPlan
    seconds: tuple[float, ...]
    """Expected time of each stage per minibatch."""
    healthy: tuple[float, ...]
    """The same on unimpaired devices."""
    before: float
    """Minibatches per second with the current cut, as measured."""
    after: float
    """Minibatches per second with the new cut."""


def basis_of(run: PlannedRun, agents: Sequence[AgentInfo]) -> Basis:
    """The data for replanning the virtual workers of a job.

    Args:
        run: the job and its first plan.
        agents: with the devices claimed by the job.
    """
    described = run.described
    reserve_bytes = 0 if described is None else described.reserve_bytes
    memory, per_wave = _memory(run.job, reserve_bytes), run.job.minibatches_by_worker(run.plan.virtual_workers)
    if described is None:
        cluster = cluster_of(agents)
        kinds = set(cluster.devices.values())
        real = [(agent.agent, DeviceId(device.device)) for agent in agents for device in agent.devices]
        names = dict(zip(real, cluster.devices, strict=True))
        layers = layers_of(run.plan) if run.model is None else run.model.layers
        return Basis(_sizes(layers, run.job, kinds), cluster, names, memory, is_forecast=False, per_wave=per_wave)
    real = [(stage.agent, stage.device) for worker in run.plan.virtual_workers for stage in worker.stages]
    called = list(described.cluster.devices)
    if run.document is not None:
        called = [stage.device for worker in run.document.virtual_workers for stage in worker.stages]
    names = dict(zip(real, called, strict=False))
    return Basis(described.profile, described.cluster, names, memory, is_forecast=True, per_wave=per_wave)


def basis_if_known(run: PlannedRun, agents: Sequence[AgentInfo]) -> Basis | None:
    """Like `basis_of`; None where devices or layers cannot be described, as where an agent reports no memory."""
    try:
        return basis_of(run, agents)
    except (HetpipeError, ValueError):
        return None


def basis_of_others(run: PlannedRun, agents: Sequence[AgentInfo]) -> Basis | None:
    """The data for planning a virtual worker on devices outside of the job's plan; None where unknown.

    Times come from the profile, if it has their types; the links between them are assumed. What crosses each cut, and
    which ones are forbidden, does not depend on the devices.
    """
    basis, described = basis_if_known(replace(run, described=None), agents), run.described
    if basis is None or described is None:
        return basis
    kinds = set(basis.cluster.devices.values())
    if not all(kinds <= layer.forward_ms.keys() for layer in described.profile.layers):
        return replace(basis, profile=_with_cuts(basis.profile, described.profile))
    memory = _memory(run.job, described.reserve_bytes)
    return replace(basis, profile=described.profile, memory=memory, is_forecast=True)


def expected(basis: Basis, worker: VirtualWorkerPlan) -> tuple[Expected, ...]:
    """The reference of each stage of a virtual worker, before anything is measured."""
    costs = basis.costs
    found = []
    for stage in worker.stages:
        kind = basis.kind(stage)
        seconds = costs.compute_ticks(kind, stage.first_layer, stage.last_layer) / _TICKS_PER_SECOND
        alike = (int(stage.first_layer), int(stage.last_layer), kind)
        found.append(Expected(alike, seconds if basis.is_forecast else None))
    return tuple(found)


def can_recut(basis: Basis, worker: VirtualWorkerPlan) -> bool:
    """Whether there is anything to move, and enough is known of its devices."""
    kinds = {basis.kind(stage) for stage in worker.stages}
    return len(worker.stages) > 1 and (basis.is_forecast or len(kinds) == 1)


def recut(basis: Basis, worker: VirtualWorkerPlan, seconds: Sequence[float], healthy: Sequence[float]) -> Recut | None:
    """The best cut for the same devices, in the same order.

    Args:
        basis: data on layers and devices.
        worker: with its current cut.
        seconds: measured time of each stage per minibatch.
        healthy: its time on an unimpaired device, > 0: the forecast, or the fastest so far of all equal stages.

    Returns:
        The cut, which may be the current one; None if nothing fits in memory.
    """
    basis = basis.of(worker)
    slowness = [one / least for one, least in zip(seconds, healthy, strict=True)]
    costs = _measured(basis, worker, slowness, healthy)
    kinds = [str(index) for index in range(len(worker.stages))]
    moved = _best_cut(basis, costs, worker.stages, kinds)
    if moved is None:
        return None
    promised = tuple(
        costs.compute_ticks(str(index), stage.first_layer, stage.last_layer) / _TICKS_PER_SECOND
        for index, stage in enumerate(moved)
    )
    return Recut(
        worker=replace(worker, stages=moved),
        seconds=promised,
        healthy=tuple(one / off for one, off in zip(promised, slowness, strict=True)),
        before=_rate(basis, costs, worker.stages, kinds),
        after=_rate(basis, costs, moved, kinds),
    )


def left_over(basis: Basis, worker: VirtualWorkerPlan, gone: Collection[AgentId]) -> VirtualWorkerPlan | None:
    """The best cut for a virtual worker's devices without those of missing agents, in their order.

    Returns:
        None if no device is left, or the rest does not have enough memory.
    """
    stages = tuple(stage for stage in worker.stages if stage.agent not in gone)
    if not stages:
        return None
    moved = best_cut(basis.of(worker), stages)
    return None if moved is None else replace(worker, stages=moved)


def best_cut(basis: Basis, stages: Sequence[StagePlan]) -> tuple[StagePlan, ...] | None:
    """The same stages, in the same order, with the best cut by the available data; None if nothing fits in memory."""
    return _best_cut(basis, basis.costs, stages, [basis.kind(stage) for stage in stages])


def freeze_cuts(
    basis: Basis, workers: Sequence[VirtualWorkerPlan], levels: Sequence[int], *, alike: bool
) -> tuple[FreezeCut, ...]:
    """The best cuts of all virtual workers for each number of frozen layers; the last one stays where it is as good.

    Args:
        basis: data on layers and devices.
        workers: as planned, in index order.
        levels: `Freezing.levels`.
        alike: whether all are to be cut alike.
    """
    found: list[FreezeCut] = []
    last = [worker.stages for worker in workers]
    for frozen in sorted({levels.index(level) for level in levels} - {0}):
        at = replace(basis, frozen_layers=levels[frozen])
        last = list(recut_workers([at.of(worker) for worker in workers], last, alike=alike))
        found += [
            FreezeCut(frozen, worker.index, replace(worker, stages=stages).bounds)
            for worker, stages in zip(workers, last, strict=True)
        ]
    return tuple(found)


def activation_cuts(
    basis: Basis, workers: Sequence[VirtualWorkerPlan], activations: Iterable[Activation], *, alike: bool
) -> tuple[ActivationCut, ...]:
    """The best cuts of all virtual workers where other layers become active; the last one stays where it is as good.

    Args:
        basis: data on layers and devices.
        workers: as planned, in index order.
        activations: in order of their clocks; the plan's own cut is that of the start.
        alike: whether all are to be cut alike.
    """
    found: list[ActivationCut] = []
    last = [worker.stages for worker in workers]
    for activation in activations:
        if not activation.clock:
            continue
        at = replace(basis, profile=active_profile(basis.profile, activation.inactive))
        cut = list(recut_workers([at.of(worker) for worker in workers], last, alike=alike))
        for worker, old, new in zip(workers, last, cut, strict=True):
            bounds = replace(worker, stages=new).bounds
            if bounds != replace(worker, stages=old).bounds:
                found.append(ActivationCut(activation.clock, worker.index, bounds))
        last = cut
    return tuple(found)


def with_activation_cuts(run: PlannedRun, agents: Sequence[AgentInfo]) -> PlannedRun:
    """The run with the cuts for its active layers, if its job asks for them, and its devices are known."""
    basis = basis_if_known(run, agents) if run.job.elastic.recut and run.plan.activations else None
    if basis is None:
        return run
    plan, alike = run.plan, run.job.sync.traits.averages_gradients
    cuts = activation_cuts(basis, plan.virtual_workers, plan.activations, alike=alike)
    return replace(run, plan=replace(plan, activation_cuts=cuts))


def recut_workers(
    bases: Sequence[Basis], last: Sequence[tuple[StagePlan, ...]], *, alike: bool
) -> tuple[tuple[StagePlan, ...], ...]:
    """The stages of virtual workers with their best cuts; with the last one where that is as good.

    Args:
        bases: of each, with its N.
        last: the stages of each.
        alike: whether all are to be cut alike.
    """
    best = [best_cut(one, stages) or stages for one, stages in zip(bases, last, strict=True)]
    if alike:
        return tuple(with_cut_of(best_of_all(bases, [*last, *best], last), stages) for stages in last)
    return tuple(
        new if rate_of(one, new) > rate_of(one, old) else old for one, new, old in zip(bases, best, last, strict=True)
    )


def best_of_all(
    bases: Sequence[Basis], cuts: Sequence[Sequence[StagePlan]], workers: Sequence[Sequence[StagePlan]]
) -> Sequence[StagePlan]:
    """Of these cuts the first with which the slowest virtual worker is fastest, among those that fit on all."""

    def slowest(cut: Sequence[StagePlan]) -> float:
        stages = [with_cut_of(cut, of) for of in workers]
        if not all(fits(basis, each) for basis, each in zip(bases, stages, strict=True)):
            return -1.0
        return min(rate_of(basis, each) for basis, each in zip(bases, stages, strict=True))

    return max(cuts, key=slowest)


def with_cut_of(cut: Sequence[StagePlan], stages: Sequence[StagePlan]) -> tuple[StagePlan, ...]:
    """The stages with the layers that those of `cut` have."""
    return tuple(
        replace(stage, first_layer=of.first_layer, last_layer=of.last_layer, memory=())
        for stage, of in zip(stages, cut, strict=True)
    )


def rate_of(basis: Basis, stages: Sequence[StagePlan]) -> float:
    """Minibatches per second of a virtual worker with these stages, as far as they are known."""
    return _rate(basis, basis.costs, stages, [basis.kind(stage) for stage in stages])


def fits(basis: Basis, stages: Sequence[StagePlan]) -> bool:
    """Whether each device has enough memory for its stage."""
    costs = basis.costs
    return all(
        costs.stage_bytes(stage.first_layer, stage.last_layer, stage=index, num_stages=len(stages), memory=basis.memory)
        <= costs.memory_bytes[basis.kind(stage)]
        for index, stage in enumerate(stages)
    )


def gain(recut: Recut, others: Collection[float], *, staleness: int | None) -> float:
    """Speed-up of the job, as a fraction: 0.5 is half as fast again.

    Args:
        recut: of one virtual worker.
        others: minibatches per second of all others (`rates_to_match`).
        staleness: D; with a bound the slowest limits all, with None no virtual worker waits for another.

    >>> one = Recut(VirtualWorkerPlan(0, ()), (), (), before=1.0, after=4.0)
    >>> gain(one, [2.0], staleness=0), gain(one, [2.0], staleness=None), gain(one, [0.5], staleness=0)
    (1.0, 1.0, 0.0)
    """
    whole = sum if staleness is None else min
    return float(whole([recut.after, *others]) / whole([recut.before, *others]) - 1.0)


def rates_to_match(
    basis: Basis,
    workers: Sequence[VirtualWorkerPlan],
    rates: Mapping[VirtualWorkerIndex, float],
    vw: VirtualWorkerIndex,
    *,
    staleness: int | None,
) -> tuple[float, ...]:
    """The minibatches per second of all virtual workers but `vw`, for `gain`.

    With a staleness bound they meet wave by wave: the rate of each is then the one at which `vw` takes as long for its
    waves as the other for its own.
    """

    def scale(other: VirtualWorkerIndex) -> float:
        return 1.0 if staleness is None else basis.num_in_wave(workers[vw]) / basis.num_in_wave(workers[other])

    return tuple(rate * scale(other) for other, rate in rates.items() if other != vw)


def rate(basis: Basis, seconds: Sequence[float]) -> float:
    """Minibatches per second of a virtual worker with these stage times, by the closed form."""
    return _TICKS_PER_SECOND * minibatches_per_tick([round(one * _TICKS_PER_SECOND) for one in seconds], basis.memory)


def played(
    before: VirtualWorkerPlan, after: VirtualWorkerPlan, emulations: Sequence[StageEmulation]
) -> tuple[StageEmulation, ...]:
    """The emulations of the stages of `after`, given those of `before`.

    Every device of `after` must be one of `before`.
    """
    known = {(s.agent, s.device): e for s, e in zip(before.stages, emulations, strict=True)}
    return tuple(
        replace(
            known[new.agent, new.device],
            upstream=known[new.agent, new.device].upstream if index else None,
            downstream=known[new.agent, new.device].downstream if index + 1 < len(after.stages) else None,
        )
        for index, new in enumerate(after.stages)
    )


def _best_cut(
    basis: Basis, costs: Costs, stages: Sequence[StagePlan], kinds: Sequence[str]
) -> tuple[StagePlan, ...] | None:
    """The stages with the smallest maximum stage time, on the same devices; None if nothing fits.

    Args:
        basis: data on layers and devices.
        costs: of the layers on the types `kinds`.
        stages: on their devices.
        kinds: the type of each.
    """
    num_stages, num_layers = len(stages), costs.num_layers
    if num_stages > num_layers:
        return None
    tables = ReachTables(costs, "off")
    sets = [NO_LINK, *(tables.link(basis.link(here, there)) for here, there in pairwise(stages)), NO_LINK]
    reaches = [
        tables.reach(kind, tables.load(kind, index, num_stages, basis.memory), sets[index], sets[index + 1])
        for index, kind in enumerate(kinds)
    ]
    # No stage takes longer than the whole model on the slowest of them, plus twice the transfers over the slowest cut.
    links = [basis.link(here, there) for here, there in pairwise(stages)]
    upper = max(costs.compute[kind][-1] for kind in kinds)
    upper += max((max(costs.arriving(link)) for link in links), default=0)
    upper += max((max(costs.returning(link)) for link in links), default=0)
    found = least_cuts(reaches, num_layers, 0, upper)
    if found is None:
        return None
    return tuple(
        replace(stage, first_layer=LayerIndex(first), last_layer=LayerIndex(last), memory=())
        for stage, (first, last) in zip(stages, pairwise([0, *found.cuts]), strict=True)
    )


def _rate(basis: Basis, costs: Costs, stages: Sequence[StagePlan], kinds: Sequence[str]) -> float:
    around = [None, *(basis.link(here, there) for here, there in pairwise(stages)), None]
    ticks = [
        costs.compute_ticks(kinds[index], stage.first_layer, stage.last_layer)
        + costs.receive_ticks(stage.first_layer, stage.last_layer, around[index], around[index + 1])
        for index, stage in enumerate(stages)
    ]
    return _TICKS_PER_SECOND * minibatches_per_tick(ticks, basis.memory)


def _measured(basis: Basis, worker: VirtualWorkerPlan, slowness: Sequence[float], healthy: Sequence[float]) -> Costs:
    """Costs from measurements; see `_by_place`."""
    owners = [index for index, stage in enumerate(worker.stages) for _ in range(stage.first_layer, stage.last_layer)]
    costs = basis.costs
    kinds = [basis.kind(stage) for stage in worker.stages]
    known = [
        costs.compute_ticks(kind, stage.first_layer, stage.last_layer) / _TICKS_PER_SECOND
        for kind, stage in zip(kinds, worker.stages, strict=True)
    ]

    def scale(layer: int, index: int) -> float:
        owner = owners[layer]
        to_seconds = 1.0 if basis.is_forecast or not known[owner] else healthy[owner] / known[owner]
        return slowness[index] * to_seconds

    return _by_place(basis, worker.stages, scale)


def _by_place(basis: Basis, stages: Sequence[StagePlan], scale: Callable[[int, int], float]) -> Costs:
    """Costs in which every stage's device is a type of its own, named by the stage's index.

    Args:
        basis: data on layers and devices.
        stages: on their devices.
        scale: factor applied to the profile's times on the device of a stage.
    """
    kinds = [basis.kind(stage) for stage in stages]
    layers = tuple(
        layer.model_copy(
            update={
                "forward_ms": {str(i): layer.forward_ms[kind] * scale(at, i) for i, kind in enumerate(kinds)},
                "backward_ms": {str(i): layer.backward_ms[kind] * scale(at, i) for i, kind in enumerate(kinds)},
            }
        )
        for at, layer in enumerate(basis.profile.layers)
    )
    types = {str(index): basis.cluster.device_types[kind] for index, kind in enumerate(kinds)}
    profile = basis.profile.model_copy(update={"layers": layers, "estimated": ()})
    return Costs(profile, basis.cluster.model_copy(update={"device_types": types}), basis.frozen_layers)


def _memory(job: Job, reserve_bytes: int) -> MemoryModel:
    """Memory of stages; an unknown optimizer counts as one without state."""
    options = options_of(job, slots=slots_of(job.optimizer, job.weights) or 0, reserve_bytes=reserve_bytes)
    return options.memory(job.sync_spec().minibatches_per_wave)


def layers_of(plan: Plan) -> list[LayerReport]:
    """The layers as far as given by a plan: their parameters, where parameter servers hold them."""
    parameters: dict[LayerIndex, dict[str, TensorSpec]] = {}
    for piece in plan.slices:
        parameters.setdefault(piece.layer, {})[piece.parameter.name] = piece.parameter
    num_layers = plan.virtual_workers[0].stages[-1].last_layer
    return [
        LayerReport(LayerIndex(at), f"layer {at}", tuple(parameters.get(LayerIndex(at), {}).values()), (), 0)
        for at in range(num_layers)
    ]


def _sizes(layers: Sequence[LayerReport], job: Job, kinds: Collection[str]) -> Profile:
    """Layers whose times are their sizes."""
    return Profile(
        version=1,
        model=str(job.model),
        batch_size=job.batch_size,
        input_bytes=0,
        layers=tuple(_sized(layer, kinds) for layer in layers),
    )


def _with_cuts(profile: Profile, known: Profile) -> Profile:
    """`profile` with the cuts of `known`, another profile of the same model: their bytes, and which are forbidden."""
    layers = tuple(
        layer.model_copy(
            update={"output_bytes": of.output_bytes, "gradient_bytes": of.gradient_bytes, "no_cut": of.no_cut}
        )
        for layer, of in zip(profile.layers, known.layers, strict=True)
    )
    return profile.model_copy(update={"version": 2, "input_bytes": known.input_bytes, "layers": layers})


def _sized(layer: LayerReport, kinds: Collection[str]) -> LayerProfile:
    # A layer takes some time even without parameters.
    times = dict.fromkeys(kinds, 1e-6 * (1 + layer_cost(layer)))
    num_bytes = _ELEMENT_BYTES * layer.activation_elements
    return LayerProfile(
        name=str(layer.index),
        parameter_bytes=sum(parameter.num_bytes for parameter in layer.parameters),
        activation_bytes=num_bytes,
        output_bytes=num_bytes,
        forward_ms=times,
        backward_ms=times,
    )
