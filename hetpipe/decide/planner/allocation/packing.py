"""Allocation of many devices as a packing problem.

All virtual workers wait for the slowest one. For a rate r the question is therefore how many disjoint virtual workers
achieve r, and the objective is r times that number. Nodes are ignored at first: a *mix* is the number of devices of
each type in a virtual worker, and its rate is that on as few nodes as possible.

1. Mixes: all of up to `MOST_STAGES` devices while these are at most `MOST_MIXES`; in addition equal devices only, any
   two types in equal parts, and equal shares of the whole cluster, up to `LONGEST` devices.
2. For several N and each rate that a mix achieves: fill the cluster with mixes that achieve it, cheapest first, at
   prices per type: initially the type's speed, then lower where devices stayed idle.
3. The most promising packings are mapped to devices, from as few nodes as possible (`DevicePool`), and evaluated as
   jobs.

This is a heuristic, bounded by `allocation.bound`.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement

from hetpipe.decide.planner.jobs import Groups, Jobs
from hetpipe.decide.planner.waves import SEARCHED_PER_STAGE
from hetpipe.values.cluster import Cluster, node_of
from hetpipe.values.ids import DeviceId

#: Number of devices of each type, in the order of `DevicePool.kinds`.
Counts = tuple[int, ...]


class DevicePool:
    """Free devices by node. Nodes with equal free devices and ordinary links are evaluated once."""

    def __init__(self, cluster: Cluster, devices: Iterable[DeviceId]) -> None:
        """Start with `devices` free.

        Args:
            cluster: all devices.
            devices: at least one, in the order of the cluster.
        """
        types = cluster.devices
        self._special = {name for override in cluster.links.overrides for name in override.between}
        self._rank = {node.name: rank for rank, node in enumerate(cluster.nodes)}
        self.kinds: Sequence[str] = sorted(set(types.values()))
        self._free: dict[str, list[list[DeviceId]]] = {}
        for device in reversed(list(devices)):
            on_node = self._free.setdefault(node_of(device), [[] for _ in self.kinds])
            on_node[self.kinds.index(types[device])].append(device)
        #: (name of a node with its own link figures, else empty; free devices) → matching nodes, by rank.
        self._alike: dict[tuple[str, Counts], list[str]] = {}
        for node in sorted(self._free, key=self._rank.__getitem__, reverse=True):
            self._alike.setdefault(self._state(node), []).append(node)
        self.counts: Counts = tuple(
            sum(len(on[index]) for on in self._free.values()) for index in range(len(self.kinds))
        )

    def find(self, wanted: Counts, *, most_nodes: int | None = None) -> tuple[DeviceId, ...] | None:
        """Find free devices of the given types on few nodes.

        Greedy: each step uses the node that provides the most devices, and on ties the one with the fewest left over.

        Args:
            wanted: number of devices of each type.
            most_nodes: maximum number of nodes.

        Returns:
            None if there are too few. The devices stay free.
        """
        if any(count > free for count, free in zip(wanted, self.counts, strict=True)):
            return None
        left = list(wanted)
        touched: dict[tuple[str, Counts], int] = {}
        found: list[DeviceId] = []
        num_nodes = 0
        while any(left):
            if num_nodes == most_nodes:
                return None
            state = max(
                (state for state, nodes in self._alike.items() if touched.get(state, 0) < len(nodes)),
                key=lambda state: (
                    sum(map(min, left, state[1])),
                    -sum(state[1]),
                    -self._rank[self._alike[state][-1 - touched.get(state, 0)]],
                ),
            )
            node = self._alike[state][-1 - touched.get(state, 0)]
            touched[state] = touched.get(state, 0) + 1
            num_nodes += 1
            for index, free in enumerate(self._free[node]):
                taken = min(left[index], len(free))
                found += free[len(free) - taken :][::-1]
                left[index] -= taken
        return tuple(found)

    def take(self, devices: Iterable[DeviceId]) -> None:
        """Mark these devices, the latest result of `find`, as used."""
        by_node: dict[str, set[DeviceId]] = {}
        for device in devices:
            by_node.setdefault(node_of(device), set()).add(device)
        for node, gone in by_node.items():
            state = self._state(node)
            self._alike[state].remove(node)
            if not self._alike[state]:
                del self._alike[state]
            self._free[node] = [[device for device in free if device not in gone] for free in self._free[node]]
            alike = self._alike.setdefault(self._state(node), [])
            alike.append(node)
            alike.sort(key=self._rank.__getitem__, reverse=True)
        self.counts = self._count()

    def _count(self) -> Counts:
        return tuple(sum(map(len, free)) for free in zip(*self._free.values(), strict=True))

    def _state(self, node: str) -> tuple[str, Counts]:
        return node if node in self._special else "", tuple(map(len, self._free[node]))


#: Maximum number of devices in a mix for complete enumeration.
MOST_STAGES = 8

#: Maximum number of mixes for complete enumeration.
MOST_MIXES = 300

#: Maximum number of devices of a virtual worker, unless the model fits on no smaller one.
LONGEST = 16

#: Values of N with a search of their own; when a grouping is evaluated, all N are tried.
_TRIED_WAVES = (1, 2, 4, 8, 16, 32)

#: Number of price adjustments, and their factor.
_PRICINGS, _CHEAPER = 4, 0.8

#: Number of packings mapped to devices.
_JUDGED = 12


@dataclass(frozen=True, slots=True)
class Packing:
    """Mixes, with multiplicities, that achieve a rate with N minibatches per wave."""

    minibatches_per_wave: int
    minibatches_per_tick: float
    """Rate that every mix achieves on as few nodes as possible."""
    mixes: tuple[tuple[Counts, int], ...]

    @property
    def num_workers(self) -> int:
        """V."""
        return sum(times for _, times in self.mixes)


def packed_groups(jobs: Jobs, devices: Collection[DeviceId]) -> Iterator[Groups]:
    """The most promising groupings of these devices, best first by the estimate; may contain duplicates."""
    found = sorted(_packings(jobs, devices), key=lambda one: -one.num_workers * one.minibatches_per_tick)
    seen: set[tuple[tuple[Counts, int], ...]] = set()
    for packing in found:
        if packing.mixes in seen:
            continue
        seen.add(packing.mixes)
        for most_nodes in (None, 1):
            groups = _with_devices(jobs, devices, packing, most_nodes)
            if groups:
                yield groups
        if len(seen) == _JUDGED:
            return


def mixes(counts: Counts, longest: int) -> list[Counts]:
    """The mixes of up to `longest` devices to consider (see the module docstring); smaller ones first."""
    kinds = range(len(counts))
    found: set[Counts] = set()

    def add(mix: Sequence[int]) -> None:
        if 0 < sum(mix) <= longest and all(map(int.__le__, mix, counts)):
            found.add(tuple(mix))

    for size in range(1, min(MOST_STAGES, longest) + 1):
        for chosen in combinations_with_replacement(kinds, size):
            add([chosen.count(kind) for kind in kinds])
        if len(found) > MOST_MIXES:
            break
    for size in range(1, longest + 1):
        for chosen in (*combinations(kinds, 1), *combinations(kinds, 2)):
            add([size * (kind in chosen) for kind in kinds])
    for num_workers in range(1, sum(counts) + 1):
        add([count // num_workers for count in counts])
    return sorted(found, key=lambda mix: (sum(mix), mix))


def _packings(jobs: Jobs, devices: Collection[DeviceId]) -> Iterator[Packing]:
    """For each N, the packings whose estimate is among the best."""
    pool = DevicePool(jobs.costs.cluster, devices)
    longest = min(sum(pool.counts), jobs.costs.max_stages)
    any_found = False
    for limit in (min(LONGEST, longest), longest):
        if not any_found:
            together = {mix: found for mix in mixes(pool.counts, limit) if (found := pool.find(mix))}
            for packing in _packings_of(jobs, together, pool):
                any_found = True
                yield packing


def _packings_of(jobs: Jobs, together: dict[Counts, tuple[DeviceId, ...]], pool: DevicePool) -> Iterator[Packing]:
    speeds = [1 / max(jobs.costs.compute[kind][-1], 1) for kind in pool.kinds]
    given = jobs.options.minibatches_per_wave
    for n in _TRIED_WAVES if given is None else (given,):
        rates = {mix: rate for mix, devices in together.items() if (rate := _rate(jobs, devices, n))}
        yield from _best_packings(rates, n, pool.counts, speeds)


def _best_packings(
    rates: dict[Counts, float], minibatches_per_wave: int, counts: Counts, speeds: Sequence[float]
) -> list[Packing]:
    """The mixes with the best estimates, at most one packing for each rate."""
    cheapest_first = sorted(rates, key=lambda mix: _price(mix, speeds))
    total = _price(counts, speeds)
    best: list[tuple[float, int, Packing]] = []
    for order, rate in enumerate(sorted(set(rates.values()), reverse=True)):
        able = [mix for mix in cheapest_first if rates[mix] >= rate]
        hope = rate * total / _price(able[0], speeds)
        if len(best) == _JUDGED and hope <= best[0][0]:
            continue
        packing = _filled(able, minibatches_per_wave, rate, counts, speeds)
        heapq.heappush(best, (packing.num_workers * rate, -order, packing))
        if len(best) > _JUDGED:
            heapq.heappop(best)
    return [packing for _, _, packing in best]


def _price(mix: Counts, prices: Sequence[float]) -> float:
    return sum(price * count for price, count in zip(prices, mix, strict=True))


def _rate(jobs: Jobs, devices: tuple[DeviceId, ...], minibatches_per_wave: int) -> float:
    """The rate of a virtual worker for this N; 0 if it does not fit or the N is not worth considering."""
    num_stages = len(devices)
    least = jobs.options.policy.least_minibatches_per_wave(num_stages)
    given = jobs.options.minibatches_per_wave is not None
    if minibatches_per_wave < least or not (given or minibatches_per_wave <= SEARCHED_PER_STAGE * num_stages):
        return 0.0
    return jobs.pipelines.min_max_rate(devices, minibatches_per_wave)


def _filled(
    able: Sequence[Counts], minibatches_per_wave: int, rate: float, counts: Counts, speeds: Sequence[float]
) -> Packing:
    """The packing of these mixes with the most virtual workers, over several rounds of prices."""
    prices = list(speeds)
    best = Packing(minibatches_per_wave, rate, ())
    for _ in range(_PRICINGS):
        left, taken = list(counts), []
        for mix in sorted(able, key=lambda mix: _price(mix, prices)):
            times = min(free // count for free, count in zip(left, mix, strict=True) if count)
            if times:
                taken.append((mix, times))
                left = [free - times * count for free, count in zip(left, mix, strict=True)]
        packing = Packing(minibatches_per_wave, rate, tuple(taken))
        if packing.num_workers > best.num_workers:
            best = packing
        if not any(left):
            break
        prices = [price * _CHEAPER if idle else price for price, idle in zip(prices, left, strict=True)]
    return best


def _with_devices(
    jobs: Jobs, devices: Collection[DeviceId], packing: Packing, most_nodes: int | None
) -> list[tuple[DeviceId, ...]]:
    """Map a packing to devices, largest virtual workers first; those that the nodes cannot form well are left out."""
    pool = DevicePool(jobs.costs.cluster, devices)
    groups = []
    for mix, times in sorted(packing.mixes, key=lambda entry: (-sum(entry[0]), entry[0])):
        for _ in range(times):
            chosen = pool.find(mix, most_nodes=most_nodes)
            if chosen is None:
                break
            pool.take(chosen)
            groups.append(chosen)
    return groups
