"""Every way to cut the model over some devices, in every order: exact for small cases, whatever the objective is.

Devices of one type on one node are interchangeable, so only orders that differ in them count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from hetpipe.decide.planner.costs import Costs, MemoryModel, minibatches_per_tick
from hetpipe.decide.planner.partitioner import StageCut
from hetpipe.decide.planner.reach_tables import Recompute
from hetpipe.decide.planner.shapes import Shape
from hetpipe.values.cluster import LinkSpec, node_of
from hetpipe.values.ids import DeviceId


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One virtual worker: its stages, first to last, and what they make of each other."""

    stages: tuple[StageCut, ...]
    minibatches_per_tick: float
    """By the closed form."""

    @property
    def bottleneck_ticks(self) -> int:
        """The largest stage time."""
        return max(stage.ticks for stage in self.stages)


def pipeline(stages: Sequence[StageCut], memory: MemoryModel) -> Pipeline:
    """The stages with their closed-form rate."""
    return Pipeline(tuple(stages), minibatches_per_tick([stage.ticks for stage in stages], memory))


def num_partitions(shape: Shape, num_layers: int) -> int:
    """How many ways there are, ignoring memory: orders that differ in types and nodes, times choices of cuts."""
    num_devices = sum(len(kinds) for _, kinds in shape)
    if num_devices > num_layers:
        return 0
    orders = math.factorial(num_devices)
    for _, kinds in shape:
        for count in Counter(kinds).values():
            orders //= math.factorial(count)
    return orders * math.comb(num_layers - 1, num_devices - 1)


def every_partition(
    costs: Costs, devices: Sequence[DeviceId], memory: MemoryModel, recompute: Recompute
) -> Iterator[Pipeline]:
    """Every partition that fits in memory, in a fixed order; all devices are used.

    A stage recomputes only if it must (`auto`), always (`on`) or never (`off`).
    """
    if len(devices) > costs.num_layers:
        return
    stages = _Stages(costs, memory, recompute, len(devices))
    for order in _orders(devices, costs.cluster.devices):
        nodes = [node_of(device) for device in order]
        links = [None, *(costs.cluster.link(here, behind) for here, behind in pairwise(nodes)), None]
        for inner in combinations(range(1, costs.num_layers), len(order) - 1):
            cuts = (0, *inner, costs.num_layers)
            found = []
            for stage, device in enumerate(order):
                cut = stages.cut(stage, device, cuts[stage], cuts[stage + 1], (links[stage], links[stage + 1]))
                if cut is None:
                    break
                found.append(cut)
            else:
                yield pipeline(found, memory)


class _Stages:
    """Stages by position, device, layers and links; most are met many times."""

    def __init__(self, costs: Costs, memory: MemoryModel, recompute: Recompute, num_stages: int) -> None:
        self._costs, self._memory, self._num_stages = costs, memory, num_stages
        self._ways = {"auto": (False, True), "on": (True,), "off": (False,)}[recompute]
        self._types = costs.cluster.devices
        self._known: dict[object, StageCut | None] = {}

    def cut(
        self, stage: int, device: DeviceId, first: int, last: int, links: tuple[LinkSpec | None, LinkSpec | None]
    ) -> StageCut | None:
        """The stage, or None where it does not fit."""
        key = (stage, device, first, last, links)
        if key not in self._known:
            self._known[key] = self._make(stage, device, first, last, links)
        return self._known[key]

    def _make(
        self, stage: int, device: DeviceId, first: int, last: int, links: tuple[LinkSpec | None, LinkSpec | None]
    ) -> StageCut | None:
        costs, kind = self._costs, self._types[device]
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
    """Orders that differ in types and nodes; among interchangeable devices the one given first goes first."""
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
