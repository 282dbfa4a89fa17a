"""The baselines of the search of cuts and policies: what their steps promise, on graphs that can be checked by hand."""

from __future__ import annotations

import itertools
import random

import torch
from torch import Tensor, nn

from benchmarks.graphs import recorded
from benchmarks.partitions import of_whole_stages, random_graph
from benchmarks.vpipe import Graph, Node, Value, algorithm_3, coarsened, nearest_cuts, plain_kernighan_lin
from hetpipe.values.memory import LayerPolicy, stage_memory


def chain_with(skips: list[tuple[int, int]], num_calls: int) -> Graph:
    """Equal calls, each reading the one before it, and some more."""
    readers = [{call + 1} for call in range(num_calls - 1)]
    for maker, reader in skips:
        readers[maker].add(reader)
    values = tuple(Value(maker, tuple(sorted(found)), 10) for maker, found in enumerate(readers))
    return Graph(tuple(Node(1, 2, 1, 1) for _ in range(num_calls)), values)


def crossing_bytes(graph: Graph, parts: list[list[int]]) -> int:
    part_of = {call: part for part, calls in enumerate(parts) for call in calls}
    pairs = ((value.num_bytes, part_of[value.maker], part_of[at]) for value in graph.values for at in value.readers)
    return sum(num_bytes for num_bytes, one, other in pairs if one != other)


def test_blocks_with_skips_are_merged_and_long_edges_are_not() -> None:
    """Three residual blocks of four calls, and a value of the first one that the last call reads."""
    graph = chain_with([(0, 4), (4, 8), (8, 12), (0, 12)], 13)
    assert coarsened(graph, graph.times, 2) == [0, 1, 5, 9, 13]
    assert coarsened(graph, graph.times, 4) == list(range(14)), "no fewer blocks than stages"


def test_bisection_of_two_halves_finds_the_only_cheap_border() -> None:
    """Two groups of calls, each tightly connected, that take turns in time."""
    groups = [list(range(0, 8, 2)), list(range(1, 8, 2))]
    values = tuple(Value(one, (other,), 10) for group in groups for one, other in itertools.combinations(group, 2))
    graph = Graph(tuple(Node(1, 2, 1, 1) for _ in range(8)), (*values, Value(0, (7,), 1)))
    parts = plain_kernighan_lin(graph, graph.times, 2)
    assert sorted(parts) == groups
    assert crossing_bytes(graph, parts) == 1


def test_exchanges_move_no_more_between_halves_than_before() -> None:
    for seed in range(20):
        graph = random_graph(random.Random(seed), 14)
        sums = list(itertools.accumulate(graph.times))
        middle = next(index for index, each in enumerate(sums) if each >= sums[-1] / 2) + 1
        parts = plain_kernighan_lin(graph, graph.times, 2)
        assert crossing_bytes(graph, parts) <= crossing_bytes(graph, [list(range(middle)), list(range(middle, 14))])
        for each in (parts, algorithm_3(graph, graph.times, 3)):
            assert sorted(call for part in each for call in part) == list(range(14))
            assert all(each)


def test_the_nearest_cuts_are_those_of_all_cuts() -> None:
    source = random.Random(0)
    for _ in range(30):
        times = [float(source.randint(1, 9)) for _ in range(9)]
        of_call = [*range(3), *(source.randrange(3) for _ in range(6))]
        parts = [[call for call, part in enumerate(of_call) if part == number] for number in range(3)]
        allowed = [0, *sorted(source.sample(range(1, 9), 5)), 9]

        def wrong(cuts: tuple[int, ...], times: list[float] = times, of_call: list[int] = of_call) -> float:
            stages = enumerate(itertools.pairwise(cuts))
            return sum(times[call] for part, ends in stages for call in range(*ends) if of_call[call] != part)

        every = [(0, *inner, 9) for inner in itertools.combinations(allowed[1:-1], 2)]
        assert wrong(tuple(nearest_cuts(parts, times, allowed))) == min(map(wrong, every))


def test_merging_keeps_what_crosses_the_cuts() -> None:
    graph = random_graph(random.Random(3), 16)
    cuts = [0, 3, 4, 9, 16]
    merged = graph.merged(cuts)
    assert merged.alive_bytes() == [graph.alive_bytes()[cut] for cut in cuts]
    assert sum(merged.times) == sum(graph.times)


class Skipping(nn.Module):
    """Two products, and the sum of what goes in and what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(x)
        found: Tensor = first + self.down(self.up(first).view(2, 16))
        return found


def test_a_recorded_model_has_the_time_of_its_products_and_what_its_calls_exchange() -> None:
    with torch.device("meta"):
        found = recorded(Skipping(), {"x": torch.empty(2, 8)})
    _, up, view, down, _ = found.graph.nodes
    for product, moved in ((up, 16 + 32 + 128), (down, 32 + 16 + 128)):
        assert product.parameter_bytes == 4 * 128
        assert product.forward_ticks == int(1e12 * (2 * 2 * 128 / 40e12 + 4 * moved / 700e9))
    assert (view.forward_ticks, view.activation_bytes) == (0, 0)
    exchanged = {(value.maker, value.readers, value.num_bytes) for value in found.graph.values}
    assert exchanged == {(0, (1, 4), 64), (1, (2,), 128), (2, (3,), 128), (3, (4,), 64)}
    assert found.layers[0] == 0
    assert found.layers[-1] == len(found.graph.nodes)


def test_stages_that_treat_all_layers_alike_cost_what_their_policies_cost() -> None:
    places = random_graph(random.Random(5), 7).places(
        [0, 0, 0], host_bytes_per_second=None, link_bytes_per_second=10**9
    )
    for keeps in (False, True):
        policy: LayerPolicy = "keep" if keeps else "recompute"
        for place, (memory, ticks) in zip(places, of_whole_stages(places, keeps=keeps), strict=True):
            for first, last in itertools.combinations(range(8), 2):
                cost = stage_memory(place.figures(first, last), [policy] * (last - first))
                assert (memory[first, last], ticks[first, last]) == (cost.num_bytes, cost.ticks)
