"""The number of minibatches per wave: Max_m of the paper (§4), and the values of N to try.

Memory bounds N from above: no stage needs less memory with a larger N, so one bisection finds the largest that fits,
up to `MOST_MINIBATCHES`, because under some policies memory sets no limit. N is searched twice:

* to choose groups of devices, by closed form, with every N from the policy's minimum to `SEARCHED_PER_STAGE` per stage
  of the shortest virtual worker (`choices`): with that many a pipeline is full, and more only reduce the frequency of
  the round trip of weights, equally for all groups;
* to choose N for the resulting groups, in steps of one half: up to Max_m, or to four times an N, at least one per
  stage, with which neither a network card nor the round trip of weights is the bottleneck (`Jobs.ladder`). The largest
  value tried is the plan's `searched_minibatches_per_wave`.

With `proportional` every N so chosen becomes N of the slowest virtual worker, and the others get N_v in proportion to
their rates (`in_proportion`, `wsp.md` §10).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hetpipe.errors import PlanError
from hetpipe.values.policies import POLICIES, WeightPolicy

#: Upper limit on N: under some policies memory does not depend on N.
MOST_MINIBATCHES = 1024

#: Maximum number of minibatches per stage in comparisons of device groups.
SEARCHED_PER_STAGE = 4


def max_minibatches_per_wave(fits: Callable[[int], bool]) -> int:
    """Max_m: the largest N ≤ `MOST_MINIBATCHES` that fits, 0 if none does.

    Args:
        fits: whether N fits in a virtual worker's memory; monotonic: false for all N above one that does not fit.

    >>> max_minibatches_per_wave(lambda n: n <= 5), max_minibatches_per_wave(lambda n: True)
    (5, 1024)
    """
    low, high = 0, MOST_MINIBATCHES
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def choices(largest: Sequence[int], num_stages: Sequence[int], weights: WeightPolicy, accumulate: int = 1) -> range:
    """The values of N that all virtual workers support, ascending.

    Args:
        largest: Max_m of each virtual worker.
        num_stages: K of each virtual worker.
        weights: the policy, which may require N ≥ K.
        accumulate: minibatches per update; N is a multiple of it.

    >>> choices([5, 9], [2, 3], "wave"), choices([5, 9], [2, 3], "stash"), choices([8, 9], [2, 3], "stash", 2)
    (range(1, 6), range(3, 6), range(4, 9, 2))
    """
    least = max(POLICIES[weights].least_minibatches_per_wave(stages) for stages in num_stages)
    return range(-(-least // accumulate) * accumulate, min(largest) + 1, accumulate)


def in_proportion(
    minibatches_per_wave: int, rates: Sequence[float], least: Sequence[int], largest: Sequence[int], accumulate: int = 1
) -> tuple[int, ...]:
    """N_v of each virtual worker, so that waves take as long as N minibatches of the slowest one, up to rounding.

    Args:
        minibatches_per_wave: N, a multiple of `accumulate`.
        rates: minibatches per unit of time of each virtual worker, above 0.
        least: smallest N_v that the policy supports.
        largest: Max_m of each virtual worker, at least `least`.
        accumulate: minibatches per update; N_v is a multiple of it.

    >>> in_proportion(4, [3.0, 1.9, 1.0], [1, 1, 1], [10, 99, 99]), in_proportion(4, [1.6, 1.0], [1, 1], [99, 99], 4)
    ((10, 8, 4), (8, 4))
    """
    slowest = min(rates)
    ideal = (minibatches_per_wave * rate / slowest for rate in rates)
    return tuple(
        min(max(round(wanted / accumulate), -(-low // accumulate)), high // accumulate) * accumulate
        for wanted, low, high in zip(ideal, least, largest, strict=True)
    )


def check_given(
    minibatches_per_wave: int, num_stages: Sequence[int], weights: WeightPolicy, accumulate: int = 1
) -> None:
    """Check that the policy supports N, and that waves consist of whole updates.

    Raises:
        PlanError: states the valid values of N.
    """
    if minibatches_per_wave % accumulate:
        raise PlanError(
            f"an update takes {accumulate} minibatches, so a wave cannot have {minibatches_per_wave}; take a multiple "
            f"of {accumulate}"
        )
    least = max(POLICIES[weights].least_minibatches_per_wave(stages) for stages in num_stages)
    if minibatches_per_wave < least:
        raise PlanError(
            f"the weight policy {weights} with {max(num_stages)} stages needs at least {least} minibatches per wave, "
            f"not {minibatches_per_wave}; raise it, or give virtual workers fewer stages"
        )
