"""Builds `StageReach`es from costs, and keeps their parts: most are shared by many stages and many searches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import or_
from typing import Literal, NewType

from hetpipe.decide.planner.costs import Costs, MemoryModel
from hetpipe.decide.planner.stage_reach import FAR, LimitedReach, Limits, Reach, StageReach, Starts, Stops, Way
from hetpipe.values.cluster import LinkSpec

#: `auto`: a stage recomputes its activations only if it would not fit otherwise.
Recompute = Literal["auto", "on", "off"]

#: Links of the same speed and latency share one.
LinkIndex = NewType("LinkIndex", int)

#: The links one of which a transfer takes; none before the first stage and behind the last.
LinkSet = frozenset[LinkIndex]

NO_LINK: LinkSet = frozenset()

_SHARE = 1 << 40


@dataclass(frozen=True, slots=True)
class Load:
    """What a stage's position asks of the memory of its device."""

    copies: int
    """Parameter-sized tensors."""
    in_flight: int
    """S_i."""
    capacity_bytes: int
    """What the device has left after the framework's reserve."""


class ReachTables:
    """Reaches by type of device, memory and links. Grows with use; never forgets."""

    def __init__(self, costs: Costs, recompute: Recompute) -> None:
        """Prepare.

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
        self._transfers: list[Sequence[int]] = []
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
            self._transfers.append(self._costs.transfers(link))
        return found

    def load(self, kind: str, stage: int, num_stages: int, memory: MemoryModel) -> Load:
        """What stage `stage` of `num_stages` asks of a device of type `kind`."""
        capacity = self._costs.memory_bytes[kind] - memory.reserve_bytes
        return Load(memory.copies(stage, num_stages), memory.in_flight(stage, num_stages), capacity)

    def reach(self, kind: str, load: Load, arriving: LinkSet, returning: LinkSet) -> Reach:
        """The reach of a stage on type `kind`; of several links the fastest counts, for each cut."""
        key = (kind, load, arriving, returning)
        found = self._reaches.get(key)
        if found is None:
            found = self._reaches[key] = self._make(kind, load, arriving, returning)
        return found

    def longest_ticks(self, kinds: Sequence[str], links: LinkSet) -> int:
        """No stage on these types and links takes longer."""
        compute = max(self._compute_ticks(kind, again=True)[-1] for kind in kinds)
        return compute + 2 * max(max(self._transfers[link]) for link in links)

    def balanced_ticks(self, counts: Mapping[str, int]) -> int:
        """The stage time if `counts` devices of each type shared the compute in proportion to their speed."""
        return int(1 / sum(count / max(1, self._costs.compute[kind][-1]) for kind, count in counts.items()))

    def progress(self, kinds: Sequence[str]) -> list[int]:
        """The share of the model's compute before each cut, summed over `kinds`; in no particular unit."""
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
        """Compute before each cut; `again`: with forward twice."""
        found = self._compute.get((kind, again))
        if found is None:
            found = self._costs.compute[kind]
            if again:
                found = [both + forward for both, forward in zip(found, self._costs.forward[kind], strict=True)]
            self._compute[kind, again] = found
        return found

    def _fastest(self, links: LinkSet) -> Sequence[int]:
        rows = [self._transfers[link] for link in links]
        return rows[0] if len(rows) == 1 else [min(column) for column in zip(*rows, strict=True)]

    def _start(self, kind: str, arriving: LinkSet, *, again: bool) -> Starts:
        found = self._starts.get((kind, again, arriving))
        if found is None:
            compute = self._compute_ticks(kind, again=again)
            if arriving:
                ticks = [done - transfer for done, transfer in zip(compute, self._fastest(arriving), strict=True)]
                ticks[0] = -FAR
            else:
                ticks = [0] + [-FAR] * self._costs.num_layers
            ticks[-1] = -FAR
            found = self._starts[kind, again, arriving] = Starts(ticks, list(accumulate(ticks, max)))
        return found

    def _stop(self, kind: str, returning: LinkSet, *, again: bool) -> Stops:
        found = self._stops.get((kind, again, returning))
        if found is None:
            compute = self._compute_ticks(kind, again=again)
            if returning:
                ticks = [done + transfer for done, transfer in zip(compute, self._fastest(returning), strict=True)]
                ticks[-1] = FAR
            else:
                ticks = [FAR] * self._costs.num_layers + compute[-1:]
            ticks[0] = FAR
            order = sorted(range(self._num_cuts), key=ticks.__getitem__)
            found = self._stops[kind, again, returning] = Stops(
                least=list(accumulate(reversed(ticks), min))[::-1],
                ordered=[ticks[cut] for cut in order],
                cuts=list(accumulate((1 << cut for cut in order), or_, initial=0)),
            )
        return found

    def _limit(self, load: Load, *, again: bool) -> Limits | None:
        """The last cut that memory allows per first cut; None where all layers fit from every cut."""
        key = (load, again)
        if key not in self._limits:
            costs = self._costs
            per_activation, per_input = (1, load.in_flight) if again else (load.in_flight, 0)
            sums = [
                load.copies * parameters + per_activation * activations
                for parameters, activations in zip(costs.parameter_bytes, costs.activation_bytes, strict=True)
            ]
            least = load.capacity_bytes - per_input * max(costs.cut_bytes)
            if sums[-1] <= least:
                self._limits[key] = None
            else:
                rooms = [
                    load.capacity_bytes - per_input * arriving + before
                    for arriving, before in zip(costs.cut_bytes, sums, strict=True)
                ]
                last = [bisect_right(sums, room) - 1 for room in rooms]
                self._limits[key] = Limits(last, list(accumulate(last, max)))
        return self._limits[key]
