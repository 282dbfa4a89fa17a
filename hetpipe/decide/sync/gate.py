"""The gate of Wave Synchronous Parallel: when a minibatch may start, and on which clock (`wsp.md` §2, §3; HetPipe §5).

Numbers: p is a minibatch (1-based), N minibatches make a wave, D is the staleness bound (None: ∞), a *segment* lies
between two barriers and starts at clock `start`: its minibatches are p > start·N.

>>> strict = Gate(SyncSpec(minibatches_per_wave=4, staleness=0))
>>> [strict.required(p) for p in (7, 8, 11, 12, 15, 16)]
[0, 1, 1, 2, 2, 3]
>>> [Gate(SyncSpec(minibatches_per_wave=1, staleness=0)).required(p) for p in (1, 2, 3, 4)]
[0, 1, 2, 3]
"""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.values.ids import Clock, Minibatch, Wave
from hetpipe.values.sync import SyncSpec


@dataclass(frozen=True, slots=True)
class Gate:
    """The gate of a job in one segment: the decisions shared by first stages, clock shard, simulator and planner.

    With `pull: required` the clock in use is kept as long as the staleness bound allows.

    >>> every, rare = (Gate(SyncSpec(4, staleness=1, pull=pull)) for pull in ("every_wave", "required"))
    >>> [every.chosen(p, in_use=0, published=2) for p in (8, 12, 16)]
    [1, 2, 2]
    >>> [rare.chosen(p, in_use=0, published=2) for p in (8, 12, 16)]
    [0, 2, 2]
    """

    sync: SyncSpec
    start: Clock = Clock(0)
    """Start of the segment."""

    # -- minibatches and switch points -------------------------------------------------------------------------------

    def wave_of(self, p: int) -> Wave:
        """The wave of minibatch `p`.

        >>> [Gate(SyncSpec(4, staleness=0)).wave_of(p) for p in (1, 4, 5)]
        [0, 0, 1]
        """
        return Wave((p - 1) // self.sync.minibatches_per_wave)

    def local_through(self, p: int) -> Minibatch:
        """v(p): the last of its own updates that minibatch `p` sees under `wave`; start·N: none of this segment.

        >>> [Gate(SyncSpec(4, staleness=0)).local_through(p) for p in (1, 4, 5, 12)]
        [0, 0, 1, 8]
        """
        n = self.sync.minibatches_per_wave
        return Minibatch(max(p - n, self.start * n))

    def is_switch_point(self, p: int) -> bool:
        """Whether the published clock in use may change at `p`: at N, 2N, … and at the first minibatch of a segment.

        Policies with one update per wave change it at the start of a wave.

        >>> [p for p in range(1, 13) if Gate(SyncSpec(4, staleness=0)).is_switch_point(p)]
        [1, 4, 8, 12]
        >>> [p for p in range(1, 13) if Gate(SyncSpec(4, staleness=0, weights="flush")).is_switch_point(p)]
        [1, 5, 9]
        """
        if self.sync.policy.one_update_per_wave:
            return self._starts_wave(p)
        n = self.sync.minibatches_per_wave
        return p % n == 0 or p == self.start * n + 1

    def switch_minibatch(self, switch: int) -> Minibatch:
        """The minibatch of switch point number `switch`.

        >>> [Gate(SyncSpec(4, staleness=0, weights=weights)).switch_minibatch(2) for weights in ("wave", "flush")]
        [8, 9]
        """
        return Minibatch(switch * self.sync.minibatches_per_wave + self.sync.policy.one_update_per_wave)

    def switch_number(self, p: int) -> int:
        """The number of the latest switch point up to `p`; inverse of `switch_minibatch`.

        >>> [Gate(SyncSpec(4, staleness=0)).switch_number(p) for p in (7, 8, 11)]
        [1, 2, 2]
        >>> [Gate(SyncSpec(1, staleness=0, weights="flush")).switch_number(p) for p in (1, 2, 3)]
        [0, 1, 2]
        """
        return (p - self.sync.policy.one_update_per_wave) // self.sync.minibatches_per_wave

    def next_switch(self, switch: int) -> int:
        """The number of the next switch point with a choice of clock; that of the barrier for a new member."""
        following = switch + 1
        while self.newest_usable(self.switch_minibatch(following)) <= self.start:
            following += 1
        return following

    @property
    def first_switch(self) -> Minibatch:
        """The first minibatch of a run that may use a clock above 0; from then on every N-th is a switch point.

        At the switch points before it, v(p) is 0: nothing newer can be used yet.

        >>> [Gate(SyncSpec(4, staleness=0, weights=weights)).first_switch for weights in ("wave", "flush")]
        [8, 5]
        """
        n = self.sync.minibatches_per_wave
        return Minibatch(next(p for p in range(n + 1, 2 * n + 1) if self.is_switch_point(p)))

    # -- clocks ------------------------------------------------------------------------------------------------------

    def required(self, p: int) -> Clock:
        """The published clock that minibatch `p` needs (`wsp.md` §2).

        D waves before the newest usable one; for `wave` that is ⌈(p + 1)/N⌉ − (D + 2).

        >>> Gate(SyncSpec(5, staleness=4)).required(30)
        1
        >>> Gate(SyncSpec(4, staleness=4), start=Clock(2)).required(9)
        2
        """
        staleness = self.sync.staleness
        if staleness is None:
            return self.start
        return Clock(max(self.start, self.newest_usable(p) - staleness))

    def newest_usable(self, p: int) -> Clock:
        """The newest published clock W that `p` may use: W·N ≤ v(p), so that none of its own updates counts twice.

        Under `flush` all waves before its own, under `double_buffer` all but the last of these.

        >>> Gate(SyncSpec(4, staleness=0)).newest_usable(8)
        1
        >>> [Gate(SyncSpec(4, staleness=0, weights=w)).newest_usable(9) for w in ("flush", "double_buffer")]
        [2, 1]
        """
        policy = self.sync.policy
        if policy.one_update_per_wave:
            return Clock(max(self.start, self.wave_of(p) - policy.waves_behind))
        return Clock(self.local_through(p) // self.sync.minibatches_per_wave)

    def awaited(self, p: int, *, in_use: int) -> Clock:
        """The clock that must be published before minibatch `p`, a switch point, may start.

        A deterministic run that pulls when required waits for the newest usable clock: the required one would be too
        old again at the next switch point.
        """
        required = self.required(p)
        if self.sync.pull == "every_wave":
            return required
        if in_use >= required:
            return Clock(in_use)
        return self.newest_usable(p) if self.sync.deterministic else required

    def chosen(self, p: int, *, in_use: int, published: int) -> Clock | None:
        """W*(p) at switch point `p`, where `in_use` was W* before; None: wait until more is published."""
        awaited = self.awaited(p, in_use=in_use)
        if published < awaited:
            return None
        if self.sync.deterministic or (self.sync.pull == "required" and awaited == in_use):
            return awaited
        return Clock(min(published, self.newest_usable(p)))

    def fetched_ahead(self, p: int, *, in_use: int, published: int) -> Clock | None:
        """The clock to prefetch before switch point `p` is reached; None: none.

        With `pull: required` that is only the newest one that `p` may ever use: any other might be fetched
        unnecessarily.
        """
        newest = self.newest_usable(p)
        if self.sync.pull == "required":
            return newest if in_use < self.required(p) and newest <= published else None
        newest = Clock(min(published, newest))
        clock = self.required(p) if self.sync.deterministic else newest
        return clock if in_use < clock <= newest else None

    # -- drained pipelines -------------------------------------------------------------------------------------------

    def starts_drained(self, p: int) -> bool:
        """Whether all minibatches before `p` must have left the pipeline first: under `flush`, at each wave.

        >>> [p for p in range(1, 7) if Gate(SyncSpec(3, staleness=0, weights="flush")).starts_drained(p)]
        [1, 4]
        """
        return self.sync.policy.drains and self._starts_wave(p)

    def drains_after(self, p: int, last: int) -> int:
        """The first minibatch from `p` on after whose forward the pipeline drains.

        Args:
            p: the next to start.
            last: of the run.

        >>> flush = Gate(SyncSpec(4, staleness=0, weights="flush"))
        >>> flush.drains_after(1, last=6), flush.drains_after(5, last=6)
        (4, 6)
        """
        if not self.sync.policy.drains:
            return last
        n = self.sync.minibatches_per_wave
        return min(-(-p // n) * n, last)

    # -- commits and barriers ----------------------------------------------------------------------------------------

    def may_commit(self, wave: int, published: int) -> bool:
        """Whether wave `wave` may be committed: only once the published clock is ≥ wave − D (`wsp.md` §4).

        >>> [Gate(SyncSpec(4, staleness=1)).may_commit(wave, published=1) for wave in (0, 2, 3)]
        [True, True, False]
        """
        return self.sync.staleness is None or published >= wave - self.sync.staleness

    def unplanned_barrier(self, *, committed: int, published: int, last_switch: int, planned: int) -> Clock:
        """The clock of an unplanned barrier (`wsp.md` §5): no member can have started a minibatch beyond it.

        Where a wave sees all waves before it (`flush`), members are one wave less ahead.

        Args:
            committed: the largest number of waves any member has committed.
            published: the published clock.
            last_switch: the largest number of a switch point for which a member has requested a clock: the only bound
                where there is no staleness bound.
            planned: the barrier already set; kept if it is lower.

        >>> Gate(SyncSpec(4, staleness=1)).unplanned_barrier(committed=3, published=2, last_switch=0, planned=100)
        5
        """
        staleness = self.sync.staleness
        furthest = last_switch if staleness is None else published + staleness + self.sync.policy.waves_behind
        return Clock(min(planned, max(committed, furthest + 1, published + 1)))

    def _starts_wave(self, p: int) -> bool:
        return (p - 1) % self.sync.minibatches_per_wave == 0
