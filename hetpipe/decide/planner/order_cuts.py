"""The best cuts for one order of devices. Fast enough to try thousands of orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetpipe.decide.planner.stage_reach import Reach


@dataclass(frozen=True, slots=True)
class OrderCuts:
    """Where an order of devices is cut, and its largest stage time."""

    ticks: int
    cuts: tuple[int, ...]
    """The last cut of every stage."""


def least_cuts(reaches: Sequence[Reach], num_layers: int, lower: int, upper: int) -> OrderCuts | None:
    """The cuts with the smallest largest stage time, if it is at most `upper`.

    Args:
        reaches: of the stages in order.
        num_layers: of the model.
        lower: no plan at all is faster.
        upper: slower plans are of no interest.
    """
    reaches = [reach.under(upper) for reach in reaches]
    if not might_pass(reaches, num_layers, upper):
        return None
    least, cuts = _bisect(reaches, num_layers, lower, upper)
    return None if cuts is None else OrderCuts(least, cuts)


def might_pass(reaches: Sequence[Reach], num_layers: int, bound: int) -> bool:
    """False proves that no cuts keep every stage within `bound`; stages may begin before the previous one ends."""
    cut = 0
    for stage, reach in enumerate(reaches):
        cut = reach.furthest(cut, bound)
        if cut <= stage:
            return False
    return cut >= num_layers


def cuts_within(reaches: Sequence[Reach], num_layers: int, bound: int) -> tuple[int, ...] | None:
    """Cuts that keep every stage within `bound` ticks, the latest ones that do; None if there are none. Exact."""
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
    """The cuts, from the last back to the first, through the sets of cuts that were reached after each stage."""
    cuts = [sets[-1].bit_length() - 1]
    for reach, firsts in zip(reversed(reaches[1:]), reversed(sets[1:-1]), strict=True):
        cuts.append(latest_start(reach, firsts, cuts[-1], bound))
    return tuple(reversed(cuts))


def latest_start(reach: Reach, firsts: int, last: int, bound: int) -> int:
    """The latest of `firsts` from which a stage reaches `last` within `bound`; one of them does."""
    wanted = 1 << last
    while True:
        first = firsts.bit_length() - 1
        if reach.image(1 << first, bound, wanted):
            return first
        firsts ^= 1 << first


def _bisect(reaches: Sequence[Reach], num_layers: int, lower: int, upper: int) -> tuple[int, tuple[int, ...] | None]:
    """The least bound in lower … upper with cuts, and these; (upper, None) if there is none."""
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
