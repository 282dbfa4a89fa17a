"""(u) Cuts and policies beside vPipe's Algorithms 1 to 3 and plain Kernighan–Lin: on random graphs, and real models."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import graphs, vpipe
from benchmarks.memory_search import kept
from benchmarks.sizes import sized
from hetpipe.decide.planner.costs import StagePlace
from hetpipe.decide.planner.policy_cuts import PolicyCuts, cut_with_policies

NUM_GRAPHS = sized(500, 10)

#: Of the real models: equal devices, and their memory between what recomputing and what keeping everything needs. The
#: last is ample: at less, plans of the baselines fit hardly anywhere.
NUM_STAGES = 4
SHARES = (0.4, 0.6, 0.8, 4.0)
#: The shares at which the baselines are measured.
_COMPARED_SHARES = (0.6, 4.0)
_HOST_BYTES_PER_SECOND = _LINK_BYTES_PER_SECOND = 12 * 10**9

#: Shares of random calls that do not read the call before them, and that read an earlier one.
_BRANCHES, _SKIPS = 0.15, 0.3
_MIB, _GIB = 1 << 20, 1 << 30
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


def of_models() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and figures of each model: forecasts in ms per minibatch of the slowest stage.

    Raises:
        AssertionError: a plan of a baseline, or one that treats all layers alike, fits and is faster than ours.
    """
    for name in graphs.NAMES:
        model = graphs.modelled(name)
        yield name, of_model(model)


def of_model(model: graphs.Modelled) -> Mapping[str, Any]:
    """Figures of one model."""

    def places(num_bytes: int) -> list[StagePlace]:
        return chain.places(
            [num_bytes] * NUM_STAGES,
            host_bytes_per_second=_HOST_BYTES_PER_SECOND,
            link_bytes_per_second=_LINK_BYTES_PER_SECOND,
        )

    chain = model.graph.merged(model.layers)
    whole = {keeps: of_whole_stages(places(0), keeps=keeps) for keeps in (False, True)}
    least, most = (evenest([memory for memory, _ in whole[keeps]]) for keeps in (False, True))
    found: dict[str, Any] = {
        "calls": len(model.graph.nodes),
        "layers": len(model.layers) - 1,
        "GiB to recompute, and to keep everything": (round(least / _GIB, 2), round(most / _GIB, 2)),
    }
    for share in SHARES:
        memory = int(least + share * (most - least))
        plan = cut_with_policies(places(memory), range(1, len(model.layers) - 1))
        assert plan is not None, "recomputing everything fits"
        figures: dict[str, Any] = {"ours": _ms(plan.ticks), "gap": f"{plan.gap:.1%}"}
        figures["GiB swapped, ms recomputed"] = (round(plan.rank[1] / _GIB, 2), _ms(plan.rank[2]))
        for name, keeps in (("recompute all", False), ("keep all", True)):
            ticks = evenest([np.where(needed <= memory, times, np.inf) for needed, times in whole[keeps]])
            assert plan.ticks <= ticks
            figures[name] = _ms(ticks) if ticks < np.inf else "does not fit"
        for name, partition in BASELINES.items() if share in _COMPARED_SHARES else ():
            started = time.process_time()
            their = vpipe.alternated(model.graph, model.layers, places(memory), partition)
            seconds = time.process_time() - started
            assert their.ticks is None or plan.ticks <= their.ticks
            figures[name] = "does not fit" if their.ticks is None else _ms(their.ticks)
            figures[f"{name}, rounds and processor seconds"] = (their.rounds, round(seconds, 1))
        found[f"{share:.0%}"] = figures
    return found


def _ms(ticks: float) -> float:
    return round(ticks / _MS, 1)


_Floats = npt.NDArray[np.float64]


def of_whole_stages(places: Sequence[StagePlace], *, keeps: bool) -> list[tuple[_Floats, _Floats]]:
    """Of each place: memory and time by first and last layer, if all is kept, or recomputed in one run; else inf."""
    found = []
    for place in places:
        layers, copies = place.layers, 1 if not keeps else place.in_flight
        sizes = [0, *accumulate(layer.activation_bytes for layer in layers)]
        again = [0 if keeps else layer.forward_ticks for layer in layers]
        times = [layer.forward_ticks + layer.backward_ticks for layer in layers]
        entries = [place.in_flight * layer.input_bytes if place.receives or not keeps else 0 for layer in layers]
        before = np.array([copies * size + weight for size, weight in zip(sizes, place.weight_bytes, strict=True)])
        computed = np.array([0, *accumulate(map(sum, zip(times, again, strict=True)))])
        memory = before[None, :] - before[:, None] + np.array([*entries, 0])[:, None]
        ticks = computed[None, :] - computed[:, None]
        ticks = ticks + np.array(place.arriving_ticks)[:, None] + np.array(place.returning_ticks)[None, :]
        is_none = np.tri(len(before), dtype=bool)
        found.append((np.where(is_none, np.inf, memory), np.where(is_none, np.inf, ticks)))
    return found


def evenest(costs: Sequence[_Floats]) -> float:
    """The least largest cost of consecutive stages."""
    best = np.full(len(costs[0]), np.inf)
    best[0] = 0.0
    for cost in costs:
        best = np.maximum(best[:, None], cost).min(axis=0)
    return float(best[-1])


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
