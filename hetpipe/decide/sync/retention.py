"""Which published clocks must the shards keep? Those that some member may still ask for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from hetpipe.decide.sync.gate import ClockRule, switch_minibatch, wave_of
from hetpipe.values.ids import Clock
from hetpipe.values.sync import SyncSpec


class Holder(Protocol):
    """What is looked at of a member."""

    #: Waves committed.
    committed: Clock
    #: The clock that the answer to its latest question chose.
    held: Clock
    #: The number of the switch point of that question.
    last_switch: int


@dataclass(frozen=True, slots=True)
class SwitchPoints:
    """The switch points of the segment that starts at `start`, by number."""

    sync: SyncSpec
    start: Clock

    def minibatch(self, switch: int) -> int:
        """Where it is."""
        n = self.sync.minibatches_per_wave
        return switch_minibatch(switch, minibatches_per_wave=n, weights=self.sync.weights)

    def wave(self, switch: int) -> int:
        """The wave that it lies in."""
        return wave_of(self.minibatch(switch), minibatches_per_wave=self.sync.minibatches_per_wave)

    @property
    def rule(self) -> ClockRule:
        """Which clock comes into use at them."""
        return ClockRule.of(self.sync, self.start)

    def required(self, switch: int) -> Clock:
        """The clock that must be published there."""
        return self.rule.required(self.minibatch(switch))

    def newest_usable(self, switch: int) -> Clock:
        """The newest clock that may come into use there."""
        return self.rule.newest_usable(self.minibatch(switch))

    def after(self, switch: int) -> int:
        """The next one at which a clock is asked for: a member has that of the barrier."""
        following = switch + 1
        while self.newest_usable(following) <= self.start:
            following += 1
        return following


def retained(
    members: Iterable[Holder], points: SwitchPoints, *, published: Clock, global_clock: Clock
) -> tuple[Clock, ...]:
    """The clocks to keep, in their order.

    Args:
        members: all of them.
        points: of the segment that is under way, or that begins with `published`.
        published: the newest clock.
        global_clock: the waves that all members have committed.
    """
    if points.sync.deterministic and points.sync.staleness is not None:
        first = min(_oldest_required(points, global_clock), published)
        return tuple(Clock(clock) for clock in range(first, published + 1))
    wanted = {published}
    for member in members:
        # Once the wave of its switch point is committed, all stages of a member have pulled what it holds.
        if member.committed <= points.wave(member.last_switch):
            wanted.add(member.held)
        # Under `double_buffer` the next answer lacks a wave that may be published already.
        switch = points.after(member.last_switch)
        if member.committed <= points.wave(switch):
            wanted.add(min(published, points.newest_usable(switch)))
    return tuple(sorted(wanted))


def _oldest_required(points: SwitchPoints, global_clock: Clock) -> Clock:
    """The oldest clock that a wave which is not committed by all may still require."""
    first: int = global_clock
    while points.wave(first) < global_clock:
        first += 1
    return points.required(first)
