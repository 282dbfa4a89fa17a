"""Verify that caches spare the frozen layers of minibatches that they have, and no others (`caching.md`).

A cache belongs to one node, so the times of its lines are comparable. Entries are only replaced by ones that spare
more, and nothing is evicted: what a cache has of a unit at some time spares every layer before the last border at which
it was kept until then. A minibatch is read where all of its units stand at the same border.
"""

from __future__ import annotations

from collections import defaultdict

from hetpipe.checker.events import Crossed
from hetpipe.checker.formulas import wave_of
from hetpipe.checker.report import Findings, Kind
from hetpipe.checker.timeline import Timeline


class CrossingVerifier:
    """Verifies the lines `crossed`, which may come in any order."""

    def __init__(self, timeline: Timeline, findings: Findings) -> None:
        self._timeline = timeline
        self._findings = findings
        #: Cache and unit → the lines that keep it.
        self._kept: defaultdict[tuple[str, str], list[Crossed]] = defaultdict(list)
        self._lines: list[Crossed] = []
        #: Virtual worker, incarnation and minibatch → stage → its line.
        self._minibatches: defaultdict[tuple[int, int, int], dict[int, Crossed]] = defaultdict(dict)

    def see(self, event: Crossed) -> None:
        """Collect one line of an incarnation and stage in the plan."""
        own = self._minibatches[event.vw, event.incarnation, event.p]
        if event.stage in own:
            self._findings.add(Kind.FROZEN_CROSSED, f"a second {event.name}", event.origin)
            return
        own[event.stage] = event
        if event.units:
            self._lines.append(event)
            for unit in event.units if event.kept else ():
                self._kept[event.cache, unit].append(event)

    def finish(self) -> None:
        """Report violations."""
        for own in self._minibatches.values():
            self._verify_path([own[stage] for stage in sorted(own)])
        for line in self._lines:
            self._verify_use(line)

    def _verify_path(self, lines: list[Crossed]) -> None:
        """Verify that a minibatch crosses the frozen layers from the first to the last, stage by stage."""
        at = 0
        for line in lines:
            wave = wave_of(self._timeline.rule_of(line.vw, line.p), line.p)
            bounds = self._timeline.lives[line.vw, line.incarnation].bounds_at(wave)
            frozen = self._timeline.frozen_at(wave)[1]
            if line.stage and line.stage - 1 not in {other.stage for other in lines}:
                return  # cut short: a line before it is missing
            if line.read and not at < line.read <= frozen:
                message = (
                    f"{line.name} reads the input of layer {line.read}, but stands at {at} of {frozen} frozen layers"
                )
                self._findings.add(Kind.CACHE_READ, message, line.origin)
            at = max(at, line.read)
            upto = frozen if bounds is None else min(bounds[line.stage + 1], frozen)
            expected = (at, upto) if at < upto else (upto, upto)
            if (line.first, line.last) != expected:
                message = (
                    f"{line.name} computes the frozen layers [{line.first}, {line.last}), but [{expected[0]}, "
                    f"{expected[1]}) are left to its stage"
                )
                self._findings.add(Kind.FROZEN_CROSSED, message, line.origin)
            at = max(at, line.last)

    def _verify_use(self, line: Crossed) -> None:
        """Verify that what is read was kept, and that what is kept is not computed again."""
        kept = [self._kept.get((line.cache, unit), []) for unit in line.units]
        # A killed stage may have kept without a line.
        may_lack = any(life.eviction is not None for life in self._timeline.lives.values())
        was_kept = all(any(other.last == line.read and other.since <= line.origin.t for other in own) for own in kept)
        if line.read and not was_kept and not may_lack:
            message = f"{line.name} reads the input of layer {line.read}, which was not kept before"
            self._findings.add(Kind.CACHE_READ, message, line.origin)
        if line.first < line.last:
            spare = [
                [other for other in own if other.last > line.first and other.origin.t < line.since] for own in kept
            ]
            borders = {max((other.last for other in own), default=0) for own in spare}
            if len(borders) == 1 and borders != {0}:
                other = max((own[-1] for own in spare), key=lambda found: found.origin.t)
                message = (
                    f"{line.name} computes the frozen layers [{line.first}, {line.last}), although the input of "
                    f"layer {other.last} is cached since the {other.name}"
                )
                self._findings.add(Kind.CACHED_TWICE, message, line.origin)
