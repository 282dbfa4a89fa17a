"""Upper bound on the job rate of any allocation: devices are few, and layers and virtual workers are whole.

All virtual workers are as fast as the slowest one, so at a job rate V / T no stage takes longer than T, and each device
has one stage. Let a chain of such stages, which covers the model, cost π_k ≥ 0 per device of type k, and the cheapest
one c(π). V virtual workers have devices worth V · c(π) at least, of a cluster worth Σ n_k π_k, so

    V ≤ Σ n_k π_k / c(π), rounded down, for any prices π.

The best prices are the dual solution of a linear programme, the fractional packing of chains into the cluster, solved
by the simplex method with column generation (Gilmore and Gomory, 1961): the chain that enters the basis is the cheapest
one at the current prices. It is found by dynamic programming over cuts, in which only the longest stage of each type
that begins at a cut counts: what is left after it is part of what is left after a shorter one.

T is a whole number of ticks. No stage becomes too long when it grows, so with T from a to b the rate is at most
V(b) / a. The range with the highest such figure is halved until it is at most a thousandth above a V(T) / T.

Transfers, memory and the round trip of weights are neglected. It is no bound where virtual workers differ in rate in
the long run: without a bound on staleness, and with waves in proportion.
"""

from __future__ import annotations

import heapq
import math
import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from hetpipe.decide.planner.costs import Costs
from hetpipe.decide.planner.job_rate import samples_per_second
from hetpipe.decide.planner.jobs import Jobs

#: Factor between the bound and the best of those it consists of, at most.
_CLOSE = 1.001

#: Relative difference from the best prices at which the search for them ends, and its most steps: all prices bound.
_PRICED, _MOST_STEPS = 1e-6, 500

#: What counts as 0, and the largest error of a number of virtual workers.
_ZERO, _ERROR = 1e-12, 1e-6


def upper_bound(jobs: Jobs) -> float:
    """Upper bound on the samples per second of any allocation of these devices; infinite if stages may take no time."""
    costs, available = jobs.costs, Counter(jobs.devices.values())
    kinds = sorted(available)
    counts = [available[kind] for kind in kinds]
    cuts = (0, *costs.allowed, costs.num_layers)
    shortest = max(min(costs.compute_ticks(kind, cuts[i], cuts[i + 1]) for kind in kinds) for i in range(len(cuts) - 1))
    if not shortest:
        return math.inf
    reached, ranges = 0.0, list[tuple[float, int, int]]()

    def add(least: int, most: int) -> None:
        nonlocal reached
        num_workers = math.floor(most_workers(costs, kinds, counts, most) + _ERROR)
        reached = max(reached, num_workers / most)
        heapq.heappush(ranges, (-num_workers / least, least, most))

    add(shortest, max(costs.compute[kind][-1] for kind in kinds))
    while -ranges[0][0] > _CLOSE * reached:
        _, least, most = heapq.heappop(ranges)
        middle = math.isqrt(least * most)
        add(least, middle)
        add(middle + 1, most)
    return samples_per_second(-ranges[0][0], costs.profile.batch_size)


def most_workers(costs: Costs, kinds: Sequence[str], counts: Sequence[int], longest_ticks: int) -> float:
    """Upper bound on the number of virtual workers without a longer stage: the optimum of the linear programme.

    Args:
        costs: the profile on the cluster.
        kinds: types of the devices.
        counts: number of devices of each type.
        longest_ticks: T, at least one tick.
    """
    chains, num_kinds = _Chains(costs, kinds, longest_ticks), range(len(kinds))
    # The basis, at first of slack variables: its inverse, the value of each variable, and the workers that it is.
    inverse = [[float(row == column) for column in num_kinds] for row in num_kinds]
    values, profits = [float(count) for count in counts], [0.0 for _ in kinds]
    bound = math.inf
    for _ in range(_MOST_STEPS):
        prices = [sum(profits[row] * inverse[row][column] for row in num_kinds) for column in num_kinds]
        lowest = min(num_kinds, key=prices.__getitem__)
        if prices[lowest] < -_ZERO:  # its slack enters: some devices of this type stay idle
            profit, entering = 0.0, [inverse[row][lowest] for row in num_kinds]
        else:
            prices = [max(price, 0.0) for price in prices]
            found = chains.cheapest(prices)
            if found is None:
                return 0.0
            price, used = found
            if price:
                bound = min(bound, sum(map(operator.mul, prices, counts)) / price)
            if sum(map(operator.mul, profits, values)) >= bound * (1 - _PRICED):
                break
            profit = 1.0
            entering = [sum(inverse[row][column] * used[column] for column in num_kinds) for row in num_kinds]
        leaving = min((row for row in num_kinds if entering[row] > _ZERO), key=lambda row: values[row] / entering[row])
        pivot = [value / entering[leaving] for value in inverse[leaving]]
        amount = values[leaving] / entering[leaving]
        for row in num_kinds:
            inverse[row] = [value - entering[row] * at for value, at in zip(inverse[row], pivot, strict=True)]
            values[row] -= entering[row] * amount
        inverse[leaving], values[leaving], profits[leaving] = pivot, amount, profit
    return bound


class _Chains:
    """Chains of stages of at most T that cover the model."""

    def __init__(self, costs: Costs, kinds: Sequence[str], longest_ticks: int) -> None:
        cuts = (0, *costs.allowed, costs.num_layers)
        #: Index of a cut → that of the end of the longest stage which begins there, for each type.
        self._ends = []
        for kind in kinds:
            before = [costs.compute[kind][cut] for cut in cuts]
            self._ends.append([bisect_right(before, ticks + longest_ticks) - 1 for ticks in before])

    def cheapest(self, prices: Sequence[float]) -> tuple[float, list[int]] | None:
        """Price of the cheapest chain, and its number of devices of each type; None if there is none."""
        last = len(self._ends[0]) - 1
        rest, chosen = [math.inf] * last + [0.0], [0] * last
        for cut in range(last - 1, -1, -1):
            for kind, (price, ends) in enumerate(zip(prices, self._ends, strict=True)):
                end = ends[cut]
                if end > cut and price + rest[end] < rest[cut]:
                    rest[cut], chosen[cut] = price + rest[end], kind
        if rest[0] == math.inf:
            return None
        used, cut = [0] * len(prices), 0
        while cut < last:
            used[chosen[cut]] += 1
            cut = self._ends[chosen[cut]][cut]
        return rest[0], used
