"""Verify the weights each minibatch saw (`wsp.md` §2, §3; `policies.md`): gate, own updates, one published clock.

W* is the same for all stages and both directions of a minibatch. Its own updates follow the policy's table and may
differ between stages and directions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetpipe.checker.events import Forward, Pass, Step, Wave
from hetpipe.checker.formulas import (
    backward_through,
    determined_clock,
    forward_through,
    is_switch_point,
    needs_pull,
    required_clock,
    wave_of,
)
from hetpipe.checker.report import Findings, Kind
from hetpipe.checker.timeline import Life, Timeline

_Minibatches = dict[int, Pass]


def verify_frozen(event: Pass | Step | Wave, name: str, timeline: Timeline, wave: int, findings: Findings) -> None:
    """Verify that an event in a wave carries the F in force there."""
    frozen = timeline.frozen_at(wave)[0]
    if event.frozen != frozen:
        message = f"{name} has {event.frozen} frozen layers, where F = {frozen} is in force"
        findings.add(Kind.FROZEN_COUNT, message, event.origin)


def verify_inactive(event: Pass | Step | Wave, name: str, timeline: Timeline, wave: int, findings: Findings) -> None:
    """Verify that a stage leaves out its inactive layers in a wave, and no others."""
    inactive, bounds = timeline.inactive_at(wave), timeline.lives[event.vw, event.incarnation].bounds_at(wave)
    first, last = (0, math.inf) if bounds is None else bounds[event.stage : event.stage + 2]
    due = tuple(layer for layer in inactive if first <= layer < last)
    is_right = event.inactive == due if bounds is not None else set(event.inactive) <= set(due)
    if not is_right:
        message = f"{name} leaves out the layers {list(event.inactive)}, where {list(due)} of the stage are inactive"
        findings.add(Kind.INACTIVE_LAYERS, message, event.origin)


def verify_plan_version(event: Pass | Wave, name: str, life: Life, wave: int, findings: Findings) -> None:
    """Verify that an event in a wave carries the plan version in force there; older histories have no versions."""
    plan = life.plan_at(wave)
    if plan is not None and event.version != plan.version:
        message = f"{name} carries version {event.version} of its plan, where version {plan.version} is in force"
        findings.add(Kind.PLAN_VERSION, message, event.origin)


@dataclass(slots=True)
class _Seen:
    """Events of one incarnation so far."""

    life: Life
    first: _Minibatches
    """p → the first pass seen; its clock is what all others must have."""
    unpublished: set[int]
    """Minibatches whose clock was reported as unpublished."""


class VersionVerifier:
    """Verifies forwards and backwards, in any order."""

    def __init__(self, timeline: Timeline, findings: Findings) -> None:
        self._timeline = timeline
        self._findings = findings
        self._seen: dict[tuple[int, int], _Seen] = {}

    def see(self, event: Pass) -> None:
        """Verify one forward or backward of a known incarnation."""
        key = (event.vw, event.incarnation)
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = _Seen(self._timeline.lives[key], {}, set())
        rule = self._timeline.rule_of(event.vw, event.p)
        floor = self._timeline.floor_clock(event.vw, event.incarnation, wave_of(rule, event.p))
        first = seen.first.get(event.p)
        if first is None:
            seen.first[event.p] = event
            self._verify_clock(event, floor, seen.life)
            self._verify_life(event, seen.life)
        elif first.clock != event.clock:
            message = f"{event.name} uses clock {event.clock}, but {first.name} uses clock {first.clock}"
            self._findings.add(Kind.MIXED_VERSIONS, message, event.origin)
        self._verify_through(event, floor, seen.life)
        verify_plan_version(event, event.name, seen.life, wave_of(rule, event.p), self._findings)
        if isinstance(event, Forward):
            self._verify_published(event, seen)

    def num_minibatches(self) -> int:
        """Number of distinct minibatches."""
        return len({(vw, p) for (vw, _), seen in self._seen.items() for p in seen.first})

    def finish(self) -> None:
        """Verify the changes of the clock in use, which needs the whole incarnation."""
        for seen in self._seen.values():
            previous: Pass | None = None
            for p in sorted(seen.first):
                current = seen.first[p]
                if previous is not None:
                    self._verify_switch(previous, current)
                previous = current

    def _verify_clock(self, event: Pass, floor: int, life: Life) -> None:
        rule = self._timeline.rule_of(event.vw, event.p)
        required = required_clock(rule, event.p, floor)
        if event.clock < required:
            message = f"{event.name} starts with clock {event.clock}, but needs clock {required} (barrier {floor})"
            self._findings.add(Kind.STALE_CLOCK, message, event.origin)
        elif rule.determines_clock and event.clock != (due := determined_clock(rule, event.p, floor)):
            why = "a deterministic run" if rule.has_shards else f"a run with sync {rule.sync}"
            message = f"{event.name} starts with clock {event.clock}, but {why} takes {due}"
            self._findings.add(Kind.NOT_REQUIRED_CLOCK, message, event.origin)
        through = forward_through(rule, event.p, floor, life.places[0])
        last_published = rule.through(event.clock)
        if last_published > through:
            message = (
                f"{event.name} starts with clock {event.clock}, which holds minibatches through {last_published}, "
                f"beyond the own updates through {through} of the first stage"
            )
            self._findings.add(Kind.CLOCK_BEYOND_LOCAL, message, event.origin)

    def _verify_through(self, event: Pass, floor: int, life: Life) -> None:
        formula = forward_through if isinstance(event, Forward) else backward_through
        through = formula(self._timeline.rule_of(event.vw, event.p), event.p, floor, life.places[event.stage])
        if event.local_through != through:
            message = f"{event.name} has own updates through {event.local_through} instead of {through}"
            self._findings.add(Kind.WRONG_LOCAL_THROUGH, message, event.origin)

    def _verify_life(self, event: Pass, life: Life) -> None:
        wave = wave_of(self._timeline.rule_of(event.vw, event.p), event.p)
        end = self._timeline.end_for(event.vw, event.incarnation)
        if end is not None and wave >= end:
            message = f"{event.name} starts behind the end of the run at clock {end}"
            self._findings.add(Kind.PAST_END, message, event.origin)
        if wave < life.first_wave:
            message = f"{event.name} lies before clock {life.first_wave}, where this incarnation joined"
            self._findings.add(Kind.MEMBERSHIP, message, event.origin)
        if life.left is not None and wave >= life.left:
            message = f"{event.name} lies behind clock {life.left}, where this incarnation left"
            self._findings.add(Kind.MEMBERSHIP, message, event.origin)

    def _verify_published(self, event: Forward, seen: _Seen) -> None:
        line = self._timeline
        made_it = event.vw == 0 and event.clock == line.start_clock == 0  # virtual worker 0 creates w_0 itself
        if not made_it and not line.is_published_before(event.clock, event.origin) and event.p not in seen.unpublished:
            seen.unpublished.add(event.p)
            message = f"{event.name} starts with clock {event.clock} before it is published"
            self._findings.add(Kind.UNPUBLISHED_CLOCK, message, event.origin)
        publish = line.publishes.get(event.clock)
        if publish is None:
            return
        if event.origin.term < publish.origin.term:
            message = f"{event.name} in term {event.origin.term} uses clock {event.clock} of term {publish.origin.term}"
            self._findings.add(Kind.OLD_TERM, message, event.origin)
        evicted_at = seen.life.eviction_position
        if evicted_at is not None and line.publish_positions[event.clock] > evicted_at:
            # An incarnation may compute until it learns of its eviction, but nothing newer is served to it.
            message = f"{event.name} uses clock {event.clock}, published after this incarnation was evicted"
            self._findings.add(Kind.OLD_INCARNATION, message, event.origin)

    def _verify_switch(self, previous: Pass, current: Pass) -> None:
        if current.clock == previous.clock:
            return
        rule = self._timeline.rule_of(current.vw, current.p)
        floor = self._timeline.floor_clock(current.vw, current.incarnation, wave_of(rule, current.p))
        change = (
            f"virtual worker {current.vw} changes from clock {previous.clock} to {current.clock} at p = {current.p}"
        )
        if current.clock < previous.clock:
            self._findings.add(Kind.CLOCK_FELL, f"{change}: the clock in use fell", current.origin)
        if not is_switch_point(rule, current.p, floor):
            self._findings.add(Kind.CLOCK_SWITCH, f"{change}, which is no switch point", current.origin)
        elif not needs_pull(rule, current.p, floor, previous.clock):
            self._findings.add(Kind.NEEDLESS_PULL, f"{change}, where the old one will do", current.origin)
