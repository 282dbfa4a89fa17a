"""How many minibatches per wave? Max_m of the paper (§4), and which N to try.

Memory bounds N from above: no stage needs less memory with a larger N, so one bisection finds the largest that fits.
The search stops at 4K: beyond that no pipeline gets faster, and weights only get staler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hetpipe.errors import PlanError
from hetpipe.spec.policies import WeightPolicy, least_minibatches_per_wave

#: No search for N goes beyond: some policies keep no more for a larger one, so memory never ends it.
MOST_MINIBATCHES = 1024

#: The search stops at this many minibatches per stage.
SEARCHED_PER_STAGE = 4


def max_minibatches_per_wave(fits: Callable[[int], bool], num_stages: int) -> int:
    """Max_m: the largest N ≤ 4K that fits, 0 if none does.

    Args:
        fits: whether a virtual worker's memory suffices for N; never true again once false.
        num_stages: K.

    >>> max_minibatches_per_wave(lambda n: n <= 5, 2), max_minibatches_per_wave(lambda n: n <= 50, 2)
    (5, 8)
    """
    low, high = 0, SEARCHED_PER_STAGE * num_stages
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def choices(largest: Sequence[int], num_stages: Sequence[int], weights: WeightPolicy, accumulate: int = 1) -> range:
    """The N that all virtual workers can do together, ascending.

    Args:
        largest: Max_m of each virtual worker.
        num_stages: K of each.
        weights: the policy, which may need N ≥ K.
        accumulate: N is a multiple of it.

    >>> choices([5, 9], [2, 3], "wave"), choices([5, 9], [2, 3], "stash"), choices([8, 9], [2, 3], "stash", 2)
    (range(1, 6), range(3, 6), range(4, 9, 2))
    """
    least = max(least_minibatches_per_wave(weights, stages) for stages in num_stages)
    return range(-(-least // accumulate) * accumulate, min(largest) + 1, accumulate)


def check_given(
    minibatches_per_wave: int, num_stages: Sequence[int], weights: WeightPolicy, accumulate: int = 1
) -> None:
    """Refuse an N that the policy is not defined for, or into which updates do not fit as a whole.

    Raises:
        PlanError: with what N can be.
    """
    if minibatches_per_wave % accumulate:
        raise PlanError(
            f"{accumulate} minibatches make an update together, so {minibatches_per_wave} minibatches per wave do not "
            f"go; take a multiple of {accumulate}"
        )
    least = max(least_minibatches_per_wave(weights, stages) for stages in num_stages)
    if minibatches_per_wave < least:
        raise PlanError(
            f"the weight policy {weights} with {max(num_stages)} stages needs at least {least} minibatches per wave, "
            f"not {minibatches_per_wave}; raise it, or let a virtual worker have fewer stages"
        )
