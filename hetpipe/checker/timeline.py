"""Replayed decision log, the reference for every other line."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from hetpipe.checker.events import Activate, Barrier, Commit, Evict, Freeze, Handover, Norms, Origin, Plan, Publish
from hetpipe.checker.rules import RunRule, StagePosition


@dataclass(slots=True)
class Life:
    """One incarnation of a virtual worker."""

    vw: int
    incarnation: int
    first_wave: int
    """The clock at which it joined."""
    num_stages: int
    assumed: tuple[int, ...] | None
    """The cut of one without `plan` lines, which older histories lack; None: it may be any."""
    eviction: Evict | None = None
    eviction_position: int | None = None
    """Position of the eviction in the decision log; None while it is a member."""
    left: int | None = None
    """The clock of the barrier at which it left, having been drained; None: it did not."""
    handover: Handover | None = None
    """Whether it has left its state behind there; None: not known."""
    plans: list[Plan] = field(default_factory=list)
    """Its plan versions, in order."""

    def plan_at(self, wave: int) -> Plan | None:
        """The plan version in force in a wave; None without one."""
        index = bisect_right(self.plans, wave, key=lambda plan: plan.clock)
        return self.plans[index - 1] if index else None

    def bounds_at(self, wave: int) -> tuple[int, ...] | None:
        """The cut in force in a wave; None: not known."""
        plan = self.plan_at(wave)
        return self.assumed if plan is None else plan.bounds

    @property
    def cuts(self) -> list[tuple[int, ...] | None]:
        """Every cut that it has had; None for an unknown one."""
        return [plan.bounds for plan in self.plans] or [self.assumed]

    @property
    def places(self) -> tuple[StagePosition, ...]:
        """Its stages, in pipeline order."""
        return tuple(StagePosition(stage, self.num_stages) for stage in range(self.num_stages))


@dataclass(slots=True)
class Timeline:
    """Indexed decisions of a run. A *position* is an index into the decision log.

    Written by `replay.Replay` only; read-only for all others.
    """

    start_clock: int
    rule: RunRule
    """The rule of the run, with the N of the virtual workers without one of their own."""
    rules: dict[int, list[RunRule]] = field(default_factory=dict)
    """vw → its rules, each with its N_v, from the barriers on at which that changed; those that always have the N of
    `rule` are absent."""
    lives: dict[tuple[int, int], Life] = field(default_factory=dict)
    """(vw, incarnation) → life."""
    members: dict[int, int] = field(default_factory=dict)
    """Member → incarnation, now."""
    local: dict[int, int] = field(default_factory=dict)
    """vw → waves committed; evicted workers included."""
    commits: dict[tuple[int, int], Commit] = field(default_factory=dict)
    """(vw, wave) → its first commit."""
    commit_positions: dict[tuple[int, int], int] = field(default_factory=dict)
    publishes: dict[int, Publish] = field(default_factory=dict)
    """clock → its first publish."""
    publish_positions: dict[int, int] = field(default_factory=dict)
    published: int | None = None
    """The last published clock."""
    pending: dict[int, Barrier] = field(default_factory=dict)
    """Barriers that are set and not reached."""
    barriers: list[int] = field(default_factory=list)
    """The clocks of the start and of all reached barriers, rising."""
    barrier_positions: dict[int, int] = field(default_factory=dict)
    """Clock of a barrier → position at which it was set there first; none for the start."""
    epoch_ends: list[Barrier] = field(default_factory=list)
    """The reached barriers that ended an epoch."""
    plans: dict[int, Plan] = field(default_factory=dict)
    """vw → the newest version of its plan."""
    announced: dict[int, list[Plan]] = field(default_factory=dict)
    """vw → the versions announced since the last barrier for waves behind it."""
    norms: dict[int, list[Norms]] = field(default_factory=dict)
    """Clock of a barrier → what has decided F there, in the order of the virtual workers."""
    freezes: list[Freeze] = field(default_factory=list)
    """Frozen layers by the clock of their barrier, rising."""
    activates: list[Activate] = field(default_factory=list)
    """Inactive layers by the clock of their barrier, rising."""
    end: Barrier | None = None
    """The reached barrier that ended the run, or stopped it."""
    max_distance: int = 0

    @property
    def complete(self) -> bool:
        """Whether the run reached its end or a stop."""
        return self.end is not None

    def rule_of(self, vw: int, p: int) -> RunRule:
        """The rule for minibatch `p` of a virtual worker."""
        rules = self.rules.get(vw, (self.rule,))
        return next((rule for rule in reversed(rules) if rule.origin < p), rules[0])

    def rule_in(self, vw: int, wave: int) -> RunRule:
        """The rule for a wave of a virtual worker."""
        rules = self.rules.get(vw, (self.rule,))
        return next((rule for rule in reversed(rules) if rule.start <= wave), rules[0])

    def frozen_at(self, wave: int) -> tuple[int, int]:
        """F, and the number of frozen layers, in a wave."""
        index = bisect_right(self.freezes, wave, key=lambda freeze: freeze.clock)
        return (self.freezes[index - 1].frozen, self.freezes[index - 1].layers) if index else (0, 0)

    def inactive_at(self, wave: int) -> tuple[int, ...]:
        """The inactive layers in a wave."""
        index = bisect_right(self.activates, wave, key=lambda activate: activate.clock)
        return self.activates[index - 1].inactive if index else ()

    def fresh_at(self, clock: int) -> tuple[int, ...]:
        """The layers that are built anew at a barrier."""
        index = bisect_left(self.activates, clock, key=lambda activate: activate.clock)
        found = self.activates[index : index + 1]
        return found[0].fresh if found and found[0].clock == clock else ()

    def idle_at(self, wave: int) -> frozenset[int]:
        """The layers that are not trained in a wave."""
        return frozenset((*range(self.frozen_at(wave)[1]), *self.inactive_at(wave)))

    def is_frozen(self, vw: int, incarnation: int, stage: int, wave: int) -> bool:
        """Whether all layers of a stage are frozen in a wave."""
        bounds, layers = self.lives[vw, incarnation].bounds_at(wave), self.frozen_at(wave)[1]
        return bounds is not None and stage + 1 < len(bounds) and bounds[stage + 1] <= layers

    def lives_of(self, vw: int) -> list[Life]:
        """All incarnations of a virtual worker."""
        return [life for life in self.lives.values() if life.vw == vw]

    def is_published_before(self, clock: int, origin: Origin) -> bool:
        """Whether `clock` was, or may have been, published when the line at `origin` was written."""
        publish = self.publishes.get(clock)
        return publish is not None and publish.origin.may_precede(origin)

    def floor_clock(self, vw: int, incarnation: int, wave: int) -> int:
        """The latest barrier at or below `wave` that binds an incarnation.

        A barrier that is set but not published counts too: it may not be passed. One set after the incarnation was
        evicted does not: without other members it may lie before work of that incarnation, all of which was dropped.
        """
        eviction = self.lives[vw, incarnation].eviction_position
        index = max(0, bisect_right(self.barriers, wave) - 1)
        while index and not self._was_set(self.barriers[index], eviction):
            index -= 1
        pending = (clock for clock in self.pending if clock <= wave and self._was_set(clock, eviction))
        return max(pending, default=self.barriers[index])

    def end_for(self, vw: int, incarnation: int) -> int | None:
        """The clock at which the run ended, behind which nothing of an incarnation starts; None: it did not.

        As for `floor_clock`, a barrier that was set after the incarnation was evicted does not bind it.
        """
        if self.end is None or not self._was_set(self.end.clock, self.lives[vw, incarnation].eviction_position):
            return None
        return self.end.clock

    def _was_set(self, barrier: int, position: int | None) -> bool:
        """Whether a barrier was set before `position` in the decision log; None is its end."""
        return position is None or self.barrier_positions.get(barrier, -1) < position

    def epochs_ended(self, wave: int) -> int:
        """Number of epochs of this run that ended at or below `wave`."""
        return bisect_right(self.epoch_ends, wave, key=lambda barrier: barrier.clock)

    def committed(self, vw: int, incarnation: int, wave: int) -> bool:
        """Whether this incarnation committed `wave`."""
        commit = self.commits.get((vw, wave))
        return commit is not None and commit.incarnation == incarnation

    def may_have_lost_commit(self, vw: int, incarnation: int, wave: int) -> bool:
        """Whether a kill may have lost the commit line of `wave`: the next one in a run cut short."""
        return not self.complete and self.members.get(vw) == incarnation and self.local[vw] == wave
