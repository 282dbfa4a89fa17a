"""Verify a summary history: one line per stage and wave instead of per minibatch.

A line has the minibatches of a wave and the published clocks with which the first and the last of them started. That
suffices to verify the staleness bound of every wave, and that every committed wave was computed once by every stage.
Own updates seen by each minibatch, the order within a wave and the steps are not recorded, and not verified.
"""

from __future__ import annotations

from hetpipe.checker.events import Wave
from hetpipe.checker.facts import Facts
from hetpipe.checker.formulas import determined_clock, minibatches_in, needs_pull, required_clock, wave_of
from hetpipe.checker.report import Findings, Kind
from hetpipe.checker.timeline import Timeline
from hetpipe.checker.versions import verify_frozen, verify_inactive, verify_plan_version


class WaveVerifier:
    """Verifies wave lines, in any order."""

    def __init__(self, facts: Facts, timeline: Timeline, findings: Findings) -> None:
        self._batch_size = facts.data.batch_size
        self._timeline = timeline
        self._findings = findings
        #: (vw, incarnation, wave) → stage → its line.
        self._waves: dict[tuple[int, int, int], dict[int, Wave]] = {}

    def see(self, event: Wave) -> None:
        """Verify one stage's wave, of a known incarnation."""
        stages = self._waves.setdefault((event.vw, event.incarnation, event.wave), {})
        if event.stage in stages:
            self._findings.add(Kind.MINIBATCH_TWICE, f"{event.name} is computed a second time", event.origin)
            return
        stages[event.stage] = event
        rule = self._timeline.rule_in(event.vw, event.wave)
        first = rule.through(event.wave) + 1
        if event.first != first or wave_of(rule, max(event.last, 1)) != event.wave:
            due = f"but begins with {first}"
            message = f"{event.name} has the minibatches {event.first} to {event.last}, {due}"
            self._findings.add(Kind.MINIBATCH_MISSING, message, event.origin)
            return
        self._verify_clocks(event)
        self._verify_life(event)
        life = self._timeline.lives[event.vw, event.incarnation]
        verify_plan_version(event, event.name, life, event.wave, self._findings)
        verify_frozen(event, event.name, self._timeline, event.wave, self._findings)
        verify_inactive(event, event.name, self._timeline, event.wave, self._findings)

    def num_minibatches(self) -> int:
        """Number of minibatches in all waves computed by some stage."""
        return sum(max(wave.last - wave.first + 1 for wave in stages.values()) for stages in self._waves.values())

    def finish(self) -> None:
        """Verify that the stages of a virtual worker agree, and that committed waves were computed."""
        if self._timeline.rule.pulls_when_required:
            self._verify_pulls()
        for stages in self._waves.values():
            first, *others = stages.values()
            for other in others:
                if (other.first_clock, other.last_clock) != (first.first_clock, first.last_clock):
                    message = (
                        f"{other.name} uses the clocks {other.first_clock} to {other.last_clock}, but stage "
                        f"{first.stage} uses {first.first_clock} to {first.last_clock}"
                    )
                    self._findings.add(Kind.MIXED_VERSIONS, message, other.origin)
        for (vw, wave), commit in self._timeline.commits.items():
            life = self._timeline.lives.get((vw, commit.incarnation))
            expected = minibatches_in(commit.samples, self._batch_size)
            if life is None or not expected:
                continue
            found = self._waves.get((vw, commit.incarnation, wave), {})
            for place in life.places:
                line = found.get(place.stage)
                if line is None:
                    message = (
                        f"wave {wave} of virtual worker {vw} is committed, but not computed on stage {place.stage}"
                    )
                    self._findings.add(Kind.MINIBATCH_MISSING, message, commit.origin)
                elif line.last - line.first + 1 != expected:
                    message = (
                        f"commit of wave {wave} by virtual worker {vw} counts {commit.samples} samples ({expected} "
                        f"minibatches of {self._batch_size}), but {line.name} has {line.last - line.first + 1}"
                    )
                    self._findings.add(Kind.SAMPLE_COUNT, message, line.origin)

    def _verify_pulls(self) -> None:
        """Verify that the clocks of first stages change only where required, if the job pulls when required."""
        previous: tuple[int, int] | None = None
        last_clock = 0
        for (vw, incarnation, wave), stages in sorted(self._waves.items()):
            event = stages[min(stages)]
            floor = self._timeline.floor_clock(vw, incarnation, wave)
            for p, clock in ((event.first, event.first_clock), (event.last, event.last_clock)):
                if (
                    previous == (vw, incarnation)
                    and clock != last_clock
                    and not needs_pull(self._timeline.rule_of(vw, p), p, floor, last_clock)
                ):
                    change = f"p = {p} of {event.name} goes from clock {last_clock} to {clock}"
                    self._findings.add(Kind.NEEDLESS_PULL, f"{change}, where the old one will do", event.origin)
                previous, last_clock = (vw, incarnation), clock

    def _verify_clocks(self, event: Wave) -> None:
        line, rule = self._timeline, self._timeline.rule_in(event.vw, event.wave)
        floor = line.floor_clock(event.vw, event.incarnation, event.wave)
        for p, clock in ((event.first, event.first_clock), (event.last, event.last_clock)):
            required = required_clock(rule, p, floor)
            name = f"p = {p} of {event.name} starts with clock {clock}"
            if clock < required:
                self._findings.add(
                    Kind.STALE_CLOCK, f"{name}, but needs clock {required} (barrier {floor})", event.origin
                )
            elif rule.determines_clock and clock != (due := determined_clock(rule, p, floor)):
                why = "a deterministic run" if rule.has_shards else f"a run with sync {rule.sync}"
                self._findings.add(Kind.NOT_REQUIRED_CLOCK, f"{name}, but {why} takes {due}", event.origin)
            made_it = event.vw == 0 and clock == line.start_clock == 0  # virtual worker 0 creates w_0 itself
            if not made_it and not line.is_published_before(clock, event.origin):
                self._findings.add(Kind.UNPUBLISHED_CLOCK, f"{name} before it is published", event.origin)
        if event.last_clock < event.first_clock:
            message = f"{event.name} changes from clock {event.first_clock} to {event.last_clock}"
            self._findings.add(Kind.CLOCK_FELL, f"{message}: the clock in use fell", event.origin)

    def _verify_life(self, event: Wave) -> None:
        life = self._timeline.lives[event.vw, event.incarnation]
        end = self._timeline.end_for(event.vw, event.incarnation)
        if end is not None and event.wave >= end:
            message = f"{event.name} lies behind the end of the run at clock {end}"
            self._findings.add(Kind.PAST_END, message, event.origin)
        if event.wave < life.first_wave:
            message = f"{event.name} lies before clock {life.first_wave}, where this incarnation joined"
            self._findings.add(Kind.MEMBERSHIP, message, event.origin)
        if life.left is not None and event.wave >= life.left:
            message = f"{event.name} lies behind clock {life.left}, where this incarnation left"
            self._findings.add(Kind.MEMBERSHIP, message, event.origin)
