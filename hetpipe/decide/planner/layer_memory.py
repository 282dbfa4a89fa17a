"""The memory policies of the layers of one stage: the fastest that fit; `memory-policy.md` §3.

Among the policies whose peak memory is within the device's, minimise (time, swapped bytes, recomputed time) in this
order. Each of the three is minimised in turn, within the optimum of those before it, in two steps:

* *Bounds.* With a price per tick recomputed, per byte swapped and per byte of memory, the cheapest policies of a chain
  are found by dynamic programming over its layers and runs. Their cost, less the price of what may be used, is a lower
  bound for every choice (Lagrangian duality), and the policies themselves are often feasible, and good.
* *Search.* Dynamic programming over the layers, with the Pareto front of (memory, swapped bytes, recomputed time) of
  what precedes a layer, from which everything goes that the bounds show to be no better than the best known.

The memory of the largest run is not a sum over layers. So both are done for each value that it can have, as a limit on
runs, unless the bounds exclude the value.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from hetpipe.values.memory import LayerPolicy, StageFigures, StageMemory, canonical, stage_memory

#: Partial choices that are examined for a stage, about half a second's; beyond, the best known choice is returned with
#: its gap.
MAX_EXAMINED = 80_000

#: Number of prices per byte of memory, and of divisions of a second between recomputation and swaps, at first.
_NUM_MEMORY_PRICES = 14
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
#: Prices that the search uses to prune, per limit on runs.
_NUM_BOUNDS = 5

_Goal = Literal["ticks", "swapped_bytes", "recomputed_ticks"]
_GOALS: tuple[_Goal, ...] = ("ticks", "swapped_bytes", "recomputed_ticks")


@dataclass(frozen=True, slots=True)
class LayerMemoryPlan:
    """The policies of one stage's layers."""

    policies: tuple[LayerPolicy, ...]
    cost: StageMemory
    gap_ticks: int = 0
    """Time per minibatch that other policies can save at most; 0: none is faster. Positive only where the search was
    cut off (`MAX_EXAMINED`)."""


@dataclass(frozen=True, slots=True)
class _Prices:
    """Per tick recomputed, per byte swapped, and per byte of memory."""

    ticks: float
    swapped: float
    memory: float


@dataclass(frozen=True, slots=True)
class _Segment:
    """A kept or swapped layer, or a run: what it adds if the layer before it is held, and if that is recomputed."""

    last: int
    policy: LayerPolicy
    memory: tuple[int, int]
    swapped: tuple[int, int]
    ticks: int
    peak: int

    def costs(self, prices: _Prices) -> tuple[float, float]:
        """At `prices`, both cases."""
        ticks = prices.ticks * self.ticks
        return (
            ticks + prices.swapped * self.swapped[0] + prices.memory * self.memory[0],
            ticks + prices.swapped * self.swapped[1] + prices.memory * self.memory[1],
        )


@dataclass(frozen=True, slots=True)
class _Label:
    """A choice for the layers up to some position."""

    memory: int
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


def choose_policies(
    stage: StageFigures, memory_bytes: int, *, recomputable: Sequence[bool] | None = None
) -> LayerMemoryPlan | None:
    """The best policies for `stage` within `memory_bytes`; None if none fit.

    Args:
        stage: the stage.
        memory_bytes: memory of its device.
        recomputable: per layer, whether it may be recomputed; None: each.
    """
    kept: tuple[LayerPolicy, ...] = tuple("keep" for _ in stage.layers)
    cost = stage_memory(stage, kept)
    if cost.num_bytes <= memory_bytes:
        return LayerMemoryPlan(kept, cost)
    search = _Search(stage, memory_bytes, recomputable or (True,) * len(stage.layers))
    for goal in _GOALS:
        search.minimise(goal)
        if search.best is None:
            return None
    assert search.best is not None
    return search.best


def least_bytes(stage: StageFigures) -> int:
    """The least memory with which some policies for `stage` fit."""
    search = _Search(stage, 0, (True,) * len(stage.layers))
    return min(stage_memory(stage, each).num_bytes for each in search.smallest())


class _Search:
    """One stage and the best known policies, which every `minimise` improves."""

    def __init__(self, stage: StageFigures, memory_bytes: int, recomputable: Sequence[bool]) -> None:
        self._stage = stage
        self._memory_bytes = memory_bytes
        self._segments = _segments(stage, recomputable)
        first = stage.layers[0]
        #: Memory of the stage's input, where its first layer is held.
        self._entry = stage.in_flight * first.input_bytes if stage.receives else 0
        #: Values that the memory of the largest run can have; 0 without any.
        self._limits = sorted({0, *(segment.peak for each in self._segments for segment in each)})
        self._compute = stage.compute_ticks
        self._examined = 0
        #: Time to swap a byte; 0 if nothing can be swapped.
        self._ticks_per_byte = stage.swap_ticks(1 << 40) / (1 << 40) if stage.host_bytes_per_second else 0.0
        self.best: LayerMemoryPlan | None = None

    def minimise(self, goal: _Goal) -> None:
        """Improve the best known policies in `goal`, without a loss in the goals before it."""
        if goal == "swapped_bytes" and self._stage.host_bytes_per_second is None:
            return
        ranked = self._ranked_prices(goal)
        lowest = min((bound for _, bound, _ in ranked), default=None)
        for limit, bound, prices in sorted(ranked, key=lambda entry: entry[1]):
            if not self._can_improve(goal, bound):
                continue
            self._search(goal, limit, prices)
            if self._examined > MAX_EXAMINED:
                break
        if goal == "ticks" and self.best is not None and self._examined > MAX_EXAMINED and lowest is not None:
            gap = max(0, self.best.cost.ticks - self._stage.receive_ticks - int(max(lowest, self._compute)))
            self.best = LayerMemoryPlan(self.best.policies, self.best.cost, gap)

    def smallest(self) -> Iterator[tuple[LayerPolicy, ...]]:
        """The policies with the least memory, one for each limit on runs."""
        prices = _Prices(0.0, 0.0, 1.0)
        for limit in self._limits:
            yield self._cheapest(prices, self._table(prices, limit), limit)

    # -- bounds ------------------------------------------------------------------------------------------------------

    def _ranked_prices(self, goal: _Goal) -> list[tuple[int, float, list[_Prices]]]:
        """Per limit on runs: the best bound, and the prices that give the highest ones.

        The tables of all prices are made without a limit, where the bounds are valid, if lower.
        """
        every = list(self._prices(goal))
        roots = []
        for prices in every:
            table = self._table(prices, self._limits[-1])
            self._try(self._cheapest(prices, table, self._limits[-1]))
            roots.append(table[0][0])
        found = []
        for limit in self._limits:
            bounds = [self._bound(goal, prices, root, limit) for prices, root in zip(every, roots, strict=True)]
            order = sorted(range(len(every)), key=bounds.__getitem__, reverse=True)[:_NUM_BOUNDS]
            found.append((limit, bounds[order[0]], [every[index] for index in order]))
        return found

    def _prices(self, goal: _Goal) -> Iterator[_Prices]:
        """Prices to try, whose bounds are in the units of the goal."""
        stage = self._stage
        per_byte = self._ticks_per_byte
        saved = [stage.in_flight * layer.activation_bytes for layer in stage.layers]
        rates = [layer.forward_ticks / size for layer, size in zip(stage.layers, saved, strict=True) if size]
        rates = [rate for rate in (*rates, per_byte) if rate > 0] or [1.0]
        lowest, highest = min(rates) / 64, max(rates) * 64
        steps = [
            lowest * (highest / lowest) ** (index / (_NUM_MEMORY_PRICES - 1)) for index in range(_NUM_MEMORY_PRICES)
        ]
        for memory in (0.0, *steps):
            for share in _SHARES:
                ticks, swapped = share, (1 - share) * per_byte
                if goal == "ticks":
                    yield _Prices(ticks, swapped, memory)
                elif goal == "swapped_bytes":
                    yield _Prices(ticks / per_byte * 4, 1.0, memory / per_byte)
                elif goal == "recomputed_ticks":
                    yield _Prices(1.0, swapped * 4, memory)

    def _table(self, prices: _Prices, limit: int) -> list[tuple[float, float]]:
        """Per position: least cost of the layers behind it, if the one before it is held, and if it is recomputed."""
        num = len(self._segments)
        table = [(0.0, 0.0)] * (num + 1)
        for position in range(num - 1, -1, -1):
            held = recomputed = float("inf")
            for segment in self._segments[position]:
                if segment.peak > limit:
                    continue
                first, second = segment.costs(prices)
                behind = table[segment.last][segment.policy == "recompute"]
                held, recomputed = min(held, first + behind), min(recomputed, second + behind)
            table[position] = (held, recomputed)
        return table

    def _cheapest(self, prices: _Prices, table: Sequence[tuple[float, float]], limit: int) -> tuple[LayerPolicy, ...]:
        """The policies of a table."""
        position, was_recomputed, found = 0, False, list[LayerPolicy]()
        while position < len(self._segments):
            segment = min(
                (each for each in self._segments[position] if each.peak <= limit),
                key=lambda each: (
                    each.costs(prices)[was_recomputed] + table[each.last][each.policy == "recompute"],
                    -each.last,
                ),
            )
            found.append("recompute-new-run" if segment.policy == "recompute" else segment.policy)
            found.extend("recompute" for _ in range(segment.last - position - 1))
            position, was_recomputed = segment.last, segment.policy == "recompute"
        return canonical(found)

    def _bound(self, goal: _Goal, prices: _Prices, cost: float, limit: int) -> float:
        """Lower bound of `goal` for a choice that costs at least `cost` at `prices`."""
        bound = cost - prices.memory * (self._memory_bytes - self._stage.fixed_bytes - limit)
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
        ticks = self.best.cost.ticks - self._stage.receive_ticks
        return ticks - self._compute, self.best.cost.swapped_bytes

    def _can_improve(self, goal: _Goal, bound: float) -> bool:
        """Whether a choice with this lower bound may be better; the goals are whole numbers."""
        if self.best is None:
            return True
        now = self.best.cost.ticks - self._stage.receive_ticks if goal == "ticks" else getattr(self.best.cost, goal)
        return bound <= now - 0.5

    def _try(self, policies: tuple[LayerPolicy, ...]) -> None:
        cost = stage_memory(self._stage, policies)
        if cost.num_bytes <= self._memory_bytes and (self.best is None or cost.rank < self.best.cost.rank):
            gap = 0 if self.best is None else self.best.gap_ticks
            self.best = LayerMemoryPlan(policies, cost, gap)

    # -- search ------------------------------------------------------------------------------------------------------

    def _search(self, goal: _Goal, limit: int, every: Sequence[_Prices]) -> None:
        """Search the choices whose runs are within `limit`."""
        tables = [(prices, self._table(prices, limit)) for prices in every]
        for prices, table in tables:
            self._try(self._cheapest(prices, table, limit))
        least = self._table(_Prices(0.0, 0.0, 1.0), limit)
        room = self._memory_bytes - self._stage.fixed_bytes - limit
        num = len(self._segments)
        fronts: list[tuple[list[_Label], list[_Label]]] = [([], []) for _ in range(num + 1)]
        fronts[0][0].append(_Label(0, 0, 0, None, None))
        for position in range(num):
            for was_recomputed in (False, True):
                for label in _pareto(fronts[position][was_recomputed]):
                    if not self._is_promising(goal, label, position, was_recomputed, limit, tables):
                        continue
                    for segment, longer in self._extended(label, position, was_recomputed, limit):
                        recomputes = segment.policy == "recompute"
                        if longer.memory + least[segment.last][recomputes] <= room:
                            fronts[segment.last][recomputes].append(longer)
            if self._examined > MAX_EXAMINED:
                return
        for label in (*fronts[num][False], *fronts[num][True]):
            self._try(label.policies())

    def _extended(
        self,
        label: _Label,
        position: int,
        was_recomputed: bool,  # noqa: FBT001 - an index
        limit: int,
    ) -> Iterator[tuple[_Segment, _Label]]:
        """`label` with each segment that can begin at `position`."""
        for segment in self._segments[position]:
            if segment.peak > limit:
                continue
            self._examined += 1
            memory = label.memory + segment.memory[was_recomputed]
            if position == 0 and segment.policy != "recompute":
                memory += self._entry
            swapped = label.swapped + segment.swapped[was_recomputed]
            yield segment, _Label(memory, swapped, label.ticks + segment.ticks, segment, label)

    def _is_promising(
        self,
        goal: _Goal,
        label: _Label,
        position: int,
        was_recomputed: bool,  # noqa: FBT001 - an index of tables
        limit: int,
        tables: Iterable[tuple[_Prices, list[tuple[float, float]]]],
    ) -> bool:
        """Whether no bound shows that a choice which begins with `label` is no better than the best known one."""
        if self.best is not None:
            if goal == "ticks":
                if not self._can_improve(goal, self._compute + label.ticks) or not self._can_improve(
                    goal, self._stage.swap_ticks(label.swapped)
                ):
                    return False
            else:
                most_ticks, _ = self._budgets()
                if label.ticks > most_ticks or self._stage.swap_ticks(label.swapped) > most_ticks + self._compute:
                    return False
                if goal == "recomputed_ticks" and label.swapped > self.best.cost.swapped_bytes:
                    return False
        elif goal != "ticks":
            return False
        for prices, table in tables:
            cost = (
                table[position][was_recomputed]
                + prices.ticks * label.ticks
                + prices.swapped * label.swapped
                + prices.memory * label.memory
            )
            if not self._can_improve(goal, self._bound(goal, prices, cost, limit)):
                return False
        return True


def _pareto(labels: Sequence[_Label]) -> list[_Label]:
    """Those that no other one equals or beats in memory, swapped bytes and recomputed time."""
    found: list[_Label] = []
    #: Of those found: swapped bytes ascending, and recomputed ticks, which descend.
    swapped: list[int] = []
    ticks: list[int] = []
    for label in sorted(labels, key=lambda each: (each.memory, each.swapped, each.ticks)):
        place = bisect_right(swapped, label.swapped)
        if place and ticks[place - 1] <= label.ticks:
            continue
        end = place
        while end < len(ticks) and ticks[end] >= label.ticks:
            end += 1
        if place and swapped[place - 1] == label.swapped:
            place -= 1
        swapped[place:end] = [label.swapped]
        ticks[place:end] = [label.ticks]
        found.append(label)
    return found


def _segments(stage: StageFigures, recomputable: Sequence[bool]) -> list[list[_Segment]]:
    """Per position, what can begin there."""
    layers = stage.layers
    sizes = [0, *accumulate(layer.activation_bytes for layer in layers)]
    times = [0, *accumulate(layer.forward_ticks for layer in layers)]
    found: list[list[_Segment]] = []
    for position, layer in enumerate(layers):
        held, with_input = layer.activation_bytes, layer.activation_bytes + layer.input_bytes
        begun = [
            _Segment(
                position + 1, "keep", (stage.in_flight * held, stage.in_flight * with_input), (0, 0), ticks=0, peak=0
            )
        ]
        if stage.host_bytes_per_second is not None:
            memory = (stage.resident * held, stage.resident * with_input)
            begun.append(_Segment(position + 1, "swap", memory, (held, with_input), ticks=0, peak=0))
        kept = stage.in_flight * layer.input_bytes
        for last in range(position + 1, len(layers) + 1):
            if not recomputable[last - 1]:
                break
            begun.append(
                _Segment(
                    last,
                    "recompute",
                    (kept, kept),
                    (0, 0),
                    ticks=times[last] - times[position],
                    peak=sizes[last] - sizes[position],
                )
            )
        found.append(begun)
    return found
