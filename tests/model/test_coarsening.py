"""Large models are merged to a bounded number of layers, and none gets larger than it may."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.model.graph import MOST_LAYERS, Crossing, CutPoint, layers_from

MOST = 1 / 24


def graph(num_cuts: int, seed: int) -> tuple[list[CutPoint], list[tuple[int, int]]]:
    """Cuts that move all sorts of sizes, with all sorts of work between them."""
    source = random.Random(seed)
    cuts, work, total = [], [], 0
    for order in range(1, num_cuts + 1):
        total += source.choice([0, 1, 10, 100, 1000])
        work.append((order - 1, total))
        size = source.choice([100, 101, 200, 800, 5000])
        crossing = (Crossing("v:0", (), "float32", size, has_gradient=source.random() < 0.7),)
        cuts.append(CutPoint(str(order), str(order), order, ("",), crossing))
    return cuts, [*work, (num_cuts, total + 50)]


def one_after_the_other(cuts: list[CutPoint], work: list[tuple[int, int]]) -> list[CutPoint]:
    """The same rule, looking at all cuts again after each that goes: quadratic, and plain to see."""
    total, done = work[-1][1], {order + 1: amount for order, amount in work}
    kept = list(cuts)

    def size(cut: CutPoint) -> int:
        return cut.forward_bytes + cut.backward_bytes + 1

    def worst() -> int | None:
        found, most = None, 1.2
        for index, cut in enumerate(kept):
            around = [kept[at] for at in (index - 1, index + 1) if 0 <= at < len(kept)]
            start = done[kept[index - 1].order] if index else 0
            end = done[kept[index + 1].order] if index + 1 < len(kept) else total
            excess = size(cut) / min(map(size, around)) if around else 1.0
            if excess > most and end - start <= total * MOST:
                found, most = index, excess
        return found

    while (index := worst()) is not None:
        del kept[index]
    index = 0
    while index < len(kept):
        start = done[kept[index - 1].order] if index else 0
        end = done[kept[index + 1].order] if index + 1 < len(kept) else total
        here = done[kept[index].order]
        if min(here - start, end - here) < total / 240 and end - start <= total * MOST:
            del kept[index]
        else:
            index += 1
    return kept


@settings(max_examples=40)
@given(st.integers(1, 120), st.integers(0, 10**9))
def test_the_heap_keeps_the_cuts_that_the_plain_rule_keeps(num_cuts: int, seed: int) -> None:
    cuts, work = graph(num_cuts, seed)
    assert list(layers_from(cuts, work)) == one_after_the_other(cuts, work)


@pytest.mark.parametrize("num_cuts", [300, 5000])
def test_thousands_of_cuts_are_merged_to_a_bounded_number_of_layers(num_cuts: int) -> None:
    cuts, work = graph(num_cuts, 3)
    kept = layers_from(cuts, work)
    total, done = work[-1][1], {order + 1: amount for order, amount in work}
    ends = [0, *(done[cut.order] for cut in kept), total]

    assert 24 <= len(kept) + 1 <= MOST_LAYERS
    largest = max(end - start for start, end in pairwise([0, *(done[cut.order] for cut in cuts), total]))
    assert all(end - start <= max(total * MOST, largest) for start, end in pairwise(ends))
