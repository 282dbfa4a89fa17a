"""Which shard holds which parameter. Pure.

Both answers keep parameters whole: one `SlicePlan` per parameter, in chain order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

from hetpipe.spec.ids import LayerIndex, ShardIndex
from hetpipe.spec.plan import LayerReport, SlicePlan, TensorSpec

#: Sizes in bytes, in chain order, and the number of shards → the shard of each.
Placement = Callable[[Sequence[int], int], tuple[ShardIndex, ...]]


def round_robin(sizes_bytes: Sequence[int], num_shards: int) -> tuple[ShardIndex, ...]:
    """Deal the parameters out in chain order.

    >>> round_robin([10, 90, 10, 90], 2)
    (0, 1, 0, 1)
    """
    return tuple(ShardIndex(index % num_shards) for index in range(len(sizes_bytes)))


def balanced(sizes_bytes: Sequence[int], num_shards: int) -> tuple[ShardIndex, ...]:
    """Largest first, each to the shard with the fewest bytes so far; among equals the first parameter and shard.

    The fullest shard holds at most 4/3 of the best possible (Graham 1969, longest processing time first).

    >>> balanced([10, 90, 10, 90], 2)
    (0, 0, 1, 1)
    """
    fill = [(0, ShardIndex(shard)) for shard in range(num_shards)]
    shards = [ShardIndex(0)] * len(sizes_bytes)
    for index in sorted(range(len(sizes_bytes)), key=lambda index: -sizes_bytes[index]):
        num_bytes, shard = heapq.heappop(fill)
        shards[index] = shard
        heapq.heappush(fill, (num_bytes + sizes_bytes[index], shard))
    return tuple(shards)


PLACEMENTS: Mapping[str, Placement] = {"round_robin": round_robin, "balanced": balanced}


def place(layers: Sequence[LayerReport], *, num_shards: int, placement: Placement) -> tuple[SlicePlan, ...]:
    """One slice per parameter of the model, in chain order, on the shard that `placement` chooses."""
    parameters: list[tuple[LayerIndex, TensorSpec]] = [
        (layer.index, parameter) for layer in layers for parameter in layer.parameters
    ]
    shards = placement([parameter.num_bytes for _, parameter in parameters], num_shards)
    return tuple(
        SlicePlan(parameter=parameter, layer=layer, shard=shard, start=0, stop=parameter.num_elements)
        for (layer, parameter), shard in zip(parameters, shards, strict=True)
    )
