"""The formulas of `wsp.md` §2, §3, §5 and the table of `policies.md`, duplicated on purpose.

They verify the ones in `hetpipe.decide.sync` and `hetpipe.decide.schedule`, so they share no code with them. p is
1-based; `floor` is the clock of the latest barrier c with p > cN: after it, no minibatch may start with an older clock
or with own older updates still separate. Where N has changed at a barrier, cN is origin + (c − start)·N of the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from hetpipe.checker.rules import OrderRule, RunRule, StagePosition, WeightRule


def wave_of(rule: RunRule, p: int) -> int:
    """The wave c with p in [cN + 1, (c + 1)N].

    >>> [wave_of(RunRule(4, 0), p) for p in (1, 4, 5)]
    [0, 0, 1]
    >>> [wave_of(RunRule(2, 0, start=3, origin=12), p) for p in (13, 14, 15)]
    [3, 3, 4]
    """
    return rule.start + (p - rule.origin - 1) // rule.minibatches_per_wave


def required_clock(rule: RunRule, p: int, floor: int) -> int:
    """Lowest published clock with which minibatch p may start.

    >>> [required_clock(RunRule(4, 0), p, 0) for p in (7, 8, 11, 12)]
    [0, 1, 1, 2]
    >>> [required_clock(RunRule(5, 4), p, 0) for p in (29, 30)]
    [0, 1]
    """
    if rule.staleness is None:
        return floor
    return max(floor, _waves_due(rule, p) - rule.staleness)


def determined_clock(rule: RunRule, p: int, floor: int) -> int:
    """The clock with which minibatch p starts where p alone determines it.

    It is the required clock, except when weights are pulled only when required: then the clock of the latest pull,
    which fetches the newest clock that p may use and is too old D + 1 waves later.

    >>> [determined_clock(RunRule(4, 1, pulls_when_required=True), p, 0) for p in (11, 12, 16, 20)]
    [0, 2, 2, 4]
    """
    if not rule.pulls_when_required or rule.staleness is None:
        return required_clock(rule, p, floor)
    missing = required_clock(rule, p, floor) - floor
    num_pulls = -(-missing // (rule.staleness + 1))
    return floor + num_pulls * (rule.staleness + 1)


def needs_pull(rule: RunRule, p: int, floor: int, in_use: int) -> bool:
    """Whether the clock may change from `in_use` at p, a switch point after the barrier `floor`.

    >>> [needs_pull(RunRule(4, 1, pulls_when_required=True), 12, 0, clock) for clock in (0, 1)]
    [True, False]
    """
    return not rule.pulls_when_required or in_use < required_clock(rule, p, floor)


def forward_through(rule: RunRule, p: int, floor: int, place: StagePosition) -> int:
    """v_i(p): the last own minibatch whose update is in the weights of the forward of p; always ends an update.

    >>> [forward_through(RunRule(4, 0), p, 0, StagePosition()) for p in (3, 4, 5, 9)]
    [0, 0, 1, 5]
    >>> forward_through(RunRule(4, 0), 9, 2, StagePosition())
    8
    >>> [forward_through(RunRule(4, 0, WeightRule.STASH), 9, 0, StagePosition(stage, 3)) for stage in range(3)]
    [6, 7, 8]
    >>> rule = RunRule(4, 0, WeightRule.VERTICAL, accumulate=2)
    >>> [forward_through(rule, 10, 0, StagePosition(stage, 3)) for stage in range(3)]
    [6, 6, 6]
    """
    match rule.weights:
        case WeightRule.WAVE:
            newest = p - rule.minibatches_per_wave
        case WeightRule.FLUSH:
            newest = rule.through(wave_of(rule, p))
        case WeightRule.DOUBLE_BUFFER:
            newest = rule.through(wave_of(rule, p) - 1)
        case WeightRule.VERTICAL:
            newest = p - place.num_stages
        case WeightRule.STASH | WeightRule.PREDICT | WeightRule.SPECTRAIN:
            newest = p - place.from_end
    return _updated(rule, newest, floor)


def backward_through(rule: RunRule, p: int, floor: int, place: StagePosition) -> int:
    """The same for the weights read by the backward of p: all updates before p where the policy predicts.

    >>> [backward_through(RunRule(4, 0, WeightRule.PREDICT), 9, 0, StagePosition(stage, 3)) for stage in range(3)]
    [8, 8, 8]
    """
    return _updated(rule, p - 1, floor) if rule.predicts else forward_through(rule, p, floor, place)


def ends_update(rule: RunRule, p: int) -> bool:
    """Whether an update follows the backward of p; also true for the last minibatch before a barrier.

    >>> [p for p in range(1, 9) if ends_update(RunRule(4, 0, accumulate=2), p)]
    [2, 4, 6, 8]
    """
    return (p - rule.origin) % rule.minibatches_per_update == 0


def forward_is_newest(rule: RunRule) -> bool:
    """Whether a forward sees every update its stage has made, due to strict order or a drain."""
    return rule.predicts or rule.weights in (WeightRule.STASH, WeightRule.FLUSH)


def most_in_flight(rule: RunRule, place: StagePosition) -> int | None:
    """S_i: maximum number of minibatches between forward and backward at a stage; None if unbounded.

    >>> [most_in_flight(RunRule(2, 0, WeightRule.FLUSH), StagePosition(stage, 3)) for stage in range(3)]
    [2, 2, 1]
    """
    if rule.weights is WeightRule.WAVE:
        return None  # its versions depend on p alone, whatever the order
    if rule.order is OrderRule.GPIPE:
        return rule.minibatches_per_wave
    return min(rule.minibatches_per_wave, place.from_end) if rule.weights is WeightRule.FLUSH else place.from_end


def drained_since(rule: RunRule, p: int, floor: int) -> int:
    """Clock whose earlier minibatches are drained when p starts: that of its wave under `flush`, else `floor`.

    >>> drained_since(RunRule(4, 0), 9, 1), drained_since(RunRule(4, 0, WeightRule.FLUSH), 9, 1)
    (1, 2)
    """
    return wave_of(rule, p) if rule.weights is WeightRule.FLUSH else floor


def is_switch_point(rule: RunRule, p: int, floor: int) -> bool:
    """Whether the published clock in use may change at p: p = N, 2N, … and after a barrier.

    For policies with one update per wave: the wave starts.

    >>> [p for p in range(1, 10) if is_switch_point(RunRule(4, 0), p, 0)]
    [1, 4, 8]
    """
    if p == rule.through(floor) + 1:
        return True
    within = p - rule.origin
    return (within - rule.updates_per_wave) % rule.minibatches_per_wave == 0


def minibatches_in(samples: int, batch_size: int) -> int:
    """Number of minibatches of `samples` samples; only the last may be partial.

    >>> [minibatches_in(samples, 8) for samples in (0, 3, 8, 9)]
    [0, 1, 1, 2]
    """
    return -(-samples // batch_size)


def shares(per_wave: Mapping[int, int], minibatches: int) -> dict[int, int]:
    """Member → its number of the first `minibatches` minibatches dealt after a barrier.

    Each wave deals N_v to member v; those of the last, partial wave go to the member that would complete its next one
    first if full waves took equally long.

    >>> shares({0: 4, 1: 1}, 10), shares({0: 4, 1: 1}, 8), shares({0: 2, 1: 2}, 3)
    ({0: 8, 1: 2}, {0: 7, 1: 1}, {0: 2, 1: 1})
    """
    waves, rest = divmod(minibatches, sum(per_wave.values()))
    extra = dict.fromkeys(per_wave, 0)
    for _ in range(rest):
        extra[min(extra, key=lambda vw: (Fraction(extra[vw] + 1, per_wave[vw]), vw))] += 1
    return {vw: waves * num + extra[vw] for vw, num in per_wave.items()}


def _waves_due(rule: RunRule, p: int) -> int:
    """Number of waves before minibatch p whose updates may be in published weights."""
    if rule.weights is WeightRule.FLUSH:
        return wave_of(rule, p)
    if rule.weights is WeightRule.DOUBLE_BUFFER:
        return wave_of(rule, p) - 1
    return rule.start - (-(p - rule.origin + 1) // rule.minibatches_per_wave) - 2


def _updated(rule: RunRule, through: int, floor: int) -> int:
    """Round down to whole updates, but not below the barrier."""
    whole = rule.origin + (through - rule.origin) // rule.minibatches_per_update * rule.minibatches_per_update
    return max(whole, rule.through(floor))
