"""The best pipeline of each virtual worker under slow network cards, against all combinations."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.decide.planner import combinations
from hetpipe.decide.planner.combinations import Combinations
from hetpipe.decide.planner.partitioner import StageCut
from hetpipe.decide.planner.pipelines import Pipeline
from hetpipe.values.ids import DeviceId

CARDS = {"n0": 1e9, "n1": 5e8}

#: Stage time in µs, and the bytes that leave each node per wave.
Made = tuple[int, int, int]
made = st.tuples(st.integers(1, 6), st.integers(0, 4), st.integers(0, 4))
workers = st.lists(st.lists(made, min_size=1, max_size=5), min_size=1, max_size=4)


def pipeline_of(one: Made) -> Pipeline:
    stage = StageCut(DeviceId("n0/0"), "V", 0, 1, False, one[0] * 10**6, 0, 0)  # noqa: FBT003 - positional by nature
    return Pipeline((stage,), 1 / stage.ticks)


def search(given_workers: list[list[Made]]) -> tuple[Combinations, Mapping[int, Made]]:
    pipelines = [[pipeline_of(one) for one in own] for own in given_workers]
    origin = {
        id(pipeline): one
        for own, mades in zip(pipelines, given_workers, strict=True)
        for pipeline, one in zip(own, mades, strict=True)
    }
    found = Combinations(
        pipelines,
        minibatches_per_wave=2,
        network_cards=CARDS,
        bytes_moved=lambda pipeline: {
            ("n0", "out"): origin[id(pipeline)][1] * 1000,
            ("n1", "in"): origin[id(pipeline)][2] * 1000,
        },
    )
    return found, origin


def key(chosen: tuple[Made, ...]) -> tuple[float, int]:
    """Minibatches per second of the job, and the largest stage time (negative)."""
    slowest = max(one[0] for one in chosen)
    rates = [len(chosen) / (slowest * 1e-6)]
    for node, card in enumerate(CARDS.values(), 1):
        leaving = sum(one[node] * 1000 for one in chosen)
        rates += [card * 2 * len(chosen) / leaving] if leaving else []
    return round(min(rates), 3), -slowest


@given(workers)
def test_no_combination_is_better(given_workers: list[list[Made]]) -> None:
    found, origin = search(given_workers)

    chosen = tuple(origin[id(pipeline)] for pipeline in found.best())

    assert all(one in own for one, own in zip(chosen, given_workers, strict=True))
    assert key(chosen) == max(key(other) for other in product(*given_workers))


@settings(max_examples=30)
@given(workers)
def test_with_too_many_combinations_it_is_no_worse_than_the_fastest(given_workers: list[list[Made]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combinations, "COMBINED", 0)
        found, origin = search(given_workers)
        chosen = tuple(origin[id(pipeline)] for pipeline in found.best())

    fastest = tuple(min(own, key=lambda one: (one[0], one[1] + one[2])) for own in given_workers)
    assert key(chosen) >= key(fastest)
