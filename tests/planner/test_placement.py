"""Every parameter has one shard; a balanced placement is near the best."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpipe.planner.placement import PLACEMENTS, balanced, place
from hetpipe.spec.ids import LayerIndex
from hetpipe.spec.plan import LayerReport, TensorSpec
from tests.coordinator.builders import layer


@pytest.mark.parametrize("name", sorted(PLACEMENTS))
@given(sizes=st.lists(st.integers(0, 1_000), max_size=20), num_shards=st.integers(1, 5))
def test_every_parameter_has_one_shard(name: str, sizes: list[int], num_shards: int) -> None:
    shards = PLACEMENTS[name](sizes, num_shards)

    assert len(shards) == len(sizes)
    assert all(0 <= shard < num_shards for shard in shards)


@given(sizes=st.lists(st.integers(1, 1_000), min_size=1, max_size=20), num_shards=st.integers(1, 5))
def test_balanced_keeps_its_promise(sizes: list[int], num_shards: int) -> None:
    loads = [0] * num_shards
    for size, shard in zip(sizes, balanced(sizes, num_shards), strict=True):
        loads[shard] += size

    # List scheduling: the fullest shard had the least before it got its last parameter.
    assert max(loads) <= sum(sizes) / num_shards + max(sizes)


def test_bytes_count_not_elements() -> None:
    wide = TensorSpec("wide", (10,), "float64")
    narrow = [TensorSpec(f"narrow{index}", (15,), "bfloat16") for index in range(2)]
    layers = [LayerReport(LayerIndex(0), "all", (*narrow, wide), (), 0)]

    slices = place(layers, num_shards=2, placement=balanced)

    assert {part.parameter.name: part.shard for part in slices} == {"wide": 0, "narrow0": 1, "narrow1": 1}


def test_slices_are_in_chain_order() -> None:
    slices = place([layer(0, parameters=1), layer(1, parameters=9)], num_shards=2, placement=balanced)

    assert [part.layer for part in slices] == [0, 1]
    assert [part.shard for part in slices] == [1, 0]
