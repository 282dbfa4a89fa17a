"""Cuts of an order of devices together with the memory policies of all layers; `memory-search.md`.

Minimise (largest stage time, swapped bytes, recomputed time) over all cuts and policies that fit, in this order. The
policies of one stage are those of `layer_memory`, which takes milliseconds, and a model has too many possible stages to
ask for each. So cuts are searched lazily:

* Each possible stage has a *lower bound* of its time, which costs next to nothing: with a price per byte of memory,
  per tick recomputed and per byte swapped, each layer takes its cheapest policy (Lagrangian duality). Runs enter by
  what their inputs and the largest of them need at least. The bounds of all possible stages are sums over layers, and
  so differences of two arrays.
* Dynamic programming finds the cuts whose largest bound is least, which is a lower bound for every plan. The policies
  of these stages are chosen, what is found replaces their bounds and those of stages that cannot be faster, and the
  cuts are searched again, until the time of a plan equals the bound. While they are new, those cuts go first that
  would be best if all bounds of a stage were as far below its times as one that was found.

The same is then done for swapped bytes and recomputed time among the stages that are as fast as needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hetpipe.decide.planner.costs import StagePlace
from hetpipe.decide.planner.layer_memory import MAX_EXAMINED, Budget, LayerMemoryPlan, Prices, choose_policies

#: Partial choices for all stages that are examined before the best plan is returned with its gap.
MAX_CHOICES = 40_000
#: Of a stage at first; those that matter are examined as `MAX_EXAMINED` allows.
_FEW_EXAMINED = 1_000

#: Possible stages as fast as needed up to which those that swap and recompute least are searched.
_MOST_STAGES = 400

#: Divisions of a second between recomputation and swaps, and prices of memory relative to what layers save.
_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
_QUANTILES = (0.0, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0)

#: Growth of the largest stage time that is considered, while no cuts are within it.
_GROWTH = 1.25

_TICKS_PER_SECOND = 10**12

_Floats: TypeAlias = npt.NDArray[np.float64]
_Ints: TypeAlias = npt.NDArray[np.int64]
_Bools: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PlannedLayers:
    """Layers [first, last) of one stage, with their policies."""

    first: int
    last: int
    memory: LayerMemoryPlan


@dataclass(frozen=True, slots=True)
class PolicyCuts:
    """The stages of one virtual worker, first to last."""

    stages: tuple[PlannedLayers, ...]
    lower_bound_ticks: int
    """Proven: no cuts and policies have a smaller largest stage time."""
    is_least: bool
    """Whether none that are as fast swap less, or as much and recompute less; False: not proven."""

    @property
    def ticks(self) -> int:
        """The largest stage time."""
        return max(stage.memory.cost.ticks for stage in self.stages)

    @property
    def gap(self) -> float:
        """Upper bound on the relative distance of the largest stage time from the optimum; 0.0 if exact."""
        return (self.ticks - self.lower_bound_ticks) / max(1, self.lower_bound_ticks)

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order of preference: largest stage time, swapped bytes, recomputed time."""
        costs = [stage.memory.cost for stage in self.stages]
        return self.ticks, sum(cost.swapped_bytes for cost in costs), sum(cost.recomputed_ticks for cost in costs)


def cut_with_policies(
    places: Sequence[StagePlace], allowed: Sequence[int], *, enough_ticks: int = 0, max_choices: int = MAX_CHOICES
) -> PolicyCuts | None:
    """The best cuts and policies for stages at `places`; None if none were found that fit.

    Args:
        places: of each stage, first to last, over the same layers.
        allowed: the cuts where a stage may end, ascending, without 0 and the end.
        enough_ticks: a largest stage time at which the search stops, whatever is swapped and recomputed.
        max_choices: partial choices that may be examined, at some ten microseconds each.
    """
    if len(places) > len(allowed) + 1:
        return None
    return _Search(places, (0, *allowed, len(places[0].layers)), enough_ticks, max_choices).best()


#: A possible stage: its index, and its first and last cut among the allowed ones.
_Key: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Tried:
    """A stage whose policies were chosen."""

    plan: LayerMemoryPlan | None
    """None: none fit."""
    least_ticks: float
    """No policies are faster; 0 where others might be, as these are as fast as was needed."""
    is_long: bool
    """Whether it was examined for as long as `MAX_EXAMINED` allows."""

    @property
    def ticks(self) -> float:
        """Of the policies found; inf if none fit."""
        return float("inf") if self.plan is None else self.plan.cost.ticks


class _Search:
    """The search for one order of devices."""

    def __init__(self, places: Sequence[StagePlace], cuts: Sequence[int], enough_ticks: int, max_choices: int) -> None:
        self._enough_ticks = enough_ticks
        self._places = places
        self._cuts = cuts
        sizes = _stage_sizes(places[0], cuts)
        self._bounds = [
            _PlaceBounds(place, np.array(cuts), sizes, is_last=stage + 1 == len(places))
            for stage, place in enumerate(places)
        ]
        self._through = self._times_through()
        self._tried: dict[_Key, _Tried] = {}
        self._budget = Budget(max_choices)
        #: The fastest cuts so far, and their time.
        self._found: tuple[_Key, ...] | None = None
        self._ticks = float("inf")

    def best(self) -> PolicyCuts | None:
        """See `cut_with_policies`."""
        if self._through[0][0] == np.inf:
            return None
        longest = sum(bounds.longest_ticks for bounds in self._bounds)
        limit = max(1.0, float(self._through[0][0]))
        while True:
            window = self._window(limit)
            lowest, is_over = self._explore(window, limit)
            if is_over or limit >= longest:
                break
            limit = min(limit * _GROWTH, self._ticks, longest)
        if self._found is None:
            return None
        lower = int(min(np.ceil(lowest - 0.5), self._ticks))
        if self._ticks <= self._enough_ticks:
            return self._plan([(key, self._tried[key].plan) for key in self._found], lower, is_least=False)
        return self._with_least_swaps(self._found, window if limit >= self._ticks else None, lower)

    def _explore(self, window: _Window, limit: float) -> tuple[float, bool]:
        """Choose the policies of the most promising stages within `limit`.

        Returns:
            a lower bound of every plan; whether the search is over, with a proof or because nothing is left to try.
        """
        while True:
            lowest, path = window.least_time()
            if path is None or lowest > limit + 0.5:
                return limit, limit >= self._ticks
            if lowest > self._ticks - 0.5:
                return lowest, True
            path, wanted = self._promising(window, path, lowest)
            if not wanted or self._budget.choices < 0:
                return lowest, True
            for key in wanted:
                self._try(key, max(int(lowest), self._enough_ticks))
                self._raise(window, key)
            ticks = max(self._tried[key].ticks for key in path)
            if ticks < self._ticks:
                self._ticks, self._found = ticks, path
            if self._ticks <= self._enough_ticks:
                return lowest, True

    def _promising(self, window: _Window, path: tuple[_Key, ...], lowest: float) -> tuple[tuple[_Key, ...], list[_Key]]:
        """The cuts to go on with, and their stages to choose policies of, for the first time or with more effort.

        As long as they are new, those are the cuts that are likely to be best: bounds are further below the times of
        some stages than of others, and the cuts `path` with the least bound would approach them layer by layer.
        """
        slower = [1.0] * len(self._places)
        for key, tried in self._tried.items():
            if tried.plan is not None:
                slower[key[0]] = max(slower[key[0]], tried.ticks / window.first_bound(key))
        likely = window.likely(slower)
        for each in (likely, path):
            if new := [key for key in each if key not in self._tried]:
                return each, new
        slow = [key for key in path if self._tried[key].ticks > lowest + 0.5]
        return path, [key for key in slow if not self._tried[key].is_long]

    def _try(self, key: _Key, enough_ticks: int) -> None:
        """Choose the policies of a stage; if that was done before, with more effort."""
        stage, first, last = key[0], self._cuts[key[1]], self._cuts[key[2]]
        is_long = key in self._tried
        place = self._places[stage]
        few = 0 if self._enough_ticks else _FEW_EXAMINED
        plan = self._chosen(place, first, last, enough_ticks, MAX_EXAMINED if is_long else few, only_ticks=True)
        before = self._tried.get(key)
        least = float("inf") if plan is None else float(plan.cost.ticks - plan.gap_ticks)
        least = least if least > enough_ticks else 0.0
        is_long |= plan is None or plan.gap_ticks == 0
        if before is not None:
            least = max(least, before.least_ticks)
            if plan is None or before.ticks <= plan.cost.ticks:
                plan = before.plan  # little effort was left
        self._tried[key] = _Tried(plan, least, is_long)

    def _chosen(
        self, place: StagePlace, first: int, last: int, enough_ticks: int, choices: int, *, only_ticks: bool = False
    ) -> LayerMemoryPlan | None:
        """The policies of a stage, with at most `choices` partial choices."""
        budget = Budget(max(0, min(choices, MAX_EXAMINED, self._budget.choices)))
        self._budget.choices -= budget.choices
        plan = choose_policies(
            place.figures(first, last),
            place.memory_bytes,
            enough_ticks=enough_ticks,
            budget=budget,
            only_ticks=only_ticks,
        )
        self._budget.choices += budget.choices
        return plan

    def _times_through(self) -> list[_Floats]:
        """Per border, a lower bound of the largest stage time with each cut there, without memory."""
        num_stages, num_cuts = len(self._places), len(self._cuts)
        before, behind = np.full(num_cuts, np.inf), np.full(num_cuts, np.inf)
        before[0] = behind[-1] = 0.0
        forward, backward = [before], [behind]
        for stage in range(num_stages):
            before = np.maximum(before[:, None], self._bounds[stage].times).min(axis=0)
            behind = np.maximum(behind[None, :], self._bounds[num_stages - 1 - stage].times).min(axis=1)
            forward.append(before)
            backward.append(behind)
        return [np.maximum(a, b) for a, b in zip(forward, reversed(backward), strict=True)]

    def _window(self, limit: float) -> _Window:
        """All stages of cuts whose times are within `limit`."""
        borders = [np.flatnonzero(times <= limit) for times in self._through]
        window = _Window(
            borders, [each.within(*ends, limit) for each, ends in zip(self._bounds, pairwise(borders), strict=True)]
        )
        for key in self._tried:
            self._raise(window, key)
        return window

    def _raise(self, window: _Window, key: _Key) -> None:
        """Raise the bounds of a stage whose policies were chosen, and of stages that are no faster."""
        stage, first, last = key
        bounds, least = self._bounds[stage], self._tried[key].least_ticks
        if least > 0:
            ticks = least - bounds.receive[first, last]
            window.raise_from(stage, bounds.no_less_memory(first), last, ticks, bounds.receive)

    # -- the least swapped bytes, and recomputed time ----------------------------------------------------------------

    def _with_least_swaps(self, found: Sequence[_Key], window: _Window | None, lower: int) -> PolicyCuts:
        """Of the plans as fast as that of `found`, one that swaps least, then recomputes least.

        Args:
            found: the stages of a plan.
            window: all stages that are as fast; None if these are not known: then the cuts stay.
            lower: proven lower bound of the largest stage time.
        """
        limit = self._ticks + 0.5
        is_small = window is not None and window.count(limit) <= _MOST_STAGES
        every = sorted({*found, *window.keys(limit)}) if window is not None and is_small else []
        chosen: dict[_Key, LayerMemoryPlan | None] = {}
        path: Sequence[_Key] = found
        while wanted := [key for key in path if key not in chosen]:
            for left, key in zip(range(len(wanted), 0, -1), wanted, strict=True):
                chosen[key] = self._least(key, self._budget.choices // left)
            if is_small:
                path = self._least_path(every, chosen)
        are_least = all(plan is None or plan.is_least for plan in chosen.values())
        return self._plan([(key, chosen[key]) for key in path], lower, is_least=is_small and are_least)

    def _plan(self, stages: Sequence[tuple[_Key, LayerMemoryPlan | None]], lower: int, *, is_least: bool) -> PolicyCuts:
        planned = (
            PlannedLayers(self._cuts[first], self._cuts[last], plan)
            for (_, first, last), plan in stages
            if plan is not None
        )
        return PolicyCuts(tuple(planned), lower, is_least=is_least)

    def _least(self, key: _Key, choices: int) -> LayerMemoryPlan | None:
        """The policies of a stage that swap least within the time of the plan; None if none are as fast."""
        stage, first, last = key[0], self._cuts[key[1]], self._cuts[key[2]]
        place, tried = self._places[stage], self._tried.get(key)
        plan = self._chosen(place, first, last, int(self._ticks), choices)
        if tried is not None and tried.ticks <= self._ticks and (plan is None or plan.cost.ticks > self._ticks):
            return tried.plan
        return None if plan is None or plan.cost.ticks > self._ticks else plan

    def _least_path(self, every: Sequence[_Key], chosen: Mapping[_Key, LayerMemoryPlan | None]) -> tuple[_Key, ...]:
        """The cuts with the least swapped bytes, then recomputed time, if those not chosen yet had none."""
        best: dict[tuple[int, int], tuple[int, int, tuple[_Key, ...]]] = {(0, 0): (0, 0, ())}
        for key in every:
            stage, first, last = key
            before = best.get((stage, first))
            plan = chosen.get(key)
            if before is None or (plan is None and key in chosen):
                continue
            swapped, recomputed = (0, 0) if plan is None else (plan.cost.swapped_bytes, plan.cost.recomputed_ticks)
            total = (before[0] + swapped, before[1] + recomputed, (*before[2], key))
            known = best.get((stage + 1, last))
            if known is None or total[:2] < known[:2]:
                best[stage + 1, last] = total
        return best[len(self._places), len(self._cuts) - 1][2]


class _Window:
    """Lower bounds of the stages between some of the cuts."""

    def __init__(self, borders: Sequence[_Ints], bounds: Sequence[_Floats]) -> None:
        """Create a window.

        Args:
            borders: the cuts before the first stage, between each two, and behind the last.
            bounds: of each stage, by its first and last cut among those.
        """
        self._borders = borders
        self._bounds = bounds
        self._first_bounds = [each.copy() for each in bounds]

    def first_bound(self, key: _Key) -> float:
        """That of a stage before its policies were chosen, at least 1."""
        stage, first, last = key
        row, column = np.searchsorted(self._borders[stage], first), np.searchsorted(self._borders[stage + 1], last)
        return max(1.0, float(self._first_bounds[stage][row, column]))

    def raise_from(self, stage: int, firsts: _Bools, last: int, ticks: float, receive: _Floats) -> None:
        """Raise the lower bound to `ticks` of stages with a first cut among `firsts` and a last one at `last` or later.

        Args:
            stage: its index.
            firsts: per cut, whether it counts.
            last: a cut.
            ticks: besides transfers.
            receive: these, by first and last cut.
        """
        rows = np.flatnonzero(firsts[self._borders[stage]])
        column = int(np.searchsorted(self._borders[stage + 1], last))
        bounds = self._bounds[stage]
        received = receive[np.ix_(self._borders[stage][rows], self._borders[stage + 1][column:])]
        bounds[rows, column:] = np.maximum(bounds[rows, column:], ticks + received)

    def count(self, limit: float) -> int:
        """Number of stages whose bound is within `limit`."""
        return sum(int(np.count_nonzero(bounds <= limit)) for bounds in self._bounds)

    def keys(self, limit: float) -> Iterator[_Key]:
        """The stages whose bound is within `limit`, first stages first."""
        for stage, bounds in enumerate(self._bounds):
            for first, last in np.argwhere(bounds <= limit):
                yield stage, int(self._borders[stage][first]), int(self._borders[stage + 1][last])

    def least_time(self) -> tuple[float, tuple[_Key, ...] | None]:
        """The least largest bound of any cuts, and the evenest cuts that have it; inf and None if there are none."""
        return self._least(self._bounds)

    def likely(self, slower: Sequence[float]) -> tuple[_Key, ...]:
        """The cuts that are best if each stage takes the given multiple of its first bound; () if there are none."""
        scaled = [factor * bounds for factor, bounds in zip(slower, self._first_bounds, strict=True)]
        return self._least(scaled)[1] or ()

    def _least(self, every: Sequence[_Floats]) -> tuple[float, tuple[_Key, ...] | None]:
        before = np.zeros(1)
        for bounds in every:
            if not before.size or not bounds.size:
                return float("inf"), None
            before = np.maximum(before[:, None], bounds).min(axis=0)
        least = float(before[0])
        if least == float("inf"):
            return least, None
        sums, origins = np.zeros(1), []
        for bounds in every:
            squares = np.where(bounds <= least, (bounds / max(1.0, least)) ** 2, np.inf) + sums[:, None]
            origins.append(squares.argmin(axis=0))
            sums = squares.min(axis=0)
        last, path = 0, list[_Key]()
        for stage in range(len(every) - 1, -1, -1):
            first = int(origins[stage][last])
            path.append((stage, int(self._borders[stage][first]), int(self._borders[stage + 1][last])))
            last = first
        return least, tuple(reversed(path))


class _PlaceBounds:
    """Lower bounds of the time of all stages that one place can have."""

    def __init__(self, place: StagePlace, cuts: _Ints, sizes: _StageSizes, *, is_last: bool) -> None:
        """Prepare the bounds.

        Args:
            place: the place.
            cuts: the allowed cuts, with 0 and the end.
            sizes: of the stages between them.
            is_last: whether no stage follows.
        """
        layers = place.layers
        self._place = place
        self._cuts = cuts
        #: Minibatches of which a held layer is there at least.
        self._num_held = place.figures(0, 0).num_held
        #: Share of the excess that bounds count: it is less the more layers are held behind runs, as much as these need
        #: themselves where there is one minibatch.
        self._excess = 1.0 if self._num_held > 1 else 0.5
        #: Minibatches of which the inputs of runs are there, less the average of what they take off the excess.
        self._per_input = place.in_flight - self._excess / 2
        self._forward = np.array([layer.forward_ticks for layer in layers], dtype=np.float64)
        self._sizes = np.array([layer.activation_bytes for layer in layers], dtype=np.float64)
        self._inputs = np.array([layer.input_bytes for layer in layers], dtype=np.float64)
        self._weights = np.array(place.weight_bytes, dtype=np.float64)
        self._total_sizes = _before(self._sizes)
        self._compute = _before(
            np.array([layer.forward_ticks + layer.backward_ticks for layer in layers], dtype=np.float64)
        )
        arriving = np.array(place.arriving_ticks, dtype=np.float64)[cuts]
        returning = np.array(place.returning_ticks, dtype=np.float64)[cuts]
        #: Transfers, by first and last cut; inf where that is no stage.
        self.receive: _Floats = arriving[:, None] + returning[None, :]
        np.copyto(self.receive, np.inf, where=sizes.is_none)
        ends = np.arange(len(cuts)) == len(cuts) - 1
        self.receive[:, ends != is_last] = np.inf
        begins = np.arange(len(cuts)) == 0
        self.receive[begins == place.receives, :] = np.inf
        #: Forward, backward and transfers of each stage; inf where it cannot fit.
        self.times = _between(self._compute[cuts], self._compute[cuts])
        self.times += self.receive
        is_too_large = self._least_bytes(sizes) > place.memory_bytes - place.reserve_bytes
        np.copyto(self.times, np.inf, where=is_too_large)
        swap = 0 if place.host_bytes_per_second is None else place.figures(0, 1).swap_ticks(1)
        every = self._sizes.sum() + self._inputs.sum()
        #: Upper bound of all of them, under any policies.
        self.longest_ticks = float(
            self._compute[-1] + self._forward.sum() + arriving.max() + returning.max() + every * swap
        )

    def _least_bytes(self, sizes: _StageSizes) -> _Floats:
        """Memory of each stage at least, in the first of `scratch`: with as many runs as need least, or without any."""
        place, cuts = self._place, self._cuts
        found, other = sizes.scratch
        np.multiply(sizes.roots, 2 * sqrt(self._excess * self._per_input), out=found)
        if place.receives:
            found -= np.multiply(sizes.least_inputs, self._per_input, out=other)
        np.minimum(np.multiply(sizes.activations, self._num_held - self._excess, out=other), found, out=found)
        fixed, entries = self._weights[cuts], np.zeros(len(cuts))
        if place.receives:
            entries = place.in_flight * np.append(self._inputs, 0.0)[cuts]
        found += fixed[None, :]
        found -= (fixed - entries)[:, None]
        return found

    def no_less_memory(self, first: int) -> _Bools:
        """First cuts, with which stages of the same end need no less memory under the same policies than with `first`.

        They have more layers, and for their own input, which each minibatch in flight keeps, no less than for that of
        `first`.
        """
        inputs = np.append(self._inputs, 0.0)[self._cuts]
        cuts = np.arange(len(self._cuts))
        found: _Bools = (cuts == first) | ((cuts < first) & (inputs >= inputs[first]) & self._place.receives)
        return found

    def within(self, firsts: _Ints, lasts: _Ints, limit: float) -> _Floats:
        """Lower bounds of the times between these cuts; inf where a stage cannot be within `limit`."""
        place, between = self._place, np.ix_(firsts, lasts)
        times = self.times[between]
        times[times > limit] = np.inf
        if not np.isfinite(times).any():
            return times
        starts, ends = self._cuts[firsts], self._cuts[lasts]
        sizes = _between(self._total_sizes[starts], self._total_sizes[ends])
        per_run_byte = self._per_run_byte(
            self._inputs[starts.min() : ends.max()].min(), sizes[np.isfinite(times)].max()
        )
        entries = np.zeros(len(starts))
        if place.receives:
            inputs = self._inputs[starts]
            entries = place.in_flight * (inputs - self._inputs[starts.min() : ends.max()].min())
        room = place.memory_bytes - place.reserve_bytes
        least = np.zeros_like(times)
        for prices in self._prices(per_run_byte):
            before = self._total(prices, per_run_byte) + prices.memory * self._weights + prices.ticks * self._compute
            # One difference of sums is the cost of a stage at these prices, less that of the memory that it may use.
            np.maximum(least, _between(before[starts] - prices.memory * (entries - room), before[ends]), out=least)
        np.maximum(times, least + self.receive[between], out=times)
        times[times > limit + 0.5] = np.inf  # ticks are whole: less is rounding
        return times

    def _per_run_byte(self, least_input: float, largest: float) -> float:
        """Memory per byte of recomputed layers that runs need at least, in stages whose layers keep `largest` bytes.

        Say m runs have X bytes in total and the held layers H, of one minibatch, and all inputs are `least_input`. On
        average over the runs, those behind one have inputs of (m - 1) / 2, so the excess is X / m less these and H at
        least. With a share e of it, inputs and runs need (S - e / 2)·in·m + e·X / m, so at least
        2·√(e·(S - e / 2)·in·X), which is concave in X, and held layers need e less minibatches.
        """
        if not largest:
            return 0.0
        return float(min(self._num_held, 2 * sqrt(self._excess * self._per_input * least_input / largest)))

    def _total(self, prices: Prices, per_run_byte: float) -> _Floats:
        """Least cost of the layers before each position, each under its cheapest policy."""
        place = self._place
        per_byte = prices.memory * (place.in_flight - self._excess)
        if place.host_bytes_per_second is not None:
            per_byte = min(per_byte, prices.swapped + prices.memory * (self._num_held - self._excess))
        held = per_byte * self._sizes
        again = prices.ticks * self._forward + prices.memory * per_run_byte * self._sizes
        return _before(np.minimum(held, again))

    def _prices(self, per_run_byte: float) -> Iterator[Prices]:
        """Prices whose bounds are ticks."""
        place = self._place
        saved = (place.in_flight - self._excess - per_run_byte) * self._sizes
        can = (saved > 0) & (self._forward > 0)
        rates = np.unique(np.quantile(self._forward[can] / saved[can], _QUANTILES)) if can.any() else np.zeros(0)
        per_byte = 0.0 if place.host_bytes_per_second is None else 2 * _TICKS_PER_SECOND / place.host_bytes_per_second
        beside = place.in_flight - self._num_held
        for share in _SHARES if per_byte else _SHARES[:1]:
            swapped = (1 - share) * per_byte
            for memory in {*(share * rates), *([swapped / beside] if beside else [])} - {0.0}:
                yield Prices(share, swapped, float(memory))


@dataclass(frozen=True, slots=True)
class _StageSizes:
    """What all possible stages keep, by first and last cut, on whatever device, in bytes."""

    is_none: _Bools
    """Whether the last cut is not behind the first."""
    activations: _Floats
    """Of all layers, for one minibatch."""
    least_inputs: _Floats
    """The least input of any layer."""
    roots: _Floats
    """Square roots of the products of the two."""
    scratch: tuple[_Floats, _Floats]
    """For what is computed of each place in turn: new memory takes longer than the computation."""


def _stage_sizes(place: StagePlace, cuts: Sequence[int]) -> _StageSizes:
    inputs = np.array([layer.input_bytes for layer in place.layers], dtype=np.float64)
    least = np.zeros((len(cuts), len(cuts)))
    for index, first in enumerate(cuts[:-1]):
        least[index, index + 1 :] = np.minimum.accumulate(inputs[first:])[np.array(cuts[index + 1 :]) - first - 1]
    before = _before(np.array([layer.activation_bytes for layer in place.layers], dtype=np.float64))[list(cuts)]
    activations = np.maximum(_between(before, before), 0.0)
    is_none = np.tri(len(cuts), dtype=np.bool_)
    roots = np.sqrt(least * activations)
    return _StageSizes(is_none, activations, least, roots, (np.empty_like(roots), np.empty_like(roots)))


def _before(values: _Floats) -> _Floats:
    """Sums of the values before each position."""
    return np.concatenate(([0.0], np.cumsum(values)))


def _between(starts: _Floats, ends: _Floats) -> _Floats:
    """Sums between each two positions, of the sums before them."""
    difference: _Floats = ends[None, :] - starts[:, None]
    return difference
