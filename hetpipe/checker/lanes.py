"""Verify that every stage ran every minibatch exactly once and made every update when it was due.

A *lane* is one stage of one incarnation of a virtual worker. One process runs it, so within a lane line order is event
order. Missing events are verified at the end: a run cut short or an evicted incarnation may lack the tail of its work,
but nothing that was committed and nothing that a later event depends on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from hetpipe.checker.events import Backward, Forward, Pass, Skip, StageEvent, Step
from hetpipe.checker.facts import Facts
from hetpipe.checker.formulas import ends_update, forward_is_newest, forward_through, minibatches_in, wave_of
from hetpipe.checker.orders import OrderVerifier
from hetpipe.checker.report import Findings, Kind
from hetpipe.checker.rules import StagePosition, SyncRule
from hetpipe.checker.timeline import Timeline
from hetpipe.checker.versions import verify_frozen, verify_inactive


@dataclass(slots=True)
class _Lane:
    """Events of one stage of one incarnation. Each dictionary: p → its first event."""

    place: StagePosition
    forwards: dict[int, Forward] = field(default_factory=dict)
    backwards: dict[int, Backward] = field(default_factory=dict)
    steps: dict[int, Step] = field(default_factory=dict)
    last_step: int = 0
    needed_step: int = 0
    """The largest v(p) of its forwards that lies behind their barrier."""
    too_early: list[tuple[Pass, int]] = field(default_factory=list)
    """Passes that name an update of which there was no step, and the last one of which there was."""
    disordered: list[StageEvent] = field(default_factory=list)
    """Backwards before their forward, steps before their backward."""


class LaneVerifier:
    """Verifies forwards, backwards and steps; the events of one lane must come in file order."""

    def __init__(self, facts: Facts, timeline: Timeline, findings: Findings) -> None:
        self._batch_size = facts.data.batch_size
        self._timeline = timeline
        self._findings = findings
        self._orders = OrderVerifier(timeline, findings)
        self._lanes: dict[tuple[int, int], list[_Lane]] = {}

    def see(self, event: Pass | Step) -> None:
        """Verify one event of an incarnation and stage in the plan."""
        key = (event.vw, event.incarnation)
        lanes = self._lanes.get(key)
        if lanes is None:
            lanes = self._lanes[key] = [_Lane(place) for place in self._timeline.lives[key].places]
        lane = lanes[event.stage]
        wave = self._wave_of(event)
        verify_frozen(event, event.name, self._timeline, wave, self._findings)
        verify_inactive(event, event.name, self._timeline, wave, self._findings)
        if self._timeline.is_frozen(event.vw, event.incarnation, event.stage, wave):
            self._see_frozen(lane, event)
        elif isinstance(event, Forward):
            self._see_forward(lane, event)
        elif isinstance(event, Backward):
            self._see_backward(lane, event)
        elif isinstance(event, Step):
            self._see_step(lane, event)

    def finish(self) -> None:
        """Report missing lines."""
        committed_minibatches: Counter[tuple[int, int]] = Counter()
        for (vw, incarnation), lanes in self._lanes.items():
            started = _started(lanes)
            self._verify_gaps(started)
            for p in started:
                wave = wave_of(self._timeline.rule_of(vw, p), p)
                if self._timeline.committed(vw, incarnation, wave):
                    committed_minibatches[vw, wave] += 1
            due = {p for p in started if self._is_due(vw, incarnation, p)}
            stepping = self._stepping(started)
            for lane in lanes:
                self._verify_order(lane)
                self._verify_steps(lane, stepping)
                self._verify_missing(lane, due, started, stepping)
            self._verify_coverage(vw, incarnation, lanes)
        self._verify_skips()
        self._verify_commits(committed_minibatches)
        self._orders.finish()

    def num_skipped(self) -> int:
        """Updates skipped, each counted once per virtual worker."""
        return sum(len({p for lane in lanes for p in _skips(lane)}) for lanes in self._lanes.values())

    def _see_forward(self, lane: _Lane, event: Forward) -> None:
        if event.p in lane.forwards:
            self._findings.add(Kind.MINIBATCH_TWICE, f"a second {event.name}", event.origin)
            return
        lane.forwards[event.p] = event
        self._orders.see(event)
        floor, rule = self._floor(event, event.p), self._timeline.rule_of(event.vw, event.p)
        through = forward_through(rule, event.p, floor, lane.place)
        if through > rule.through(floor):
            lane.needed_step = max(lane.needed_step, through)
        self._verify_newest(lane, event, floor, must_be=forward_is_newest(rule))

    def _see_frozen(self, lane: _Lane, event: Pass | Step) -> None:
        """Verify an event of a stage of frozen layers alone: a forward, each once, in order."""
        if not isinstance(event, Forward):
            self._findings.add(Kind.FROZEN_TRAINED, f"{event.name}, all of whose layers are frozen", event.origin)
            return
        if event.p in lane.forwards:
            self._findings.add(Kind.MINIBATCH_TWICE, f"a second {event.name}", event.origin)
            return
        last = max(lane.forwards, default=0)
        if event.p < last:
            message = f"{event.name} comes after the one of p = {last}"
            self._findings.add(Kind.OUT_OF_ORDER, message, event.origin)
        lane.forwards[event.p] = event

    def _see_backward(self, lane: _Lane, event: Backward) -> None:
        if event.p in lane.backwards:
            self._findings.add(Kind.MINIBATCH_TWICE, f"a second {event.name}", event.origin)
            return
        lane.backwards[event.p] = event
        self._orders.see(event)
        if event.p not in lane.forwards:
            lane.disordered.append(event)
        floor = self._floor(event, event.p)
        self._verify_newest(lane, event, floor, must_be=self._timeline.rule.predicts)

    def _verify_newest(self, lane: _Lane, event: Pass, floor: int, *, must_be: bool) -> None:
        """Verify that a pass sees only updates its stage has made, and all of them if `must_be`."""
        newest = max(lane.last_step, self._timeline.rule_of(event.vw, event.p).through(floor))
        if event.local_through > newest:
            lane.too_early.append((event, newest))
        elif must_be and event.local_through < newest:
            message = f"{event.name} has own updates through {event.local_through}, but its stage has {newest}"
            self._findings.add(Kind.NOT_NEWEST, message, event.origin)

    def _see_step(self, lane: _Lane, event: Step) -> None:
        if event.p in lane.steps:
            self._findings.add(Kind.STEP_TWICE, f"a second {event.name}", event.origin)
            return
        lane.steps[event.p] = event
        if event.p < lane.last_step:
            message = f"{event.name} comes after the step of p = {lane.last_step}"
            self._findings.add(Kind.STEP_ORDER, message, event.origin)
        lane.last_step = max(lane.last_step, event.p)
        if event.p not in lane.backwards:
            lane.disordered.append(event)

    def _verify_skips(self) -> None:
        """Verify that an update is skipped on all stages at one scale, or on none; under allreduce on all replicas."""
        first: dict[tuple[int, ...], Step] = {}
        together = self._timeline.rule.sync is SyncRule.ALLREDUCE
        for (vw, incarnation), lanes in self._lanes.items():
            for step in (step for lane in lanes for step in lane.steps.values()):
                rule = self._timeline.rule_of(vw, step.p)
                update = (wave_of(rule, step.p),) if together else (vw, incarnation, step.p)
                known = first.setdefault(update, step)
                if known is not step and _scale_of(known) != _scale_of(step):
                    message = f"{step.name}{_at_scale(step)}, but {known.name}{_at_scale(known)}"
                    self._findings.add(Kind.SKIPPED_APART, message, step.origin)

    def _wave_of(self, event: StageEvent) -> int:
        return wave_of(self._timeline.rule_of(event.vw, event.p), event.p)

    def _floor(self, event: StageEvent, p: int) -> int:
        """The latest barrier before minibatch `p` that binds the incarnation of `event`."""
        wave = wave_of(self._timeline.rule_of(event.vw, p), p)
        return self._timeline.floor_clock(event.vw, event.incarnation, wave)

    def _stepping(self, started: dict[int, StageEvent]) -> set[int]:
        """Minibatches that end an update: those that fill a group, and the last before each barrier."""
        last = {self._floor(event, p): p for p, event in started.items()}
        return {p for p, event in started.items() if ends_update(self._timeline.rule_of(event.vw, p), p)}.union(
            last.values()
        )

    def _is_due(self, vw: int, incarnation: int, p: int) -> bool:
        """Whether p must be complete: no eviction or cut excuses it."""
        line = self._timeline
        if line.committed(vw, incarnation, wave_of(line.rule_of(vw, p), p)):
            return True
        if line.lives[vw, incarnation].left is not None:
            return True
        return line.complete and line.members.get(vw) == incarnation

    def _verify_gaps(self, started: dict[int, StageEvent]) -> None:
        """Verify that minibatches are numbered without gaps from each barrier on."""
        previous, previous_floor = 0, -1
        for p, event in started.items():
            floor = self._floor(event, p)
            first = self._timeline.rule_of(event.vw, p).through(floor) + 1
            expected = previous + 1 if floor == previous_floor else first
            if p != expected:
                skipped = f"p = {expected}" if expected == p - 1 else f"p = {expected} … {p - 1}"
                message = f"{skipped} of virtual worker {event.vw} never started, but the {event.name} did"
                self._findings.add(Kind.MINIBATCH_MISSING, message, event.origin)
            previous, previous_floor = p, floor

    def _verify_order(self, lane: _Lane) -> None:
        """Verify the order of present lines; missing ones are reported separately."""
        for event in lane.disordered:
            before = lane.forwards if isinstance(event, Backward) else lane.backwards
            if event.p in before:
                message = f"{event.name} comes before the {before[event.p].name}"
                self._findings.add(Kind.MINIBATCH_ORDER, message, event.origin)

    def _verify_steps(self, lane: _Lane, stepping: set[int]) -> None:
        """Report unexpected steps, and passes on updates that came later or never."""
        for p, step in lane.steps.items():
            if p not in stepping:
                message = f"{step.name}, whose gradient goes into the update of a later minibatch"
                self._findings.add(Kind.STEP_UNDUE, message, step.origin)
        for event, newest in lane.too_early:
            through = event.local_through
            if through in lane.steps or through not in stepping:  # else that step is missing, and reported so
                message = f"{event.name} has own updates through {through}, but its stage has made those to {newest}"
                self._findings.add(Kind.UPDATE_NOT_READY, message, event.origin)

    def _verify_missing(self, lane: _Lane, due: set[int], started: dict[int, StageEvent], stepping: set[int]) -> None:
        """Report missing events of a lane: all due ones, and dependencies of later ones."""
        last_forward = max(lane.forwards, default=0)
        last_backward = max(lane.backwards, default=0)
        last_step = max(lane.last_step, lane.needed_step)
        for p, event in started.items():
            forward, backward, step = lane.forwards.get(p), lane.backwards.get(p), lane.steps.get(p)
            wanted = p in due
            if forward is None and (wanted or backward is not None or step is not None or p < last_forward):
                self._report_missing(Kind.MINIBATCH_MISSING, "forward", lane, event)
            if self._timeline.is_frozen(event.vw, event.incarnation, lane.place.stage, self._wave_of(event)):
                continue
            if backward is None and (wanted or step is not None or p < last_backward):
                self._report_missing(Kind.MINIBATCH_MISSING, "backward", lane, forward or event)
            if step is None and p in stepping and (wanted or p <= last_step):
                self._report_missing(Kind.STEP_MISSING, "step", lane, backward or forward or event)

    def _verify_coverage(self, vw: int, incarnation: int, lanes: list[_Lane]) -> None:
        """Verify that the layers that each stage has by the version that it carries are together all, each once.

        Of minibatches with a pass on every stage; missing ones are reported separately.
        """
        bounds = {plan.version: plan.bounds for plan in self._timeline.lives[vw, incarnation].plans}
        for passes in ([lane.forwards for lane in lanes], [lane.backwards for lane in lanes]) if bounds else ():
            for p, event in passes[0].items():
                found = [each.get(p) for each in passes]
                cuts = [bounds.get(each.version) for each in found if each is not None]
                if len(cuts) < len(passes) or len({each.version for each in found if each is not None}) == 1:
                    continue
                spans = [cut[stage : stage + 2] for stage, cut in enumerate(cuts) if cut is not None]
                if any(left[1] != right[0] for left, right in pairwise(spans)):
                    layers = ", ".join(f"[{first}, {last})" for first, last in spans)
                    message = f"{event.name} and the passes of its other stages compute the layers {layers}"
                    self._findings.add(Kind.LAYER_COVERAGE, message, event.origin)

    def _report_missing(self, kind: Kind, what: str, lane: _Lane, known: StageEvent) -> None:
        message = f"p = {known.p} of virtual worker {known.vw} has no {what} on stage {lane.place.stage}"
        self._findings.add(kind, message, known.origin)

    def _verify_commits(self, minibatches: Counter[tuple[int, int]]) -> None:
        for (vw, wave), commit in self._timeline.commits.items():
            expected = minibatches_in(commit.samples, self._batch_size)
            if minibatches[vw, wave] != expected:
                message = (
                    f"commit of wave {wave} by virtual worker {vw} counts {commit.samples} samples ({expected} "
                    f"minibatches of {self._batch_size}), but {minibatches[vw, wave]} minibatches were started"
                )
                self._findings.add(Kind.SAMPLE_COUNT, message, commit.origin)


def _skips(lane: _Lane) -> list[int]:
    return [p for p, step in lane.steps.items() if isinstance(step, Skip)]


def _scale_of(step: Step) -> int | None:
    """Loss scale at which an update was skipped; None if it was not."""
    return step.scale if isinstance(step, Skip) else None


def _at_scale(step: Step) -> str:
    return f" at scale {step.scale}" if isinstance(step, Skip) else ""


def _started(lanes: list[_Lane]) -> dict[int, StageEvent]:
    """Every minibatch seen at any stage, ascending → one of its events, from the first stage that has one."""
    found: dict[int, StageEvent] = {}
    for lane in lanes:
        for events in (lane.forwards, lane.backwards, lane.steps):
            for p, event in events.items():
                found.setdefault(p, event)
    return dict(sorted(found.items()))
