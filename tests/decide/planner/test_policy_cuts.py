"""Cuts with memory policies: against every cut with all policies of every stage, on instances in whole MiB."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest

from hetpipe.decide.planner.costs import StagePlace
from hetpipe.decide.planner.policy_cuts import PolicyCuts, cut_with_policies
from hetpipe.values.memory import LayerFigures, LayerPolicy, StageFigures, stage_memory

MIB = 1 << 20
MS = 10**9

Rank = tuple[int, int, int]


def places_of(rng: random.Random, num_layers: int, num_stages: int) -> list[StagePlace]:
    """Devices that differ in speed, memory, host link and links between stages; small numbers, for many ties."""
    sizes = [(rng.randint(0, 12) * MIB, rng.randint(0, 6) * MIB, rng.randint(0, 3) * MIB) for _ in range(num_layers)]
    times = [(rng.randint(0, 12), rng.randint(0, 20)) for _ in range(num_layers)]
    parameters = [0, *itertools.accumulate(size[2] for size in sizes)]
    in_flight = rng.randint(1, 5)
    places = []
    for stage in range(num_stages):
        slower = rng.choice([1, 1, 2, 3])
        arriving, returning = ([rng.randint(0, 4) * MS for _ in range(num_layers + 1)] for _ in "ab")
        copies = rng.randint(1, 4)
        places.append(
            StagePlace(
                tuple(
                    LayerFigures(f * slower * MS, b * slower * MS, a, i)
                    for (f, b), (a, i, _) in zip(times, sizes, strict=True)
                ),
                [copies * num_bytes for num_bytes in parameters],
                in_flight=max(1, in_flight - stage),
                receives=stage > 0,
                memory_bytes=0,
                reserve_bytes=rng.randint(0, 2) * MIB,
                host_bytes_per_second=rng.choice([None, 10**8, 10**9, 4 * 10**9]),
                arriving_ticks=arriving if stage else [0] * (num_layers + 1),
                returning_ticks=returning if stage + 1 < num_stages else [0] * (num_layers + 1),
            )
        )
    return [replace(place, memory_bytes=memory_for(rng, place, num_stages)) for place in places]


def memory_for(rng: random.Random, place: StagePlace, num_stages: int) -> int:
    """From a third of what an even share of the layers would keep to more than that."""
    kept = stage_memory(place.figures(0, len(place.layers)), ["keep"] * len(place.layers)).num_bytes
    return rng.randint(kept // (3 * num_stages), 2 * kept // num_stages) // MIB * MIB


@cache
def every_policies(num_layers: int, *, swaps: bool) -> tuple[tuple[LayerPolicy, ...], ...]:
    """All policies but those with `recompute-new-run` where it is the same as `recompute`."""
    every: list[LayerPolicy] = ["keep", "recompute", "recompute-new-run"]
    if swaps:
        every.append("swap")
    return tuple(
        policies
        for policies in itertools.product(every, repeat=num_layers)
        if all(
            before.startswith("recompute") or policy != "recompute-new-run"
            for before, policy in zip(("keep", *policies), policies, strict=False)
        )
    )


def costs_of(stage: StageFigures, memory_bytes: int) -> list[Rank]:
    """Of all policies that fit, those that no other one equals or beats."""
    every = every_policies(len(stage.layers), swaps=bool(stage.host_bytes_per_second))
    costs = (stage_memory(stage, each) for each in every)
    found: list[Rank] = []
    for rank in sorted({cost.rank for cost in costs if cost.num_bytes <= memory_bytes}):
        if not any(all(a <= b for a, b in zip(other, rank, strict=True)) for other in found):
            found.append(rank)
    return found


def best_rank(places: Sequence[StagePlace], allowed: Sequence[int]) -> Rank | None:
    """The optimum, by trying everything."""
    num_layers = len(places[0].layers)
    known: dict[tuple[int, int, int], list[Rank]] = {}
    every = [(0, *inner, num_layers) for inner in itertools.combinations(allowed, len(places) - 1)]
    for cuts in every:
        for stage, ends in enumerate(itertools.pairwise(cuts)):
            if (stage, *ends) not in known:
                known[stage, *ends] = costs_of(places[stage].figures(*ends), places[stage].memory_bytes)
    stages_of = [[known[stage, *ends] for stage, ends in enumerate(itertools.pairwise(cuts))] for cuts in every]
    fitting = [stages for stages in stages_of if all(stages)]
    if not fitting:
        return None
    ticks = min(max(min(ranks)[0] for ranks in stages) for stages in fitting)
    found = []
    for stages in fitting:
        fast = [[rank[1:] for rank in ranks if rank[0] <= ticks] for ranks in stages]
        if all(fast):
            found.append(tuple(map(sum, zip(*map(min, fast), strict=True))))
    swapped, recomputed = min(found)
    return ticks, swapped, recomputed


def instances(seed: int, count: int, most_layers: int) -> Iterator[tuple[list[StagePlace], list[int]]]:
    rng = random.Random(seed)
    for _ in range(count):
        num_layers = rng.randint(2, most_layers)
        num_stages = rng.randint(1, min(3, num_layers))
        allowed = [cut for cut in range(1, num_layers) if rng.random() < 0.8]
        yield places_of(rng, num_layers, num_stages), allowed


def check(places: Sequence[StagePlace], found: PolicyCuts) -> None:
    """The stages cover the layers, fit, and cost what is said."""
    assert [stage.first for stage in found.stages] == [0, *(stage.last for stage in found.stages[:-1])]
    assert found.stages[-1].last == len(places[0].layers)
    for place, stage in zip(places, found.stages, strict=True):
        assert stage.memory.cost == stage_memory(place.figures(stage.first, stage.last), stage.memory.policies)
        assert stage.memory.cost.num_bytes <= place.memory_bytes


def compare_all(seed: int, count: int, most_layers: int) -> int:
    """Every plan is the best, and proven to be; returns how many swap or recompute."""
    unfit = pressed = 0
    for places, allowed in instances(seed, count, most_layers):
        best = best_rank(places, allowed) if len(allowed) >= len(places) - 1 else None
        found = cut_with_policies(places, allowed)
        assert (None if found is None else found.rank) == best
        unfit += found is None
        if found is not None:
            check(places, found)
            assert {stage.last for stage in found.stages[:-1]} <= set(allowed)
            assert found.lower_bound_ticks == found.ticks
            assert found.is_least
            pressed += found.rank[1] + found.rank[2] > 0
    assert 0 < unfit < count // 2
    return pressed


@pytest.mark.parametrize("seed", range(4))
def test_no_cut_and_policies_are_better(seed: int) -> None:
    assert compare_all(seed, 80, 5) > 10


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(8))
def test_no_cut_and_policies_of_seven_layers_are_better(seed: int) -> None:
    assert compare_all(100 + seed, 40, 7) > 5


def test_large_models_are_cut_with_a_stated_gap_and_what_is_kept_where_it_fits() -> None:
    """200 layers in 8 stages: the gap covers what a longer search finds, and memory for everything changes nothing."""
    rng = random.Random(0)
    places, allowed = places_of(rng, 200, 8), range(1, 200)
    short = cut_with_policies(places, allowed, max_choices=2_000)
    longer = cut_with_policies(places, allowed)
    assert short is not None
    assert longer is not None
    check(places, short)
    check(places, longer)
    assert max(short.lower_bound_ticks, longer.lower_bound_ticks) <= min(short.ticks, longer.ticks)
    assert longer.rank[1] + longer.rank[2] > 0
    assert longer.gap < 0.1
    enough = cut_with_policies([replace(place, memory_bytes=1 << 50) for place in places], allowed)
    assert enough is not None
    assert enough.rank[1:] == (0, 0)
    assert enough.gap == 0
    assert enough.ticks <= longer.lower_bound_ticks


def test_what_cannot_fit_is_refused() -> None:
    places = places_of(random.Random(1), 6, 3)
    assert cut_with_policies([replace(place, memory_bytes=MIB) for place in places], range(1, 6)) is None
    assert cut_with_policies(places, [3]) is None


def test_a_search_that_ends_early_has_a_plan_that_fits() -> None:
    """Whatever effort was left for the last stage that was examined again."""
    for seed in range(12):
        places = places_of(random.Random(seed), 20, 3)
        for max_choices in (1_000, 4_000):
            found = cut_with_policies(places, range(1, 20), max_choices=max_choices)
            if found is not None:
                check(places, found)
                assert found.lower_bound_ticks <= found.ticks


def kept_ticks(place: StagePlace, first: int, last: int) -> tuple[int, int]:
    """Time and memory of a stage that keeps everything."""
    cost = stage_memory(place.figures(first, last), ["keep"] * (last - first))
    return cost.ticks, cost.num_bytes


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_where_the_fastest_cut_fits_to_the_byte_nothing_is_swapped_or_recomputed(seed: int) -> None:
    """With a byte less mostly something has to be."""
    rng = random.Random(seed)
    pressed = 0
    for _ in range(60):
        num_layers = rng.randint(2, 9)
        places = places_of(rng, num_layers, rng.randint(1, min(3, num_layers)))
        inner = itertools.combinations(range(1, num_layers), len(places) - 1)
        every = [(0, *borders, num_layers) for borders in inner]
        stages = {
            cuts: [kept_ticks(place, *ends) for place, ends in zip(places, itertools.pairwise(cuts), strict=True)]
            for cuts in every
        }
        cuts = min(every, key=lambda cuts: max(stages[cuts])[0])
        ticks = max(stages[cuts])[0]
        exactly = [replace(place, memory_bytes=need) for place, (_, need) in zip(places, stages[cuts], strict=True)]
        found = cut_with_policies(exactly, range(1, num_layers))
        assert found is not None
        assert found.rank == (ticks, 0, 0)
        assert all(policy == "keep" for stage in found.stages for policy in stage.memory.policies)
        less = [replace(place, memory_bytes=place.memory_bytes - 1) for place in exactly]
        slower = cut_with_policies(less, range(1, num_layers))
        pressed += slower is None or slower.rank > found.rank
    assert pressed > 30
