"""Choice of one pipeline per virtual worker where a network card is the bottleneck.

A pipeline that is slower by itself but sends less may be better for the job. For each virtual worker, pipelines are
dropped if another one is at least as good in rate, largest stage time and bytes on every node. Up to `COMBINED`
combinations of the remaining ones are searched exactly, by branch and bound; more by changing one virtual worker at a
time until no change helps. The latter is not worthwhile beyond `IMPROVED` pipelines in total.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hetpipe.decide.planner.costs import TICKS_PER_MS
from hetpipe.decide.planner.job_rate import CardSide
from hetpipe.decide.planner.pipelines import Pipeline

#: Limit on combinations for the exact search.
COMBINED = 20_000

#: Limit on pipelines, over all virtual workers, for the search one virtual worker at a time.
IMPROVED = 5_000

_TICKS_PER_SECOND = 1000 * TICKS_PER_MS
_SAME = 1e-12


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One pipeline of one virtual worker, reduced to its relevant figures."""

    position: int
    """Its index among the given pipelines."""
    minibatches_per_second: float
    bottleneck_ticks: int
    moved: tuple[int, ...]
    """Bytes per wave, for each direction of each network card."""


class Combinations:
    """Searches the product of all virtual workers' pipelines for one N, maximising a key."""

    def __init__(
        self,
        pipelines: Sequence[Sequence[Pipeline]],
        *,
        minibatches_per_wave: int,
        network_cards: Mapping[str, float],
        bytes_moved: Callable[[Pipeline], Mapping[CardSide, int]],
    ) -> None:
        """Prepare the search.

        Args:
            pipelines: candidates for each virtual worker.
            minibatches_per_wave: N.
            network_cards: node → bytes per second in each direction.
            bytes_moved: pipeline → bytes per wave that it causes to leave and enter each node.
        """
        sides: list[CardSide] = [side for node in sorted(network_cards) for side in ((node, "in"), (node, "out"))]
        self._cards = [network_cards[node] for node, _ in sides]
        self._minibatches = len(pipelines) * minibatches_per_wave
        self._pipelines = pipelines
        self._candidates = []
        for own in pipelines:
            candidates = []
            for position, pipeline in enumerate(own):
                moved = bytes_moved(pipeline)
                candidates.append(
                    _Candidate(
                        position,
                        pipeline.minibatches_per_tick * _TICKS_PER_SECOND,
                        pipeline.bottleneck_ticks,
                        tuple(moved.get(side, 0) for side in sides),
                    )
                )
            self._candidates.append(_undominated(candidates))

    def best(self) -> tuple[Pipeline, ...]:
        """The best combination found: one pipeline for each virtual worker."""
        if math.prod(len(own) for own in self._candidates) <= COMBINED:
            chosen = self._by_branch_and_bound()
        else:
            chosen = self._one_at_a_time()
        return tuple(own[one.position] for own, one in zip(self._pipelines, chosen, strict=True))

    def _key(self, slowest: float, bottleneck_ticks: int, moved: Sequence[int]) -> tuple[float, int]:
        rate = len(self._candidates) * slowest
        for card, num_bytes in zip(self._cards, moved, strict=True):
            if num_bytes:
                rate = min(rate, card * self._minibatches / num_bytes)
        return rate, -bottleneck_ticks

    def _key_of(self, chosen: Sequence[_Candidate]) -> tuple[float, int]:
        return self._key(
            min(one.minibatches_per_second for one in chosen),
            max(one.bottleneck_ticks for one in chosen),
            [sum(column) for column in zip(*(one.moved for one in chosen), strict=True)],
        )

    def _by_branch_and_bound(self) -> list[_Candidate]:
        num_workers, num_sides = len(self._candidates), len(self._cards)
        #: Lower bounds on the bytes, and upper bounds on the rates, of the virtual workers from each index on.
        least = [[0] * num_sides]
        fastest, shortest = [math.inf], [0]
        for own in reversed(self._candidates):
            least.append([rest + min(one.moved[side] for one in own) for side, rest in enumerate(least[-1])])
            fastest.append(min(fastest[-1], max(one.minibatches_per_second for one in own)))
            shortest.append(max(shortest[-1], min(one.bottleneck_ticks for one in own)))
        best = [own[0] for own in self._candidates]
        best_key = self._key_of(best)

        def extend(chosen: list[_Candidate], slowest: float, bottleneck_ticks: int, moved: list[int]) -> None:
            nonlocal best, best_key
            left = num_workers - len(chosen)
            hope = self._key(
                min(slowest, fastest[left]),
                max(bottleneck_ticks, shortest[left]),
                [before + rest for before, rest in zip(moved, least[left], strict=True)],
            )
            if not _better(hope, best_key):
                return
            if not left:
                best, best_key = chosen, hope
                return
            for one in self._candidates[len(chosen)]:
                extend(
                    [*chosen, one],
                    min(slowest, one.minibatches_per_second),
                    max(bottleneck_ticks, one.bottleneck_ticks),
                    [before + more for before, more in zip(moved, one.moved, strict=True)],
                )

        extend([], math.inf, 0, [0] * num_sides)
        return best

    def _one_at_a_time(self) -> list[_Candidate]:
        best = [own[0] for own in self._candidates]
        best_key = self._key_of(best)
        gained = True
        while gained:
            gained = False
            for worker, own in enumerate(self._candidates):
                for one in own:
                    changed = [*best[:worker], one, *best[worker + 1 :]]
                    key = self._key_of(changed)
                    if _better(key, best_key):
                        best, best_key, gained = changed, key, True
        return best


def _better(one: tuple[float, int], other: tuple[float, int]) -> bool:
    """Lexicographic comparison in which rates that differ only by rounding are equal."""
    if abs(one[0] - other[0]) > _SAME * max(one[0], other[0]):
        return one[0] > other[0]
    return one[1] > other[1]


def _undominated(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Candidates that no other one equals or beats in every figure; of equals the first."""
    kept: list[_Candidate] = []
    order = sorted(candidates, key=lambda one: (-one.minibatches_per_second, one.bottleneck_ticks, sum(one.moved)))
    for one in order:
        dominated = any(
            other.bottleneck_ticks <= one.bottleneck_ticks
            and all(here <= there for here, there in zip(other.moved, one.moved, strict=True))
            for other in kept
        )
        if not dominated:
            kept.append(one)
    return kept
