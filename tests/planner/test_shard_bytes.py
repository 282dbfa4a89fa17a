"""Every byte of every parameter has one shard, and where the answer promises it to be."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpipe.errors import PlanError
from hetpipe.planner.shard_bytes import PlacedParameters, parameters_of, place_bytes
from hetpipe.spec.ids import DeviceId
from hetpipe.spec.profile import LayerProfile, ParameterProfile, Profile
from tests.planner.job_cases import chain


@dataclass(frozen=True, slots=True)
class Layers:
    """Consecutive layers on a device."""

    device: DeviceId
    first: int
    last: int


def sized(sizes: list[int]) -> Profile:
    profile = chain([1.0] * len(sizes), {"V": 1.0})
    layers = [
        layer.model_copy(update={"parameter_bytes": size}) for layer, size in zip(profile.layers, sizes, strict=True)
    ]
    return profile.model_copy(update={"layers": tuple(layers)})


def shard_totals(placed: PlacedParameters) -> list[int]:
    totals = [0] * len(placed.shards)
    for piece in placed.pieces:
        totals[piece.shard] += piece.stop - piece.start
    return totals


sizes = st.lists(st.integers(0, 1_000), min_size=1, max_size=12)


@pytest.mark.parametrize("placement", ["round_robin", "balanced"])
@given(sizes=sizes, num_shards=st.integers(1, 5))
def test_every_byte_has_one_shard(placement: str, sizes: list[int], num_shards: int) -> None:
    shards = [f"n{index}" for index in range(num_shards)]

    placed = place_bytes(sized(sizes), shards=shards, placement=placement)  # type: ignore[arg-type]

    for index, size in enumerate(sizes):
        pieces = [piece for piece in placed.pieces if piece.layer == index]
        assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
        assert pieces[-1].stop == size
        assert sum(placed.local_bytes(node, index, index + 1) for node in shards) == size
    assert sum(shard_totals(placed)) == sum(sizes) == placed.bytes_of(0, len(sizes))
    assert list(placed.bytes_on.values()) == shard_totals(placed)


def test_round_robin_deals_layers_with_parameters() -> None:
    placed = place_bytes(sized([5, 0, 5, 5]), shards=["a", "b"], placement="round_robin")

    assert placed.as_document() == {"layer0": 0, "layer1": 0, "layer2": 1, "layer3": 0}


@given(sizes=sizes, num_shards=st.integers(1, 5))
def test_balanced_is_even_but_for_an_element_and_cuts_little(sizes: list[int], num_shards: int) -> None:
    placed = place_bytes(sized(sizes), shards=["n0"] * num_shards, placement="balanced")

    assert max(shard_totals(placed)) <= -(-sum(sizes) // num_shards) + 7
    assert all(piece.start % 8 == 0 for piece in placed.pieces)
    assert len(placed.pieces) - len(sizes) < num_shards


def test_balanced_cuts_nothing_that_fits() -> None:
    placed = place_bytes(sized([8, 16, 8]), shards=["a", "b"], placement="balanced")

    assert placed.as_document() == {"layer0": 1, "layer1": 0, "layer2": 1}


def test_pieces_in_the_document() -> None:
    placed = place_bytes(sized([96, 32]), shards=["a", "b"], placement="balanced")

    assert placed.as_document() == {"layer0": ((0, 0, 64), (1, 64, 96)), "layer1": 1}


def named(*parameters: ParameterProfile) -> Profile:
    layer = LayerProfile(
        name="layer",
        parameter_bytes=0,
        activation_bytes=0,
        output_bytes=0,
        forward_ms={"V": 1.0},
        backward_ms={"V": 1.0},
        parameters=parameters,
    )
    return Profile(version=1, model="m", batch_size=1, input_bytes=0, layers=(layer,))


def test_named_parameters_are_placed_one_by_one_and_cut_between_elements() -> None:
    profile = named(
        ParameterProfile(name="weight", shape=(5, 5), dtype="float32"),
        ParameterProfile(name="bias", shape=(5,), dtype="bfloat16"),
    )

    placed = place_bytes(profile, shards=["a", "b"], placement="balanced")

    assert [parameter.num_bytes for parameter in parameters_of(profile)] == [100, 10]
    assert placed.as_document() == {"weight": ((0, 0, 56), (1, 56, 100)), "bias": 1}


def test_layers_without_parameters_may_share_a_name() -> None:
    profile = sized([0, 8, 0])
    relu = {"name": "relu"}
    first, middle, last = profile.layers
    layers = (first.model_copy(update=relu), middle, last.model_copy(update=relu))

    placed = place_bytes(profile.model_copy(update={"layers": layers}), shards=["a", "b"], placement="round_robin")

    assert placed.as_document() == {"relu": 0, "layer1": 0}


def test_dtypes_are_known() -> None:
    weight = ParameterProfile(name="weight", shape=(1,), dtype="float32")
    with pytest.raises(PlanError, match="dtype float3; use bfloat16"):
        parameters_of(named(weight.model_copy(update={"dtype": "float3"})))


class TestWhereItIsComputed:
    """ed_local."""

    profile = sized([10, 20, 30])
    workers = (
        (Layers(DeviceId("a/0"), 0, 1), Layers(DeviceId("b/0"), 1, 3)),
        (Layers(DeviceId("a/1"), 0, 1), Layers(DeviceId("b/1"), 1, 3)),
    )

    def test_every_stage_has_its_parameters_on_its_node(self) -> None:
        placed = place_bytes(self.profile, shards=["b", "a"], placement="ed_local", workers=self.workers)

        assert placed.as_document() == {"layer0": 1, "layer1": 0, "layer2": 0}
        assert (placed.local_bytes("a", 0, 1), placed.local_bytes("b", 1, 3)) == (10, 50)

    def test_other_cuts_are_refused(self) -> None:
        other = (Layers(DeviceId("a/1"), 0, 2), Layers(DeviceId("b/1"), 2, 3))

        with pytest.raises(PlanError, match=r"layer 1 is computed on b by virtual worker 0 and on a by .* 1"):
            place_bytes(self.profile, shards=["a", "b"], placement="ed_local", workers=[self.workers[0], other])

    def test_every_node_needs_a_shard(self) -> None:
        with pytest.raises(PlanError, match="there is none on b; ask for 2 shards, one for each"):
            place_bytes(self.profile, shards=["a"], placement="ed_local", workers=self.workers)
