"""Every byte of every parameter lies on one shard, and no shard is fuller than its placement promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpipe.decide.planner.placement import PLACEMENTS, ParameterBytes, Piece, balanced, ed_local, fullest_allowed
from hetpipe.errors import PlanError
from hetpipe.values.ids import DeviceId
from hetpipe.values.policies import PlacementName

KIB = 1024
TOLERANCE = 64 * KIB

#: Among them sizes at which cutting begins, and some that are no multiple of anything.
sizes = st.lists(
    st.one_of(st.integers(0, 100), st.integers(0, 300 * KIB), st.integers(0, 40_000 * KIB)), min_size=1, max_size=16
)
shard_counts = st.integers(1, 7)


def chain(sizes: Sequence[int], *, per_layer: int = 1) -> list[ParameterBytes]:
    return [ParameterBytes(f"p{index}", index // per_layer, size) for index, size in enumerate(sizes)]


def totals(pieces: Sequence[Piece], num_shards: int) -> list[int]:
    found = [0] * num_shards
    for piece in pieces:
        found[piece.shard] += piece.stop - piece.start
    return found


@pytest.mark.parametrize("name", PLACEMENTS)
@given(sizes=sizes, num_shards=shard_counts)
def test_every_byte_has_one_shard(name: PlacementName, sizes: list[int], num_shards: int) -> None:
    parameters = chain(sizes)

    pieces = PLACEMENTS[name](parameters, num_shards)

    assert list(dict.fromkeys(piece.name for piece in pieces)) == [parameter.name for parameter in parameters]
    for parameter in parameters:
        mine = [piece for piece in pieces if piece.name == parameter.name]
        assert [piece.start for piece in mine] == [0, *(piece.stop for piece in mine[:-1])]
        assert mine[-1].stop == parameter.num_bytes
        assert len({piece.shard for piece in mine}) == len(mine)
        assert all(0 <= piece.shard < num_shards and piece.layer == parameter.layer for piece in mine)


@given(sizes=sizes, num_shards=shard_counts)
def test_balanced_keeps_the_fullest_shard_within_its_bound(sizes: list[int], num_shards: int) -> None:
    pieces = balanced(chain(sizes), num_shards)

    share = -(-sum(sizes) // num_shards)
    assert max(totals(pieces, num_shards)) <= fullest_allowed(sum(sizes), num_shards)
    assert fullest_allowed(sum(sizes), num_shards) <= max(1.05 * share, share + TOLERANCE)


@given(sizes=sizes, num_shards=shard_counts)
def test_balanced_makes_few_and_large_pieces(sizes: list[int], num_shards: int) -> None:
    pieces = balanced(chain(sizes), num_shards)

    assert len(pieces) - len(sizes) < num_shards
    whole = {f"p{index}": size for index, size in enumerate(sizes)}
    cut = [piece for piece in pieces if piece.stop - piece.start < whole[piece.name]]
    assert all(piece.stop - piece.start >= TOLERANCE // num_shards for piece in cut)
    assert all(piece.start % 4096 == 0 for piece in cut)


@given(sizes=sizes, num_shards=shard_counts)
def test_balanced_cuts_nothing_where_largest_first_is_even_enough(sizes: list[int], num_shards: int) -> None:
    fill = [0] * num_shards
    for size in sorted(sizes, reverse=True):
        fill[fill.index(min(fill))] += size

    is_cut = len(balanced(chain(sizes), num_shards)) > len(sizes)

    assert is_cut == (max(fill) > fullest_allowed(sum(sizes), num_shards))


@pytest.mark.parametrize("name", PLACEMENTS)
@given(sizes=sizes, num_shards=shard_counts)
def test_a_placement_depends_on_nothing_but_its_arguments(
    name: PlacementName, sizes: list[int], num_shards: int
) -> None:
    assert PLACEMENTS[name](chain(sizes), num_shards) == PLACEMENTS[name](tuple(chain(sizes)), num_shards)


def test_weights_and_biases_do_not_end_up_on_a_shard_each() -> None:
    """Dealt parameter by parameter, the shard of the weights would hold 99 % of the bytes."""
    parameters = chain([4 * 512 * 512, 4 * 512] * 12, per_layer=2)
    share = sum(parameter.num_bytes for parameter in parameters) // 2

    for place in PLACEMENTS.values():
        assert max(totals(place(parameters, 2), 2)) <= 1.01 * share


def test_the_largest_parameter_of_vgg19_is_cut_and_nothing_else() -> None:
    """Its first fully connected layer has 411 of its 575 MB."""
    fully = [411_041_792, 16_384, 67_108_864, 16_384, 16_384_000, 4_000]
    pieces = balanced(chain([*[5_000_000] * 16, *fully]), 4)

    assert [piece.name for piece in pieces if piece.stop - piece.start < 100_000_000 and piece.start] == []
    assert {piece.name for piece in pieces if piece.start} == {"p16"}
    assert max(totals(pieces, 4)) <= 1.05 * sum(totals(pieces, 4)) / 4


def test_round_robin_deals_layers_that_have_parameters() -> None:
    layers = [("a", 0, 5), ("a.bias", 0, 1), ("relu", 1, 0), ("b", 2, 5), ("c", 3, 5)]

    pieces = PLACEMENTS["round_robin"]([ParameterBytes(*entry) for entry in layers], 2)

    assert {piece.name: piece.shard for piece in pieces} == {"a": 0, "a.bias": 0, "relu": 0, "b": 1, "c": 0}


@dataclass(frozen=True, slots=True)
class Layers:
    """Consecutive layers on a device."""

    device: DeviceId
    first: int
    last: int


class TestEdLocal:
    parameters = chain([10, 20, 30])
    workers = (
        (Layers(DeviceId("a/0"), 0, 1), Layers(DeviceId("b/0"), 1, 3)),
        (Layers(DeviceId("a/1"), 0, 1), Layers(DeviceId("b/1"), 1, 3)),
    )

    def test_every_parameter_is_on_the_node_that_computes_it(self) -> None:
        pieces = ed_local(self.parameters, ["b", "a"], self.workers)

        assert [(piece.shard, piece.start, piece.stop) for piece in pieces] == [(1, 0, 10), (0, 0, 20), (0, 0, 30)]

    def test_other_cuts_are_refused(self) -> None:
        other = (Layers(DeviceId("a/1"), 0, 2), Layers(DeviceId("b/1"), 2, 3))

        with pytest.raises(PlanError, match=r"layer 1 is computed on b by virtual worker 0 and on a by .* 1"):
            ed_local(self.parameters, ["a", "b"], [self.workers[0], other])

    def test_every_node_needs_a_shard(self) -> None:
        with pytest.raises(PlanError, match="there is none on b; ask for 2 shards, one for each"):
            ed_local(self.parameters, ["a"], self.workers)
