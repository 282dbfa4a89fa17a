"""Cuts for a given order of devices that minimise the largest stage time, exactly.

A stage [first, last) takes `stop[last] − start[first]` ticks, where `start[first]` is the compute before `first` minus
the transfer that arrives there, and `stop[last]` the compute before `last` plus the transfer that returns there. One
bisection among the sorted stops therefore finds every last cut within a bound. Memory limits last per first. A stage
that may recompute has two such *ways*, valid on adjacent ranges of last. Sets of cuts are bit sets in an integer.

`ReachTables` builds these `Reach` objects from costs; `least_cuts` and `cuts_within` cut an order of them, fast enough
to try thousands of orders. The best order is searched in `orders`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import or_
from typing import Literal, NewType, Protocol

from hetpipe.decide.planner.costs import Costs, MemoryModel
from hetpipe.values.cluster import LinkSpec

# -- how far one stage reaches from a cut within a bound ---------------------------------------------------------------


#: Infinity: more ticks than any stage time or bound.
FAR = 1 << 120


@dataclass(frozen=True, slots=True)
class Starts:
    """One way to begin a stage, for every first cut."""

    ticks: Sequence[int]
    """Compute before the cut minus the arriving transfer; −FAR where a stage cannot begin."""
    best: Sequence[int]
    """Prefix maximum of `ticks`."""


@dataclass(frozen=True, slots=True)
class Stops:
    """One way to end a stage, for every last cut."""

    least: Sequence[int]
    """Suffix minimum of the compute before the cut plus the returning transfer; FAR where no stage can end."""
    ordered: Sequence[int]
    """The same values of single cuts, ascending."""
    cuts: Sequence[int]
    """Sets of the cuts of the first 0, 1, 2, … entries of `ordered`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """For every first cut, the largest last cut that fits in memory; below the first cut if none fits."""

    last: Sequence[int]
    best: Sequence[int]
    """Prefix maximum of `last`."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a stage: its times, and for each first cut the range of last cuts where it applies."""

    starts: Starts
    stops: Stops
    beyond: Sequence[int] | None
    """Exclusive lower bound on last cuts; None for no bound."""
    upto: Limits


class Reach(Protocol):
    """The cuts that a stage can reach; sets are bit sets, cuts are indices."""

    def image(self, firsts: int, bound: int, wanted: int) -> int:
        """Subset of the `wanted` last cuts that a stage starting at any of `firsts` reaches within `bound`. Exact."""

    def furthest(self, first: int, bound: int) -> int:
        """Upper bound on the last cut of stages that begin at or before `first`; negative if there are none."""

    def earliest(self, last: int, bound: int) -> int:
        """Lower bound on the first cut of stages that end at or after `last`; num_layers + 1 if there are none."""

    def under(self, bound: int) -> Reach:
        """The simplest reach with the same results for this bound and all smaller ones."""


class StageReach:
    """A stage limited by time only: its device has memory for all layers.

    Separate from `LimitedReach` for speed alone: the search takes 1.4 to 1.6 times as long without it.
    """

    __slots__ = ("_above", "_starts", "_stops")

    def __init__(self, starts: Starts, stops: Stops, above: Sequence[int]) -> None:
        """Combine starts and stops.

        Args:
            starts: for the arriving link or links.
            stops: for the returning link or links.
            above: for every cut, the set of the cuts after it.
        """
        self._starts = starts
        self._stops = stops
        self._above = above

    def image(self, firsts: int, bound: int, wanted: int) -> int:
        """Implement `Reach.image`.

        The first cut that gets furthest usually reaches the whole set. Otherwise, the lowest missing cut determines the
        next first cut to try: the closest one before it from which a stage gets furthest.
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
        """Implement `Reach.furthest`."""
        return bisect_right(self._stops.least, bound + self._starts.best[first]) - 1

    def earliest(self, last: int, bound: int) -> int:
        """Implement `Reach.earliest`."""
        return bisect_left(self._starts.best, self._stops.least[last] - bound)

    def under(self, bound: int) -> Reach:
        """Implement `Reach.under`."""
        return self


class LimitedReach:
    """A stage limited by time and memory."""

    __slots__ = ("_above", "_limited_from", "_unlimited", "_ways", "_within")

    def __init__(self, ways: Sequence[Way], above: Sequence[int], within: Sequence[int]) -> None:
        """Combine the ways.

        Args:
            ways: with and without recomputation, as allowed; their ranges do not overlap.
            above: for every cut, the set of the cuts after it.
            within: for every cut, the set of the cuts up to it.
        """
        self._ways = ways
        self._above = above
        self._within = within
        first = ways[0]
        self._unlimited = StageReach(first.starts, first.stops, above)
        #: Time of the fastest stage that is too large for the first way.
        self._limited_from = min(
            (
                first.stops.least[last + 1] - start
                for start, last in zip(first.starts.ticks, first.upto.last, strict=True)
                if last + 1 < len(above)
            ),
            default=FAR,
        )

    def image(self, firsts: int, bound: int, wanted: int) -> int:
        """Implement `Reach.image`."""
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
        """Implement `Reach.furthest`."""
        end = -1
        for way in self._ways:
            in_time = bisect_right(way.stops.least, bound + way.starts.best[first]) - 1
            end = max(end, min(in_time, way.upto.best[first]))
        return end

    def earliest(self, last: int, bound: int) -> int:
        """Implement `Reach.earliest`."""
        start = len(self._above)
        for way in self._ways:
            in_time = bisect_left(way.starts.best, way.stops.least[last] - bound)
            start = min(start, max(in_time, bisect_left(way.upto.best, last)))
        return start

    def under(self, bound: int) -> Reach:
        """Implement `Reach.under`: simplifies if no stage within `bound` can be too large."""
        return self if bound >= self._limited_from else self._unlimited


# -- reaches from costs; their parts are kept, since most are shared by many stages and searches -----------------------


#: `auto`: a stage recomputes its activations only if it would not fit otherwise.
Recompute = Literal["auto", "on", "off"]

#: Index of a distinct link speed and latency.
LinkIndex = NewType("LinkIndex", int)

#: Alternative links of a transfer; empty before the first stage and after the last.
LinkSet = frozenset[LinkIndex]

NO_LINK: LinkSet = frozenset()

_SHARE = 1 << 40


@dataclass(frozen=True, slots=True)
class Load:
    """Memory requirements of a stage's position, and the capacity of its device."""

    copies: int
    """Parameter-sized tensors."""
    in_flight: int
    """S_i."""
    capacity_bytes: int
    """Memory of the device without the framework's reserve."""


class ReachTables:
    """Reaches by device type, memory and links. Cached without eviction."""

    def __init__(self, costs: Costs, recompute: Recompute) -> None:
        """Create empty tables.

        Args:
            costs: the profile on the cluster.
            recompute: whether stages may recompute.
        """
        self._costs = costs
        self._recompute = recompute
        self._num_cuts = costs.num_layers + 1
        everything = (1 << self._num_cuts) - 1
        self._within = [(2 << cut) - 1 for cut in range(self._num_cuts)]
        self._above = [everything ^ within for within in self._within]
        self._links: dict[tuple[float, float], LinkSet] = {}
        self._arriving: list[Sequence[int]] = []
        self._returning: list[Sequence[int]] = []
        self._compute: dict[tuple[str, bool], list[int]] = {}
        self._starts: dict[tuple[str, bool, LinkSet], Starts] = {}
        self._stops: dict[tuple[str, bool, LinkSet], Stops] = {}
        self._limits: dict[tuple[Load, bool], Limits | None] = {}
        self._reaches: dict[tuple[str, Load, LinkSet, LinkSet], Reach] = {}

    def link(self, link: LinkSpec) -> LinkSet:
        """The set of this link alone."""
        key = (link.latency_seconds, link.effective_bytes_per_second)
        found = self._links.get(key)
        if found is None:
            found = self._links[key] = LinkSet({LinkIndex(len(self._links))})
            self._arriving.append(self._costs.arriving(link))
            self._returning.append(self._costs.returning(link))
        return found

    def load(self, kind: str, stage: int, num_stages: int, memory: MemoryModel) -> Load:
        """Load of stage `stage` of `num_stages` on a device of type `kind`."""
        capacity = self._costs.memory_bytes[kind] - memory.reserve_bytes
        return Load(memory.copies(stage, num_stages), memory.in_flight(stage, num_stages), capacity)

    def reach(self, kind: str, load: Load, arriving: LinkSet, returning: LinkSet) -> Reach:
        """The reach of a stage on type `kind`; with several links, the fastest one counts for each cut."""
        key = (kind, load, arriving, returning)
        found = self._reaches.get(key)
        if found is None:
            found = self._reaches[key] = self._make(kind, load, arriving, returning)
        return found

    def longest_ticks(self, kinds: Sequence[str], links: LinkSet) -> int:
        """Upper bound on the stage time on these types and links."""
        compute = max(self._compute_ticks(kind, again=True)[-1] for kind in kinds)
        arriving = max(max(self._arriving[link]) for link in links)
        return compute + arriving + max(max(self._returning[link]) for link in links)

    def balanced_ticks(self, counts: Mapping[str, int]) -> int:
        """Stage time if `counts` devices of each type shared the compute in proportion to their speed."""
        return int(1 / sum(count / max(1, self._costs.compute[kind][-1]) for kind, count in counts.items()))

    def progress(self, kinds: Sequence[str]) -> list[int]:
        """The model's compute before each cut, summed over `kinds`; in arbitrary units."""
        rows = [self._costs.compute[kind] for kind in kinds]
        return [
            sum(_SHARE * done // max(1, row[-1]) for done, row in zip(column, rows, strict=True))
            for column in zip(*rows, strict=True)
        ]

    def _make(self, kind: str, load: Load, arriving: LinkSet, returning: LinkSet) -> Reach:
        ways = []
        kept = None
        if self._recompute != "on":
            kept = self._limit(load, again=False)
            starts = self._start(kind, arriving, again=False)
            stops = self._stop(kind, returning, again=False)
            if kept is None:
                return StageReach(starts, stops, self._above)
            ways.append(Way(starts, stops, None, kept))
        if self._recompute != "off":
            limits = self._limit(load, again=True)
            starts = self._start(kind, arriving, again=True)
            stops = self._stop(kind, returning, again=True)
            if limits is None and kept is None:
                return StageReach(starts, stops, self._above)
            if limits is None:
                limits = Limits(*[[self._num_cuts - 1] * self._num_cuts] * 2)
            ways.append(Way(starts, stops, None if kept is None else kept.last, limits))
        return LimitedReach(ways, self._above, self._within)

    def _compute_ticks(self, kind: str, *, again: bool) -> list[int]:
        """Compute before each cut; `again`: with a second forward."""
        found = self._compute.get((kind, again))
        if found is None:
            found = self._costs.compute[kind]
            if again:
                found = [both + forward for both, forward in zip(found, self._costs.forward[kind], strict=True)]
            self._compute[kind, again] = found
        return found

    @staticmethod
    def _fastest(transfers: Sequence[Sequence[int]], links: LinkSet) -> Sequence[int]:
        rows = [transfers[link] for link in links]
        return rows[0] if len(rows) == 1 else [min(column) for column in zip(*rows, strict=True)]

    def _start(self, kind: str, arriving: LinkSet, *, again: bool) -> Starts:
        found = self._starts.get((kind, again, arriving))
        if found is None:
            compute = self._compute_ticks(kind, again=again)
            if arriving:
                ticks = [
                    done - transfer
                    for done, transfer in zip(compute, self._fastest(self._arriving, arriving), strict=True)
                ]
                ticks[0] = -FAR
            else:
                ticks = [0] + [-FAR] * self._costs.num_layers
            ticks[-1] = -FAR
            for cut in self._costs.forbidden:
                ticks[cut] = -FAR
            found = self._starts[kind, again, arriving] = Starts(ticks, list(accumulate(ticks, max)))
        return found

    def _stop(self, kind: str, returning: LinkSet, *, again: bool) -> Stops:
        found = self._stops.get((kind, again, returning))
        if found is None:
            compute = self._compute_ticks(kind, again=again)
            if returning:
                ticks = [
                    done + transfer
                    for done, transfer in zip(compute, self._fastest(self._returning, returning), strict=True)
                ]
                ticks[-1] = FAR
            else:
                ticks = [FAR] * self._costs.num_layers + compute[-1:]
            ticks[0] = FAR
            for cut in self._costs.forbidden:
                ticks[cut] = FAR
            order = sorted(range(self._num_cuts), key=ticks.__getitem__)
            found = self._stops[kind, again, returning] = Stops(
                least=list(accumulate(reversed(ticks), min))[::-1],
                ordered=[ticks[cut] for cut in order],
                cuts=list(accumulate((1 << cut for cut in order), or_, initial=0)),
            )
        return found

    def _limit(self, load: Load, *, again: bool) -> Limits | None:
        """The last cut that fits in memory, per first cut; None if all layers fit from every cut."""
        key = (load, again)
        if key not in self._limits:
            costs = self._costs
            per_activation, per_input = (1, load.in_flight) if again else (load.in_flight, 0)
            sums = [
                weights + per_activation * activations
                for weights, activations in zip(costs.weight_bytes(load.copies), costs.activation_bytes, strict=True)
            ]
            least = load.capacity_bytes - per_input * max(costs.kept_input_bytes)
            if sums[-1] <= least:
                self._limits[key] = None
            else:
                rooms = [
                    load.capacity_bytes - per_input * arriving + before
                    for arriving, before in zip(costs.kept_input_bytes, sums, strict=True)
                ]
                last = [bisect_right(sums, room) - 1 for room in rooms]
                self._limits[key] = Limits(last, list(accumulate(last, max)))
        return self._limits[key]


# -- the best cuts for one order of devices ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OrderCuts:
    """Cuts of an order of devices, and the largest stage time."""

    ticks: int
    cuts: tuple[int, ...]
    """Last cut of every stage."""


def least_cuts(reaches: Sequence[Reach], num_layers: int, lower: int, upper: int) -> OrderCuts | None:
    """The cuts with the smallest largest stage time, if it is at most `upper`; else None.

    Args:
        reaches: reaches of the stages, in order.
        num_layers: number of layers of the model.
        lower: proven lower bound on the largest stage time.
        upper: upper bound on the result.
    """
    reaches = [reach.under(upper) for reach in reaches]
    if not might_pass(reaches, num_layers, upper):
        return None
    least, cuts = _bisect(reaches, num_layers, lower, upper)
    return None if cuts is None else OrderCuts(least, cuts)


def might_pass(reaches: Sequence[Reach], num_layers: int, bound: int) -> bool:
    """False proves that no cuts keep every stage within `bound`; a relaxation in which stages may overlap."""
    cut = 0
    for stage, reach in enumerate(reaches):
        cut = reach.furthest(cut, bound)
        if cut <= stage:
            return False
    return cut >= num_layers


def cuts_within(reaches: Sequence[Reach], num_layers: int, bound: int) -> tuple[int, ...] | None:
    """The latest cuts that keep every stage within `bound` ticks; None if there are none. Exact."""
    earliest = [num_layers]
    for reach in reversed(reaches):
        if earliest[-1] > num_layers:
            return None
        earliest.append(reach.earliest(earliest[-1], bound))
    earliest.reverse()
    num_stages = len(reaches)
    sets = [1]
    furthest = 0
    for stage, reach in enumerate(reaches, 1):
        low, high = max(earliest[stage], stage), num_layers - num_stages + stage
        furthest = min(high, reach.furthest(furthest, bound)) if furthest >= 0 else -1
        if low > furthest:
            return None
        image = reach.image(sets[-1], bound, (2 << furthest) - (1 << low))
        if not image:
            return None
        sets.append(image)
        furthest = image.bit_length() - 1
    return _trace(reaches, sets, bound)


def _trace(reaches: Sequence[Reach], sets: Sequence[int], bound: int) -> tuple[int, ...]:
    """Backtrack from the last cut to the first, through the sets of cuts reached after each stage."""
    cuts = [sets[-1].bit_length() - 1]
    for reach, firsts in zip(reversed(reaches[1:]), reversed(sets[1:-1]), strict=True):
        cuts.append(latest_start(reach, firsts, cuts[-1], bound))
    return tuple(reversed(cuts))


def latest_start(reach: Reach, firsts: int, last: int, bound: int) -> int:
    """The latest of `firsts` from which a stage reaches `last` within `bound`; at least one must."""
    wanted = 1 << last
    while True:
        first = firsts.bit_length() - 1
        if reach.image(1 << first, bound, wanted):
            return first
        firsts ^= 1 << first


def _bisect(reaches: Sequence[Reach], num_layers: int, lower: int, upper: int) -> tuple[int, tuple[int, ...] | None]:
    """The smallest bound in lower … upper with cuts, and the cuts; (upper, None) if there are none."""
    low, high = lower, upper
    while low < high:
        middle = (low + high) // 2
        if might_pass(reaches, num_layers, middle):
            high = middle
        else:
            low = middle + 1
    cuts = cuts_within(reaches, num_layers, low)
    if cuts is None and low < upper:
        cuts = cuts_within(reaches, num_layers, upper)
        low, high = low + 1, upper
        while cuts is not None and low < high:
            middle = (low + high) // 2
            better = cuts_within(reaches, num_layers, middle)
            if better is None:
                low = middle + 1
            else:
                high, cuts = middle, better
    return low, cuts
