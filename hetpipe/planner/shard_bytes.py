"""Which bytes of the parameters lie on which shard: the placement of a plan before any process runs.

It works on a profile. Where the profile names a layer's parameters, they are placed one by one; otherwise the layer's
name stands for all of its parameters together. Three answers:

* `round_robin`: layer after layer in turn, the paper's default (§8.1);
* `balanced`: every shard holds the same number of bytes, but for one element; a parameter is cut only where that
  needs it;
* `ed_local`: each stage's layers on the shard of the node that computes it, so that no parameter byte crosses nodes
  (the paper's ED-local). Only where the virtual workers agree on which node computes which layer.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, Protocol

from hetpipe.errors import PlanError
from hetpipe.planner.placement import round_robin
from hetpipe.spec.cluster import node_of
from hetpipe.spec.ids import DeviceId
from hetpipe.spec.plan import DTYPE_BYTES
from hetpipe.spec.plan_document import SliceRange
from hetpipe.spec.profile import Profile
from hetpipe.spec.suggest import join_names

PlacementName = Literal["round_robin", "balanced", "ed_local"]

#: Where the element size is unknown, cuts fall between the largest elements there are.
_WIDEST_ELEMENT_BYTES = max(DTYPE_BYTES.values())


class Span(Protocol):
    """Consecutive layers [first, last) on a device; what placement and traffic need of a stage."""

    @property
    def device(self) -> DeviceId: ...  # noqa: D102

    @property
    def first(self) -> int: ...  # noqa: D102

    @property
    def last(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """A parameter, or all those of a layer together."""

    name: str
    layer: int
    num_bytes: int
    element_bytes: int
    """Cuts fall on multiples of it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, stop) of one parameter on one shard."""

    name: str
    layer: int
    shard: int
    start: int
    stop: int


def parameters_of(profile: Profile) -> tuple[ParameterBytes, ...]:
    """What is to be placed, in chain order; each name once, of layers without parameters too.

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
            found.append(ParameterBytes(parameter.name, index, math.prod(parameter.shape) * size, size))
        if not layer.parameters and (layer.parameter_bytes or layer.name not in names):
            found.append(ParameterBytes(layer.name, index, layer.parameter_bytes, _WIDEST_ELEMENT_BYTES))
        names.add(layer.name)
    return tuple(found)


def shard_nodes(nodes: Sequence[str], num_shards: int | None = None) -> tuple[str, ...]:
    """The node of each shard: one shard on each of `nodes`, or as many as asked for, in turn.

    >>> shard_nodes(["n0", "n2"]), shard_nodes(["n0", "n2"], 3)
    (('n0', 'n2'), ('n0', 'n2', 'n0'))
    """
    return tuple(nodes[index % len(nodes)] for index in range(num_shards or len(nodes)))


class PlacedParameters:
    """Pieces on shards, prepared for sums over layers and nodes."""

    def __init__(self, pieces: Sequence[Piece], shards: Sequence[str], num_layers: int) -> None:
        """Prepare.

        Args:
            pieces: every byte of every parameter once.
            shards: the node of each shard.
            num_layers: length of the chain.
        """
        self.pieces = tuple(pieces)
        self.shards = tuple(shards)
        per_layer = [0] * num_layers
        per_node = {node: [0] * num_layers for node in shards}
        for piece in pieces:
            num_bytes = piece.stop - piece.start
            per_layer[piece.layer] += num_bytes
            per_node[shards[piece.shard]][piece.layer] += num_bytes
        self._all = [0, *accumulate(per_layer)]
        self._num_layers = num_layers
        self._on = {node: [0, *accumulate(sizes)] for node, sizes in per_node.items()}

    @cached_property
    def bytes_on(self) -> dict[str, int]:
        """Node → bytes on its shards."""
        return {node: sums[-1] for node, sums in self._on.items()}

    @cached_property
    def by_shard(self) -> list[list[int]]:
        """For each shard, the parameter bytes on it of the layers before each cut."""
        sizes = [[0] * self._num_layers for _ in self.shards]
        for piece in self.pieces:
            sizes[piece.shard][piece.layer] += piece.stop - piece.start
        return [[0, *accumulate(layers)] for layers in sizes]

    def bytes_of(self, first: int, last: int) -> int:
        """Parameter bytes of layers [first, last)."""
        return self._all[last] - self._all[first]

    def local_bytes(self, node: str, first: int, last: int) -> int:
        """The part of them that lies on shards of `node`."""
        sums = self._on.get(node)
        return sums[last] - sums[first] if sums is not None else 0

    def as_document(self) -> dict[str, int | tuple[SliceRange, ...]]:
        """As a plan document has it: a shard where the parameter is whole, else its pieces."""
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
    profile: Profile, *, shards: Sequence[str], placement: PlacementName, workers: Sequence[Sequence[Span]] = ()
) -> PlacedParameters:
    """Put every parameter on a shard.

    Args:
        profile: the layers.
        shards: the node of each shard, at least one.
        placement: the answer wanted.
        workers: the stages of each virtual worker; only `ed_local` looks at them.

    Raises:
        PlanError: `ed_local` where it is not possible, or a dtype that is unknown.
    """
    parameters = parameters_of(profile)
    match placement:
        case "round_robin":
            pieces = _by_layer(parameters, len(shards))
        case "balanced":
            pieces = _evenly(parameters, len(shards))
        case "ed_local":
            pieces = _where_computed(parameters, shards, workers)
    return PlacedParameters(pieces, shards, len(profile.layers))


def _whole(parameter: ParameterBytes, shard: int) -> Piece:
    return Piece(parameter.name, parameter.layer, shard, 0, parameter.num_bytes)


def _by_layer(parameters: Sequence[ParameterBytes], num_shards: int) -> list[Piece]:
    sizes: dict[int, int] = {}
    for parameter in parameters:
        sizes[parameter.layer] = sizes.get(parameter.layer, 0) + parameter.num_bytes
    holding = [layer for layer, num_bytes in sizes.items() if num_bytes]
    shard_of = dict(zip(holding, round_robin([sizes[layer] for layer in holding], num_shards), strict=True))
    return [_whole(parameter, shard_of.get(parameter.layer, 0)) for parameter in parameters]


def _evenly(parameters: Sequence[ParameterBytes], num_shards: int) -> list[Piece]:
    """Largest first onto the emptiest shard; what would go over an equal share goes on to the next emptiest."""
    share = -(-sum(parameter.num_bytes for parameter in parameters) // num_shards)
    fill = [(0, shard) for shard in range(num_shards)]
    pieces: list[tuple[int, Piece]] = []
    for index in sorted(range(len(parameters)), key=lambda index: -parameters[index].num_bytes):
        parameter = parameters[index]
        start = 0
        while True:
            held, shard = heapq.heappop(fill)
            left = parameter.num_bytes - start
            room = -(-max(share - held, 0) // parameter.element_bytes) * parameter.element_bytes
            taken = left if left <= room or room == 0 else room
            pieces.append((index, Piece(parameter.name, parameter.layer, shard, start, start + taken)))
            heapq.heappush(fill, (held + taken, shard))
            start += taken
            if start == parameter.num_bytes:
                break
    return [piece for _, piece in sorted(pieces, key=lambda entry: (entry[0], entry[1].start))]


def _where_computed(
    parameters: Sequence[ParameterBytes], shards: Sequence[str], workers: Sequence[Sequence[Span]]
) -> list[Piece]:
    node_of_layer: dict[int, str] = {}
    for index, stages in enumerate(workers):
        for stage in stages:
            node = node_of(stage.device)
            for layer in range(stage.first, stage.last):
                if node_of_layer.setdefault(layer, node) != node:
                    raise PlanError(
                        f"ed_local keeps a layer's parameters on the node that computes it, but layer {layer} is "
                        f"computed on {node_of_layer[layer]} by virtual worker 0 and on {node} by virtual worker "
                        f"{index}; use --allocation ED, whose virtual workers share one partition, or another placement"
                    )
    missing = sorted(set(node_of_layer.values()) - set(shards))
    if missing:
        raise PlanError(
            "ed_local needs a shard on every node that computes, and there is none on "
            f"{join_names(missing, 'or')}; ask for {len(set(node_of_layer.values()))} shards, one for each"
        )
    first_shard = {node: shards.index(node) for node in set(shards)}
    return [_whole(parameter, first_shard[node_of_layer[parameter.layer]]) for parameter in parameters]
