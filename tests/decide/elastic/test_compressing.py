"""Compressed pipelines: against PipeTransformer's Algorithm 1, and what they keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from hetpipe.decide.elastic.compressing import Compressed, CompressionRule, compressed
from hetpipe.decide.elastic.replanning import Basis, rate_of
from hetpipe.values.cluster import DeviceType, Node
from hetpipe.values.ids import DeviceId
from hetpipe.values.policies import POLICIES
from tests.decide.elastic.test_freeze_cuts import BERT_24, VIT_12, Instance, algorithm_1, basis, instances, worker

BY_PARAMETERS = CompressionRule(POLICIES["wave"], alike=False, staleness=0, by="parameters")
BY_MEMORY = replace(BY_PARAMETERS, by="memory")


def algorithm_1_compressed(of: Instance) -> Instance:
    """Lines 25 to 33, again and again, as the text says: as long as Equation 2 holds, K is halved."""
    at_first = Instance(of.sizes, 0, of.num_stages)
    most, found = at_first.largest(algorithm_1(at_first)), of
    while found.num_stages > 1:
        half = replace(found, num_stages=found.num_stages // 2)
        if half.largest(algorithm_1(half)) > most:
            break
        found = half
    return found


def first_cut(sizes: Sequence[float], num_stages: int) -> tuple[int, ...]:
    return algorithm_1(Instance(sizes, 0, num_stages))


def found(of: Instance, rule: CompressionRule) -> Compressed:
    """Of one pipeline whose layers freeze all at once."""
    cut = first_cut(of.sizes, of.num_stages)
    return compressed(basis(of.sizes, of.num_stages), [worker(cut)], (0, of.frozen), rule)


def last_bounds(of: Compressed) -> list[tuple[int, ...]]:
    members = of.lineups[-1].members
    return [cut.bounds for cut in of.cuts if cut.vw in members and cut.frozen == of.cuts[-1].frozen]


def without_empty(of: Instance) -> bool:
    """Whether Algorithm 1 gives each partition of every length a layer, at the start and then."""
    lengths = [of.num_stages >> halvings for halvings in range(4) if of.num_stages >> halvings]
    cuts = [algorithm_1(Instance(of.sizes, frozen, length)) for length in lengths for frozen in (0, of.frozen)]
    return all(last > first for cut in cuts for first, last in pairwise(cut))


TABLES = [
    Instance(sizes, min(2 * blocks + 1, len(sizes) - 1), num_stages)
    for sizes in (VIT_12, BERT_24)
    for num_stages in (2, 4, 8)
    for blocks in range(1, len(sizes) // 2 + 1)
]


@cache
def cases(num_random: int) -> list[Instance]:
    random = [of for seed in range(8) for of in instances(seed, 120) if without_empty(of)]
    assert len(random) >= num_random
    return random[:num_random] + [of for of in TABLES if without_empty(of)]


SOME_OR_ALL = pytest.mark.parametrize("num_random", [60, pytest.param(300, marks=pytest.mark.exhaustive)])


@SOME_OR_ALL
def test_no_partition_is_larger_than_the_largest_of_algorithm_1_with_as_many(num_random: int) -> None:
    """Of random vectors of sizes, and of the tables of the paper's models; both compress some, and leave some."""
    lengths = set()
    for of in cases(num_random):
        ours = last_bounds(found(of, BY_PARAMETERS))
        as_long = replace(of, num_stages=len(ours[0]) - 1)
        assert max(map(of.largest, ours)) <= as_long.largest(algorithm_1(as_long)) * (1 + 1e-6)
        lengths.add(of.num_stages / as_long.num_stages)
    assert {1, 2, 4} <= lengths


@SOME_OR_ALL
def test_no_plan_of_algorithm_1_is_faster_where_it_fits(num_random: int) -> None:
    """Fits: no device needs more memory than at the start. It has as many replicas as its devices are enough for."""
    faster = 0
    for of in cases(num_random):
        at = replace(basis(of.sizes, of.num_stages), frozen_layers=of.frozen)
        theirs, ours = algorithm_1_compressed(of), found(of, BY_MEMORY)
        cut = algorithm_1(theirs)
        most = largest_bytes(replace(at, frozen_layers=0), first_cut(of.sizes, of.num_stages), of.num_stages)
        if largest_bytes(at, cut, theirs.num_stages) > most:
            continue
        bounds, n = last_bounds(ours), ours.lineups[-1].minibatches_per_wave
        of_ours = min(rate(at, each, n) for each in bounds) * len(bounds)
        of_theirs = rate(at, cut, 2 * theirs.num_stages) * (of.num_stages // theirs.num_stages)
        assert of_ours >= of_theirs * (1 - 1e-6)
        faster += of_ours > of_theirs * 1.01
    assert faster > 10


def rate(at: Basis, bounds: Sequence[int], n: int) -> float:
    return rate_of(replace(at, memory=replace(at.memory, minibatches_per_wave=n)), worker(bounds).stages)


def largest_bytes(at: Basis, bounds: Sequence[int], num_stages: int) -> int:
    memory = replace(at.memory, minibatches_per_wave=2 * num_stages)
    parts = enumerate(pairwise(bounds))
    return max(at.costs.stage_bytes(*part, stage=k, num_stages=num_stages, memory=memory) for k, part in parts)


EIGHT = (1.0,) * 8


@pytest.mark.parametrize(
    ("n", "keeps", "expected"),
    [
        (8, True, [(8, 1), (4, 2), (2, 4)]),  # the global batch stays
        (6, True, [(6, 1), (3, 2), (2, 3)]),  # where four pipelines cannot share it, a device is left over
        (3, True, [(3, 1), (1, 3)]),  # one of two stages would be slower
        (8, False, [(8, 1), (12, 2), (1, 4)]),  # else long waves are faster, but of one stage
    ],
)
def test_waves_of_compressed_pipelines(n: int, *, keeps: bool, expected: list[tuple[int, int]]) -> None:
    """(N, V) of every lineup, of a pipeline of four stages under a policy that drains it after each wave."""
    rule = replace(BY_PARAMETERS, policy=POLICIES["flush"], keep_global_batch=keeps)
    of = basis(EIGHT, 4)
    of = replace(of, memory=replace(of.memory, weights="flush", minibatches_per_wave=n))
    lineups = compressed(of, [worker((0, 2, 4, 5, 8))], (0, 4, 7), rule).lineups
    assert [(lineup.minibatches_per_wave, len(lineup.workers)) for lineup in lineups] == expected


def test_fast_devices_go_with_slow_ones_where_that_is_faster() -> None:
    """Four slow and four fast devices: pairs of a slow and a fast one, as all wait for the slowest pair."""
    of = basis((1.0,) * 12, 8)
    names = ("slow",) * 4 + ("fast",) * 4
    layers = tuple(
        layer.model_copy(
            update={
                key: {"slow": 3 * times["t"], "fast": times["t"]}
                for key, times in (("forward_ms", layer.forward_ms), ("backward_ms", layer.backward_ms))
            }
        )
        for layer in of.profile.layers
    )
    types = {name: DeviceType(memory_bytes=1 << 44) for name in ("slow", "fast")}
    cluster = of.cluster.model_copy(update={"device_types": types, "nodes": (Node(name="n0", devices=names),)})
    of = replace(of, profile=of.profile.model_copy(update={"layers": layers}), cluster=cluster)
    slow, fast = worker((0, 3, 6, 9, 12)), worker((0, 3, 6, 9, 12), 1)
    fast = replace(fast, stages=tuple(replace(s, device=DeviceId(f"n0/{4 + at}")) for at, s in enumerate(fast.stages)))
    lineups = compressed(of, [slow, fast], (0, 10), BY_PARAMETERS).lineups
    assert [each.devices for each in lineups[-1].workers] == [(0, 7), (1, 6), (2, 5), (3, 4)]
