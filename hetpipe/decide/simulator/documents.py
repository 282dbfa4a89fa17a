"""Conversion of a plan file, a profile and a cluster to the simulator's input."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from hetpipe.decide.planner.borders import check_borders
from hetpipe.decide.planner.costs import Costs, ticks
from hetpipe.decide.planner.frozen_profile import cached_profile
from hetpipe.decide.planner.options import schedule_for
from hetpipe.decide.planner.placement import Piece
from hetpipe.decide.planner.scaled_profile import scaled_profile
from hetpipe.decide.planner.shard_bytes import PlacedParameters, halved_pushes, parameters_of, shard_nodes
from hetpipe.decide.simulator.plan import SimulatedPlan, SimulatedStage
from hetpipe.errors import PlanError
from hetpipe.values.cluster import Cluster, node_of
from hetpipe.values.freezing import FreezeLineup
from hetpipe.values.plan_document import PlanDocument, PlannedStage, SliceRange
from hetpipe.values.policies import WEIGHT_POLICIES, Schedule, WeightPolicy
from hetpipe.values.profile import Profile
from hetpipe.values.suggest import did_you_mean

_POLICIES: dict[str, WeightPolicy] = {name: name for name in WEIGHT_POLICIES}


def weight_policy(name: str) -> WeightPolicy:
    """The weight policy of a plan file.

    Raises:
        PlanError: there is no policy of that name.
    """
    if name not in _POLICIES:
        raise PlanError(f"there is no weight policy {name!r}; {did_you_mean(name, _POLICIES)}")
    return _POLICIES[name]


def schedule_in(document: PlanDocument) -> Schedule:
    """The schedule of a plan file, with `auto` resolved.

    Raises:
        PlanError: there is no schedule of that name, or the file's weight policy does not support it.
    """
    return schedule_for(weight_policy(document.weights), document.schedule)


def costs_of(document: PlanDocument, profile: Profile, cluster: Cluster, *, frozen_layers: int | None = None) -> Costs:
    """The profile on the cluster, for minibatches of the plan's size.

    Args:
        document: the plan file.
        profile: the layers.
        cluster: the devices and links.
        frozen_layers: the first so many layers are frozen; None: those of the plan.

    The allocation `parallel` chooses that size itself and scales the profile; this function scales it in the same way.

    Raises:
        PlanError: any other plan has a minibatch size that differs from the profile's.
    """
    batch_size = document.batch_size or profile.batch_size
    if batch_size != profile.batch_size and document.allocation != "parallel":
        raise PlanError(
            f"the plan is for minibatches of {batch_size} samples, the profile for {profile.batch_size}; use the "
            "profile that the plan was made with, or plan again with this one"
        )
    frozen = document.frozen_layers if frozen_layers is None else frozen_layers
    if frozen >= len(profile.layers):
        raise PlanError(f"{frozen} layers are frozen, but the profile has {len(profile.layers)}; freeze fewer")
    return Costs(scaled_profile(profile, batch_size), cluster, frozen)


def simulated_plan(document: PlanDocument, costs: Costs) -> SimulatedPlan:
    """The plan in a plan file.

    Args:
        document: the plan file.
        costs: the profile and the cluster of the plan, with times for all device types in use.

    Raises:
        PlanError: the plan does not match them.
    """
    num_layers = document.virtual_workers[0].stages[-1].layers[1]
    if num_layers != costs.num_layers:
        raise PlanError(
            f"the plan has {num_layers} layers, the profile {costs.num_layers}; plan again with this profile"
        )
    workers = tuple(tuple(_stage(stage, costs) for stage in worker.stages) for worker in document.virtual_workers)
    for vw, stages in enumerate(workers):
        check_borders([stage.last for stage in stages[:-1]], costs, vw)
    return SimulatedPlan(
        workers=workers,
        minibatches_per_wave=document.waves,
        placed=placed_parameters(
            document.placement,
            _shards(document, costs.cluster, workers),
            costs,
            halved=halved_pushes(costs.original, document.compress_pushes),
        ),
    )


def frozen_plan(
    document: PlanDocument, profile: Profile, cluster: Cluster, frozen_layers: int, *, is_cached: bool = False
) -> tuple[SimulatedPlan, Costs]:
    """The plan in a plan file while other layers are frozen than it was made for, and its costs then.

    Args:
        document: the plan file.
        profile: the layers.
        cluster: the devices and links.
        frozen_layers: the first so many layers are frozen.
        is_cached: whether what enters the layer behind them is read from a cache.

    Raises:
        PlanError: as of `costs_of` and `simulated_plan`.
    """
    known = cached_profile(profile, frozen_layers) if is_cached else profile
    costs = costs_of(document, known, cluster, frozen_layers=frozen_layers)
    plan = simulated_plan(document, costs_of(document, profile, cluster))
    placed = PlacedParameters(
        plan.placed.pieces, plan.placed.shards, costs.num_layers, frozen_layers, plan.placed.halved
    )
    return replace(plan, placed=placed), costs


def with_cuts(plan: SimulatedPlan, bounds: Mapping[int, Sequence[int]]) -> SimulatedPlan:
    """The plan with other cuts of some virtual workers, which keep everything for their backwards."""
    workers = [
        tuple(
            replace(stage, first=first, last=last, memory=(), policy_ticks=0)
            for stage, (first, last) in zip(stages, pairwise(bounds[vw]), strict=True)
        )
        if vw in bounds
        else stages
        for vw, stages in enumerate(plan.workers)
    ]
    return replace(plan, workers=tuple(workers))


def with_lineup(plan: SimulatedPlan, lineup: FreezeLineup | None, bounds: Mapping[int, Sequence[int]]) -> SimulatedPlan:
    """The plan with the virtual workers of a lineup.

    Args:
        plan: with the virtual workers of the first lineup.
        lineup: those that train; None: those of the plan.
        bounds: virtual worker → its cut; without a lineup those that are not listed keep theirs.
    """
    if lineup is None:
        return with_cuts(plan, bounds)
    places = [stage for stages in plan.workers for stage in stages]
    workers = tuple(tuple(places[device] for device in worker.devices) for worker in lineup.workers)
    waves = (lineup.minibatches_per_wave,) * len(workers)
    own = {at: bounds[vw] for at, vw in enumerate(lineup.members)}
    return with_cuts(replace(plan, workers=workers, minibatches_per_wave=waves), own)


def _shards(document: PlanDocument, cluster: Cluster, workers: Sequence[Sequence[SimulatedStage]]) -> tuple[str, ...]:
    """The node of each shard; by default one on each node that computes, as in the planner."""
    if not document.has_shards:
        return ()
    nodes = [node.name for node in cluster.nodes]
    for node in document.shards:
        if node not in nodes:
            raise PlanError(f"a shard of the plan is on {node!r}, which the cluster lacks; {did_you_mean(node, nodes)}")
    if document.shards:
        return document.shards
    computing = {node_of(stage.device) for stages in workers for stage in stages}
    pieces = (((place,),) if isinstance(place, int) else place for place in document.placement.values())
    highest = max((piece[0] for parts in pieces for piece in parts), default=0)
    return shard_nodes([node for node in nodes if node in computing], max(len(computing), highest + 1))


def placed_parameters(
    placement: Mapping[str, int | tuple[SliceRange, ...]],
    shards: Sequence[str],
    costs: Costs,
    *,
    halved: Collection[str] = frozenset(),
) -> PlacedParameters:
    """The placement of a plan file, prepared for sums over layers.

    Args:
        placement: by parameter if the profile names them, else by layer.
        shards: the node of each shard; none: no placement.
        costs: the profile on the cluster.
        halved: parameters whose pushes have half their bytes.

    Raises:
        PlanError: a parameter is not placed, or has another size.
    """
    pieces: list[Piece] = []
    for parameter in parameters_of(costs.original) if shards else ():
        place = placement.get(parameter.name, ())
        slices = ((place, 0, parameter.num_bytes),) if isinstance(place, int) else place
        if sum(stop - start for _, start, stop in slices) != parameter.num_bytes:
            raise PlanError(
                f"the plan does not place each of the {parameter.num_bytes} bytes of {parameter.name!r} once; plan "
                "again with this profile"
            )
        pieces += [Piece(parameter.name, parameter.layer, shard, start, stop) for shard, start, stop in slices]
    return PlacedParameters(pieces, shards, costs.num_layers, costs.frozen_layers, halved)


def _stage(stage: PlannedStage, costs: Costs) -> SimulatedStage:
    devices = costs.cluster.devices
    kind = devices.get(stage.device)
    if kind is None:
        raise PlanError(f"the cluster has no device {stage.device}; {did_you_mean(stage.device, devices)}")
    if stage.type != kind:
        raise PlanError(f"{stage.device} is a {stage.type} in the plan and a {kind} in the cluster; plan again")
    first, last = stage.layers
    added = 0
    if stage.memory:
        added = max(0, ticks(stage.time_ms) - ticks(stage.receive_ms) - costs.compute_ticks(kind, first, last))
    return SimulatedStage(stage.device, kind, first, last, stage.recompute, stage.memory, added)
