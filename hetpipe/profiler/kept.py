"""Which layer keeps how much from forward to backward? Pure: storages are numbers here.

A stage keeps each storage once, whoever saves it, so the layers' figures must add up to what all of them keep together.
A storage that several layers save (an activation's result, which the next linear layer saves as its input) counts at
the first of them. What a cut adds is not in these figures: the stage behind it keeps a copy of such a storage of its
own, and for a moment it has that input's gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Saved:
    """What one layer saved for its backward: identity of a storage → its bytes.

    An identity is unique among the storages of one layer and of its outputs, which are the next layer's inputs; after
    that it may be used again.
    """

    storages: Mapping[int, int]
    outputs: frozenset[int]
    """The storages of the layer's outputs, saved or not."""


def kept_bytes(layers: Sequence[Saved]) -> tuple[int, ...]:
    """Bytes that each layer of a chain keeps.

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
