"""Replay the decision log: commits, publishes, barriers, evictions, joins and leaves, in the clock shard's order.

The only check that needs a total order over events of all virtual workers, which the clock shard provides: it writes
these lines one by one (`wsp.md` §4). The result is the `Timeline`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import pairwise

from hetpipe.checker.events import (
    Activate,
    Barrier,
    Commit,
    Decision,
    Event,
    Evict,
    Freeze,
    Handover,
    Join,
    Leave,
    Norms,
    Plan,
    Publish,
    Waves,
)
from hetpipe.checker.facts import Facts, Lineup
from hetpipe.checker.report import Findings, Kind
from hetpipe.checker.rules import RunRule
from hetpipe.checker.timeline import Life, Timeline


def decisions_in_order(events: Iterable[Event]) -> list[Decision]:
    """The decision log: files in order of their first decision, each in line order.

    A restarted clock shard appends to the same file or to a later one; either way lines keep their order, even if the
    times of two adjacent lines do not.
    """
    files: dict[str, list[Decision]] = {}
    for event in events:
        if isinstance(event, Decision):
            files.setdefault(event.origin.file, []).append(event)
    ordered = sorted(files.values(), key=lambda decisions: decisions[0].origin.t)
    return [decision for decisions in ordered for decision in decisions]


def founders_of(decisions: Iterable[Decision], facts: Facts) -> list[int]:
    """Initial members: those with a recorded join at the start, as others may have died before the run began.

    Without such records, all virtual workers of the plan.
    """
    known = range(len(facts.layout.bounds))
    joined = {d.vw for d in decisions if isinstance(d, Join) and d.clock == facts.start.clock and d.vw in known}
    return sorted(joined or known)


def _rules(facts: Facts) -> dict[int, list[RunRule]]:
    """The rules of the virtual workers that have an N of their own, or whose N changes."""
    rules = {vw: [facts.rule.with_wave_of(num)] for vw, num in enumerate(facts.waves)}
    for vw, (num, before) in facts.start.waves.items():
        rules[vw] = [facts.rule.with_wave_of(num, facts.start.clock, before)]
    for change in facts.wave_changes:
        for vw in range(len(facts.layout.bounds)):
            own = rules.setdefault(vw, [facts.rule])
            own.append(facts.rule.with_wave_of(change.of(vw), change.clock, own[-1].through(change.clock)))
    return rules


class Replay:
    """Replays decisions in order, reports violations of `wsp.md` §2, §4 and §5, and fills a timeline."""

    def __init__(self, facts: Facts, findings: Findings, founders: Collection[int]) -> None:
        """Start with `founders` as members, each in its first incarnation unless its join is recorded otherwise."""
        self._rule = facts.rule
        self._layout = facts.layout
        self._has_waves = bool(facts.waves)
        self._wave_changes = facts.wave_changes
        self._members = facts.members
        self._lineups = facts.lineups
        self._start_lineup = facts.start.lineup
        self._has_numbers = bool(facts.start.waves)
        #: (vw, clock) of the barriers at which N is recorded.
        self._numbered: set[tuple[int, int]] = set()
        self._findings = findings
        self._position = -1
        self._freezing = facts.freezing
        self._inactive_due, self._fresh_due = facts.inactive_due, facts.fresh_due
        self._start_frozen, self._start_epoch = facts.start.frozen, facts.start.epoch
        start = facts.start.clock
        #: Clocks of barriers at which N changes because others train.
        self._renumbered: list[int] = []
        #: Clocks of barriers from which on others train, or waves have another length → who does.
        self._lineup_at: dict[int, Lineup] = {}
        self.timeline = Timeline(
            start_clock=start,
            rule=facts.rule,
            rules=_rules(facts),
            lives={(vw, 0): Life(vw, 0, start, facts.layout.stages_of(vw), facts.layout.bounds[vw]) for vw in founders},
            members=dict.fromkeys(founders, 0),
            local=dict.fromkeys(range(len(facts.layout.bounds)), start),
            barriers=[start],
        )
        if (lineup := self._lineup(self._start_lineup)) is not None:
            self._begin_lineup(lineup, start)

    def see(self, decision: Decision) -> None:
        """Replay one decision."""
        self._position += 1
        if isinstance(decision, Commit):
            self._see_commit(decision)
        elif isinstance(decision, Publish):
            self._see_publish(decision)
        elif isinstance(decision, Barrier):
            self._see_barrier(decision)
        elif isinstance(decision, Evict):
            self._see_evict(decision)
        elif isinstance(decision, Leave):
            self._see_leave(decision)
        elif isinstance(decision, Handover):
            self._see_handover(decision)
        elif isinstance(decision, Plan):
            self._see_plan(decision)
        elif isinstance(decision, Waves):
            self._see_waves(decision)
        elif isinstance(decision, Norms | Freeze | Activate):
            self._see_layers(decision)
        else:
            self._see_join(decision)

    def _see_layers(self, decision: Norms | Freeze | Activate) -> None:
        if isinstance(decision, Norms):
            self.timeline.norms.setdefault(decision.clock, []).append(decision)
        elif isinstance(decision, Freeze):
            self._see_freeze(decision)
        else:
            self._see_activate(decision)

    def _see_commit(self, commit: Commit) -> None:
        line = self.timeline
        vw, wave = commit.vw, commit.wave
        name = f"commit of wave {wave} by virtual worker {vw}, incarnation {commit.incarnation}"
        if line.members.get(vw) != commit.incarnation:
            self._refuse(f"{name}, which is no member", vw, commit)
            self._enter(commit)
            return
        expected = line.local[vw]
        if wave != expected:
            self._findings.add(Kind.COMMIT_ORDER, f"{name}, where wave {expected} is next", commit.origin)
        self._enter(commit)
        if wave < expected:
            return
        line.local[vw] = wave + 1
        self._verify_barrier_of(commit, name)
        self._verify_distance_of(commit, name)

    def _enter(self, commit: Commit) -> None:
        """Record a commit, even an illegal one, so that its applies are not reported a second time."""
        key = (commit.vw, commit.wave)
        self.timeline.commits.setdefault(key, commit)
        self.timeline.commit_positions.setdefault(key, self._position)

    def _verify_barrier_of(self, commit: Commit, name: str) -> None:
        end, pending = self.timeline.end, self.timeline.pending
        if end is not None and commit.wave >= end.clock:
            message = f"{name}, after the run ended at clock {end.clock}"
            self._findings.add(Kind.PAST_END, message, commit.origin)
        elif pending and commit.wave >= min(pending):
            message = f"{name}, before the barrier at clock {min(pending)} is published"
            self._findings.add(Kind.COMMIT_PAST_BARRIER, message, commit.origin)

    def _verify_distance_of(self, commit: Commit, name: str) -> None:
        line, staleness, bound = self.timeline, self._rule.staleness, self._rule.bound_clock_distance
        slowest = min(line.local[vw] for vw in line.members)
        distance = line.local[commit.vw] - slowest
        line.max_distance = max(line.max_distance, distance)
        if staleness is None or bound is None:
            return
        published = line.start_clock if line.published is None else line.published
        if distance > bound:
            message = f"{name} takes it {distance} waves ahead of global clock {slowest}, over the bound {bound}"
            self._findings.add(Kind.CLOCK_DISTANCE, message, commit.origin)
        elif published < commit.wave - staleness:
            message = f"{name} at published clock {published}, before clock {commit.wave - staleness} (D = {staleness})"
            self._findings.add(Kind.COMMIT_EARLY, message, commit.origin)

    def _see_publish(self, publish: Publish) -> None:
        line, clock, last = self.timeline, publish.clock, self.timeline.published
        expected = line.start_clock if last is None else last + 1
        if last is not None and clock == last:
            self._findings.add(Kind.CLOCK_REPEATED, f"clock {clock} is published again", publish.origin)
        elif clock < expected:
            message = f"the published clock fell from {expected if last is None else last} to {clock}"
            self._findings.add(Kind.CLOCK_FELL, message, publish.origin)
        if clock < expected:
            return
        if clock > expected:
            message = f"clock {clock} is published where clock {expected} is next"
            self._findings.add(Kind.CLOCK_SKIPPED, message, publish.origin)
        for vw, incarnation in line.members.items():
            if line.local[vw] < clock:
                message = (
                    f"clock {clock} is published before virtual worker {vw}, incarnation {incarnation}, committed "
                    f"wave {clock - 1}: it has committed {line.local[vw]} waves"
                )
                self._findings.add(Kind.PUBLISH_EARLY, message, publish.origin)
        line.published = clock
        line.publishes[clock] = publish
        line.publish_positions[clock] = self._position
        self._reach_barriers(clock)

    def _reach_barriers(self, clock: int) -> None:
        line = self.timeline
        for reached in sorted(pending for pending in line.pending if pending <= clock):
            barrier = line.pending.pop(reached)
            before = line.barriers[-1]
            line.barriers.append(reached)
            self._settle_announced(reached)
            if not barrier.words & {"end", "stop"}:
                self._change_lineup(before, reached)
            if "epoch" in barrier.words:
                line.epoch_ends.append(barrier)
            if barrier.words & {"end", "stop"}:
                line.end = barrier

    def _lineup(self, frozen: int) -> Lineup | None:
        """Who trains with F; None: all."""
        due = [lineup for lineup in self._lineups if lineup.frozen <= frozen]
        return due[-1] if due else next(iter(self._lineups), None)

    def _change_lineup(self, before: int, clock: int) -> None:
        """From each barrier on those train who are for the F between it and the barrier `before`."""
        lineup = self._lineup(max(self.timeline.frozen_at(before)[0], self._start_frozen))
        if lineup is not None and lineup != self._lineup_at[max(self._lineup_at)]:
            self._begin_lineup(lineup, clock)

    def _begin_lineup(self, lineup: Lineup, clock: int) -> None:
        line = self.timeline
        self._lineup_at[clock] = lineup
        num = lineup.minibatches_per_wave
        if all(line.rule_in(vw, clock).minibatches_per_wave == num for vw in lineup.members):
            return
        for vw in range(len(self._layout.bounds)):
            own = line.rules.setdefault(vw, [self._rule])
            own.append(self._rule.with_wave_of(num, clock, own[-1].through(clock)))
        self._renumbered.append(clock)

    def _settle_announced(self, barrier: int) -> None:
        """What was announced for waves below a barrier is in force; the rest is void."""
        line = self.timeline
        for vw, plans in line.announced.items():
            for plan in plans:
                if plan.clock < barrier:
                    line.plans[vw] = plan
                else:
                    line.lives[vw, plan.incarnation].plans.remove(plan)
        line.announced.clear()

    def _see_barrier(self, barrier: Barrier) -> None:
        line = self.timeline
        published = line.start_clock if line.published is None else line.published
        committed = max((line.local[vw] for vw in line.members), default=0)
        if barrier.clock == published == line.start_clock:
            return  # the barrier the run starts from
        if barrier.clock <= published or barrier.clock < committed:
            message = (
                f"a barrier is set at clock {barrier.clock}, behind published clock {published} "
                f"or committed clock {committed}"
            )
            self._findings.add(Kind.BARRIER, message, barrier.origin)
            return
        for replaced in [clock for clock in line.pending if clock > barrier.clock]:
            del line.pending[replaced]
            del line.barrier_positions[replaced]
        line.pending[barrier.clock] = barrier
        line.barrier_positions.setdefault(barrier.clock, self._position)

    def _see_evict(self, evict: Evict) -> None:
        line = self.timeline
        life = line.lives.get((evict.vw, evict.incarnation))
        if life is None or line.members.get(evict.vw) != evict.incarnation:
            name = f"eviction of virtual worker {evict.vw}, incarnation {evict.incarnation}"
            self._refuse(f"{name}, which is no member", evict.vw, evict)
            return
        del line.members[evict.vw]
        life.eviction, life.eviction_position = evict, self._position

    def _see_leave(self, leave: Leave) -> None:
        """Verify a leave: it takes effect at a published barrier, with every wave below it committed."""
        line, vw = self.timeline, leave.vw
        name = f"virtual worker {vw}, incarnation {leave.incarnation}, leaves at clock {leave.clock}"
        life = line.lives.get((vw, leave.incarnation))
        if life is None or line.members.get(vw) != leave.incarnation:
            self._refuse(f"{name}, but it is no member", vw, leave)
            return
        if leave.clock != line.barriers[-1] or leave.clock != line.published:
            self._findings.add(Kind.MEMBERSHIP, f"{name}, where no barrier is passed", leave.origin)
        if line.local[vw] != leave.clock:
            message = f"{name}, having committed {line.local[vw]} waves"
            self._findings.add(Kind.MEMBERSHIP, message, leave.origin)
        del line.members[vw]
        life.left = leave.clock

    def _see_handover(self, handover: Handover) -> None:
        """Verify a handover: once, by one that has left at that barrier."""
        vw, clock = handover.vw, handover.clock
        life = self.timeline.lives.get((vw, handover.incarnation))
        name = f"virtual worker {vw}, incarnation {handover.incarnation}, hands over its state at clock {clock}"
        if life is None or life.left != clock:
            self._findings.add(Kind.HANDOVER, f"{name}, where it does not leave", handover.origin)
        elif life.handover is not None:
            self._findings.add(Kind.HANDOVER, f"{name} a second time", handover.origin)
        else:
            life.handover = handover

    def _see_plan(self, plan: Plan) -> None:
        """Verify a plan version: newer than the last, of a member, at a barrier, with each layer in one stage."""
        line, vw = self.timeline, plan.vw
        life = line.lives.get((vw, plan.incarnation))
        if life is None or line.members.get(vw) != plan.incarnation:
            self._refuse(f"{plan.name} is of incarnation {plan.incarnation}, which is no member", vw, plan)
            return
        if plan.live and plan.clock <= max(line.barriers[-1], line.local[vw]):
            self._findings.add(Kind.PLAN, f"{plan.name} is announced when that wave has begun", plan.origin)
        if not plan.live and plan.clock not in line.pending and plan.clock != line.barriers[-1]:
            self._findings.add(Kind.PLAN, f"{plan.name} begins where there is no barrier", plan.origin)
        announced = line.announced.get(vw, [])
        known, layers = announced[-1] if announced else line.plans.get(vw), self._layout.num_layers
        is_kept = known is not None and (known.version, known.bounds) == (plan.version, plan.bounds)
        if known is not None and plan.version <= known.version and not is_kept:
            self._findings.add(Kind.PLAN, f"{plan.name} follows version {known.version}", plan.origin)
        rises = all(first < last for first, last in pairwise(plan.bounds))
        if not rises or plan.bounds[:1] != (0,) or plan.bounds[-1] != layers or len(plan.bounds) != life.num_stages + 1:
            message = f"{plan.name} cuts the {layers} layers at {list(plan.bounds)} for {life.num_stages} stages"
            self._findings.add(Kind.PLAN, message, plan.origin)
            return
        life.plans.append(plan)
        if plan.live:
            line.announced.setdefault(vw, []).append(plan)
        else:
            line.plans[vw] = plan

    def _see_waves(self, waves: Waves) -> None:
        """Verify N_v from a barrier on, and that the numbers of minibatches go on there."""
        line, vw, clock = self.timeline, waves.vw, waves.clock
        self._numbered.add((vw, clock))
        rule = line.rule_in(vw, clock)
        name = f"virtual worker {vw} has waves of {waves.minibatches_per_wave} minibatches at clock {clock}"
        if clock not in line.pending and clock != line.barriers[-1]:
            self._findings.add(Kind.WAVE_SIZE, f"{name}, where there is no barrier", waves.origin)
        elif waves.minibatches_per_wave != rule.minibatches_per_wave:
            message = f"{name}; those of the run have {rule.minibatches_per_wave}"
            self._findings.add(Kind.WAVE_SIZE, message, waves.origin)
        elif waves.before != rule.through(clock):
            message = f"{name} and goes on with minibatch {waves.before + 1}; the next one is {rule.through(clock) + 1}"
            self._findings.add(Kind.WAVE_SIZE, message, waves.origin)

    def _is_numbered(self, clock: int) -> bool:
        """Whether N has changed at or below a clock, so that each member has a line at every barrier."""
        changed = (*(change.clock for change in self._wave_changes), *self._renumbered)
        return self._has_numbers or any(at <= clock for at in changed)

    def finish(self) -> None:
        """Verify what the script decides; call after the last decision."""
        self._verify_numbered()
        self._verify_members()
        self._verify_lineups()
        self._verify_frozen()
        self._verify_active()

    def _verify_members(self) -> None:
        """Verify that those whom the script has dropped commit nothing, until it adds them again where they join."""
        line = self.timeline
        for (vw, wave), commit in line.commits.items():
            own = [each for each in self._members if each.vw == vw]
            newest = [each for each in own if each.clock <= wave][-1:]
            if newest and not newest[0].is_added:
                message = f"virtual worker {vw} commits wave {wave}, but the script drops it at clock {newest[0].clock}"
                self._findings.add(Kind.MEMBERSHIP, message, commit.origin)
            if own and not newest and own[0].is_added:
                message = (
                    f"virtual worker {vw} commits wave {wave}, but the script adds it at clock {own[0].clock} only"
                )
                self._findings.add(Kind.MEMBERSHIP, message, commit.origin)
        users: dict[tuple[str, int], int] = {}
        for (vw, wave), commit in line.commits.items():
            shares = vw < len(self._layout.devices) and (self._members or self._lineups)
            for device in self._layout.devices[vw] if shares else ():
                other = users.setdefault((device, wave), vw)
                if other != vw:
                    message = f"virtual worker {vw} commits wave {wave} on device {device}, as {other} does"
                    self._findings.add(Kind.MEMBERSHIP, message, commit.origin)
        for each in self._members:
            is_reached = each.clock in line.barriers[1:] and (line.end is None or each.clock < line.end.clock)
            if each.is_added and is_reached and each.clock not in [life.first_wave for life in line.lives_of(each.vw)]:
                message = f"virtual worker {each.vw} does not join at clock {each.clock}, where the script adds it"
                self._findings.add(Kind.MEMBERSHIP, message, line.publishes[each.clock].origin)

    def _verify_lineups(self) -> None:
        """Verify that those train who are for the frozen layers, and that they join where they begin to."""
        line, clocks = self.timeline, sorted(self._lineup_at)
        for (vw, wave), commit in line.commits.items() if clocks else ():
            since = max(clock for clock in clocks if clock <= wave)
            if vw not in self._lineup_at[since].members:
                message = f"virtual worker {vw} commits wave {wave}, but others train from clock {since} on"
                self._findings.add(Kind.MEMBERSHIP, message, commit.origin)
        for before, clock in pairwise(clocks):
            for vw in sorted(self._lineup_at[clock].members - self._lineup_at[before].members):
                if clock not in [life.first_wave for life in line.lives_of(vw)]:
                    message = f"virtual worker {vw} does not join at clock {clock}, where it replaces others"
                    self._findings.add(Kind.MEMBERSHIP, message, line.publishes[clock].origin)

    def _verify_numbered(self) -> None:
        """Verify that N is recorded wherever it must be."""
        for (vw, wave), commit in self.timeline.commits.items():
            if wave in self.timeline.barriers and self._is_numbered(wave) and (vw, wave) not in self._numbered:
                message = f"virtual worker {vw} commits wave {wave} behind a barrier at which its N is not recorded"
                self._findings.add(Kind.WAVE_SIZE, message, commit.origin)

    def _see_freeze(self, freeze: Freeze) -> None:
        """Verify frozen layers: at a barrier, never fewer than before, and the model's for F."""
        line, levels = self.timeline, self._layout.freeze_levels
        name = f"F = {freeze.frozen} from clock {freeze.clock} on"
        before = line.freezes[-1].frozen if line.freezes else self._start_frozen
        if freeze.clock not in line.pending and freeze.clock != line.barriers[-1]:
            self._findings.add(Kind.FREEZE, f"{name} begins where there is no barrier", freeze.origin)
        if freeze.frozen < before:
            self._findings.add(Kind.FREEZE, f"{name} follows F = {before}: frozen layers stay frozen", freeze.origin)
        wanted = levels[freeze.frozen] if freeze.frozen < len(levels) else None
        if freeze.layers != wanted:
            whose = f"{wanted} in this model" if wanted is not None else "no layers of this model"
            self._findings.add(Kind.FREEZE, f"{name} freezes the first {freeze.layers}: it is {whose}", freeze.origin)
        line.freezes.append(freeze)

    def _see_activate(self, activate: Activate) -> None:
        """Verify that other layers are active from a barrier on."""
        line = self.timeline
        if activate.clock not in line.pending and activate.clock != line.barriers[-1]:
            message = (
                f"layers {list(activate.inactive)} are inactive from clock {activate.clock} on, where no barrier is"
            )
            self._findings.add(Kind.ACTIVATE, message, activate.origin)
        line.activates.append(activate)

    def _verify_active(self) -> None:
        """Verify the inactive layers in every segment, and those that are built anew, by the job."""
        line = self.timeline
        before = line.start_clock
        last = None if line.end is None else line.end.clock
        committed = max((wave for _, wave in line.commits), default=-1)
        for clock in dict.fromkeys(line.barriers):
            if last is None and committed < clock:  # the history may end among the records of this barrier
                return
            if clock == last and clock != line.start_clock:  # nothing changes where the run ends
                return
            found, due = line.inactive_at(clock), self._inactive_due(clock)
            if found != due and clock in line.publishes:
                message = f"layers {list(found)} are inactive from clock {clock} on, where {list(due)} are due"
                self._findings.add(Kind.ACTIVATE, message, line.publishes[clock].origin)
            fresh, wanted = line.fresh_at(clock), self._fresh_due(clock)
            again = () if wanted or clock == before else line.fresh_at(before)
            if again and not any(each.samples for (_, wave), each in line.commits.items() if before <= wave < clock):
                wanted = tuple(layer for layer in again if layer not in due)
            if fresh != wanted and clock in line.publishes:
                message = f"layers {list(fresh)} are built anew at clock {clock}, where {list(wanted)} are due"
                self._findings.add(Kind.ACTIVATE, message, line.publishes[clock].origin)
            before = clock

    def _verify_frozen(self) -> None:
        """Verify F in every segment, by the job."""
        line, levels = self.timeline, self._layout.freeze_levels
        last, before = None if line.end is None else line.end.clock, self._start_frozen
        committed = max((wave for _, wave in line.commits), default=-1)
        for clock in dict.fromkeys(line.barriers):
            if last is None and committed < clock:  # the history may end among the records of this barrier
                return
            if clock != last or clock == line.start_clock:  # nothing freezes where the run ends
                due = self._freezing.due(clock, self._start_epoch + line.epochs_ended(clock))
                before = max(before, self._allowed(due))
                if self._norms_decide(clock):
                    self._verify_norms(clock)
                    totals: dict[int, float] = {}
                    for norms in sorted(line.norms.get(clock, ()), key=lambda each: each.vw):
                        for layer, square in zip(norms.layers, norms.squares, strict=True):
                            totals[layer] = totals.get(layer, 0.0) + square
                    frozen_layers = levels[before] if before < len(levels) else 0
                    before = self._allowed(self._freezing.decided(before, len(levels), totals, frozen_layers))
            found = line.frozen_at(clock)[0]
            origin = line.publishes[clock].origin if clock in line.publishes else None
            if found != before and origin is not None:
                self._findings.add(Kind.FREEZE, f"F is {found} from clock {clock} on, where {before} is due", origin)

    def _verify_norms(self, clock: int) -> None:
        """Verify that every member with minibatches since the barrier before has recorded its norms, once."""
        line = self.timeline
        since = max((barrier for barrier in line.barriers if barrier < clock), default=line.start_clock)
        recorded = [norms.vw for norms in line.norms.get(clock, ())]
        for vw in sorted({vw for vw, _ in line.commits} | set(recorded)):
            own = [line.commits.get((vw, wave)) for wave in range(since, clock)]
            is_due = bool(own) and own[-1] is not None and any(commit is not None and commit.samples for commit in own)
            times = recorded.count(vw)
            if times > 1 or (is_due and not times):
                message = f"norms of virtual worker {vw} are recorded {times} times at clock {clock}, where they decide"
                self._findings.add(Kind.FREEZE, message, line.publishes[clock].origin)

    def _allowed(self, frozen: int) -> int:
        """F as far as ties allow it."""
        levels = self._layout.freeze_levels
        return levels.index(levels[frozen]) if frozen < len(levels) else frozen

    def _norms_decide(self, clock: int) -> bool:
        """Whether norms of gradients decide at a barrier."""
        every = self._freezing.every_waves
        if self._freezing.alpha is None:
            return False
        return any(end.clock == clock for end in self.timeline.epoch_ends) if every is None else clock % every == 0

    def _see_join(self, join: Join) -> None:
        line, vw = self.timeline, join.vw
        name = f"virtual worker {vw}, incarnation {join.incarnation}, joins at clock {join.clock}"
        if vw not in line.local and join.num_stages is None:
            self._findings.add(Kind.MEMBERSHIP, f"{name}, but the plan has no such worker", join.origin)
            return
        newest = max((incarnation for owner, incarnation in line.lives if owner == vw), default=-1)
        self._see_wave_of(join, name)
        if vw in line.members:
            self._found(join, name)
            return
        if join.incarnation <= newest:
            self._findings.add(Kind.OLD_INCARNATION, f"{name}, after incarnation {newest} was over", join.origin)
            return
        if join.clock not in line.pending and join.clock != line.barriers[-1]:
            self._findings.add(Kind.MEMBERSHIP, f"{name}, where there is no barrier", join.origin)
        if join.clock < line.local.get(vw, join.clock):
            message = f"{name}, below its own committed clock {line.local[vw]}"
            self._findings.add(Kind.MEMBERSHIP, message, join.origin)
        self._admit(join)

    def _see_wave_of(self, join: Join, name: str) -> None:
        """Verify that N_v of a virtual worker is known and constant, and equal to the common N where there is one."""
        line, vw, given = self.timeline, join.vw, join.minibatches_per_wave
        if self._has_waves and vw not in line.rules and given is not None:
            line.rules[vw] = [line.rule.with_wave_of(given)]
        known = line.rule_in(vw, join.clock).minibatches_per_wave
        if given != (known if self._has_waves or self._is_numbered(join.clock) else None):
            has = "without an N of its own" if given is None else f"with waves of {given} minibatches"
            self._findings.add(Kind.WAVE_SIZE, f"{name} {has}; those of the run have {known}", join.origin)

    def _found(self, join: Join, name: str) -> None:
        """Verify a join of a member: legal only as the record of an initial worker, before its first commit."""
        line = self.timeline
        if join.clock != line.start_clock or line.local[join.vw] != line.start_clock:
            self._findings.add(Kind.MEMBERSHIP, f"{name}, but it is a member already", join.origin)
            return
        del line.lives[join.vw, line.members[join.vw]]
        self._admit(join)

    def _admit(self, join: Join) -> None:
        line, planned = self.timeline, self._layout.stages_of(join.vw)
        line.members[join.vw] = join.incarnation
        line.local[join.vw] = join.clock
        is_planned = join.num_stages is None or (join.clock == line.start_clock and join.num_stages == planned)
        line.lives[join.vw, join.incarnation] = Life(
            join.vw,
            join.incarnation,
            join.clock,
            join.num_stages or planned,
            self._layout.bounds[join.vw] if is_planned else None,
        )

    def _refuse(self, message: str, vw: int, decision: Decision) -> None:
        """Report a decision about an incarnation that is not a member: evicted, or never joined."""
        known = any(owner == vw for owner, _ in self.timeline.lives)
        self._findings.add(Kind.OLD_INCARNATION if known else Kind.MEMBERSHIP, message, decision.origin)
