"""Partitioning of the layers on many sets of devices: the cuts and orders that make the slowest stage fastest.

With `ChosenPolicies`, the memory policies of all layers are searched together with the cut (`policy_cuts`), for the
order of devices that is best if whole stages recompute where they would not fit.

Tables shared by calls are cached, so an allocation search can make thousands of them. If nothing fits, `explain`
describes the shortage and possible changes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from hetpipe.decide.planner.borders import forbidden_cuts, too_few_cuts
from hetpipe.decide.planner.costs import Costs, MemoryModel, StagePlace
from hetpipe.decide.planner.cuts import FAR, LinkSet, ReachTables, Recompute
from hetpipe.decide.planner.layer_memory import LayerMemoryPlan
from hetpipe.decide.planner.orders import DeviceMix, KindIndex, MixShape, Optimum, OrderSearch, OrderWithCuts, Seat
from hetpipe.decide.planner.waves import choices
from hetpipe.errors import PlanError
from hetpipe.values.cluster import node_of
from hetpipe.values.ids import DeviceId
from hetpipe.values.memory import LayerPolicy
from hetpipe.values.policies import LEAST_MEMORY
from hetpipe.values.quantities import bytes_text
from hetpipe.values.suggest import did_you_mean, join_names

if TYPE_CHECKING:
    from hetpipe.decide.planner.policy_cuts import PolicyCuts

#: Number of states beyond which a search keeps only the most promising ones …
MAX_STATES = 20_000_000

#: … and the number of device sets it then keeps per stage.
BEAM_WIDTH = 256


#: Partial choices of memory policies that are examined to find out whether any fit.
_CHOICES_OF_ANY = 10_000


@dataclass(frozen=True, slots=True)
class StageCut:
    """One stage: layers [first, last) on a device."""

    device: DeviceId
    kind: str
    """The device's type."""
    first: int
    last: int
    recompute: bool
    ticks: int
    """The stage time: compute, including chosen recomputation, and the transfers that count towards the stage."""
    receive_ticks: int
    """The transfers within `ticks`."""
    memory_bytes: int
    memory: tuple[LayerPolicy, ...] = ()
    """Memory policy of each layer, if they are chosen; empty: as `recompute` says."""
    policy_ticks: int = 0
    """The time within `ticks` that these policies add to forward and backward."""


@dataclass(frozen=True, slots=True)
class ChosenPolicies:
    """Memory policies are chosen for each layer."""

    host_bytes_per_second: float | None = None
    """Speed of the link to host memory; None: unknown, and nothing is swapped."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A whole virtual worker, first stage first."""

    stages: tuple[StageCut, ...]
    num_states: int
    """Size of the search space: layers × merged uses of the nodes × possible nodes of the last stage."""
    lower_bound_ticks: int
    """Proven: no partition of these devices has a smaller bottleneck; with chosen policies, none in this order."""

    @property
    def bottleneck_ticks(self) -> int:
        """The largest stage time."""
        return max(stage.ticks for stage in self.stages)

    @property
    def gap(self) -> float:
        """Upper bound on the relative distance of the bottleneck from the optimum; 0.0 if exact."""
        excess = self.bottleneck_ticks - self.lower_bound_ticks
        return excess / max(1, self.lower_bound_ticks)


@dataclass(frozen=True, slots=True)
class _Given:
    """The devices of a call as a shape, with their assignment to it."""

    shape: MixShape
    devices: Mapping[Seat, Sequence[DeviceId]]
    """Equivalent devices of each seat, in the order of the cluster."""


class Partitioner:
    """Partitions of one profile on one cluster.

    Caches tables of reaches, and the result for every memory model and shape of devices (the types on each node and the
    links among them): a set of devices equivalent to an earlier one costs next to nothing.
    """

    def __init__(
        self,
        costs: Costs,
        *,
        recompute: Recompute = "auto",
        chosen: ChosenPolicies | None = None,
        max_states: int = MAX_STATES,
        beam_width: int = BEAM_WIDTH,
    ) -> None:
        """Create a partitioner.

        Args:
            costs: the profile on the cluster.
            recompute: `on` or `off` for every stage; `auto`: a stage recomputes only if it would not fit otherwise.
            chosen: the policies of layers are chosen instead; None: they are not.
            max_states: results are exact up to this size of the search space (`Partition.num_states`). Beyond it, only
                the most promising states are kept; `Partition.gap` bounds the distance from the optimum.
            beam_width: beyond `max_states`, the number of sets of used devices kept per stage.
        """
        #: The profile on the cluster.
        self.costs = costs
        self.recompute: Recompute = recompute
        self.chosen = chosen
        self._max_states = max_states
        self._beam_width = beam_width
        self._tables = ReachTables(costs, recompute)
        self._mixes: dict[MixShape, DeviceMix] = {}
        self._optima: dict[tuple[MixShape, MemoryModel], Optimum] = {}
        self._fits: dict[tuple[MixShape, MemoryModel], OrderWithCuts | None] = {}
        self._with_policies: dict[tuple[MixShape, MemoryModel, int], tuple[tuple[Seat, ...], PolicyCuts] | None] = {}
        self._kinds = costs.cluster.devices
        self._positions = {device: position for position, device in enumerate(self._kinds)}
        self._links: dict[tuple[str, str], LinkSet] = {}

    def find(self, devices: Sequence[DeviceId], memory: MemoryModel) -> Partition | None:
        """The partition with the smallest largest stage time over all cuts and all orders of the devices.

        Every device gets at least one layer, and no more than fit in its memory. The result is a function of the set of
        devices, which are processed in the order of the cluster; ties between best partitions are broken
        deterministically. For the order found, stages end as late as the bottleneck allows, from the last cut to the
        first.

        Args:
            devices: the devices, each once.
            memory: memory model of stages: weight policy, N, optimizer and reserve.

        Returns:
            None if nothing fits or, beyond `max_states`, nothing that fits was found.

        Raises:
            PlanError: a device is unknown, duplicate, or of a type without times.
        """
        given = self._given(devices)
        if len(devices) > self.costs.max_stages:
            return None
        mix = self._mix(given.shape)
        optimum = self._optima.get((given.shape, memory))
        if optimum is None:
            optimum = self._search(mix, memory).solve(self._width(mix), lambda: self.fits(devices, memory))
            self._optima[given.shape, memory] = optimum
        if self.chosen is not None:
            return self._partition_with_policies(given, optimum, memory)
        if optimum.found is None:
            return None
        stages = tuple(self._stages(given, optimum.found, memory))
        return Partition(stages, self._num_states(mix), optimum.lower_bound_ticks)

    # -- with the policies of layers ---------------------------------------------------------------------------------

    def stage_place(
        self, order: Sequence[DeviceId], stage: int, memory: MemoryModel, chosen: ChosenPolicies
    ) -> StagePlace:
        """The place of a stage in an order of devices."""
        nodes = [node_of(device) for device in order]
        link = self.costs.cluster.link
        before = link(nodes[stage - 1], nodes[stage]) if stage else None
        behind = link(nodes[stage], nodes[stage + 1]) if stage + 1 < len(order) else None
        return self.costs.place(
            self._kinds[order[stage]],
            (stage, len(order)),
            memory,
            links=(before, behind),
            host_bytes_per_second=chosen.host_bytes_per_second,
        )

    def _partition_with_policies(
        self, given: _Given, optimum: Optimum, memory: MemoryModel, *, enough_ticks: int = 0
    ) -> Partition | None:
        """The best cuts and policies in the order of `optimum`, or some within `enough_ticks`."""
        assert self.chosen is not None
        key = (given.shape, memory, enough_ticks)
        if key not in self._with_policies:
            orders = self._orders(given, optimum)
            found = [each for seats in orders if (each := self._cut(given, seats, memory, enough_ticks))]
            self._with_policies[key] = min(found, key=lambda each: each[1].rank, default=None)
        best = self._with_policies[key]
        if best is None:
            return None
        seats, cuts = best
        order = _devices_of(given, seats)
        stages = []
        for index, (device, planned) in enumerate(zip(order, cuts.stages, strict=True)):
            place = self.stage_place(order, index, memory, self.chosen)
            stages.append(stage_cut(device, self._kinds[device], place, (planned.first, planned.last), planned.memory))
        return Partition(tuple(stages), self._num_states(self._mix(given.shape)), cuts.lower_bound_ticks)

    def _orders(self, given: _Given, optimum: Optimum) -> list[tuple[Seat, ...]]:
        """The order of `optimum`; if it has none, with the largest memory first, and last."""
        if optimum.found is not None:
            return [optimum.found.seats]
        memory_of = self.costs.memory_bytes
        seats = [seat for seat, devices in given.devices.items() for _ in devices]
        by_memory = sorted(seats, key=lambda seat: -memory_of[given.shape.kinds[seat.kind]])
        return list(dict.fromkeys((tuple(by_memory), tuple(reversed(by_memory)))))

    def _cut(
        self, given: _Given, seats: tuple[Seat, ...], memory: MemoryModel, enough_ticks: int
    ) -> tuple[tuple[Seat, ...], PolicyCuts] | None:
        # Here, so that a coordinator starts without NumPy, which this search alone needs.
        from hetpipe.decide.planner.policy_cuts import MAX_CHOICES, cut_with_policies

        assert self.chosen is not None
        order = _devices_of(given, seats)
        places = [self.stage_place(order, stage, memory, self.chosen) for stage in range(len(order))]
        cuts = cut_with_policies(
            places,
            self.costs.allowed,
            enough_ticks=enough_ticks,
            max_choices=_CHOICES_OF_ANY if enough_ticks else MAX_CHOICES,
        )
        return None if cuts is None else (seats, cuts)

    def fits(self, devices: Sequence[DeviceId], memory: MemoryModel) -> bool:
        """Whether `find` has a result; faster than `find`. False negatives are possible unless `decides_fit`."""
        return self.any_fit(devices, memory) is not None

    def any_fit(self, devices: Sequence[DeviceId], memory: MemoryModel) -> tuple[StageCut, ...] | None:
        """The stages of some partition that fits, not necessarily the best; None unless `fits`."""
        given = self._regardless_of_nodes(devices)
        found = self._any_fit(given, memory)
        if found is None and self.chosen is not None and len(devices) <= self.costs.max_stages:
            partition = self._partition_with_policies(given, Optimum(None, 0), memory, enough_ticks=FAR)
            return None if partition is None else partition.stages
        return None if found is None else tuple(self._stages(given, found, memory))

    def decides_fit(self, devices: Sequence[DeviceId]) -> bool:
        """Whether the search of `fits` is exact, that is within `max_states`."""
        return self._width(self._mix(self._regardless_of_nodes(devices).shape)) is None

    def _regardless_of_nodes(self, devices: Sequence[DeviceId]) -> _Given:
        """The devices as if on one node: whether something fits depends on their types alone."""
        given = self._given(devices)
        totals = tuple(sum(column) for column in zip(*given.shape.counts, strict=True))
        alike: dict[Seat, list[DeviceId]] = {}
        for seat, found in given.devices.items():
            alike.setdefault(Seat(0, seat.kind), []).extend(found)
        return _Given(
            MixShape(given.shape.kinds, (totals,), ((self._tables.link(self.costs.cluster.links.intra_node),),)), alike
        )

    def _any_fit(self, given: _Given, memory: MemoryModel) -> OrderWithCuts | None:
        key = (given.shape, memory)
        if key not in self._fits:
            mix = self._mix(given.shape)
            few = mix.num_stages <= self.costs.max_stages
            self._fits[key] = self._search(mix, memory).any_plan(self._width(mix)) if few else None
        return self._fits[key]

    def _search(self, mix: DeviceMix, memory: MemoryModel) -> OrderSearch:
        return OrderSearch(mix, self._tables, memory, self.costs.num_layers)

    def _mix(self, shape: MixShape) -> DeviceMix:
        found = self._mixes.get(shape)
        if found is None:
            found = self._mixes[shape] = DeviceMix(shape)
        return found

    def _num_states(self, mix: DeviceMix) -> int:
        return mix.num_fronts() * self.costs.num_layers

    def _width(self, mix: DeviceMix) -> int | None:
        return None if self._num_states(mix) <= self._max_states else self._beam_width

    def _given(self, devices: Sequence[DeviceId]) -> _Given:
        unknown = [device for device in devices if device not in self._kinds]
        if unknown:
            raise PlanError(f"the cluster has no device {unknown[0]}; {did_you_mean(unknown[0], self._kinds)}")
        if not devices or len(set(devices)) < len(devices):
            raise PlanError(f"a virtual worker needs devices, each of them once; got {', '.join(devices) or 'none'}")
        compute = self.costs.compute
        missing = sorted({self._kinds[device] for device in devices} - compute.keys())
        if missing:
            raise PlanError(f"the profile has no times for type {missing[0]}; profile it, or leave its devices out")
        kinds = sorted({self._kinds[device] for device in devices}, key=lambda kind: (compute[kind][-1], kind))
        alike: dict[tuple[str, str], list[DeviceId]] = {}
        for device in sorted(devices, key=self._positions.__getitem__):
            alike.setdefault((node_of(device), self._kinds[device]), []).append(device)
        names = list(dict.fromkeys(name for name, _ in alike))
        counts = {name: tuple(len(alike.get((name, kind), ())) for kind in kinds) for name in names}
        names.sort(key=lambda name: counts[name], reverse=True)
        shape = MixShape(
            tuple(kinds),
            tuple(counts[name] for name in names),
            tuple(tuple(self._link(name, other) for other in names) for name in names),
        )
        return _Given(
            shape,
            {Seat(names.index(name), KindIndex(kinds.index(kind))): found for (name, kind), found in alike.items()},
        )

    def _link(self, node: str, other: str) -> LinkSet:
        found = self._links.get((node, other))
        if found is None:
            found = self._links[node, other] = self._tables.link(self.costs.cluster.link(node, other))
        return found

    def _stages(self, given: _Given, found: OrderWithCuts, memory: MemoryModel) -> Iterator[StageCut]:
        """The stages found, with device names and figures as defined in `costs`."""
        devices = _devices_of(given, found.seats)
        link = self.costs.cluster.link
        links = [None, *(link(node_of(a), node_of(b)) for a, b in pairwise(devices)), None]
        for stage, (device, (first, last)) in enumerate(zip(devices, pairwise((0, *found.cuts)), strict=True)):
            kind = self._kinds[device]
            need = partial(self.costs.stage_bytes, first, last, stage=stage, num_stages=len(devices), memory=memory)
            recompute = self.recompute == "on" or (self.recompute == "auto" and need() > self.costs.memory_bytes[kind])
            transfers = self.costs.receive_ticks(first, last, links[stage], links[stage + 1])
            yield StageCut(
                device=device,
                kind=kind,
                first=first,
                last=last,
                recompute=recompute,
                ticks=self.costs.compute_ticks(kind, first, last, recompute=recompute) + transfers,
                receive_ticks=transfers,
                memory_bytes=need(recompute=recompute),
            )


def stage_cut(
    device: DeviceId, kind: str, place: StagePlace, layers: tuple[int, int], plan: LayerMemoryPlan
) -> StageCut:
    """The stage of layers [first, last) at a place, with its chosen memory policies."""
    figures, cost = place.figures(*layers), plan.cost
    return StageCut(
        device=device,
        kind=kind,
        first=layers[0],
        last=layers[1],
        recompute=False,
        ticks=cost.ticks,
        receive_ticks=figures.receive_ticks,
        memory_bytes=cost.num_bytes,
        memory=plan.policies,
        policy_ticks=cost.ticks - figures.receive_ticks - figures.compute_ticks,
    )


def _devices_of(given: _Given, seats: Sequence[Seat]) -> list[DeviceId]:
    """A device for each seat."""
    left = {seat: iter(devices) for seat, devices in given.devices.items()}
    return [next(left[seat]) for seat in seats]


# -- the words of an `InfeasiblePlan` ----------------------------------------------------------------------------------


_MOST_LISTED = 8


def explain(partitioner: Partitioner, devices: Sequence[DeviceId], memory: MemoryModel) -> str:
    """Description of the memory shortage (layer or stage, device, bytes) and of changes that would help.

    The shortage is minimal: over all cuts and orders, the smallest excess over a device's memory.

    Args:
        partitioner: a partitioner whose `find` returns None for the other arguments.
        devices: devices of the virtual worker.
        memory: memory model of its stages.
    """
    if len(devices) > partitioner.costs.max_stages:
        costs = partitioner.costs
        fix = f"use at most {costs.max_stages} devices per virtual worker"
        return too_few_cuts(len(devices), costs.max_stages, forbidden_cuts(costs.profile), fix=fix)
    missing_bytes = shortage_bytes(partitioner, devices, memory)
    enough, missing = _with_more(memory, missing_bytes), bytes_text(missing_bytes, round_up=True)
    stages = partitioner.any_fit(devices, enough)
    assert stages is not None, "a cut with this shortage was just found"
    capacities = partitioner.costs.memory_bytes
    index, fullest = max(enumerate(stages), key=lambda item: item[1].memory_bytes - capacities[item[1].kind])
    changes = [*_changes(partitioner, devices, memory), f"give every device {missing} more"]
    tried = (
        "no cuts and no order of" if partitioner.decides_fit(devices) else "none of the most promising partitions on"
    )
    return (
        f"{tried} {_listed(devices)} fit; at best {_named(partitioner, index, fullest)} lacks {missing} "
        f"on {fullest.device} (type {fullest.kind}, {bytes_text(capacities[fullest.kind])}); {join_names(changes)}"
    )


def _listed(devices: Sequence[DeviceId]) -> str:
    return ", ".join(devices) if len(devices) <= _MOST_LISTED else f"the {len(devices)} devices"


def _named(partitioner: Partitioner, index: int, stage: StageCut) -> str:
    names = [layer.name for layer in partitioner.costs.profile.layers[stage.first : stage.last]]
    if len(names) == 1:
        return f"layer {stage.first} ({names[0]}), alone as stage {index},"
    return f"stage {index} with layers {stage.first} to {stage.last - 1} ({names[0]} to {names[-1]})"


def _with_more(memory: MemoryModel, extra_bytes: int) -> MemoryModel:
    """The model for devices with `extra_bytes` more memory."""
    return replace(memory, reserve_bytes=memory.reserve_bytes - extra_bytes)


def shortage_bytes(partitioner: Partitioner, devices: Sequence[DeviceId], memory: MemoryModel) -> int:
    """The least number of bytes that must be added to every device for something to fit; for chosen policies about."""
    costs, num_stages = partitioner.costs, len(devices)
    enough = max(
        costs.stage_bytes(0, costs.num_layers, stage=stage, num_stages=num_stages, memory=memory)
        + memory.in_flight(stage, num_stages) * max(costs.cut_bytes)
        for stage in range(num_stages)
    )
    # Policies take longer to choose: a thousandth is precise enough.
    steps = range(0, enough + 1, 1 if partitioner.chosen is None else max(1, enough >> 10))
    return steps[_first(steps, lambda extra: partitioner.fits(devices, _with_more(memory, extra)))]


def _changes(partitioner: Partitioner, devices: Sequence[DeviceId], memory: MemoryModel) -> Iterator[str]:
    """Single changes with which something fits, the least costly for training first."""

    def misfit(changed: MemoryModel) -> bool:
        return not partitioner.fits(devices, changed)

    if (
        partitioner.chosen is None
        and partitioner.recompute != "auto"
        and Partitioner(partitioner.costs).fits(devices, memory)
    ):
        yield "set --recompute auto"
    smaller = choices([memory.minibatches_per_wave - 1], [len(devices)], memory.weights, memory.accumulate)
    num_fitting = _first(smaller, lambda n: misfit(replace(memory, minibatches_per_wave=n)))
    if num_fitting > 0:
        yield f"lower --minibatches-per-wave to {smaller[num_fitting - 1]}"
    num_fitting = _first(range(memory.optimizer_slots), lambda slots: misfit(replace(memory, optimizer_slots=slots)))
    if num_fitting > 0:
        yield f"take an optimizer with fewer tensors per parameter (--optimizer-slots {num_fitting - 1})"
    if memory.schedule == "gpipe" and not misfit(replace(memory, schedule="1f1b")):
        yield "set --schedule 1f1b"
    if memory.weights != LEAST_MEMORY and not misfit(replace(memory, weights=LEAST_MEMORY)):
        yield f"set --weights {LEAST_MEMORY}"
    offered = partitioner.costs.cluster.devices
    spare = {kind: device for device, kind in reversed(offered.items()) if device not in devices}
    for kind in sorted(spare.keys() & partitioner.costs.compute.keys()):
        if partitioner.fits([*devices, spare[kind]], memory):
            yield f"add {spare[kind]} (type {kind})"
            break


def _first(values: range, holds: Callable[[int], bool]) -> int:
    """Number of leading `values` for which the monotonic predicate `holds` is false."""
    return bisect_left(values, True, key=holds)  # noqa: FBT003 - the value looked for
