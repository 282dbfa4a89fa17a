"""How far one stage reaches from a cut when no stage may take longer than a bound. Sets of cuts are bits of an integer.

A stage [first, last) takes `stop[last] − start[first]` ticks, where `start[first]` is the compute before `first` less
the transfer that arrives there, and `stop[last]` the compute before `last` plus the transfer that returns there. So one
bisection among the sorted stops finds every last cut within a bound. Memory then limits last per first. Where a stage
may recompute, it has two such *ways*, valid on neighbouring ranges of last.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

#: More ticks than any stage takes, and than any bound.
FAR = 1 << 120


@dataclass(frozen=True, slots=True)
class Starts:
    """One way to begin a stage, for every first cut."""

    ticks: Sequence[int]
    """Compute before the cut less the arriving transfer; −FAR where a stage cannot begin."""
    best: Sequence[int]
    """The largest of `ticks` up to each cut."""


@dataclass(frozen=True, slots=True)
class Stops:
    """One way to end a stage, for every last cut."""

    least: Sequence[int]
    """The smallest compute before the cut plus returning transfer, from each cut on; FAR where none can end."""
    ordered: Sequence[int]
    """The same of single cuts, ascending."""
    cuts: Sequence[int]
    """The set of cuts of the first 0, 1, 2, … entries of `ordered`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The last cut up to which memory suffices, for every first cut; below the first cut where none does."""

    last: Sequence[int]
    best: Sequence[int]
    """The largest of `last` up to each cut."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a stage: its times, and the range of last cuts, per first cut, for which it is chosen."""

    starts: Starts
    stops: Stops
    beyond: Sequence[int] | None
    """Only last cuts after this one."""
    upto: Limits


class Reach(Protocol):
    """What a stage reaches; all sets and cuts as bits and positions."""

    def image(self, firsts: int, bound: int, wanted: int) -> int:
        """Those of the `wanted` last cuts that a stage reaches from any of `firsts` within `bound` ticks. Exact."""

    def furthest(self, first: int, bound: int) -> int:
        """No stage that begins at `first` or before ends after this cut; less than 0 if none ends at all."""

    def earliest(self, last: int, bound: int) -> int:
        """No stage that ends at `last` or behind begins before this cut; num_layers + 1 if none begins at all."""

    def under(self, bound: int) -> Reach:
        """The simplest reach that gives the same answers for this bound and all smaller ones."""


class StageReach:
    """A stage that only time limits: its device has memory for all layers."""

    __slots__ = ("_above", "_starts", "_stops")

    def __init__(self, starts: Starts, stops: Stops, above: Sequence[int]) -> None:
        """Combine.

        Args:
            starts: with the arriving link or links.
            stops: with the returning link or links.
            above: for every cut, the set of the cuts after it.
        """
        self._starts = starts
        self._stops = stops
        self._above = above

    def image(self, firsts: int, bound: int, wanted: int) -> int:
        """As promised.

        The furthest first cut usually reaches all there is. Where it does not, the lowest cut that is still missing
        says which first cut to try next: the closest one before it, from where a stage also gets furthest.
        """
        start, best = self._starts.ticks, self._starts.best
        ordered, cuts, above = self._stops.ordered, self._stops.cuts, self._above
        found = 0
        first = firsts.bit_length() - 1
        while True:
            found |= cuts[bisect_right(ordered, bound + start[first])] & above[first] & wanted
            firsts ^= 1 << first
            if not firsts:
                break
            missing = cuts[bisect_right(ordered, bound + best[firsts.bit_length() - 1])] & wanted & ~found
            missing &= -(firsts & -firsts) << 1
            if not missing:
                break
            first = (firsts & ((missing & -missing) - 1)).bit_length() - 1
        return found

    def furthest(self, first: int, bound: int) -> int:
        """As promised."""
        return bisect_right(self._stops.least, bound + self._starts.best[first]) - 1

    def earliest(self, last: int, bound: int) -> int:
        """As promised."""
        return bisect_left(self._starts.best, self._stops.least[last] - bound)

    def under(self, bound: int) -> Reach:
        """As promised."""
        return self


class LimitedReach:
    """A stage that memory limits, too."""

    __slots__ = ("_above", "_limited_from", "_unlimited", "_ways", "_within")

    def __init__(self, ways: Sequence[Way], above: Sequence[int], within: Sequence[int]) -> None:
        """Combine.

        Args:
            ways: with and without recomputation, as far as allowed; their ranges do not overlap.
            above: for every cut, the set of the cuts after it.
            within: for every cut, the set of the cuts up to it.
        """
        self._ways = ways
        self._above = above
        self._within = within
        first = ways[0]
        self._unlimited = StageReach(first.starts, first.stops, above)
        #: The time of the fastest stage that is too large to be run in the first way.
        self._limited_from = min(
            (
                first.stops.least[last + 1] - start
                for start, last in zip(first.starts.ticks, first.upto.last, strict=True)
                if last + 1 < len(above)
            ),
            default=FAR,
        )

    def image(self, firsts: int, bound: int, wanted: int) -> int:
        """As promised."""
        above, within = self._above, self._within
        found = 0
        for way in self._ways:
            start, best, beyond = way.starts.ticks, way.starts.best, way.beyond
            ordered, cuts = way.stops.ordered, way.stops.cuts
            last, last_best = way.upto.last, way.upto.best
            left = firsts
            first = left.bit_length() - 1
            while True:
                after = first if beyond is None else max(first, beyond[first])
                if last[first] > after:
                    reached = cuts[bisect_right(ordered, bound + start[first])]
                    found |= reached & above[after] & within[last[first]] & wanted
                left ^= 1 << first
                if not left:
                    break
                top = left.bit_length() - 1
                hope = cuts[bisect_right(ordered, bound + best[top])] & within[max(0, last_best[top])]
                missing = hope & wanted & ~found & -(left & -left) << 1
                if not missing:
                    break
                first = (left & ((missing & -missing) - 1)).bit_length() - 1
        return found

    def furthest(self, first: int, bound: int) -> int:
        """As promised."""
        end = -1
        for way in self._ways:
            in_time = bisect_right(way.stops.least, bound + way.starts.best[first]) - 1
            end = max(end, min(in_time, way.upto.best[first]))
        return end

    def earliest(self, last: int, bound: int) -> int:
        """As promised."""
        start = len(self._above)
        for way in self._ways:
            in_time = bisect_left(way.starts.best, way.stops.least[last] - bound)
            start = min(start, max(in_time, bisect_left(way.upto.best, last)))
        return start

    def under(self, bound: int) -> Reach:
        """As promised: nothing that takes no longer than `bound` may be too large."""
        return self if bound >= self._limited_from else self._unlimited
