"""Placement of a profile's parameters on shards (`decide.planner.placement`), prepared for sums.

If the profile names a layer's parameters, they are placed individually; otherwise the layer's name stands for all of
its parameters together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

from hetpipe.decide.planner.placement import PLACEMENTS, ParameterBytes, Piece, Span, ed_local
from hetpipe.errors import PlanError
from hetpipe.values.plan import DTYPE_BYTES
from hetpipe.values.plan_document import SliceRange
from hetpipe.values.policies import PlacementName
from hetpipe.values.profile import Profile


def parameters_of(profile: Profile) -> tuple[ParameterBytes, ...]:
    """The parameters to place, in chain order; each name once, including layers without parameters.

    Raises:
        PlanError: a dtype is unknown.
    """
    found: list[ParameterBytes] = []
    names: set[str] = set()
    for index, layer in enumerate(profile.layers):
        for parameter in layer.parameters:
            size = DTYPE_BYTES.get(parameter.dtype)
            if size is None:
                raise PlanError(
                    f"parameter {parameter.name} has the dtype {parameter.dtype}; use {', '.join(sorted(DTYPE_BYTES))}"
                )
            found.append(ParameterBytes(parameter.name, index, math.prod(parameter.shape) * size))
        if not layer.parameters and (layer.parameter_bytes or layer.name not in names):
            found.append(ParameterBytes(layer.name, index, layer.parameter_bytes))
        names.add(layer.name)
    return tuple(found)


def shard_nodes(nodes: Sequence[str], num_shards: int | None = None) -> tuple[str, ...]:
    """The node of each shard: one shard on each of `nodes`, or `num_shards` in turn.

    >>> shard_nodes(["n0", "n2"]), shard_nodes(["n0", "n2"], 3)
    (('n0', 'n2'), ('n0', 'n2', 'n0'))
    """
    return tuple(nodes[index % len(nodes)] for index in range(num_shards or len(nodes)))


class PlacedParameters:
    """Pieces on shards, prepared for sums over layers and nodes."""

    def __init__(self, pieces: Sequence[Piece], shards: Sequence[str], num_layers: int, frozen_layers: int = 0) -> None:
        """Compute prefix sums.

        Args:
            pieces: pieces that cover every byte of every parameter once.
            shards: the node of each shard.
            num_layers: length of the chain.
            frozen_layers: the first so many layers are frozen: their parameters stay where they are.
        """
        self.pieces = tuple(pieces)
        self.shards = tuple(shards)
        per_layer = [0] * num_layers
        per_node = {node: [0] * num_layers for node in shards}
        self._moved = [piece for piece in self.pieces if piece.layer >= frozen_layers]
        for piece in self._moved:
            num_bytes = piece.stop - piece.start
            per_layer[piece.layer] += num_bytes
            per_node[shards[piece.shard]][piece.layer] += num_bytes
        self._all = [0, *accumulate(per_layer)]
        self._num_layers = num_layers
        self._on = {node: [0, *accumulate(sizes)] for node, sizes in per_node.items()}

    @cached_property
    def bytes_on(self) -> dict[str, int]:
        """Node → bytes on its shards that are pushed and pulled."""
        return {node: sums[-1] for node, sums in self._on.items()}

    @cached_property
    def by_shard(self) -> list[list[int]]:
        """Per shard, the bytes on it that are pushed and pulled, of the layers before each cut."""
        sizes = [[0] * self._num_layers for _ in self.shards]
        for piece in self._moved:
            sizes[piece.shard][piece.layer] += piece.stop - piece.start
        return [[0, *accumulate(layers)] for layers in sizes]

    @cached_property
    def held_by_shard(self) -> list[int]:
        """Per shard, all parameter bytes on it."""
        held = [0] * len(self.shards)
        for piece in self.pieces:
            held[piece.shard] += piece.stop - piece.start
        return held

    def bytes_of(self, first: int, last: int) -> int:
        """Bytes of layers [first, last) that are pushed and pulled."""
        return self._all[last] - self._all[first]

    def local_bytes(self, node: str, first: int, last: int) -> int:
        """The part of `bytes_of` on shards of `node`."""
        sums = self._on.get(node)
        return sums[last] - sums[first] if sums is not None else 0

    def as_document(self) -> dict[str, int | tuple[SliceRange, ...]]:
        """Convert to the format of a plan document: a shard for a whole parameter, else its pieces."""
        found: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault(piece.name, []).append(piece)
        return {
            name: pieces[0].shard
            if len(pieces) == 1
            else tuple((piece.shard, piece.start, piece.stop) for piece in pieces)
            for name, pieces in found.items()
        }


def place_bytes(
    profile: Profile,
    *,
    shards: Sequence[str],
    placement: PlacementName,
    workers: Sequence[Sequence[Span]] = (),
    frozen_layers: int = 0,
) -> PlacedParameters:
    """Place every parameter on shards.

    Args:
        profile: the layers.
        shards: the node of each shard, at least one.
        placement: name of the placement.
        workers: the stages of each virtual worker; used by `ed_local` only.
        frozen_layers: the first so many layers are frozen.

    Raises:
        PlanError: `ed_local` is impossible, or a dtype is unknown.
    """
    parameters = parameters_of(profile)
    if placement == "ed_local":
        pieces = ed_local(parameters, shards, workers)
    else:
        pieces = PLACEMENTS[placement](parameters, len(shards))
    return PlacedParameters(pieces, shards, len(profile.layers), frozen_layers)
