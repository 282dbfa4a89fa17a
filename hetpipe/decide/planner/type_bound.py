"""What no plan can beat, from how many devices of each type are used alone: how far they get at best.

The relaxation forgets the nodes (every transfer takes the fastest link there is for the type) and that a stage must
begin exactly where the previous one ended (it may begin before). What is left is a small dynamic programme over counts
of types. It gives lower bounds, and for every search the window of cuts that are worth a look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from hetpipe.decide.planner.device_mix import DeviceMix, KindIndex
from hetpipe.decide.planner.stage_reach import Reach


class _Best:
    """The best of several types' reaches."""

    def __init__(self, reaches: Sequence[Reach]) -> None:
        self._reaches = reaches

    def under(self, bound: int) -> _Best | Reach:
        """Answers the same for `bound`."""
        reaches = [reach.under(bound) for reach in self._reaches]
        return reaches[0] if len(reaches) == 1 else _Best(reaches)

    def furthest(self, first: int, bound: int) -> int:
        """As `Reach.furthest`."""
        return max(reach.furthest(first, bound) for reach in self._reaches)

    def earliest(self, last: int, bound: int) -> int:
        """As `Reach.earliest`."""
        return min(reach.earliest(last, bound) for reach in self._reaches)


class TypeBound:
    """Best cases by the counts of used types, coded as `Front.used`."""

    def __init__(self, mix: DeviceMix, num_layers: int, reach: Callable[[int, KindIndex], Reach]) -> None:
        """Prepare.

        Args:
            mix: of the devices.
            num_layers: of the model.
            reach: (stage, type) → the reach over the fastest links.
        """
        self._num_layers = num_layers
        self._num_stages = mix.num_stages
        #: For every stage and class of types.
        self._reaches = [
            [_Best([reach(stage, kind) for kind in kinds]) for kinds in mix.classes] for stage in range(mix.num_stages)
        ]
        sizes = [sum(mix.counts[kind] for kind in kinds) for kinds in mix.classes]
        strides = [mix.strides[kinds[0]] for kinds in mix.classes]
        digits = product(*(range(size + 1) for size in reversed(sizes)))
        #: For every code, the number of devices and the classes among them with the code without one of each.
        self._parts = [
            (
                sum(number),
                [
                    (index, code - stride)
                    for index, (used, stride) in enumerate(zip(reversed(number), strides, strict=True))
                    if used
                ],
            )
            for code, number in enumerate(digits)
        ]

    def feasible(self, bound: int) -> bool:
        """Could a plan with no stage longer than `bound` ticks exist? False is a proof that none does."""
        return self._furthest(bound, [0] * len(self._parts))[-1] >= self._num_layers

    def windows(self, bound: int) -> list[int]:
        """For every code, the set of cuts at which its devices may end and the others begin; 0 for none."""
        earliest = self._earliest(bound)
        furthest = self._furthest(bound, earliest)
        return [(2 << high) - (1 << low) if low <= high else 0 for low, high in zip(earliest, furthest, strict=True)]

    def _furthest(self, bound: int, needed: Sequence[int]) -> list[int]:
        """For every code, the furthest end; −1 if it is before `needed` or there is none."""
        last = self._num_layers - self._num_stages
        rows = [[reach.under(bound).furthest for reach in row] for row in self._reaches]
        found = [0]
        for (size, parts), least in zip(self._parts[1:], needed[1:], strict=True):
            row = rows[size - 1]
            best = -1
            for index, before in parts:
                first = found[before]
                if first >= 0:
                    end = row[index](first, bound)
                    if end > best:  # noqa: PLR1730 - this loop is the hottest there is
                        best = end
            found.append(min(best, last + size) if best >= size and best >= least else -1)
        return found

    def _earliest(self, bound: int) -> list[int]:
        """For every code, the earliest cut from which the other devices may finish; num_layers + 1 if they cannot."""
        none = self._num_layers + 1
        rows = [[reach.under(bound).earliest for reach in row] for row in self._reaches]
        found = [self._num_layers]
        for size, parts in self._parts[1:]:
            stage = self._num_stages - size
            row = rows[stage]
            best = none
            for kind, before in parts:
                last = found[before]
                if last < none:
                    start = row[kind](last, bound)
                    if start < best:  # noqa: PLR1730 - as above
                        best = start
            found.append(max(best, stage) if best <= self._num_layers - size else none)
        return found[::-1]
