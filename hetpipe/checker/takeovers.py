"""Verify what virtual workers begin with that take over the state of one that leaves where they join.

The decision log says whether that one has left its state behind (`handover`); each stage writes what it begins with
(`takeover`), before it computes.
"""

from __future__ import annotations

from hetpipe.checker.events import Pass, Takeover, Wave
from hetpipe.checker.report import Findings, Kind
from hetpipe.checker.timeline import Timeline


class TakeoverVerifier:
    """Verifies takeovers in any order, against the timeline."""

    def __init__(self, timeline: Timeline, findings: Findings) -> None:
        self._timeline = timeline
        self._findings = findings
        #: (vw, incarnation) → stage → what it begins with.
        self._found: dict[tuple[int, int], dict[int, Takeover]] = {}
        #: The stages of incarnations that have computed.
        self._computed: dict[tuple[int, int], dict[int, Pass | Wave]] = {}

    def see(self, event: Takeover) -> None:
        """Verify one stage's takeover."""
        line = self._timeline
        if line.lives[event.vw, event.incarnation].first_wave != event.clock:
            self._findings.add(Kind.HANDOVER, f"{event.name}, where it does not join", event.origin)
        own = self._found.setdefault((event.vw, event.incarnation), {})
        if event.stage in own:
            self._findings.add(Kind.HANDOVER, f"{event.name}, a second time", event.origin)
        own[event.stage] = event
        left = [life for life in line.lives_of(event.source) if life.left == event.clock]
        if not left:
            message = f"{event.name}, where virtual worker {event.source} does not leave"
            self._findings.add(Kind.HANDOVER, message, event.origin)
            return
        handover = left[0].handover
        if handover is None:
            if line.complete:  # else a kill may have lost the line
                message = f"{event.name}, but it is not decided what virtual worker {event.source} leaves"
                self._findings.add(Kind.HANDOVER, message, event.origin)
        elif handover.whole != event.whole:
            has = "has" if handover.whole else "has not"
            message = f"{event.name}, but virtual worker {event.source} {has} left its state"
            self._findings.add(Kind.HANDOVER, message, event.origin)

    def see_pass(self, event: Pass | Wave) -> None:
        """Record that a stage computes."""
        self._computed.setdefault((event.vw, event.incarnation), {}).setdefault(event.stage, event)

    def finish(self) -> None:
        """Verify that all stages of a virtual worker that compute take over, or none, and from one source."""
        for life, own in self._found.items():
            first = own[min(own)]
            for stage, computed in self._computed.get(life, {}).items():
                if stage not in own:
                    message = f"stage {stage} of virtual worker {life[0]} computes without a takeover; {first.name}"
                    self._findings.add(Kind.HANDOVER, message, computed.origin)
            for event in own.values():
                if event.source != first.source:
                    self._findings.add(Kind.HANDOVER, f"{event.name}, but {first.name}", event.origin)
