"""The pipelines that a virtual worker's devices can form: the partitions considered by searches over allocations.

With N ≥ K (and no `flush`) the rate of a pipeline is 1 over its largest stage time, so the min-max partition is the
fastest. With fewer minibatches in flight, and under `flush`, the sum of all stage times matters as well; and if a
network card is the bottleneck, so do the bytes that cross nodes. Therefore:

* up to `LISTED` combinations of cuts and orders, all are considered (`every_partition`): exact for any objective;
* beyond that, only the min-max partition: the fastest with N ≥ K; with smaller N the fastest is at most K/N times as
  fast, under `flush` at most 1 + (K − 1)/N times.

The pipelines considered depend on the virtual worker's devices only, never on the rest of the cluster. Two sets of
devices are equivalent for planning if their *shapes* are equal. A shape contains the types that share a node, but not
the node's identity, unless a link of that node has its own figures. Every search works on shapes and maps back to
device names at the end, so that a thousand devices of four types cost little more than sixteen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, pairwise, takewhile

from hetpipe.decide.planner.costs import Costs, MemoryModel, minibatches_per_tick
from hetpipe.decide.planner.cuts import Recompute
from hetpipe.decide.planner.layer_memory import Budget, choose_policies
from hetpipe.decide.planner.partitioner import ChosenPolicies, Partitioner, StageCut, stage_cut
from hetpipe.values.cluster import Cluster, LinkSpec, node_of
from hetpipe.values.ids import DeviceId

# -- when are two sets of devices the same? ----------------------------------------------------------------------------


#: Per node, in canonical order: its name if its links are special (else empty), and the types used on it, sorted.
Shape = tuple[tuple[str, tuple[str, ...]], ...]


class Shapes:
    """Computes shapes in one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        """Index the cluster.

        Args:
            cluster: the devices and links.
        """
        self._special = {name for override in cluster.links.overrides for name in override.between}
        self._types = cluster.devices
        self._rank = {device: rank for rank, device in enumerate(self._types)}
        self._node_rank = {node.name: rank for rank, node in enumerate(cluster.nodes)}

    def shape_of(self, devices: Iterable[DeviceId]) -> tuple[Shape, tuple[DeviceId, ...]]:
        """The shape, and the devices in its order: by node, within a node by type, otherwise as in the cluster."""
        by_node: dict[str, list[DeviceId]] = {}
        for device in devices:
            by_node.setdefault(node_of(device), []).append(device)
        groups = []
        for node, members in by_node.items():
            members.sort(key=lambda device: (self._types[device], self._rank[device]))
            name = node if node in self._special else ""
            kinds = tuple(self._types[device] for device in members)
            groups.append(((name, kinds), self._node_rank[node], members))
        groups.sort(key=lambda group: group[:2])
        return tuple(shape for shape, _, _ in groups), tuple(device for _, _, members in groups for device in members)


# -- every way to cut and order few devices ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One virtual worker: its stages, first to last, and their combined rate."""

    stages: tuple[StageCut, ...]
    minibatches_per_tick: float
    """Closed-form rate."""

    @property
    def bottleneck_ticks(self) -> int:
        """The largest stage time."""
        return max(stage.ticks for stage in self.stages)


def pipeline(stages: Sequence[StageCut], memory: MemoryModel) -> Pipeline:
    """The stages with their closed-form rate."""
    return Pipeline(tuple(stages), minibatches_per_tick([stage.ticks for stage in stages], memory))


def num_partitions(shape: Shape, max_stages: int) -> int:
    """Number of partitions, ignoring memory: orders that differ in types and nodes, times choices of cuts."""
    num_devices = sum(len(kinds) for _, kinds in shape)
    if num_devices > max_stages:
        return 0
    orders = math.factorial(num_devices)
    for _, kinds in shape:
        for count in Counter(kinds).values():
            orders //= math.factorial(count)
    return orders * math.comb(max_stages - 1, num_devices - 1)


def every_partition(
    costs: Costs,
    devices: Sequence[DeviceId],
    memory: MemoryModel,
    recompute: Recompute,
    chosen: ChosenPolicies | None = None,
) -> Iterator[Pipeline]:
    """Yield every partition that fits in memory, in a fixed order; all devices are used.

    A stage recomputes only if necessary (`auto`), always (`on`) or never (`off`); with `chosen`, it has the memory
    policies with which it is fastest.
    """
    if len(devices) > costs.max_stages:
        return
    stages = _Stages(costs, memory, recompute, chosen, len(devices))
    for order in _orders(devices, costs.cluster.devices):
        nodes = [node_of(device) for device in order]
        links = [None, *(costs.cluster.link(here, behind) for here, behind in pairwise(nodes)), None]
        for inner in combinations(costs.allowed, len(order) - 1):
            cuts = (0, *inner, costs.num_layers)
            found = []
            for stage, device in enumerate(order):
                cut = stages.cut(stage, device, cuts[stage], cuts[stage + 1], (links[stage], links[stage + 1]))
                if cut is None:
                    break
                found.append(cut)
            else:
                yield pipeline(found, memory)


#: Partial choices of memory policies that are examined for one of many stages.
_FEW_CHOICES = 2_000


class _Stages:
    """Cache of stages by position, device, layers and links; most are requested many times."""

    def __init__(
        self, costs: Costs, memory: MemoryModel, recompute: Recompute, chosen: ChosenPolicies | None, num_stages: int
    ) -> None:
        self._costs, self._memory, self._num_stages, self._chosen = costs, memory, num_stages, chosen
        self._ways = {"auto": (False, True), "on": (True,), "off": (False,)}[recompute]
        self._types = costs.cluster.devices
        self._known: dict[object, StageCut | None] = {}

    def cut(
        self, stage: int, device: DeviceId, first: int, last: int, links: tuple[LinkSpec | None, LinkSpec | None]
    ) -> StageCut | None:
        """The stage; None if it does not fit."""
        key = (stage, device, first, last, links)
        if key not in self._known:
            self._known[key] = self._make(stage, device, first, last, links)
        return self._known[key]

    def _make(
        self, stage: int, device: DeviceId, first: int, last: int, links: tuple[LinkSpec | None, LinkSpec | None]
    ) -> StageCut | None:
        costs, kind = self._costs, self._types[device]
        if self._chosen is not None:
            place = costs.place(
                kind,
                (stage, self._num_stages),
                self._memory,
                links=links,
                host_bytes_per_second=self._chosen.host_bytes_per_second,
            )
            plan = choose_policies(place.figures(first, last), place.memory_bytes, budget=Budget(_FEW_CHOICES))
            return None if plan is None else stage_cut(device, kind, place, (first, last), plan)
        for recompute in self._ways:
            num_bytes = costs.stage_bytes(
                first, last, stage=stage, num_stages=self._num_stages, memory=self._memory, recompute=recompute
            )
            if num_bytes <= costs.memory_bytes[kind]:
                received = costs.receive_ticks(first, last, *links)
                computed = costs.compute_ticks(kind, first, last, recompute=recompute)
                return StageCut(device, kind, first, last, recompute, computed + received, received, num_bytes)
        return None


def _orders(devices: Sequence[DeviceId], types: dict[DeviceId, str]) -> Iterator[list[DeviceId]]:
    """Orders that differ in types and nodes; interchangeable devices keep the given order."""
    by_class: dict[tuple[str, str], list[DeviceId]] = {}
    for device in devices:
        by_class.setdefault((types[device], node_of(device)), []).append(device)
    members = list(by_class.values())
    used = [0] * len(members)

    def extend(order: list[DeviceId]) -> Iterator[list[DeviceId]]:
        if len(order) == len(devices):
            yield order
            return
        for index, alike in enumerate(members):
            if used[index] < len(alike):
                used[index] += 1
                yield from extend([*order, alike[used[index] - 1]])
                used[index] -= 1

    return extend([])


# -- those to consider -------------------------------------------------------------------------------------------------


#: Limit on partitions for enumeration.
LISTED = 1_000

#: Cache size for fastest pipelines by device names: some values of N on a large cluster.
_REMEMBERED = 8_192


@dataclass(frozen=True, slots=True)
class _ShapePipelines:
    """The pipelines of one shape for one N, on the devices of the first request."""

    devices: tuple[DeviceId, ...]
    pipelines: tuple[Pipeline, ...]

    def of(self, devices: tuple[DeviceId, ...]) -> tuple[Pipeline, ...]:
        """The same pipelines on the devices of another virtual worker of this shape."""
        if devices == self.devices:
            return self.pipelines
        names = dict(zip(self.devices, devices, strict=True))
        return tuple(
            replace(found, stages=tuple(replace(stage, device=names[stage.device]) for stage in found.stages))
            for found in self.pipelines
        )


class Pipelines:
    """Finds pipelines; cached by shape."""

    def __init__(
        self, costs: Costs, memory_at: Callable[[int], MemoryModel], recompute: Recompute, partitioner: Partitioner
    ) -> None:
        """Create an empty cache.

        Args:
            costs: the profile on the cluster.
            memory_at: N → memory model of stages.
            recompute: whether stages may recompute.
            partitioner: finds min-max partitions, with the same `recompute`.
        """
        self._costs = costs
        self._memory_at = memory_at
        self._recompute: Recompute = recompute
        self._partitioner = partitioner
        self._shapes = Shapes(costs.cluster)
        self._min_max: dict[tuple[Shape, int], _ShapePipelines] = {}
        self._listed: dict[tuple[Shape, int], _ShapePipelines] = {}
        self._num: dict[Shape, int] = {}
        #: Different placements request the same devices.
        self._fastest_of = lru_cache(maxsize=_REMEMBERED)(self._fastest)

    def fastest(self, devices: Sequence[DeviceId], minibatches_per_wave: int) -> Pipeline | None:
        """The first of `several`."""
        return self._fastest_of(tuple(devices), minibatches_per_wave)

    def rate(self, devices: Sequence[DeviceId], minibatches_per_wave: int) -> float:
        """Minibatches per tick of the fastest pipeline; 0 if none fits in memory."""
        known, _ = self._know_fastest(devices, minibatches_per_wave)
        return known.pipelines[0].minibatches_per_tick if known.pipelines else 0.0

    def min_max_rate(self, devices: Sequence[DeviceId], minibatches_per_wave: int) -> float:
        """Minibatches per tick of the min-max partition: at most that of the fastest, and quicker to find."""
        known, _ = self._know_min_max(devices, minibatches_per_wave)
        return known.pipelines[0].minibatches_per_tick if known.pipelines else 0.0

    def several(self, devices: Sequence[DeviceId], minibatches_per_wave: int) -> tuple[Pipeline, ...]:
        """All considered pipelines, fastest first; ties are ordered by the largest stage time, smallest first."""
        known, ordered = self._know_several(devices, minibatches_per_wave)
        return known.of(ordered)

    def shortest(self, devices: Sequence[DeviceId], minibatches_per_wave: int, rate: float) -> Pipeline:
        """The first of `several` with the smallest largest stage time and at least `rate` minibatches per tick.

        Args:
            devices: devices of a virtual worker that fits in memory.
            minibatches_per_wave: N.
            rate: at most the rate of the fastest.
        """
        known, ordered = self._know_fastest(devices, minibatches_per_wave)
        enough = takewhile(lambda one: one.minibatches_per_tick >= rate, known.pipelines)
        best = min(enough, key=lambda one: one.bottleneck_ticks)
        return replace(known, pipelines=(best,)).of(ordered)[0]

    def num_several(self, devices: Sequence[DeviceId]) -> int:
        """Upper bound on the length of `several`."""
        return self._num_several(self._shapes.shape_of(devices)[0])

    def fits(self, devices: Sequence[DeviceId], minibatches_per_wave: int) -> bool:
        """Whether any pipeline fits in memory."""
        return self._partitioner.fits(devices, self._memory_at(minibatches_per_wave))

    def _fastest(self, devices: tuple[DeviceId, ...], minibatches_per_wave: int) -> Pipeline | None:
        known, ordered = self._know_fastest(devices, minibatches_per_wave)
        return next(iter(replace(known, pipelines=known.pipelines[:1]).of(ordered)), None)

    def _know_fastest(
        self, devices: Sequence[DeviceId], minibatches_per_wave: int
    ) -> tuple[_ShapePipelines, tuple[DeviceId, ...]]:
        full = minibatches_per_wave >= len(devices) and not self._memory_at(minibatches_per_wave).policy.drains
        return (self._know_min_max if full else self._know_several)(devices, minibatches_per_wave)

    def _know_min_max(
        self, devices: Sequence[DeviceId], minibatches_per_wave: int
    ) -> tuple[_ShapePipelines, tuple[DeviceId, ...]]:
        shape, ordered = self._shapes.shape_of(devices)
        known = self._min_max.get((shape, minibatches_per_wave))
        if known is None:
            known = self._min_max[shape, minibatches_per_wave] = self._find(ordered, minibatches_per_wave)
        return known, ordered

    def _find(self, devices: tuple[DeviceId, ...], minibatches_per_wave: int) -> _ShapePipelines:
        """A larger N leaves less memory, so the partition for N = 1 is the best for every N with which it fits."""
        memory = self._memory_at(minibatches_per_wave)
        if minibatches_per_wave > 1:
            least, _ = self._know_min_max(devices, 1)
            if not least.pipelines:
                return least
            again = self._with(least.pipelines[0].stages, memory)
            if again is not None:
                return _ShapePipelines(least.devices, (again,))
        found = self._partitioner.find(devices, memory)
        return _ShapePipelines(devices, (pipeline(found.stages, memory),) if found is not None else ())

    def _with(self, stages: Sequence[StageCut], memory: MemoryModel) -> Pipeline | None:
        """The same cuts with another N; None if they do not fit."""
        found = []
        for index, stage in enumerate(stages):
            num_bytes = self._costs.bytes_of(stage, (index, len(stages)), memory)
            if num_bytes > self._costs.memory_bytes[stage.kind]:
                return None
            found.append(replace(stage, memory_bytes=num_bytes))
        return pipeline(found, memory)

    def _know_several(
        self, devices: Sequence[DeviceId], minibatches_per_wave: int
    ) -> tuple[_ShapePipelines, tuple[DeviceId, ...]]:
        shape, ordered = self._shapes.shape_of(devices)
        if self._num_several(shape) == 1:
            return self._know_min_max(devices, minibatches_per_wave)
        known = self._listed.get((shape, minibatches_per_wave))
        if known is None:
            memory = self._memory_at(minibatches_per_wave)
            found = every_partition(self._costs, ordered, memory, self._recompute, self._partitioner.chosen)
            in_order = sorted(found, key=lambda one: (-one.minibatches_per_tick, one.bottleneck_ticks))
            known = self._listed[shape, minibatches_per_wave] = _ShapePipelines(ordered, tuple(in_order))
        return known, ordered

    def _num_several(self, shape: Shape) -> int:
        if shape not in self._num:
            count = num_partitions(shape, self._costs.max_stages)
            self._num[shape] = count if count <= LISTED else 1
        return self._num[shape]
