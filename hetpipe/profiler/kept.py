"""Bytes each layer retains from forward to backward. Pure: storages are integers here.

A stage holds each storage once even if several layers save it, so the layers' figures sum to the total.
A storage that several layers save (an activation's result, which the next linear layer saves as its input) counts at
the first of them. The overhead of a cut is excluded: the next stage holds its own copy of such a storage and,
briefly, the gradient of that input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Saved:
    """Storages one layer saved for its backward: storage identity → bytes.

    Identities are unique among the storages of one layer and its outputs, which are the next layer's inputs; after
    that it may be used again.
    """

    storages: Mapping[int, int]
    outputs: frozenset[int]
    """The storages of the layer's outputs, saved or not."""


def kept_bytes(layers: Sequence[Saved]) -> tuple[int, ...]:
    """Bytes retained by each layer of a chain.

    >>> relu = Saved({1: 100}, outputs=frozenset({1}))  # saves its result
    >>> linear = Saved({1: 100, 7: 8}, outputs=frozenset({2}))  # saves its input, and something of its own
    >>> kept_bytes([relu, linear])
    (100, 8)
    """
    found: list[int] = []
    #: Storages that were counted and reach the layer at hand.
    counted: frozenset[int] = frozenset()
    for layer in layers:
        found.append(sum(size for identity, size in layer.storages.items() if identity not in counted))
        counted = (counted | layer.storages.keys()) & layer.outputs
    return tuple(found)
