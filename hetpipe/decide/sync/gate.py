"""When may a minibatch start? The gate of Wave Synchronous Parallel, in formulas (`wsp.md` §2; HetPipe §5).

Numbers: p is a minibatch (1-based), N minibatches make a wave, D is the staleness bound (None: ∞), a *segment* is what
lies between two barriers and starts at clock `start`: its minibatches are p > start·N.

>>> [required_clock(p, minibatches_per_wave=4, staleness=0) for p in (7, 8, 11, 12, 15, 16)]
[0, 1, 1, 2, 2, 3]
>>> [required_clock(p, minibatches_per_wave=1, staleness=0) for p in (1, 2, 3, 4)]
[0, 1, 2, 3]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from hetpipe.values.ids import Clock, Minibatch, Wave
from hetpipe.values.policies import ONE_UPDATE_PER_WAVE, PullTiming, WeightPolicy
from hetpipe.values.sync import SyncSpec


def required_clock(
    p: int, *, minibatches_per_wave: int, staleness: int | None, start: int = 0, weights: str = "wave"
) -> Clock:
    """The published clock that minibatch `p` needs, under the weight policy `weights` (`wsp.md` §2).

    D waves before the newest that it may use; for `wave` that is ⌈(p + 1)/N⌉ − (D + 2).

    >>> required_clock(30, minibatches_per_wave=5, staleness=4)
    1
    >>> required_clock(9, minibatches_per_wave=4, staleness=4, start=2)
    2
    """
    if staleness is None:
        return Clock(start)
    newest = newest_usable_clock(p, minibatches_per_wave=minibatches_per_wave, start=start, weights=weights)
    return Clock(max(start, newest - staleness))


def local_through(p: int, *, minibatches_per_wave: int, start: int = 0) -> Minibatch:
    """v(p): the last of its own updates that minibatch `p` sees under `wave`; start·N: none of this segment.

    >>> [local_through(p, minibatches_per_wave=4) for p in (1, 4, 5, 12)]
    [0, 0, 1, 8]
    """
    return Minibatch(max(p - minibatches_per_wave, start * minibatches_per_wave))


def is_switch_point(p: int, *, minibatches_per_wave: int, start: int = 0, weights: str = "wave") -> bool:
    """Whether the published clock in use may change at `p`: at N, 2N, … and at the first minibatch of a segment.

    Policies that update once per wave change it where a wave starts.

    >>> [p for p in range(1, 13) if is_switch_point(p, minibatches_per_wave=4)]
    [1, 4, 8, 12]
    >>> [p for p in range(1, 13) if is_switch_point(p, minibatches_per_wave=4, weights="flush")]
    [1, 5, 9]
    """
    if weights in ONE_UPDATE_PER_WAVE:
        return _starts_wave(p, minibatches_per_wave)
    return p % minibatches_per_wave == 0 or p == start * minibatches_per_wave + 1


def switch_minibatch(switch: int, *, minibatches_per_wave: int, weights: str = "wave") -> Minibatch:
    """The minibatch of switch point number `switch`: that many waves are, or are about to be, begun and ended.

    >>> [switch_minibatch(2, minibatches_per_wave=4, weights=weights) for weights in ("wave", "flush")]
    [8, 9]
    """
    return Minibatch(switch * minibatches_per_wave + (weights in ONE_UPDATE_PER_WAVE))


def switch_number(p: int, *, minibatches_per_wave: int, weights: str = "wave") -> int:
    """The number of the latest switch point up to `p`; inverse of `switch_minibatch`.

    >>> [switch_number(p, minibatches_per_wave=4) for p in (7, 8, 11)]
    [1, 2, 2]
    >>> [switch_number(p, minibatches_per_wave=1, weights="flush") for p in (1, 2, 3)]
    [0, 1, 2]
    """
    return (p - (weights in ONE_UPDATE_PER_WAVE)) // minibatches_per_wave


def newest_usable_clock(p: int, *, minibatches_per_wave: int, start: int = 0, weights: str = "wave") -> Clock:
    """The newest published clock W that `p` may use: W·N ≤ v(p), so that no update of its own counts twice.

    Under `flush` all waves before its own, under `double_buffer` all but the last of these.

    >>> newest_usable_clock(8, minibatches_per_wave=4)
    1
    >>> [newest_usable_clock(9, minibatches_per_wave=4, weights=weights) for weights in ("flush", "double_buffer")]
    [2, 1]
    """
    if weights in ONE_UPDATE_PER_WAVE:
        delay = 1 if weights == "double_buffer" else 0
        return Clock(max(start, wave_of(p, minibatches_per_wave=minibatches_per_wave) - delay))
    return Clock(local_through(p, minibatches_per_wave=minibatches_per_wave, start=start) // minibatches_per_wave)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockRule:
    """Which published clock comes into use at a switch point, and which one is fetched before (`wsp.md` §3).

    The one decision that first stages, the clock shard, the simulator and the planner read. With `pull: required` the
    clock in use stays as long as the staleness bound allows it.

    >>> every, rare = (ClockRule(minibatches_per_wave=4, staleness=1, pull=pull) for pull in ("every_wave", "required"))
    >>> [every.chosen(p, in_use=0, published=2) for p in (8, 12, 16)]
    [1, 2, 2]
    >>> [rare.chosen(p, in_use=0, published=2) for p in (8, 12, 16)]
    [0, 2, 2]
    """

    minibatches_per_wave: int
    """N."""
    staleness: int | None
    """D; None: ∞."""
    weights: WeightPolicy = "wave"
    deterministic: bool = False
    pull: PullTiming = "every_wave"
    start: Clock = Clock(0)
    """Of the segment."""

    @classmethod
    def of(cls, sync: SyncSpec, start: int) -> Self:
        """The rule of a job, in the segment that starts at `start`."""
        return cls(
            minibatches_per_wave=sync.minibatches_per_wave,
            staleness=sync.staleness,
            weights=sync.weights,
            deterministic=sync.deterministic,
            pull=sync.pull,
            start=Clock(start),
        )

    def required(self, p: int) -> Clock:
        """The published clock that minibatch `p` needs."""
        return required_clock(
            p,
            minibatches_per_wave=self.minibatches_per_wave,
            staleness=self.staleness,
            start=self.start,
            weights=self.weights,
        )

    def newest_usable(self, p: int) -> Clock:
        """The newest published clock that minibatch `p` may use, so that no update of its own counts twice."""
        return newest_usable_clock(
            p, minibatches_per_wave=self.minibatches_per_wave, start=self.start, weights=self.weights
        )

    def awaited(self, p: int, *, in_use: int) -> Clock:
        """The clock that must be published before minibatch `p`, a switch point, may start.

        A deterministic run that pulls when required waits for the newest usable clock: were it the required one, it
        would be too old again at the next switch point.
        """
        required = self.required(p)
        if self.pull == "every_wave":
            return required
        if in_use >= required:
            return Clock(in_use)
        return self.newest_usable(p) if self.deterministic else required

    def chosen(self, p: int, *, in_use: int, published: int) -> Clock | None:
        """W*(p) at switch point `p`, where `in_use` was W* before; None: wait until more is published."""
        awaited = self.awaited(p, in_use=in_use)
        if published < awaited:
            return None
        if self.deterministic or (self.pull == "required" and awaited == in_use):
            return awaited
        return Clock(min(published, self.newest_usable(p)))

    def fetched_ahead(self, p: int, *, in_use: int, published: int) -> Clock | None:
        """The clock to fetch before switch point `p` is met; None: nothing.

        With `pull: required` that is only the newest one that `p` may ever use: any other might be fetched in vain.
        """
        newest = self.newest_usable(p)
        if self.pull == "required":
            return newest if in_use < self.required(p) and newest <= published else None
        newest = Clock(min(published, newest))
        clock = self.required(p) if self.deterministic else newest
        return clock if in_use < clock <= newest else None


def wave_of(p: int, *, minibatches_per_wave: int) -> Wave:
    """The wave that minibatch `p` belongs to.

    >>> [wave_of(p, minibatches_per_wave=4) for p in (1, 4, 5)]
    [0, 0, 1]
    """
    return Wave((p - 1) // minibatches_per_wave)


def starts_drained(p: int, *, minibatches_per_wave: int, weights: str) -> bool:
    """Whether every minibatch before `p` must be through the whole pipeline first: under `flush`, where a wave starts.

    >>> [p for p in range(1, 7) if starts_drained(p, minibatches_per_wave=3, weights="flush")]
    [1, 4]
    """
    return weights == "flush" and _starts_wave(p, minibatches_per_wave)


def may_commit(wave: int, *, published: int, staleness: int | None) -> bool:
    """Whether wave `wave` may be committed: only once the published clock is ≥ wave − D (`wsp.md` §4).

    >>> [may_commit(w, published=1, staleness=1) for w in (0, 2, 3)]
    [True, True, False]
    """
    return staleness is None or published >= wave - staleness


def unplanned_barrier(
    *,
    committed: int,
    published: int,
    staleness: int | None,
    last_switch: int,
    planned: int,
    weights: str = "wave",
) -> Clock:
    """The clock of a barrier that nobody planned (`wsp.md` §5): no member can have started a minibatch beyond it.

    Args:
        committed: the largest number of waves any member has committed.
        published: the published clock.
        staleness: D, or None; then members ask for a clock at every switch point, and `last_switch` bounds them.
        last_switch: the largest number of a switch point at which a member has asked for its clock.
        planned: the barrier already set; it stays if it is lower.
        weights: the policy; under `flush` members are a wave less ahead.

    >>> unplanned_barrier(committed=3, published=2, staleness=1, last_switch=0, planned=100)
    5
    """
    ahead = 1 if weights == "flush" else 2
    bound = max(committed, published + staleness + ahead if staleness is not None else last_switch + 1)
    return Clock(min(planned, max(bound, published + 1)))


def _starts_wave(p: int, minibatches_per_wave: int) -> bool:
    return (p - 1) % minibatches_per_wave == 0
