"""The layers that cross each border between stages when a virtual worker's cut changes. Pure (plan-versions.md §4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Crossing:
    """The layers that cross one border of a stage."""

    layers: range
    """Empty if none does."""
    down: bool
    """Whether they go to the later of the two stages."""


def stays_near(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether every layer stays in its stage or goes to one next to it.

    >>> stays_near((0, 1, 2, 5), (0, 2, 3, 5)), stays_near((0, 1, 2, 5), (0, 3, 4, 5))
    (True, False)
    """
    inner = range(1, len(before) - 1)
    return all(before[border - 1] <= after[border] <= before[border + 1] for border in inner)


def crossing(before: Sequence[int], after: Sequence[int], border: int) -> Crossing:
    """The layers that cross the border between stages `border` and `border + 1`; all go in one direction.

    Layers that move further than to the next stage cross several borders, one after the other.

    Args:
        before: bounds of the stages, of as many as `after`.
        after: bounds of the stages to come.
        border: from 0 on.

    >>> crossing((0, 3, 4), (0, 1, 4), 0), crossing((0, 1, 4), (0, 3, 4), 0)
    (Crossing(layers=range(1, 3), down=True), Crossing(layers=range(1, 3), down=False))
    >>> crossing((0, 1, 4), (0, 1, 4), 0).layers
    range(1, 1)
    """
    old, new = before[border + 1], after[border + 1]
    return Crossing(range(min(old, new), max(old, new)), down=new < old)
