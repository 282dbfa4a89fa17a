"""The memory policies of the layers of one stage: the fastest that fit; `memory-policy.md` §3.

Among the policies whose peak memory is within the device's, minimise (time, swapped bytes, recomputed time) in this
order. Each of the three is minimised in turn, within the optimum of those before it, in two steps:

* *Bounds.* With a price per tick recomputed, per byte swapped and per byte of memory, the cheapest policies of a chain
  are found by dynamic programming over its layers, in linear time. Their cost, less the price of what may be used, is a
  lower bound for every choice (Lagrangian duality), and the policies themselves are often feasible, and good.
* *Search.* Dynamic programming over the layers, with the Pareto front of (memory, excess, swapped bytes, recomputed
  time) of what precedes a layer, from which everything goes that the bounds show to be no better than the best known.

The *excess*, the last term of the memory (§2), is not a sum over layers: what a run needs less what the layers behind
it hold of one minibatch, of the run for which that is most. So it is branched on: the bound of a range of excesses
takes its lower end as memory and its upper end, with the most that the layers behind a run can hold, as a limit on
runs. Ranges whose bound is too high are dropped, and others halved, until the search has a small one, in which it
follows the excess exactly.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import sqrt
from typing import Literal, NamedTuple

from hetpipe.values.memory import LayerPolicy, StageFigures, StageMemory, canonical, stage_memory

#: Partial choices that are examined for a stage, up to half a second's; beyond, the best known choice is returned with
#: its gap.
MAX_EXAMINED = 70_000

#: Bisections of the division of a second between recomputation and swaps, and for each of the price of memory.
_NUM_SHARES = 5
_NUM_BISECTIONS = 8
#: Layers of a bound that take as long as a partial choice.
_LAYERS_PER_CHOICE = 4
#: Prices that are kept for parts of a range, and by which the search prunes.
_NUM_BOUNDS = 5

_Goal = Literal["ticks", "swapped_bytes", "recomputed_ticks"]


@dataclass(slots=True)
class Budget:
    """Limit on the effort of searches."""

    choices: int
    """Partial choices that may still be examined, at some five microseconds each; may fall below 0."""


@dataclass(frozen=True, slots=True)
class LayerMemoryPlan:
    """The policies of one stage's layers."""

    policies: tuple[LayerPolicy, ...]
    cost: StageMemory
    gap_ticks: int = 0
    """Time per minibatch that other policies can save at most; 0: none is faster. Positive only where the search was
    cut off (`MAX_EXAMINED`)."""
    is_least: bool = True
    """Whether no policies that are as fast swap less, or as much and recompute less; False: the search was cut off."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Lagrange multipliers: the price of a tick recomputed, of a byte swapped, and of a byte of memory."""

    ticks: float
    swapped: float
    memory: float


@dataclass(frozen=True, slots=True)
class _Table:
    """Least cost at some prices of the layers from each position on."""

    held: Sequence[float]
    """If the layer before is kept or swapped, or there is none."""
    recomputed: Sequence[float]
    """If the layer before is recomputed."""
    run: Sequence[tuple[float, int]]
    """If a run begins here, with its end."""

    def cost(self, position: int, *, was_recomputed: bool) -> float:
        """Of the layers from `position` on."""
        return self.recomputed[position] if was_recomputed else self.held[position]


@dataclass(frozen=True, slots=True)
class _Priced:
    """Prices with their table of least costs."""

    prices: Prices
    table: _Table


@dataclass(frozen=True, slots=True)
class _Segment:
    """A kept or swapped layer, or a run: what it adds if the layer before it is held, and if that is recomputed."""

    last: int
    policy: LayerPolicy
    memory: tuple[int, int]
    holds: tuple[int, int]
    """Of one minibatch."""
    swapped: tuple[int, int]
    ticks: int
    recomputed: int
    """Σa of a run, else 0."""


class _Label(NamedTuple):
    """A choice for the layers up to some position. A tuple, as tens of thousands are made."""

    memory: int
    """What adds up over layers."""
    excess: int
    """As if no layers followed; at least the least one of the range that is searched."""
    swapped: int
    ticks: int
    segment: _Segment | None
    before: _Label | None

    def policies(self) -> tuple[LayerPolicy, ...]:
        """One per layer so far."""
        segments: list[_Segment] = []
        label: _Label | None = self
        while label is not None and label.segment is not None:
            segments.append(label.segment)
            label = label.before
        found: list[LayerPolicy] = []
        for segment in reversed(segments):
            found.append("recompute-new-run" if segment.policy == "recompute" else segment.policy)
            found.extend("recompute" for _ in range(segment.last - len(found)))
        return canonical(found)


@dataclass(frozen=True, slots=True)
class _Suffix:
    """A choice for the layers from some position on."""

    peak: int
    others: int
    """Memory of all minibatches but the one whose backward they have had."""
    last: int
    """End of its first layer or run."""
    policy: LayerPolicy
    """Of these."""
    behind: _Suffix | None

    def policies(self) -> tuple[LayerPolicy, ...]:
        """One per layer."""
        found: list[LayerPolicy] = []
        first, each = 0, self
        while each.behind is not None:
            found.append("recompute-new-run" if each.policy == "recompute" else each.policy)
            found.extend("recompute" for _ in range(each.last - first - 1))
            first, each = each.last, each.behind
        return canonical(found)


def choose_policies(
    stage: StageFigures,
    memory_bytes: int,
    *,
    enough_ticks: int = 0,
    budget: Budget | None = None,
    only_ticks: bool = False,
) -> LayerMemoryPlan | None:
    """The best policies for `stage` within `memory_bytes`; None if none fit.

    Args:
        stage: the stage.
        memory_bytes: memory of its device.
        enough_ticks: a time per minibatch below which nothing is gained: shorter ones count as equal.
        budget: limit of the search; by default `MAX_EXAMINED`.
        only_ticks: whether it is the same how much policies swap and recompute that are as fast.
    """
    kept: tuple[LayerPolicy, ...] = tuple("keep" for _ in stage.layers)
    cost = stage_memory(stage, kept)
    if cost.num_bytes <= memory_bytes:
        return LayerMemoryPlan(kept, cost)
    search = _Search(stage, memory_bytes, enough_ticks, budget or Budget(MAX_EXAMINED))
    if not search.find_any():
        return None
    search.minimise("ticks")
    if only_ticks:
        return None if search.best is None else replace(search.best, is_least=False)
    search.minimise("swapped_bytes")
    search.minimise("recomputed_ticks")
    return search.best


def least_bytes(stage: StageFigures) -> int:
    """The least memory with which some policies for `stage` fit."""
    kept = stage_memory(stage, ["keep" for _ in stage.layers]).num_bytes
    lightest = _Search(stage, kept, 0, Budget(0)).lightest(kept)
    return kept if lightest is None else stage_memory(stage, lightest).num_bytes


class _Search:
    """One stage and the best known policies, which every `minimise` improves."""

    def __init__(self, stage: StageFigures, memory_bytes: int, enough_ticks: int, budget: Budget) -> None:
        self._stage = stage
        self._memory_bytes = memory_bytes
        self._enough_ticks = max(0, enough_ticks - stage.receive_ticks)
        self._budget = budget
        #: Sums over the layers before each position.
        self._sizes = [0, *accumulate(layer.activation_bytes for layer in stage.layers)]
        self._times = [0, *accumulate(layer.forward_ticks for layer in stage.layers)]
        #: (a, in) of each layer.
        self._figures = [(layer.activation_bytes, layer.input_bytes) for layer in stage.layers]
        #: Memory of the stage's input, where its first layer is held.
        self._entry = stage.in_flight * stage.layers[0].input_bytes if stage.receives else 0
        #: Bytes of one minibatch that the layers from each position on hold at most, if the one before is recomputed.
        self._behind = _most_held(stage)
        #: Ends of the ranges of excesses that are searched: the sizes that runs can have. The first is 0.
        self._limits = sorted({0, *(last - first for last in self._sizes for first in self._sizes if last > first)})
        self._compute = stage.compute_ticks
        #: Time to swap a byte; 0 if nothing can be swapped.
        self._ticks_per_byte = stage.swap_ticks(1 << 40) / (1 << 40) if stage.host_bytes_per_second else 0.0
        #: Of policies that were tried, as bisections come to the same ones again and again; of bounds (`_reaches_of`).
        self._costs: dict[tuple[LayerPolicy, ...], StageMemory] = {}
        self._reaches: dict[int, list[int]] = {}
        self.best: LayerMemoryPlan | None = None

    def minimise(self, goal: _Goal) -> None:
        """Improve the best known policies in `goal`, without a loss in the goals before it."""
        if goal == "swapped_bytes" and self._stage.host_bytes_per_second is None:
            return
        if self._budget.choices < 0:
            self._cut_off(goal, 0.0)
            return
        first, last = 0, len(self._limits) - 1
        priced = self._priced(goal)
        #: Ranges of limits, the one with the lowest bound first.
        left = [(self._range_bound(goal, priced, first, last), first, last, priced)]
        while left:
            bound, first, last, priced = heapq.heappop(left)
            if not self._can_improve(goal, bound):
                return
            if self._budget.choices < 0:
                self._cut_off(goal, bound)
                return
            if first == last:
                if not self._search(goal, first, priced):
                    heapq.heappush(left, (bound, first, last, priced))
                continue
            middle = (first + last) // 2
            for low, high in ((first, middle), (middle + 1, last)):
                within = self._limited(goal, priced, low, high)
                heapq.heappush(left, (max(bound, self._range_bound(goal, within, low, high)), low, high, within))

    def _cut_off(self, goal: _Goal, bound: float) -> None:
        """Note that the search of a goal ends early, with a lower bound of it."""
        if self.best is None:
            return
        gap = self._now(goal) - max(int(bound), self._compute, self._enough_ticks)
        gap_ticks = max(0, gap) if goal == "ticks" else self.best.gap_ticks
        self.best = replace(self.best, gap_ticks=gap_ticks, is_least=False)

    def find_any(self) -> bool:
        """Whether any policies fit; if so, the best known ones do."""
        priced = Prices(0.0, 0.0, 1.0)
        for limit in dict.fromkeys((self._likely_limit(), len(self._limits) - 1)):
            if self._try(self._cheapest(_Priced(priced, self._table(priced, 0, limit)))):
                return True
        lightest = self.lightest(self._memory_bytes + 1)
        return lightest is not None and self._try(lightest)

    def lightest(self, below: int) -> tuple[LayerPolicy, ...] | None:
        """The policies that need least memory; None if all need `below` or more.

        Dynamic programming from the last layer on. Of the layers from a position on, two figures matter for those
        before: their peak, and what they have in the other minibatches, which is there while a run before is
        recomputed.
        """
        stage, num = self._stage, len(self._stage.layers)
        num_held, room = stage.num_held, below - stage.fixed_bytes
        holds: LayerPolicy = "keep" if num_held == stage.in_flight else "swap"
        fronts: list[tuple[list[_Suffix], list[_Suffix]]] = [([], []) for _ in range(num)]
        fronts.append(([_Suffix(0, 0, num, holds, None)], [_Suffix(0, 0, num, holds, None)]))
        for position in range(num - 1, -1, -1):
            own, entering = self._figures[position]
            entry = self._entry if position == 0 else 0
            inputs, others, runs = stage.in_flight * entering, (stage.in_flight - 1) * entering, list[_Suffix]()
            for last in range(position + 1, num + 1):
                needed = inputs + self._sizes[last] - self._sizes[position]
                if needed >= room:
                    break
                runs += [
                    _Suffix(
                        max(inputs + each.peak, needed + each.others), others + each.others, last, "recompute", each
                    )
                    for each in fronts[last][True]
                ]
            for was_recomputed, held in ((False, own), (True, own + entering)):
                kept = [
                    _Suffix(
                        each.peak + num_held * held + entry,
                        each.others + (num_held - 1) * held,
                        position + 1,
                        holds,
                        each,
                    )
                    for each in fronts[position + 1][False]
                ]
                fronts[position][was_recomputed].extend(_lightest([*kept, *runs], room))
            self._budget.choices -= -(-len(runs) // _LAYERS_PER_CHOICE)
        best = min(fronts[0][False], key=lambda each: each.peak, default=None)
        return None if best is None else best.policies()

    # -- bounds ------------------------------------------------------------------------------------------------------

    def _priced(self, goal: _Goal) -> list[_Priced]:
        """Prices with high lower bounds, without a limit on runs, by bisection; tries the cheapest policies of each."""
        found: list[_Priced] = []
        low, high, share = 0.0, 1.0, 1.0
        nearest: dict[bool, tuple[LayerPolicy, ...]] = {}
        for _ in range(_NUM_SHARES if self._ticks_per_byte else 1):
            policies = self._at_share(goal, share, found)
            if policies is None or not self._can_improve(goal, 0.0):
                break
            swaps_much = self._swaps_much(goal, policies)
            nearest[swaps_much] = policies
            if share == 1.0 and not swaps_much:
                break
            low, high = (low, share) if swaps_much else (share, high)
            share = (low + high) / 2
        self._mix(nearest, lambda mixed: self._try(mixed) and self._swaps_much(goal, mixed))
        return found

    def _at_share(self, goal: _Goal, share: float, found: list[_Priced]) -> tuple[LayerPolicy, ...] | None:
        """Policies at the lowest price of memory at which they fit; appends to `found` what has no limit on runs."""
        stage, per_byte = self._stage, self._ticks_per_byte
        saved = [stage.in_flight * layer.activation_bytes for layer in stage.layers]
        rates = [layer.forward_ticks / size for layer, size in zip(stage.layers, saved, strict=True) if size]
        rates = [rate for rate in (*rates, per_byte) if rate > 0] or [1.0]
        low, high = min(rates) / 64, max(rates) * 64
        nearest: dict[bool, tuple[LayerPolicy, ...]] = {}
        every = len(self._limits) - 1
        for limit in dict.fromkeys((every, self._likely_limit())):
            least, most = low, high
            for _ in range(_NUM_BISECTIONS):
                middle = sqrt(least * most)
                prices = self._prices(goal, share, middle)
                priced = _Priced(prices, self._table(prices, 0, limit))
                if limit == every:
                    found.append(priced)
                policies = self._cheapest(priced)
                fit = self._try(policies)
                nearest[fit] = policies
                least, most = (least, middle) if fit else (middle, most)
        return self._mix(nearest, self._try)

    def _likely_limit(self) -> int:
        """The end of a range, as a size of runs with which the inputs of all, and the largest, would need least."""
        layers = self._stage.layers
        inputs = sum(layer.input_bytes for layer in layers) / len(layers)
        wanted = max(
            sqrt(self._stage.in_flight * inputs * self._sizes[-1]), *(each.activation_bytes for each in layers)
        )
        return min(bisect_left(self._limits, wanted), len(self._limits) - 1)

    def _swaps_much(self, goal: _Goal, policies: tuple[LayerPolicy, ...]) -> bool:
        """Whether swaps should cost more in comparison with recomputation."""
        cost = self._cost(policies)
        computed = self._compute + cost.recomputed_ticks
        if goal == "ticks":
            return self._stage.swap_ticks(cost.swapped_bytes) > computed
        most_ticks, most_swapped = self._budgets()
        return computed <= self._compute + most_ticks if goal == "swapped_bytes" else cost.swapped_bytes > most_swapped

    def _prices(self, goal: _Goal, share: float, memory: float) -> Prices:
        """In the units of the goal: of a second, `share` counts as recomputation and the rest as swaps."""
        per_byte = self._ticks_per_byte
        if goal == "ticks":
            return Prices(share, (1 - share) * per_byte, memory)
        if goal == "swapped_bytes":
            return Prices(share / per_byte * 4, 1.0, memory / per_byte)
        return Prices(1.0, (1 - share) * per_byte * 4, memory)

    def _limited(self, goal: _Goal, priced: Sequence[_Priced], low: int, high: int) -> list[_Priced]:
        """The prices with the highest bounds for ranges `low` … `high`, with tables; tries the policies of each."""
        ranked = sorted(priced, key=lambda each: self._bound(goal, each.prices, each.table.held[0], self._floor(low)))
        found = []
        nearest: dict[bool, tuple[LayerPolicy, ...]] = {}
        for each in ranked[-_NUM_BOUNDS:]:
            limited = _Priced(each.prices, self._table(each.prices, low, high))
            policies = self._cheapest(limited)
            nearest[self._try(policies)] = policies
            found.append(limited)
        self._mix(nearest, self._try)
        return found

    def _mix(
        self, some: Mapping[bool, tuple[LayerPolicy, ...]], is_like: Callable[[tuple[LayerPolicy, ...]], bool]
    ) -> tuple[LayerPolicy, ...] | None:
        """Policies that are like `some[True]`, with as many layers as possible of `some[False]`; tries all between.

        At some prices all layers of a kind change at once; what is best then changes some of them.
        """
        if len(some) < len((False, True)):
            return some.get(True)
        found = some[True]
        for first, behind in ((True, False), (False, True)):
            low, high = 0, len(found)
            while high - low > 1:
                middle = (low + high) // 2
                mixed = _joined(some[first], some[behind], middle)
                is_true = is_like(mixed)
                low, high = (low, middle) if is_true == first else (middle, high)
                found = mixed if is_true else found
        return found

    def _range_bound(self, goal: _Goal, priced: Sequence[_Priced], low: int, high: int) -> float:
        """Lower bound of `goal` for policies whose excess is in one of the ranges `low` … `high`; inf: none fit."""
        floor = self._floor(low)
        least = self._table(Prices(0.0, 0.0, 1.0), low, high)
        if least.held[0] > self._room(floor):
            return float("inf")
        bounds = (self._bound(goal, each.prices, each.table.held[0], floor) for each in priced)
        return max(0.0, *bounds)

    def _floor(self, index: int) -> int:
        """The least excess in a range."""
        return self._limits[index - 1] + 1 if index else 0

    def _room(self, excess: int) -> int:
        """Memory for what adds up over layers, beside an excess."""
        return self._memory_bytes - self._stage.fixed_bytes - excess

    def _table(self, prices: Prices, low: int, high: int) -> _Table:
        """Least costs of policies whose excess is in one of the ranges `low` … `high`, or of more than these."""
        self._budget.choices -= -(-len(self._stage.layers) // _LAYERS_PER_CHOICE)
        limit, most_behind = self._limits[high], max(0, self._room(self._floor(low)) // self._stage.num_held)
        stage, sizes, times, reaches = self._stage, self._sizes, self._times, self._reaches_of(most_behind)
        per_kept, per_tick = prices.memory * stage.in_flight, prices.ticks
        per_swapped = prices.swapped + prices.memory * stage.resident
        per_held = per_kept if stage.host_bytes_per_second is None else min(per_kept, per_swapped)
        num = len(stage.layers)
        held, recomputed = [0.0] * (num + 1), [0.0] * (num + 1)
        runs = [(float("inf"), 0)] * num
        #: Ends of runs that can still be the best, nearest first, with what ends there costs less of that begun.
        ends: deque[tuple[float, int]] = deque()
        hold = after = 0.0
        for position in range(num - 1, -1, -1):
            own, entering = self._figures[position]
            cost = per_tick * times[position + 1] + after
            while ends and ends[0][0] > cost:
                ends.popleft()
            ends.appendleft((cost, position + 1))
            most = sizes[position] + limit
            while ends and reaches[ends[-1][1]] > most:
                ends.pop()
            hold += per_held * own
            after = hold + per_held * entering
            if ends:
                least, end = ends[-1]
                run = per_kept * entering - per_tick * times[position] + least
                runs[position] = (run, end)
                if run < hold:  # noqa: PLR1730 - `min` takes half as long again
                    hold = run
                if run < after:  # noqa: PLR1730 - likewise
                    after = run
            held[position], recomputed[position] = hold, after
        held[0] = min(held[0] + prices.memory * self._entry, runs[0][0])
        return _Table(held, recomputed, runs)

    def _reaches_of(self, most_behind: int) -> list[int]:
        """Per end of a run: sizes before it, less what the layers behind it hold, at most `most_behind`."""
        found = self._reaches.get(most_behind)
        if found is None:
            found = [size - min(held, most_behind) for size, held in zip(self._sizes, self._behind, strict=True)]
            self._reaches[most_behind] = found
        return found

    def _cheapest(self, priced: _Priced) -> tuple[LayerPolicy, ...]:
        """The policies of a table."""
        prices, table, stage = priced.prices, priced.table, self._stage
        swaps = (
            stage.host_bytes_per_second is not None
            and prices.swapped + prices.memory * stage.resident < prices.memory * stage.in_flight
        )
        holds: LayerPolicy = "swap" if swaps else "keep"
        position, was_recomputed, found, num = 0, False, list[LayerPolicy](), len(stage.layers)
        while position < num:
            run, end = table.run[position]
            if run <= (table.recomputed if was_recomputed else table.held)[position]:
                found.append("recompute-new-run" if was_recomputed else "recompute")
                found += ["recompute"] * (end - position - 1)
                position, was_recomputed = end, True
            else:
                found.append(holds)
                position, was_recomputed = position + 1, False
        return tuple(found)

    def _bound(self, goal: _Goal, prices: Prices, cost: float, excess: int) -> float:
        """Lower bound of `goal` for a choice that costs at least `cost` at `prices`, and has at least this excess."""
        bound = cost - prices.memory * self._room(excess)
        if goal == "ticks":
            return bound + prices.ticks * self._compute
        assert self.best is not None
        most_ticks, most_swapped = self._budgets()
        if goal == "swapped_bytes":
            return bound - prices.ticks * most_ticks
        return bound - prices.swapped * most_swapped

    def _budgets(self) -> tuple[int, float]:
        """Recomputed ticks and swapped bytes that a choice as fast as the best known one may have."""
        assert self.best is not None
        return self._now("ticks") - self._compute, self.best.cost.swapped_bytes

    def _now(self, goal: _Goal) -> int:
        """The goal of the best known policies; of times without what is received, and at least what is enough."""
        assert self.best is not None
        if goal == "ticks":
            return max(self.best.cost.ticks - self._stage.receive_ticks, self._enough_ticks)
        return self.best.cost.swapped_bytes if goal == "swapped_bytes" else self.best.cost.recomputed_ticks

    def _can_improve(self, goal: _Goal, bound: float) -> bool:
        """Whether a choice with this lower bound may be better; the goals are whole numbers."""
        if self.best is None:
            return bound < float("inf")
        least = self._enough_ticks if goal == "ticks" else 0
        return max(bound, least) <= self._now(goal) - 0.5

    def _try(self, policies: tuple[LayerPolicy, ...]) -> bool:
        """Take these policies if they are better than the best known ones; returns whether they fit."""
        cost = self._cost(policies)
        if cost.num_bytes > self._memory_bytes:
            return False
        if self.best is None:
            self.best = LayerMemoryPlan(policies, cost)
        elif self._rank(cost) < self._rank(self.best.cost):
            self.best = replace(self.best, policies=policies, cost=cost)
        return True

    def _cost(self, policies: tuple[LayerPolicy, ...]) -> StageMemory:
        """Of policies, computed once."""
        cost = self._costs.get(policies)
        if cost is None:
            cost = self._costs[policies] = stage_memory(self._stage, policies)
        return cost

    def _rank(self, cost: StageMemory) -> tuple[int, int, int]:
        ticks, swapped, recomputed = cost.rank
        return max(ticks - self._stage.receive_ticks, self._enough_ticks), swapped, recomputed

    # -- search ------------------------------------------------------------------------------------------------------

    def _search(self, goal: _Goal, index: int, priced: Sequence[_Priced]) -> bool:
        """Search the choices whose excess is in a range; False if it was cut off."""
        for label in self._labels(index, self._promising(goal, self._floor(index), priced)):
            self._try(label.policies())
        return self._budget.choices >= 0

    def _labels(self, index: int, is_promising: Callable[[_Label, int, bool], bool]) -> list[_Label]:
        """The Pareto-optimal choices for all layers that fit and whose excess is in a range.

        Args:
            index: of the range.
            is_promising: whether a choice for the layers up to a position is of interest.
        """
        floor, limit, num_held = self._floor(index), self._limits[index], self._stage.num_held
        room, segments = self._room(floor), self._segments(index)
        least, num = self._table(Prices(0.0, 0.0, 1.0), index, index), len(segments)
        fronts: list[tuple[list[_Label], list[_Label]]] = [([], []) for _ in range(num + 1)]
        fronts[0][0].append(_Label(0, floor, 0, 0, None, None))
        for position in range(num):
            for was_recomputed in (False, True):
                for label in _pareto(fronts[position][was_recomputed], floor):
                    if not is_promising(label, position, was_recomputed):
                        continue
                    self._budget.choices -= len(segments[position])
                    for segment in segments[position]:
                        recomputes = segment.policy == "recompute"
                        memory = label.memory + segment.memory[was_recomputed]
                        if position == 0 and not recomputes:
                            memory += self._entry
                        left, last = room - memory, segment.last
                        behind = (least.recomputed if recomputes else least.held)[last]
                        if behind > left:
                            continue
                        excess = max(label.excess - segment.holds[was_recomputed], segment.recomputed, floor)
                        # While the excess is there, layers behind it hold all but one of their minibatches at least.
                        if excess == floor or (
                            (num_held - 1) * behind <= num_held * (left - excess + floor)
                            and excess - self._behind[last] <= limit
                            and num_held * (excess - limit) <= left
                        ):
                            swapped = label.swapped + segment.swapped[was_recomputed]
                            longer = _Label(memory, excess, swapped, label.ticks + segment.ticks, segment, label)
                            fronts[last][recomputes].append(longer)
        return [*fronts[num][False], *fronts[num][True]]

    def _segments(self, index: int) -> list[list[_Segment]]:
        """Per position, the segments with which the excess can be in a range."""
        limit, most_behind = self._limits[index], max(0, self._room(self._floor(index)) // self._stage.num_held)
        return _segments(self._stage, [limit + min(behind, most_behind) for behind in self._behind])

    def _promising(self, goal: _Goal, floor: int, every: Sequence[_Priced]) -> Callable[[_Label, int, bool], bool]:
        """Whether a choice up to a position may be better than the best known one, by all bounds.

        What does not depend on the choice is computed once: this is the inner loop of the search.
        """
        swap_ticks, budget = self._stage.swap_ticks, self._budget
        most_ticks, most_swapped, most = float("inf"), float("inf"), float("inf")
        if self.best is not None:
            most = self._now(goal) - 0.5
            ticks, most_swapped = self._budgets()
            most_ticks = ticks - 0.5 if goal == "ticks" else ticks
            if goal != "recomputed_ticks":
                most_swapped = float("inf")
        most_moving = most_ticks + self._compute
        can_be = self._can_improve(goal, 0.0)
        tables = [
            (
                (each.table.held, each.table.recomputed),
                each.prices.ticks,
                each.prices.swapped,
                each.prices.memory,
                most - self._bound(goal, each.prices, 0.0, floor),
            )
            for each in every
        ]

        def is_promising(label: _Label, position: int, was_recomputed: bool) -> bool:  # noqa: FBT001 - an index
            if budget.choices < 0 or not can_be:
                return False
            if label.ticks > most_ticks or label.swapped > most_swapped or swap_ticks(label.swapped) > most_moving:
                return False
            return all(
                costs[was_recomputed][position]
                + per_tick * label.ticks
                + per_byte * label.swapped
                + per_memory * label.memory
                <= most_cost
                for costs, per_tick, per_byte, per_memory, most_cost in tables
            )

        return is_promising


def _joined(first: tuple[LayerPolicy, ...], behind: tuple[LayerPolicy, ...], at: int) -> tuple[LayerPolicy, ...]:
    """The policies of `first` up to a layer, 1 or later, and of `behind` from it on; canonical, as both are.

    >>> _joined(("keep", "keep", "keep"), ("recompute", "recompute-new-run", "swap"), 1)
    ('keep', 'recompute', 'swap')
    """
    policy = behind[at]
    if policy == "recompute-new-run" and first[at - 1] in ("keep", "swap"):
        policy = "recompute"
    return (*first[:at], policy, *behind[at + 1 :])


def _pareto(labels: Sequence[_Label], floor: int) -> list[_Label]:
    """The Pareto-optimal labels by memory, with and without excess, swapped bytes and recomputed time.

    One of several equal ones. Of those with different excesses above `floor`, the least one, some are not optimal.
    """
    found: list[_Label] = []
    least, fronts = _Front(), defaultdict[int, _Front](_Front)
    #: Those above the least excess that are found, by their memory with it: from there on they count as if they had it.
    later: list[tuple[int, int, _Label]] = []
    for label in sorted(labels, key=lambda each: (each.memory, each.excess, each.swapped, each.ticks)):
        while later and later[0][0] <= label.memory:
            least.add(heapq.heappop(later)[2])
        if label.excess == floor:
            if least.add(label):
                found.append(label)
        elif not least.has_better(label) and fronts[label.excess].add(label):
            found.append(label)
            heapq.heappush(later, (label.memory + label.excess - floor, len(found), label))
    return found


def _lightest(suffixes: Sequence[_Suffix], room: int) -> list[_Suffix]:
    """The Pareto-optimal ones whose peak is below `room`."""
    found: list[_Suffix] = []
    for each in sorted(suffixes, key=lambda each: (each.peak, each.others)):
        if each.peak < room and (not found or each.others < found[-1].others):
            found.append(each)
    return found


class _Front:
    """Pareto front of swapped bytes and recomputed time."""

    def __init__(self) -> None:
        #: Swapped bytes, ascending, and recomputed ticks, which descend.
        self._swapped: list[int] = []
        self._ticks: list[int] = []

    def has_better(self, label: _Label) -> bool:
        """Whether one swaps and recomputes no more."""
        place = bisect_right(self._swapped, label.swapped)
        return place > 0 and self._ticks[place - 1] <= label.ticks

    def add(self, label: _Label) -> bool:
        """Add `label`; False, and nothing is added, if it has a better one."""
        if self.has_better(label):
            return False
        swapped, ticks = self._swapped, self._ticks
        place = end = bisect_right(swapped, label.swapped)
        while end < len(ticks) and ticks[end] >= label.ticks:
            end += 1
        if place and swapped[place - 1] == label.swapped:
            place -= 1
        swapped[place:end] = [label.swapped]
        ticks[place:end] = [label.ticks]
        return True


def _segments(stage: StageFigures, most: Sequence[int]) -> list[list[_Segment]]:
    """Per position, the segments that can begin there, with runs of at most `most[last]` bytes."""
    layers, in_flight = stage.layers, stage.in_flight
    found: list[list[_Segment]] = []
    for position, layer in enumerate(layers):
        held, with_input = layer.activation_bytes, layer.activation_bytes + layer.input_bytes
        holds, nothing = (held, with_input), (0, 0)
        memory = (in_flight * held, in_flight * with_input)
        begun = [_Segment(position + 1, "keep", memory, holds, nothing, ticks=0, recomputed=0)]
        if stage.host_bytes_per_second is not None:
            memory = (stage.resident * held, stage.resident * with_input)
            begun.append(_Segment(position + 1, "swap", memory, holds, holds, ticks=0, recomputed=0))
        entering, size, ticks = layer.input_bytes, 0, 0
        memory, holds = (in_flight * entering, in_flight * entering), (entering, entering)
        for last in range(position + 1, len(layers) + 1):
            size += layers[last - 1].activation_bytes
            if size > most[last]:
                break
            ticks += layers[last - 1].forward_ticks
            begun.append(_Segment(last, "recompute", memory, holds, nothing, ticks, size))
        found.append(begun)
    return found


def _most_held(stage: StageFigures) -> list[int]:
    """Bytes of one minibatch that the layers from each position on hold at most, if the one before is recomputed."""
    held = recomputed = 0
    found = [0]
    for layer in reversed(stage.layers):
        run = layer.input_bytes + recomputed
        held, recomputed = (
            max(layer.activation_bytes + held, run),
            max(layer.activation_bytes + layer.input_bytes + held, run),
        )
        found.append(recomputed)
    return found[::-1]
