"""Verify that layers are built anew where the decision log says so, and by all virtual workers the same."""

from __future__ import annotations

from bisect import bisect_right

from hetpipe.checker.events import Fresh, Pass, Wave
from hetpipe.checker.formulas import wave_of
from hetpipe.checker.report import Findings, Kind
from hetpipe.checker.timeline import Timeline


class FreshVerifier:
    """Verifies what stages build anew; the events of one stage must come in file order."""

    def __init__(self, timeline: Timeline, findings: Findings) -> None:
        self._timeline = timeline
        self._findings = findings
        #: Barriers at which layers are built anew.
        self._clocks = [each.clock for each in timeline.activates if each.fresh]
        #: (clock, vw, incarnation, stage) → the layers that it has built.
        self._built: dict[tuple[int, int, int, int], tuple[int, ...]] = {}
        #: (clock, layer) → the first digest.
        self._digests: dict[tuple[int, int], Fresh] = {}
        #: Stages that have computed since the barrier, likewise.
        self._computed: set[tuple[int, int, int, int]] = set()

    def see(self, event: Fresh) -> None:
        """Verify what a stage has built."""
        who = f"stage {event.stage} of virtual worker {event.vw} builds layers {list(event.layers)} anew"
        strange = sorted(set(event.layers).difference(self._timeline.fresh_at(event.clock)))
        if strange:
            message = f"{who} at clock {event.clock}, where {strange} are not"
            self._findings.add(Kind.FRESH, message, event.origin)
        self._built[event.clock, event.vw, event.incarnation, event.stage] = event.layers
        for layer, digest in zip(event.layers, event.digests, strict=True):
            first = self._digests.setdefault((event.clock, layer), event)
            if first.digests[first.layers.index(layer)] != digest:
                message = f"{who} at clock {event.clock}, and layer {layer} otherwise than virtual worker {first.vw}"
                self._findings.add(Kind.FRESH, message, event.origin)

    def see_pass(self, event: Pass | Wave) -> None:
        """Verify that a stage that computes has built its layers."""
        if not self._clocks:
            return
        line = self._timeline
        wave = event.wave if isinstance(event, Wave) else wave_of(line.rule_of(event.vw, event.p), event.p)
        begun = bisect_right(line.barriers, wave)
        clock = line.barriers[begun - 1] if begun else line.start_clock
        key = clock, event.vw, event.incarnation, event.stage
        bounds = line.lives[event.vw, event.incarnation].bounds_at(wave)
        if clock not in self._clocks or key in self._computed or bounds is None:
            return
        self._computed.add(key)
        due = tuple(layer for layer in line.fresh_at(clock) if layer in range(*bounds[event.stage : event.stage + 2]))
        found = self._built.get(key, ())
        if found != due:
            message = f"{event.name} without layers {list(due)} built anew at clock {clock}, but {list(found)}"
            self._findings.add(Kind.FRESH, message, event.origin)
