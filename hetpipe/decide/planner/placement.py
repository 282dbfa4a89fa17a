"""Placement of parameter bytes on shards: the single definition for planner, simulator and runs. Pure.

A parameter is described by its name, layer and size. A placement is a list of pieces; there are three:

* `balanced`, the default: equally many bytes on every shard, as whole parameters and a few large pieces;
* `round_robin`: layers in turn, as in the paper (§8.1); parameters are not split;
* `ed_local`: each layer on a shard of the node that computes it (the paper's ED-local), so that no parameter byte
  crosses nodes. It depends on the virtual workers; the other two do not.

The parameters come from a profile (`decide.planner.shard_bytes`) or from the model of a run
(`decide.planner.partition`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hetpipe.errors import PlanError
from hetpipe.values.cluster import node_of
from hetpipe.values.ids import DeviceId
from hetpipe.values.policies import PlacementName
from hetpipe.values.suggest import join_names

#: A shard may exceed an equal share by this fraction (1/20), and by this many bytes in any case: less is not worth a
#: cut. A message of 64 KiB takes 0.05 ms at 10 Gbit/s, less than the call that carries it.
_TOLERANCE_DIVISOR = 20
_TOLERANCE_BYTES = 64 * 1024

#: Alignment of cuts, relative to the start of the parameter: falls between elements of every dtype.
_CUT_BYTES = 4096


class Span(Protocol):
    """Consecutive layers [first, last) on a device; the part of a stage that placement and traffic depend on."""

    @property
    def device(self) -> DeviceId: ...  # noqa: D102

    @property
    def first(self) -> int: ...  # noqa: D102

    @property
    def last(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """A parameter, or all parameters of a layer together."""

    name: str
    layer: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, stop) of one parameter on one shard."""

    name: str
    layer: int
    shard: int
    start: int
    stop: int


#: Parameters in chain order, and the number of shards → their pieces: parameters in the same order, the pieces of each
#: ascending and contiguous. An empty parameter has one empty piece.
Placement = Callable[[Sequence[ParameterBytes], int], list[Piece]]


def fullest_allowed(total_bytes: int, num_shards: int) -> int:
    """Maximum bytes that `balanced` puts on one shard: 1.05 of an equal share, or 64 KiB more than it if that is more.

    >>> fullest_allowed(200_000_000, 2), fullest_allowed(2_000, 2)
    (105000000, 66536)
    """
    share = -(-total_bytes // num_shards)
    return share + max(share // _TOLERANCE_DIVISOR, _TOLERANCE_BYTES)


def balanced(parameters: Sequence[ParameterBytes], num_shards: int) -> list[Piece]:
    """Largest first, each on the shard with the fewest bytes so far; split if the shard would exceed its limit.

    The limit is `fullest_allowed`. A shard that would exceed it gets the part of the parameter that fills it to an
    equal share, rounded up to 4 KiB; the rest goes to the shard with the fewest bytes at that point. Ties are broken in
    favour of the first parameter and the first shard.

    Guarantees: no shard exceeds `fullest_allowed`; all parameters together have fewer than `num_shards` cuts; no piece
    of a split parameter is smaller than 64 KiB / `num_shards`; and nothing is split if largest first succeeds without,
    in particular no model of up to 128 KiB on two shards.

    >>> [(p.name, p.shard) for p in balanced([ParameterBytes(n, 0, b) for n, b in (("w", 90), ("b", 10))], 2)]
    [('w', 0), ('b', 1)]
    >>> [(p.shard, p.start, p.stop) for p in balanced([ParameterBytes("w", 0, 400_000)], 2)]
    [(0, 0, 200704), (1, 200704, 400000)]
    """
    total = sum(parameter.num_bytes for parameter in parameters)
    share, limit = -(-total // num_shards), fullest_allowed(total, num_shards)
    fill = [(0, shard) for shard in range(num_shards)]
    pieces: list[tuple[int, Piece]] = []
    for index in sorted(range(len(parameters)), key=lambda index: -parameters[index].num_bytes):
        parameter, start = parameters[index], 0
        while True:
            held, shard = heapq.heappop(fill)
            taken = parameter.num_bytes - start
            if held + taken > limit:
                taken = -(-(share - held) // _CUT_BYTES) * _CUT_BYTES
            pieces.append((index, Piece(parameter.name, parameter.layer, shard, start, start + taken)))
            heapq.heappush(fill, (held + taken, shard))
            start += taken
            if start == parameter.num_bytes:
                break
    return [piece for _, piece in sorted(pieces, key=lambda entry: (entry[0], entry[1].start))]


def round_robin(parameters: Sequence[ParameterBytes], num_shards: int) -> list[Piece]:
    """Layers with parameters in turn, in chain order; the parameters of a layer stay together.

    >>> [p.shard for p in round_robin([ParameterBytes(n, n // 2, 4) for n in range(6)], 2)]
    [0, 0, 1, 1, 0, 0]
    """
    holding = dict.fromkeys(parameter.layer for parameter in parameters if parameter.num_bytes)
    shard_of = {layer: position % num_shards for position, layer in enumerate(holding)}
    return [_whole(parameter, shard_of.get(parameter.layer, 0)) for parameter in parameters]


#: Placements that depend on sizes only.
PLACEMENTS: Mapping[PlacementName, Placement] = {"balanced": balanced, "round_robin": round_robin}


def ed_local(
    parameters: Sequence[ParameterBytes], shards: Sequence[str], workers: Sequence[Sequence[Span]]
) -> list[Piece]:
    """Each parameter, whole, on the first shard of the node that computes its layer.

    Args:
        parameters: parameters in chain order.
        shards: the node of each shard.
        workers: the stages of each virtual worker.

    Raises:
        PlanError: virtual workers compute a layer on different nodes, or a node has no shard.
    """
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


def _whole(parameter: ParameterBytes, shard: int) -> Piece:
    return Piece(parameter.name, parameter.layer, shard, 0, parameter.num_bytes)
