"""Which layers cross which border: passed on from neighbour to neighbour, each arrives where the new cut has it."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hetpipe.decide.elastic.moving import crossing


@st.composite
def two_cuts(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    num_stages = draw(st.integers(1, 6))
    num_layers = draw(st.integers(num_stages, 12))
    inner = st.lists(
        st.integers(1, max(num_layers - 1, 1)), unique=True, min_size=num_stages - 1, max_size=num_stages - 1
    )
    return [0, *sorted(draw(inner)), num_layers], [0, *sorted(draw(inner)), num_layers]


@given(two_cuts())
def test_every_layer_arrives(cuts: tuple[list[int], list[int]]) -> None:
    before, after = cuts
    stages = [set(range(first, last)) for first, last in pairwise(before)]
    borders = [crossing(before, after, border) for border in range(len(stages) - 1)]
    for border, crossed in enumerate(borders):  # downwards, in the order in which they are passed on
        if crossed.down:
            assert set(crossed.layers) <= stages[border], "it has what it passes on"
            stages[border] -= set(crossed.layers)
            stages[border + 1] |= set(crossed.layers)
    for border, crossed in reversed(list(enumerate(borders))):
        if not crossed.down:
            assert set(crossed.layers) <= stages[border + 1]
            stages[border + 1] -= set(crossed.layers)
            stages[border] |= set(crossed.layers)
    assert stages == [set(range(first, last)) for first, last in pairwise(after)]


@given(two_cuts())
def test_nothing_moves_to_the_present_cut(cuts: tuple[list[int], list[int]]) -> None:
    cut, _ = cuts
    assert not any(crossing(cut, cut, border).layers for border in range(len(cut) - 2))
