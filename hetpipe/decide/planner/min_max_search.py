"""The search for the order and the cuts with the smallest largest stage time: guess well, then prove.

Good plans come cheaply: from sweeps (`min_max_sweep`) that keep few states, and from trying the neighbours of the best
order so far. The exact sweeps then mostly prove that one tick less is impossible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, permutations

from hetpipe.decide.planner.costs import MemoryModel
from hetpipe.decide.planner.device_mix import DeviceMix, Seat
from hetpipe.decide.planner.min_max_sweep import Sweeper
from hetpipe.decide.planner.order_cuts import cuts_within, least_cuts, might_pass
from hetpipe.decide.planner.reach_tables import ReachTables

#: A sweep of so many fronts per stage nearly always finds a plan that is close to the best.
_FIRST_WIDTH = 32

#: With a width, the bisection ends when its range is the best plan's bottleneck shifted right by so many bits.
_BEAM_PRECISION = 9


@dataclass(frozen=True, slots=True)
class Found:
    """An order of devices with its best cuts."""

    seats: tuple[Seat, ...]
    ticks: int
    """No stage takes longer; in a plan that `solve` found, one takes as long."""
    cuts: tuple[int, ...]
    """The last cut of every stage."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The result of a search."""

    found: Found | None
    """None if there is no plan, or none was found with a width."""
    lower_bound_ticks: int
    """No plan is faster."""


class MinMaxSearch:
    """The search over one mix of devices with one memory model."""

    def __init__(self, mix: DeviceMix, tables: ReachTables, memory: MemoryModel, num_layers: int) -> None:
        """Prepare. `num_layers` is at least the number of devices."""
        self._num_layers = num_layers
        self._sweeper = Sweeper(mix, tables, memory, num_layers)
        self._bound = self._sweeper.bound
        #: No stage takes longer.
        self._longest = tables.longest_ticks(mix.shape.kinds, frozenset().union(*sum(mix.shape.links, ())))
        #: The bottleneck if work could be divided at will and transfers cost nothing.
        self._guess = tables.balanced_ticks(dict(zip(mix.shape.kinds, mix.counts, strict=True)))

    def solve(self, width: int | None, fits: Callable[[], bool]) -> Optimum:
        """The best plan; exact if `width` is None.

        Args:
            width: the fronts that a sweep keeps per stage, or None for all.
            fits: whether there is any plan at all; asked only where none turns up soon.
        """
        if not self._bound.feasible(self._longest):
            return Optimum(None, self._longest)
        lower = self._least_bound()
        best = self._first_plan(lower, width, fits)
        if best is None:
            return Optimum(None, lower)
        return self._refine(self._improve(best, lower), lower, width)

    def _refine(self, best: Found, lower: int, width: int | None) -> Optimum:
        """Prove that nothing is faster, or find what is: bisection between `lower` and the best plan so far.

        Mostly the best plan is already the optimum, so the first question is for one tick less. Where fronts were
        dropped, a sweep without a plan is no proof: the bisection goes on above it, but `lower` stays.
        """
        floor, halve = lower, False
        while floor < best.ticks:
            target = (floor + best.ticks) // 2 if halve else best.ticks - 1
            swept = self._sweeper.sweep(target, width)
            if swept.seats is not None:
                best = self._improve(self._with_cuts(swept.seats, lower, target), lower)
                halve = True
            elif swept.complete:
                floor = lower = target + 1
                halve = False
            elif halve:
                floor = target + 1
            else:
                halve = True
            if width is not None and halve and best.ticks - floor < best.ticks >> _BEAM_PRECISION:
                break
        return Optimum(best, lower)

    def any_plan(self, width: int | None) -> Found | None:
        """Some plan that memory allows, if there is any, without a look at its speed. Arguments as `solve`."""
        if not self._bound.feasible(self._longest):
            return None
        swept = self._sweeper.sweep(self._longest, _FIRST_WIDTH)
        if swept.seats is None and not swept.complete:
            swept = self._sweeper.sweep(self._longest, width)
        if swept.seats is None:
            return None
        cuts = cuts_within(self._sweeper.order(swept.seats), self._num_layers, self._longest)
        assert cuts is not None, "a sweep found cuts for this order"
        return Found(swept.seats, self._longest, cuts)

    def _least_bound(self) -> int:
        """A bound below which no plan exists, to one part in a thousand: gallop from a guess, then bisection."""
        low, high = 0, self._longest
        middle = min(high, self._guess)
        step = (middle >> 4) + 1
        while high - low > high >> 10:
            if self._bound.feasible(middle):
                high = middle
            else:
                low = middle + 1
            step *= 2
            if low == 0:
                middle = max(middle - step, 0)
            elif high == self._longest:
                middle = min(middle + step, (low + high) // 2)
            else:
                middle = (low + high) // 2
        return low

    def _first_plan(self, lower: int, width: int | None, fits: Callable[[], bool]) -> Found | None:
        """Any good plan: by sweeps of small width with growing bounds, then by one of full width."""
        bound, step = lower + (lower >> 7), (lower >> 6) + 1
        doubted = False
        while bound < self._longest:
            seats = self._sweeper.sweep(bound, _FIRST_WIDTH).seats
            if seats is not None:
                return self._with_cuts(seats, lower, bound)
            bound += step
            step *= 3
            if bound > 2 * lower and not doubted:
                doubted = True
                if not fits():
                    return None
        some = self.any_plan(width)
        return None if some is None else self._with_cuts(some.seats, lower, self._longest)

    def _with_cuts(self, seats: tuple[Seat, ...], lower: int, upper: int) -> Found:
        cuts = least_cuts(self._sweeper.order(seats), self._num_layers, lower, upper)
        assert cuts is not None, "a sweep found cuts for this order"
        return Found(seats, cuts.ticks, cuts.cuts)

    def _improve(self, best: Found, lower: int) -> Found:
        """Climb: exchange two devices, or move one, until no such change makes the plan faster."""
        pairs = list(permutations(range(len(best.seats)), 2))
        changes = [(_exchanged, i, j) for i, j in pairs if i < j] + [(_moved, i, j) for i, j in pairs if abs(i - j) > 1]
        num_failed = 0
        for change, i, j in cycle(changes):
            if num_failed == len(changes) or best.ticks <= lower:
                break
            num_failed += 1
            seats = change(best.seats, i, j)
            if seats != best.seats:
                order = self._sweeper.order(seats)
                if might_pass(order, self._num_layers, best.ticks - 1):
                    cuts = least_cuts(order, self._num_layers, lower, best.ticks - 1)
                    if cuts is not None:
                        best = Found(seats, cuts.ticks, cuts.cuts)
                        num_failed = 0
        return best


def _exchanged(seats: tuple[Seat, ...], i: int, j: int) -> tuple[Seat, ...]:
    changed = list(seats)
    changed[i], changed[j] = seats[j], seats[i]
    return tuple(changed)


def _moved(seats: tuple[Seat, ...], i: int, j: int) -> tuple[Seat, ...]:
    without = seats[:i] + seats[i + 1 :]
    return (*without[:j], seats[i], *without[j:])
