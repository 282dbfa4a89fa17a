"""Verify the order of computation of each stage (`policies.md`, Schedules; `wsp.md` §5).

Every stage runs its forwards and its backwards in order of p and is drained at barriers. Weight policies add
constraints: strict 1F1B, at most S_i in flight, under `flush` a drain after each wave, and under `gpipe` all forwards
of a wave before its backwards. A premature backward can only be detected once the following minibatches are known, so
that check runs at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hetpipe.checker.events import Backward, Forward, Pass
from hetpipe.checker.formulas import drained_since, most_in_flight, wave_of
from hetpipe.checker.report import Findings, Kind
from hetpipe.checker.rules import OrderRule, RunRule, StagePosition
from hetpipe.checker.timeline import Timeline


@dataclass(slots=True)
class _Lane:
    """Progress of one stage of one incarnation."""

    rule: RunRule
    place: StagePosition
    forwarded: int = 0
    """The last minibatch whose forward began."""
    backwarded: int = 0
    drained_since: int = 0
    """The clock before whose minibatches it was drained when that forward began."""
    early: list[tuple[Backward, int]] = field(default_factory=list)
    """Backwards with room for another forward, and the last forward before each."""

    @property
    def limit(self) -> int | None:
        """S_i, or None."""
        return most_in_flight(self.rule, self.place)


@dataclass(slots=True)
class _Life:
    lanes: list[_Lane]
    last: dict[int, int] = field(default_factory=dict)
    """Clock at which the pipeline was drained → the last minibatch that any stage forwarded before the next drain."""


class OrderVerifier:
    """Verifies forwards and backwards, each passed once; those of one stage must come in file order."""

    def __init__(self, timeline: Timeline, findings: Findings) -> None:
        self._timeline = timeline
        self._findings = findings
        self._lives: dict[tuple[int, int], _Life] = {}

    def see(self, event: Pass) -> None:
        """Verify one pass of an incarnation and stage in the plan."""
        key = (event.vw, event.incarnation)
        life = self._lives.get(key)
        if life is None:
            rule = self._timeline.rule_of(event.vw, event.p)
            life = self._lives[key] = _Life([_Lane(rule, place) for place in self._timeline.lives[key].places])
        lane = life.lanes[event.stage]
        lane.rule = self._timeline.rule_of(event.vw, event.p)
        since = self._since(event)
        if isinstance(event, Forward):
            life.last[since] = max(life.last.get(since, 0), event.p)
            self._see_forward(lane, event, since)
        elif isinstance(event, Backward):
            self._see_backward(lane, event, since)

    def finish(self) -> None:
        """Verify backwards against the forwards that follow them."""
        for life in self._lives.values():
            for lane in life.lanes:
                for backward, forwarded in lane.early:
                    if forwarded < life.last.get(self._since(backward), 0):
                        message = f"{backward.name} comes before the forward of p = {forwarded + 1}, which is due"
                        self._findings.add(Kind.BACKWARD_EARLY, message, backward.origin)

    def _since(self, event: Pass) -> int:
        rule = self._timeline.rule_of(event.vw, event.p)
        floor = self._timeline.floor_clock(event.vw, event.incarnation, wave_of(rule, event.p))
        return drained_since(rule, event.p, floor)

    def _see_forward(self, lane: _Lane, event: Forward, since: int) -> None:
        if event.p < lane.forwarded:
            message = f"{event.name} comes after the one of p = {lane.forwarded}"
            self._findings.add(Kind.OUT_OF_ORDER, message, event.origin)
            return
        if since > lane.drained_since and lane.backwarded < lane.forwarded:
            message = f"{event.name} comes before the backward of p = {lane.forwarded}: the pipeline is not drained"
            self._findings.add(Kind.NOT_DRAINED, message, event.origin)
        lane.forwarded, lane.drained_since = event.p, since
        in_flight = self._in_flight(lane, since)
        if lane.limit is not None and in_flight > lane.limit:
            message = f"{event.name} puts {in_flight} minibatches in flight, more than {lane.limit}"
            self._findings.add(Kind.IN_FLIGHT, message, event.origin)

    def _see_backward(self, lane: _Lane, event: Backward, since: int) -> None:
        if event.p < lane.backwarded:
            message = f"{event.name} comes after the one of p = {lane.backwarded}"
            self._findings.add(Kind.OUT_OF_ORDER, message, event.origin)
            return
        if event.p <= lane.forwarded and self._may_be_early(lane, since):
            lane.early.append((event, lane.forwarded))
        lane.backwarded = event.p

    def _may_be_early(self, lane: _Lane, since: int) -> bool:
        """Whether the stage should have run another forward before this backward, if one was left."""
        if lane.rule.order is OrderRule.GPIPE:
            return (lane.forwarded - lane.rule.origin) % lane.rule.minibatches_per_wave != 0
        return lane.rule.is_strict and lane.limit is not None and self._in_flight(lane, since) < lane.limit

    def _in_flight(self, lane: _Lane, since: int) -> int:
        return lane.forwarded - max(lane.backwarded, lane.rule.through(since))
