"""Placement of a profile's parameters on shards (`decide.planner.placement`), prepared for sums.

If the profile names a layer's parameters, they are placed individually; otherwise the layer's name stands for all of
its parameters together.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from itertools import accumulate

from hetpipe.decide.planner.placement import PLACEMENTS, ParameterBytes, Piece, Span, ed_local
from hetpipe.errors import PlanError
from hetpipe.values.plan import DTYPE_BYTES
from hetpipe.values.plan_document import SliceRange
from hetpipe.values.policies import PlacementName
from hetpipe.values.profile import Profile
from hetpipe.values.sync import PushCompression


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


def halved_pushes(profile: Profile, compression: PushCompression) -> frozenset[str]:
    """The parameters whose pushes have half their bytes (`docs/semantics/wsp.md` §12), by the names of `parameters_of`.

    Where the profile names no parameters, those of a layer count as `float32`.
    """
    if compression == "none":
        return frozenset()
    return frozenset(
        name
        for layer in profile.layers
        for name in ([p.name for p in layer.parameters if p.dtype == "float32"] if layer.parameters else [layer.name])
    )


def pushed_bytes(piece: Piece, halved: Collection[str]) -> int:
    """Bytes of a push of `piece`, without what the wire adds; `halved` as of `halved_pushes`.

    >>> piece = Piece("w", 0, 0, start=100, stop=300)
    >>> pushed_bytes(piece, ()), pushed_bytes(piece, {"w"})
    (200, 100)
    """
    num_bytes = piece.stop - piece.start
    return -(-num_bytes // 2) if piece.name in halved else num_bytes


def shard_nodes(nodes: Sequence[str], num_shards: int | None = None) -> tuple[str, ...]:
    """The node of each shard: one shard on each of `nodes`, or `num_shards` in turn.

    >>> shard_nodes(["n0", "n2"]), shard_nodes(["n0", "n2"], 3)
    (('n0', 'n2'), ('n0', 'n2', 'n0'))
    """
    return tuple(nodes[index % len(nodes)] for index in range(num_shards or len(nodes)))


class ShardSums:
    """Bytes between layers and shards in one direction, prepared for sums over layers and nodes."""

    def __init__(self, sizes: Iterable[tuple[Piece, int]], shards: Sequence[str], num_layers: int) -> None:
        """Compute prefix sums.

        Args:
            sizes: pieces, with the bytes that are moved of each.
            shards: the node of each shard.
            num_layers: length of the chain.
        """
        self._sizes = tuple(sizes)
        self._shards = tuple(shards)
        self._num_layers = num_layers
        per_layer = [0] * num_layers
        per_node = {node: [0] * num_layers for node in shards}
        for piece, num_bytes in self._sizes:
            per_layer[piece.layer] += num_bytes
            per_node[shards[piece.shard]][piece.layer] += num_bytes
        self._all = [0, *accumulate(per_layer)]
        self._on = {node: [0, *accumulate(sizes)] for node, sizes in per_node.items()}

    @cached_property
    def bytes_on(self) -> dict[str, int]:
        """Node → bytes of all layers on its shards."""
        return {node: sums[-1] for node, sums in self._on.items()}

    @cached_property
    def by_shard(self) -> list[list[int]]:
        """Per shard, the bytes on it of the layers before each cut."""
        sizes = [[0] * self._num_layers for _ in self._shards]
        for piece, num_bytes in self._sizes:
            sizes[piece.shard][piece.layer] += num_bytes
        return [[0, *accumulate(layers)] for layers in sizes]

    def bytes_of(self, first: int, last: int) -> int:
        """Bytes of layers [first, last)."""
        return self._all[last] - self._all[first]

    def local_bytes(self, node: str, first: int, last: int) -> int:
        """The part of `bytes_of` on shards of `node`."""
        sums = self._on.get(node)
        return sums[last] - sums[first] if sums is not None else 0


class PlacedParameters:
    """Pieces on shards, and the bytes of a push and a pull of them."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        shards: Sequence[str],
        num_layers: int,
        frozen_layers: int = 0,
        halved: Collection[str] = frozenset(),
    ) -> None:
        """Compute the sums of both directions.

        Args:
            pieces: pieces that cover every byte of every parameter once.
            shards: the node of each shard.
            num_layers: length of the chain.
            frozen_layers: the first so many layers are frozen: their parameters stay where they are.
            halved: parameters whose pushes have half their bytes (`halved_pushes`).
        """
        self.pieces = tuple(pieces)
        self.shards = tuple(shards)
        self.halved = frozenset(halved)
        moved = [piece for piece in self.pieces if piece.layer >= frozen_layers]
        #: What a pull moves, and a shard adds.
        self.pulled = ShardSums([(piece, piece.stop - piece.start) for piece in moved], shards, num_layers)
        #: What a push moves; the same object if nothing is halved.
        self.pushed = (
            ShardSums([(piece, pushed_bytes(piece, self.halved)) for piece in moved], shards, num_layers)
            if self.halved
            else self.pulled
        )

    @cached_property
    def held_by_shard(self) -> list[int]:
        """Per shard, all parameter bytes on it."""
        held = [0] * len(self.shards)
        for piece in self.pieces:
            held[piece.shard] += piece.stop - piece.start
        return held

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
    halved: Collection[str] = frozenset(),
) -> PlacedParameters:
    """Place every parameter on shards.

    Args:
        profile: the layers.
        shards: the node of each shard, at least one.
        placement: name of the placement.
        workers: the stages of each virtual worker; used by `ed_local` only.
        frozen_layers: the first so many layers are frozen.
        halved: parameters whose pushes have half their bytes (`halved_pushes`).

    Raises:
        PlanError: `ed_local` is impossible, or a dtype is unknown.
    """
    parameters = parameters_of(profile)
    if placement == "ed_local":
        pieces = ed_local(parameters, shards, workers)
    else:
        pieces = PLACEMENTS[placement](parameters, len(shards))
    return PlacedParameters(pieces, shards, len(profile.layers), frozen_layers, halved)
