"""(u) Cuts and policies beside vPipe's Algorithms 1 to 3 and plain Kernighan–Lin: on random graphs, and real models."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import vpipe
from benchmarks.memory_search import kept
from benchmarks.sizes import sized
from hetpipe.decide.planner.costs import StagePlace
from hetpipe.decide.planner.policy_cuts import PolicyCuts, cut_with_policies

NUM_GRAPHS = sized(500, 10)

#: Shares of random calls that do not read the call before them, and that read an earlier one.
_BRANCHES, _SKIPS = 0.15, 0.3
_MIB = 1 << 20
_MS = 10**9

BASELINES: Mapping[str, vpipe.Partition] = {
    "Algorithm 3": vpipe.algorithm_3,
    "plain Kernighan–Lin": vpipe.plain_kernighan_lin,
}


def of_random_graphs() -> Mapping[str, Any]:
    """Graphs of 12 to 20 calls in 2 to 4 stages; whose plans fit, and how much faster ours are where both do."""
    cases = []
    for seed in range(NUM_GRAPHS):
        source = random.Random(seed)
        graph = random_graph(source, source.randint(12, 20))
        cases.append((graph, list(range(len(graph.nodes) + 1)), _places(source, graph, source.randint(2, 4))))
    return _compared(cases)


def random_graph(source: random.Random, num_calls: int) -> vpipe.Graph:
    """A backbone with branches, skip connections near and far, and calls of very different time and size."""
    nodes, readers = [], list[set[int]]()
    for call in range(num_calls):
        forward = source.randint(1, 12) * _MS
        nodes.append(
            vpipe.Node(
                forward,
                2 * forward,
                parameter_bytes=source.randint(0, 2) * _MIB,
                activation_bytes=source.randint(1, 12) * _MIB,
            )
        )
        readers.append(set())
        if call == 0:
            continue
        is_branch = call > 1 and source.random() < _BRANCHES
        readers[source.randrange(call - 1) if is_branch else call - 1].add(call)
        if source.random() < _SKIPS:
            readers[max(0, call - source.choice((2, 3, 4, num_calls)))].add(call)
    values = (
        vpipe.Value(maker, tuple(sorted(found)), source.randint(1, 3) * _MIB)
        for maker, found in enumerate(readers)
        if found
    )
    return vpipe.Graph(tuple(nodes), tuple(values))


def _places(source: random.Random, graph: vpipe.Graph, num_stages: int) -> list[StagePlace]:
    def places(memory: Sequence[int]) -> list[StagePlace]:
        return graph.places(memory, host_bytes_per_second=host, link_bytes_per_second=8 * 10**9)

    host = source.choice((10**9, 4 * 10**9))
    needed = [kept(place) // num_stages for place in places([0] * num_stages)]
    share = source.uniform(0.6, 2.5)  # equal devices: as in the paper
    return places([int(share * statistics.mean(needed))] * num_stages)


def _compared(cases: Sequence[tuple[vpipe.Graph, Sequence[int], Sequence[StagePlace]]]) -> Mapping[str, Any]:
    """How many plans fit, and the largest stage times of the baselines relative to ours.

    Raises:
        AssertionError: a plan of a baseline fits, and is faster than ours.
    """
    ours = [cut_with_policies(places, range(1, len(places[0].layers))) for _, _, places in cases]
    found: dict[str, Any] = {"graphs": len(cases), "ours fit": sum(plan is not None for plan in ours)}
    for name, partition in BASELINES.items():
        theirs = [vpipe.alternated(*case, partition) for case in cases]
        ratios = list(_ratios(ours, theirs))
        found[name] = {
            "fit": len(ratios),
            "as fast as ours": sum(ratio == 1 for ratio in ratios),
            "largest stage time / ours, median": round(statistics.median(ratios), 3) if ratios else None,
            "largest": round(max(ratios), 3) if ratios else None,
            "parts were intervals of the chain": sum(each.is_interval for each in theirs),
        }
    return found


def _ratios(ours: Sequence[PolicyCuts | None], theirs: Sequence[vpipe.Alternated]) -> Iterator[float]:
    for index, (plan, their) in enumerate(zip(ours, theirs, strict=True)):
        if their.ticks is None:
            continue
        assert plan is not None, f"graph {index}: a plan of the baseline fits, and none of ours"
        assert plan.ticks <= their.ticks, f"graph {index}: {plan.ticks} is slower than {their.ticks}"
        yield their.ticks / max(1, plan.ticks)
