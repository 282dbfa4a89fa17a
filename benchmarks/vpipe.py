"""Algorithms 1 to 3 of vPipe (its section 4.2) and plain Kernighan–Lin, on graphs of calls: baselines of the search.

What the paper leaves open is filled in its favour, and said where it is done. A stage is an interval of the calls in
their order in time, as in its equation (1): what Kernighan–Lin finds is turned into the nearest such cut. A plan counts
with the times and memory of `docs/semantics/memory-policy.md`, of which the paper's equations are a part.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

from hetpipe.decide.planner.costs import StagePlace
from hetpipe.values.memory import LayerFigures, LayerPolicy, StageFigures, stage_memory

_TICKS_PER_SECOND = 10**12

#: Rounds of Algorithm 1; the paper's runs need fewer.
MOST_ROUNDS = 10
#: Parameters, gradients, and two moments of Adam, as one version of weights is kept.
_COPIES = 4

#: Bytes between each two calls that exchange some.
_Neighbours: TypeAlias = Mapping[int, Mapping[int, int]]


@dataclass(frozen=True, slots=True)
class Node:
    """One call, for one minibatch."""

    forward_ticks: int
    backward_ticks: int
    parameter_bytes: int
    activation_bytes: int


@dataclass(frozen=True, slots=True)
class Value:
    """What one call makes for others."""

    maker: int
    readers: tuple[int, ...]
    """Ascending, all behind the maker."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Graph:
    """Calls in the order of time, and what they exchange."""

    nodes: tuple[Node, ...]
    values: tuple[Value, ...]

    @property
    def times(self) -> list[float]:
        """Ticks of forward and backward of each call."""
        return [float(node.forward_ticks + node.backward_ticks) for node in self.nodes]

    def alive_bytes(self) -> list[int]:
        """Before each call, and behind the last: what was made before and is read there or behind."""
        changes = [0] * (len(self.nodes) + 1)
        for value in self.values:
            changes[value.maker + 1] += value.num_bytes
            changes[value.readers[-1] + 1] -= value.num_bytes
        return list(accumulate(changes))

    def merged(self, cuts: Sequence[int]) -> Graph:
        """The graph of the calls between each two `cuts`, which include 0 and the end."""
        block_of = blocks_of(cuts)
        nodes = tuple(
            Node(
                sum(node.forward_ticks for node in self.nodes[first:last]),
                sum(node.backward_ticks for node in self.nodes[first:last]),
                sum(node.parameter_bytes for node in self.nodes[first:last]),
                sum(node.activation_bytes for node in self.nodes[first:last]),
            )
            for first, last in pairwise(cuts)
        )
        values = []
        for value in self.values:
            maker = block_of[value.maker]
            readers = tuple(sorted({block_of[reader] for reader in value.readers} - {maker}))
            if readers:
                values.append(Value(maker, readers, value.num_bytes))
        return Graph(nodes, tuple(values))

    def places(
        self, memory_bytes: Sequence[int], *, host_bytes_per_second: int | None, link_bytes_per_second: int
    ) -> list[StagePlace]:
        """Equal devices but for their memory, each call a layer, whose input is all that is alive there."""
        alive = self.alive_bytes()
        layers = tuple(
            LayerFigures(node.forward_ticks, node.backward_ticks, node.activation_bytes, num_bytes)
            for node, num_bytes in zip(self.nodes, alive, strict=False)
        )
        weights = [0, *accumulate(_COPIES * node.parameter_bytes for node in self.nodes)]
        transfers = [num_bytes * _TICKS_PER_SECOND // link_bytes_per_second for num_bytes in alive]
        none = [0] * len(alive)
        last = len(memory_bytes) - 1
        return [
            StagePlace(
                layers,
                weights,
                in_flight=last + 1 - stage,
                receives=stage > 0,
                memory_bytes=num_bytes,
                reserve_bytes=0,
                host_bytes_per_second=host_bytes_per_second,
                arriving_ticks=transfers if stage else none,
                returning_ticks=transfers if stage < last else none,
            )
            for stage, num_bytes in enumerate(memory_bytes)
        ]


def blocks_of(cuts: Sequence[int]) -> list[int]:
    """The block of each call, between cuts that include 0 and the end."""
    return [block for block, (first, last) in enumerate(pairwise(cuts)) for _ in range(last - first)]


# -- Algorithm 3 ---------------------------------------------------------------------------------------------------

#: From a graph, the time of each call and a number of stages to the calls of each stage.
Partition = Callable[[Graph, Sequence[float], int], list[list[int]]]


def algorithm_3(graph: Graph, times: Sequence[float], num_stages: int) -> list[list[int]]:
    """`layerRepartition()`: coarsen, bisect by Kernighan–Lin, uncoarsen, refine at every border (lines 1 to 6)."""
    cuts = coarsened(graph, times, num_stages)
    sums = [0.0, *accumulate(times)]
    coarse = [sums[last] - sums[first] for first, last in pairwise(cuts)]
    parts = plain_kernighan_lin(graph.merged(cuts), coarse, num_stages)
    fine = [[call for block in part for call in range(cuts[block], cuts[block + 1])] for part in parts]
    neighbours = _neighbours(graph)
    for border in range(num_stages - 1):  # lines 27 to 29
        fine[border : border + 2] = _exchanged(fine[border], fine[border + 1], neighbours, times, share=0.5)
    return fine


def coarsened(graph: Graph, times: Sequence[float], num_stages: int) -> list[int]:
    """Lines 7 to 21: cuts, with 0 and the end, between the blocks of calls that sub-graph edges merge.

    An edge between neighbours in time is critical. Of the others those that bridge more than the mean time of a stage
    are sparse, and remain. The rest are sub-graph edges: each merges its reader with all calls since its maker, but not
    with the maker, whose value is also the output of the block before: else a chain of skip connections would be one
    block. At least as many blocks are left as there are stages: if not, the calls stay apart.
    """
    invoked = [0.0, *accumulate(times)]
    mean = invoked[-1] / num_stages
    is_border = [True] * (len(times) + 1)
    for value in graph.values:
        for reader in value.readers:
            if reader != value.maker + 1 and invoked[reader] - invoked[value.maker] <= mean:
                is_border[value.maker + 2 : reader + 1] = [False] * (reader - value.maker - 1)
    cuts = [position for position, border in enumerate(is_border) if border]
    return cuts if len(cuts) > num_stages else list(range(len(times) + 1))


def plain_kernighan_lin(graph: Graph, times: Sequence[float], num_stages: int) -> list[list[int]]:
    """Lines 22 to 26: recursive bisection, from halves in the order of time; as a baseline, of the graph as it is."""
    neighbours = _neighbours(graph)

    def partition(calls: list[int], number: int) -> list[list[int]]:
        if number == 1:
            return [calls]
        before = (number + 1) // 2
        share = before / number
        sums = list(accumulate(times[call] for call in calls))
        middle = bisect_left(sums, share * sums[-1]) + 1
        middle = min(max(middle, before), len(calls) - (number - before))
        first, second = _exchanged(calls[:middle], calls[middle:], neighbours, times, share=share)
        return [*partition(first, before), *partition(second, number - before)]

    return partition(list(range(len(times))), num_stages)


def _neighbours(graph: Graph) -> _Neighbours:
    found: dict[int, dict[int, int]] = {call: {} for call in range(len(graph.nodes))}
    for value in graph.values:
        for reader in value.readers:
            for one, other in ((value.maker, reader), (reader, value.maker)):
                found[one][other] = found[one].get(other, 0) + value.num_bytes
    return found


def _exchanged(
    first: Sequence[int], second: Sequence[int], neighbours: _Neighbours, times: Sequence[float], *, share: float
) -> list[list[int]]:
    """Two parts after the exchanges of Kernighan and Lin (1970), which lessen the bytes between them.

    A pass exchanges the pair that gains most, locks both, and goes on, also at a loss, until one part is all locked;
    what counts are the first exchanges up to the best sum of gains. Passes are repeated as long as they gain.

    Their nodes have equal sizes; here the first part must keep `share` of the time, as exactly as before or to within
    the slowest call.
    """
    side = {call: index for index, part in enumerate((first, second)) for call in part}
    total = sum(times[call] for call in side)
    most_apart = max(
        abs(sum(times[call] for call in first) - share * total), max((times[call] for call in side), default=0.0)
    )
    while True:
        gain = _pass(side, neighbours, times, (share * total, most_apart))
        if gain <= 0:
            return [sorted(call for call, at in side.items() if at == index) for index in (0, 1)]


def _pass(side: dict[int, int], neighbours: _Neighbours, times: Sequence[float], balance: tuple[float, float]) -> int:
    """One pass; exchanges in `side`, and returns what was gained, in bytes."""
    wanted, most_apart = balance
    gains = {
        call: sum(
            num_bytes if side[other] != at else -num_bytes
            for other, num_bytes in neighbours[call].items()
            if other in side
        )
        for call, at in side.items()
    }
    #: Calls of each part that are not locked, by (−gain, call).
    free = [sorted((-gains[call], call) for call, at in side.items() if at == index) for index in (0, 1)]
    now = sum(times[call] for call, at in side.items() if at == 0)
    pairs: list[tuple[int, int]] = []
    total = best = num_best = 0
    while free[0] and free[1]:
        found = _best_pair(free, neighbours, times, (wanted - now, most_apart))
        if found is None:
            break
        gain, *pair = found
        for call in pair:
            free[side[call]].remove((-gains[call], call))
        now += times[pair[1]] - times[pair[0]]
        for call in pair:
            for other, num_bytes in neighbours[call].items():
                entry = (-gains.get(other, 0), other)
                if other not in side or (place := bisect_left(free[side[other]], entry)) == len(free[side[other]]):
                    continue
                if free[side[other]][place] != entry:
                    continue  # locked
                del free[side[other]][place]
                gains[other] += 2 * num_bytes if side[other] == side[call] else -2 * num_bytes
                insort(free[side[other]], (-gains[other], other))
        pairs.append((pair[0], pair[1]))
        total += gain
        if total > best:
            best, num_best = total, len(pairs)
    for one, other in pairs[:num_best]:
        side[one], side[other] = 1, 0
    return best


def _best_pair(
    free: Sequence[Sequence[tuple[int, int]]],
    neighbours: _Neighbours,
    times: Sequence[float],
    balance: tuple[float, float],
) -> tuple[int, int, int] | None:
    """(gain, call of the first part, of the second) of the best exchange that keeps the balance; None without one."""
    missing, most_apart = balance
    found: tuple[int, int, int] | None = None
    for lost, one in free[0]:
        if found is not None and -lost - free[1][0][0] <= found[0]:
            break
        for lost_too, other in free[1]:
            if found is not None and -lost - lost_too <= found[0]:
                break
            if abs(missing - times[other] + times[one]) > most_apart:
                continue
            gain = -lost - lost_too - 2 * neighbours[one].get(other, 0)
            if found is None or gain > found[0]:
                found = (gain, one, other)
    return found


def nearest_cuts(parts: Sequence[Sequence[int]], times: Sequence[float], allowed: Sequence[int]) -> list[int]:
    """The cuts of the chain, with 0 and the end, for which the least time is in another stage than its part.

    Args:
        parts: the calls of each stage.
        times: of each call.
        allowed: where a stage may end, ascending, with 0 and the end; at least as many stages.
    """
    part_of = {call: part for part, calls in enumerate(parts) for call in calls}
    #: Per cut, for the stages before it: the wrong time, and the cuts.
    best: list[tuple[float, list[int]] | None] = [(0.0, [0])] + [None] * (len(allowed) - 1)
    for part in range(len(parts)):
        wrong = [0.0, *accumulate(0.0 if part_of[call] == part else times[call] for call in range(len(times)))]
        longer: list[tuple[float, list[int]] | None] = [None] * len(allowed)
        least: tuple[float, list[int]] | None = None
        for index, cut in enumerate(allowed):
            if least is not None:
                longer[index] = (least[0] + wrong[cut], [*least[1], cut])
            before = best[index]
            if before is not None and (least is None or before[0] - wrong[cut] < least[0]):
                least = (before[0] - wrong[cut], before[1])
        best = longer
    assert best[-1] is not None
    return best[-1][1]


# -- Algorithms 1 and 2 --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Alternated:
    """What Algorithm 1 found."""

    ticks: int | None
    """The largest stage time of the fastest round whose stages fit; None: those of no round do."""
    rounds: int
    is_interval: bool
    """Whether every part was an interval of the chain."""


def alternated(graph: Graph, layers: Sequence[int], places: Sequence[StagePlace], partition: Partition) -> Alternated:
    """Algorithm 1: a partition, Algorithm 2 in each stage, and again with the times that were measured.

    A call is then slower by what its layer is recomputed or waits for swaps. The paper stops where the stages are
    balanced, which it does not define: here it goes on while there are new cuts, and the best round counts.

    Args:
        graph: the calls.
        layers: the first call of each layer, and the end: a stage ends there, and a layer has one policy.
        places: of the stages, over the layers.
        partition: by `algorithm_3` or `plain_kernighan_lin`.
    """
    times, ticks, seen = graph.times, None, set[tuple[int, ...]]()
    is_interval = True
    layer_of = {call: layer for layer, call in enumerate(layers)}
    own = [graph.nodes[first:last] for first, last in pairwise(layers)]
    while len(seen) < MOST_ROUNDS:
        parts = partition(graph, times, len(places))
        is_interval &= all(part == list(range(part[0], part[-1] + 1)) for part in parts)
        cuts = tuple(layer_of[cut] for cut in nearest_cuts(parts, times, layers))
        if cuts in seen:
            break
        seen.add(cuts)
        slower, stages = list[float](), []
        for place, (first, last) in zip(places, pairwise(cuts), strict=True):
            stage = place.figures(first, last)
            policies = algorithm_2(stage, place.memory_bytes)
            cost = stage_memory(stage, policies)
            stages.append((cost.ticks, cost.num_bytes <= place.memory_bytes))
            waits = max(0, stage.swap_ticks(cost.swapped_bytes) - stage.compute_ticks - cost.recomputed_ticks)
            for layer, policy in zip(stage.layers, policies, strict=True):
                again = layer.forward_ticks if policy.startswith("recompute") else 0
                swaps = waits * layer.activation_bytes / max(1, cost.swapped_bytes) if policy == "swap" else 0.0
                slower.append(1 + (again + swaps) / max(1, layer.forward_ticks + layer.backward_ticks))
        if all(fits for _, fits in stages):
            longest = max(each for each, _ in stages)
            ticks = longest if ticks is None else min(ticks, longest)
        times = [
            factor * (node.forward_ticks + node.backward_ticks)
            for factor, nodes in zip(slower, own, strict=True)
            for node in nodes
        ]
    return Alternated(ticks, len(seen), is_interval)


def algorithm_2(stage: StageFigures, memory_bytes: int) -> list[LayerPolicy]:
    """Algorithm 2 of vPipe as printed, line by line; `rank` is S, memory that of its equation (1)."""
    speed = (stage.host_bytes_per_second or 1) / _TICKS_PER_SECOND
    costs, operations = [], list[LayerPolicy]()
    for layer in stage.layers:  # lines 2 to 9
        recomputes = layer.activation_bytes / speed > layer.forward_ticks
        costs.append(layer.forward_ticks if recomputes else layer.activation_bytes / speed)
        operations.append("recompute" if recomputes else "swap")
    gains = [layer.activation_bytes / max(cost, 1e-9) for layer, cost in zip(stage.layers, costs, strict=True)]
    space = speed * stage.compute_ticks  # lines 10 and 11
    left = sorted(range(len(gains)), key=gains.__getitem__)
    policies: list[LayerPolicy] = ["keep" for _ in stage.layers]
    while space >= 0 and left:  # lines 13 to 16
        index = left.pop()
        policies[index] = "swap"
        space -= stage.in_flight * stage.layers[index].activation_bytes
    while left and _consumed(stage, policies) > memory_bytes:  # lines 17 to 19
        index = left.pop()
        policies[index] = operations[index]
    return policies


def _consumed(stage: StageFigures, policies: Sequence[LayerPolicy]) -> int:
    default = (layer.activation_bytes for layer, policy in zip(stage.layers, policies, strict=True) if policy == "keep")
    return stage.fixed_bytes + stage.in_flight * sum(default)
