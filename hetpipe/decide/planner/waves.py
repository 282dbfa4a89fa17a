"""How many minibatches per wave? Max_m of the paper (§4), and which N to try.

Memory bounds N from above: no stage needs less memory with a larger N, so one bisection finds the largest that fits.
It is looked for up to `MOST_MINIBATCHES`, as under some policies memory never ends it. N is searched twice:

* which devices form virtual workers is asked by closed form with every N from the least that the policy allows to
  `SEARCHED_PER_STAGE` for each stage of the shortest virtual worker (`choices`): with that many a pipeline is full, and
  more only make the round trip of weights rarer, for all groups alike;
* which N runs is asked for the groups that come of it, in steps of a half: up to Max_m, or to four times an N, at least
  one per stage, with which neither a network card nor the round trip of weights holds the stages back (`Jobs.ladder`).
  The largest that was tried is what a plan calls `searched_minibatches_per_wave`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hetpipe.errors import PlanError
from hetpipe.values.policies import POLICIES, WeightPolicy

#: No search for N goes beyond: some policies keep no more for a larger one, so memory never ends it.
MOST_MINIBATCHES = 1024

#: Groups of devices are compared with at most this many minibatches per stage.
SEARCHED_PER_STAGE = 4


def max_minibatches_per_wave(fits: Callable[[int], bool]) -> int:
    """Max_m: the largest N ≤ `MOST_MINIBATCHES` that fits, 0 if none does.

    Args:
        fits: whether a virtual worker's memory suffices for N; never true again once false.

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
    """The N that all virtual workers can do together, ascending.

    Args:
        largest: Max_m of each virtual worker.
        num_stages: K of each.
        weights: the policy, which may need N ≥ K.
        accumulate: N is a multiple of it.

    >>> choices([5, 9], [2, 3], "wave"), choices([5, 9], [2, 3], "stash"), choices([8, 9], [2, 3], "stash", 2)
    (range(1, 6), range(3, 6), range(4, 9, 2))
    """
    least = max(POLICIES[weights].least_minibatches_per_wave(stages) for stages in num_stages)
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
    least = max(POLICIES[weights].least_minibatches_per_wave(stages) for stages in num_stages)
    if minibatches_per_wave < least:
        raise PlanError(
            f"the weight policy {weights} with {max(num_stages)} stages needs at least {least} minibatches per wave, "
            f"not {minibatches_per_wave}; raise it, or let a virtual worker have fewer stages"
        )
