"""The formulas of `wsp.md` §2, §3 and §5, written a second time on purpose.

They judge the ones in `hetpipe.sync`, so they share no code with them. p counts from 1; `floor` is the clock of the
latest barrier c with p > cN: behind it, no minibatch may start with an older clock or own older updates apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class WeightRule(StrEnum):
    """The weight policies whose versions the checker knows (`policies.md`)."""

    WAVE = "wave"
    FLUSH = "flush"
    DOUBLE_BUFFER = "double_buffer"


@dataclass(frozen=True, slots=True)
class Rule:
    """What a run promised about its clocks."""

    minibatches_per_wave: int
    """N ≥ 1."""
    staleness: int | None
    """D ≥ 0, or None for D = ∞."""
    weights: WeightRule = WeightRule.WAVE
    deterministic: bool = False

    @property
    def bound_clock_distance(self) -> int | None:
        """D + 1, the largest legal c_v - c_g; None where there is no bound."""
        return None if self.staleness is None else self.staleness + 1


def wave_of(rule: Rule, p: int) -> int:
    """The wave c with p in [cN + 1, (c + 1)N].

    >>> [wave_of(Rule(4, 0), p) for p in (1, 4, 5)]
    [0, 0, 1]
    """
    return (p - 1) // rule.minibatches_per_wave


def required_clock(rule: Rule, p: int, floor: int) -> int:
    """The lowest published clock with which minibatch p may start.

    >>> [required_clock(Rule(4, 0), p, 0) for p in (7, 8, 11, 12)]
    [0, 1, 1, 2]
    >>> [required_clock(Rule(5, 4), p, 0) for p in (29, 30)]
    [0, 1]
    """
    if rule.staleness is None:
        return floor
    if rule.weights is WeightRule.WAVE:
        waves_due = -(-(p + 1) // rule.minibatches_per_wave) - 2
    elif rule.weights is WeightRule.FLUSH:
        waves_due = wave_of(rule, p)
    else:
        waves_due = wave_of(rule, p) - 1
    return max(floor, waves_due - rule.staleness)


def local_through(rule: Rule, p: int, floor: int) -> int:
    """v(p): the last own minibatch whose update is in the weights of p.

    >>> [local_through(Rule(4, 0), p, 0) for p in (3, 4, 5, 9)]
    [0, 0, 1, 5]
    >>> local_through(Rule(4, 0), 9, 2)
    8
    """
    if rule.weights is WeightRule.WAVE:
        through = p - rule.minibatches_per_wave
    elif rule.weights is WeightRule.FLUSH:
        through = wave_of(rule, p) * rule.minibatches_per_wave
    else:
        through = (wave_of(rule, p) - 1) * rule.minibatches_per_wave
    return max(through, floor * rule.minibatches_per_wave)


def is_switch_point(rule: Rule, p: int, floor: int) -> bool:
    """True where the published clock in use may change: p = N, 2N, … (wave starts for the others) and behind a barrier.

    >>> [p for p in range(1, 10) if is_switch_point(Rule(4, 0), p, 0)]
    [1, 4, 8]
    """
    num = rule.minibatches_per_wave
    if p == floor * num + 1:
        return True
    return p % num == 0 if rule.weights is WeightRule.WAVE else (p - 1) % num == 0


def minibatches_in(samples: int, batch_size: int) -> int:
    """How many minibatches `samples` samples make: all full but the last.

    >>> [minibatches_in(samples, 8) for samples in (0, 3, 8, 9)]
    [0, 1, 1, 2]
    """
    return -(-samples // batch_size)
