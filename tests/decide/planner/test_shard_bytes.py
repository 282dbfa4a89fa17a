"""The parameters of a profile on shards: sums over layers and nodes, and what a plan document says of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpipe.decide.planner.shard_bytes import PlacedParameters, halved_pushes, parameters_of, place_bytes
from hetpipe.errors import PlanError
from hetpipe.values.policies import PlacementName
from hetpipe.values.profile import LayerProfile, ParameterProfile, Profile
from hetpipe.values.sync import PushCompression
from tests.decide.planner.job_cases import chain


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


@pytest.mark.parametrize("placement", ["round_robin", "balanced"])
@given(sizes=st.lists(st.integers(0, 1_000_000), min_size=1, max_size=12), num_shards=st.integers(1, 5))
def test_sums_over_layers_and_nodes_are_those_of_the_pieces(
    placement: PlacementName, sizes: list[int], num_shards: int
) -> None:
    shards = [f"n{index}" for index in range(num_shards)]

    placed = place_bytes(sized(sizes), shards=shards, placement=placement)

    for index, size in enumerate(sizes):
        assert sum(placed.pulled.local_bytes(node, index, index + 1) for node in shards) == size
    assert sum(shard_totals(placed)) == sum(sizes) == placed.pulled.bytes_of(0, len(sizes))
    assert list(placed.pulled.bytes_on.values()) == shard_totals(placed)


def test_pieces_in_the_document() -> None:
    placed = place_bytes(sized([400_000, 32]), shards=["a", "b"], placement="balanced")

    assert placed.as_document() == {"layer0": ((0, 0, 200_704), (1, 200_704, 400_000)), "layer1": 1}


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


def test_named_parameters_are_placed_one_by_one() -> None:
    profile = named(
        ParameterProfile(name="weight", shape=(5, 5), dtype="float32"),
        ParameterProfile(name="bias", shape=(5,), dtype="bfloat16"),
    )

    placed = place_bytes(profile, shards=["a", "b"], placement="balanced")

    assert [parameter.num_bytes for parameter in parameters_of(profile)] == [100, 10]
    assert placed.as_document() == {"weight": 0, "bias": 1}


@given(
    st.lists(
        st.tuples(st.integers(0, 300_000), st.sampled_from(["float32", "float64", "bfloat16"])), min_size=1, max_size=8
    ),
    st.integers(1, 4),
    st.sampled_from([0, 1]),
)
def test_pushes_of_float32_are_halved_and_pulls_are_whole(
    parameters: list[tuple[int, str]], num_shards: int, frozen: int
) -> None:
    profile = named(
        *(ParameterProfile(name=str(i), shape=(n,), dtype=dtype) for i, (n, dtype) in enumerate(parameters))
    )
    shards = [f"n{index}" for index in range(num_shards)]

    def place(compression: PushCompression) -> PlacedParameters:
        halved = halved_pushes(profile, compression)
        return place_bytes(profile, shards=shards, placement="balanced", frozen_layers=frozen, halved=halved)

    whole, placed = place("none"), place("bfloat16")

    assert whole.pushed is whole.pulled, "the same numbers as before"
    assert (placed.pieces, placed.held_by_shard) == (whole.pieces, whole.held_by_shard)
    assert placed.pulled.by_shard == whole.pulled.by_shard
    for shard, sums in enumerate(placed.pushed.by_shard):
        sizes = [
            (piece.stop - piece.start) // (2 if parameters[int(piece.name)][1] == "float32" else 1)
            for piece in placed.pieces
            if piece.shard == shard and not frozen
        ]
        assert sums == [0, sum(sizes)]
    assert sum(placed.pushed.bytes_on.values()) == placed.pushed.bytes_of(0, 1)


def test_without_names_layers_count_as_float32() -> None:
    profile = sized([7, 0, 400])

    assert halved_pushes(profile, "none") == frozenset()
    placed = place_bytes(profile, shards=["a"], placement="balanced", halved=halved_pushes(profile, "bfloat16"))
    assert placed.pushed.by_shard == [[0, 4, 4, 204]]


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
