"""Memory policies of layers: the formulas on a stage that can be added up by hand, the choice against all others."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from hetpipe.decide.planner.layer_memory import Budget, choose_policies, least_bytes
from hetpipe.values.memory import LayerFigures, LayerPolicy, StageFigures, runs_of, stage_memory

MIB = 1 << 20
NUM_INSTANCES = 400

#: Three layers of distinct figures, in bytes and ticks.
SMALL = StageFigures(
    (LayerFigures(10, 20, 1000, 7), LayerFigures(30, 40, 2000, 11), LayerFigures(50, 60, 4000, 13)),
    in_flight=3,
    receives=True,
    fixed_bytes=100_000,
    receive_ticks=5,
    host_bytes_per_second=2 * 10**12,
)


@pytest.mark.parametrize(
    ("policies", "num_bytes", "ticks", "swapped", "recomputed"),
    [
        ("k k k", 3 * (7 + 1000 + 2000 + 4000), 210, 0, 0),
        # One run: its input, and everything in it once.
        ("r r r", 3 * 7 + 7000, 300, 0, 90),
        # Two runs: two inputs, and the larger of them.
        ("r r n", 3 * (7 + 13) + 4000, 300, 0, 90),
        # What enters a kept layer counts there if the layer before it is recomputed. When that is, the kept layer has
        # freed one minibatch, which is more than the run needs.
        ("r k k", 3 * (7 + 2000 + 11 + 4000), 220, 0, 10),
        ("k r k", 3 * (7 + 1000 + 11 + 4000 + 13), 240, 0, 30),
        ("k k r", 3 * (7 + 1000 + 2000 + 13) + 4000, 260, 0, 50),
        # A swapped layer is there twice, and moves what enters it if nobody else keeps that.
        ("s k k", 3 * (7 + 2000 + 4000) + 2 * 1000, 1000, 1000, 0),
        ("r s k", 3 * (7 + 4000) + 2 * 2011, 2011, 2011, 10),
        ("k k s", 3 * (7 + 1000 + 2000) + 2 * 4000, 4000, 4000, 0),
    ],
)
def test_a_stage_added_up_by_hand(policies: str, num_bytes: int, ticks: int, swapped: int, recomputed: int) -> None:
    words: dict[str, LayerPolicy] = {"k": "keep", "r": "recompute", "n": "recompute-new-run", "s": "swap"}
    found = stage_memory(SMALL, [words[letter] for letter in policies.split()])
    assert found.num_bytes == 100_000 + num_bytes
    assert (found.ticks, found.swapped_bytes, found.recomputed_ticks) == (ticks + 5, swapped, recomputed)


@pytest.mark.parametrize(
    ("policies", "num_bytes"),
    [
        # The run at the front needs 4000 or 6000 once the layers behind it have freed one of their minibatches.
        ("r k k", 3 * (13 + 11 + 2000 + 1000) + 4000 - 3011),
        ("r r k", 3 * (13 + 7 + 1000) + 6000 - 1007),
        ("r s s", 3 * 13 + 2 * 3011 + 4000 - 3011),
        # So has the input of a run.
        ("r n k", 3 * (13 + 11 + 7 + 1000) + 4000 - 11 - 1007),
        ("r r n", 3 * (13 + 7) + 6000 - 7),
    ],
)
def test_while_a_run_is_recomputed_the_layers_behind_it_hold_a_minibatch_less(policies: str, num_bytes: int) -> None:
    words: dict[str, LayerPolicy] = {"k": "keep", "r": "recompute", "n": "recompute-new-run", "s": "swap"}
    stage = replace(SMALL, layers=SMALL.layers[::-1])
    assert stage_memory(stage, [words[letter] for letter in policies.split()]).num_bytes == 100_000 + num_bytes


def peaks(stage: StageFigures, policies: Sequence[LayerPolicy]) -> list[int]:
    """Bytes before the first backward of a full stage, and while each run is recomputed."""
    held: list[tuple[int, int, int]] = []  # of each layer: what it holds of one minibatch, in how many, and run memory
    runs = list(runs_of(policies))
    for index, (layer, policy) in enumerate(zip(stage.layers, policies, strict=True)):
        enters = layer.input_bytes if index and policies[index - 1].startswith("recompute") else 0
        if policy == "keep":
            held.append((layer.activation_bytes + enters, stage.in_flight, 0))
        elif policy == "swap":
            held.append((layer.activation_bytes + enters, min(stage.in_flight, 2), 0))
        else:
            run = next((run for run in runs if run[0] == index), None)
            needed = 0 if run is None else sum(each.activation_bytes for each in stage.layers[slice(*run)])
            held.append((0 if run is None else layer.input_bytes, stage.in_flight, needed))
    entry = stage.in_flight * stage.layers[0].input_bytes if stage.receives and policies[0] in ("keep", "swap") else 0
    full = stage.fixed_bytes + entry + sum(num_bytes * count for num_bytes, count, _ in held)
    return [
        full,
        *(
            full + needed - sum(num_bytes for num_bytes, _, _ in held[index + 1 :])
            for index, (_, _, needed) in enumerate(held)
            if needed
        ),
    ]


def instance(rng: random.Random, num_layers: int, *, shrinks: bool) -> StageFigures:
    """Whole MiB, small numbers, so that ties are frequent; with `shrinks` the first layers are the largest."""
    layers = [
        LayerFigures(rng.randint(0, 20) * 10**9, rng.randint(0, 30) * 10**9, *(rng.randint(0, 12) * MIB for _ in "ai"))
        for _ in range(num_layers)
    ]
    if shrinks:
        layers.sort(key=lambda layer: layer.activation_bytes, reverse=True)
    return StageFigures(
        tuple(layers),
        in_flight=rng.randint(1, 2 if shrinks else 5),
        receives=rng.random() < 0.7,
        fixed_bytes=rng.randint(0, 10) * MIB,
        receive_ticks=rng.randint(0, 5) * 10**9,
        host_bytes_per_second=rng.choice([None, 10**8, 10**9, 2 * 10**9, 16 * 10**9]),
    )


def instances(seed: int, count: int, *, shrinks: bool = False) -> Iterator[tuple[StageFigures, int]]:
    rng = random.Random(seed)
    for _ in range(count):
        stage = instance(rng, rng.randint(1, 6), shrinks=shrinks)
        policies = list(every_policies(stage))
        needs = sorted({stage_memory(stage, policies[0]).num_bytes, *(need(stage, each) for each in policies)})
        # From a MiB too little for everything to just too little for keeping all.
        yield stage, rng.randint(needs[0] // MIB - 1, needs[-1] // MIB) * MIB


def every_policies(stage: StageFigures) -> Iterator[tuple[LayerPolicy, ...]]:
    held: list[LayerPolicy] = ["keep", "swap"] if stage.host_bytes_per_second else ["keep"]
    every: list[LayerPolicy] = [*held, "recompute", "recompute-new-run"]
    yield from itertools.product(every, repeat=len(stage.layers))


def need(stage: StageFigures, policies: tuple[LayerPolicy, ...]) -> int:
    return stage_memory(stage, policies).num_bytes


@pytest.mark.parametrize(
    ("seed", "shrinks"),
    [(0, False), (4, True)]
    + [pytest.param(seed, seed > 4, marks=pytest.mark.exhaustive) for seed in (1, 2, 3, 5, 6, 7)],
)
def test_no_policies_are_better(seed: int, shrinks: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """Where the first layers are the largest, what layers behind the runs free decides which policies fit."""
    unfit = decided = 0
    count = NUM_INSTANCES // (8 if shrinks else 4)
    for stage, memory in instances(seed, count, shrinks=shrinks):
        costs = [stage_memory(stage, each) for each in every_policies(stage)]
        best = min((cost.rank for cost in costs if cost.num_bytes <= memory), default=None)
        found = choose_policies(stage, memory)
        unfit += best is None
        assert (None if found is None else found.cost.rank) == best
        assert least_bytes(stage) == min(cost.num_bytes for cost in costs)
        if found is not None:
            assert found.cost == stage_memory(stage, found.policies)
            assert found.cost.num_bytes <= memory
            assert found.gap_ticks == 0
            full, *recomputing = peaks(stage, found.policies)
            assert found.cost.num_bytes == max(full, *recomputing, 0)
            runs = (sum(x.activation_bytes for x in stage.layers[slice(*run)]) for run in runs_of(found.policies))
            decided += full + max(runs, default=0) > memory
    assert 0 < unfit < count // 2, "some fit by no policies, and most by some"
    assert decided > count // 20, "with the largest run in full other policies were chosen"


def test_where_everything_fits_nothing_is_swapped_or_recomputed() -> None:
    found = choose_policies(SMALL, need(SMALL, ("keep",) * 3))
    assert found is not None
    assert found.policies == ("keep",) * 3


def test_a_search_that_is_cut_off_states_its_gap() -> None:
    """The gap covers the best choice, and the one that is returned fits."""
    gaps = 0
    for stage, memory in instances(9, 60):
        best = choose_policies(stage, memory)
        found = choose_policies(stage, memory, budget=Budget(3))
        if best is None or found is None:
            continue
        assert found.cost.num_bytes <= memory
        assert found.cost.ticks - found.gap_ticks <= best.cost.ticks
        gaps += found.gap_ticks > 0
    assert gaps > 0, "some are cut off"


def test_of_policies_that_are_fast_enough_those_with_the_least_swaps_are_taken() -> None:
    for stage, memory in instances(11, 40):
        found = choose_policies(stage, memory)
        if found is None:
            continue
        enough = found.cost.ticks * 5 // 4
        costs = [stage_memory(stage, each) for each in every_policies(stage)]
        best = min(cost.rank[1:] for cost in costs if cost.num_bytes <= memory and cost.ticks <= enough)
        slower = choose_policies(stage, memory, enough_ticks=enough)
        assert slower is not None
        assert slower.cost.rank[1:] == best
        assert slower.cost.ticks <= enough
