"""Evaluations put together from the parts of the virtual workers. Pure."""

from __future__ import annotations

from collections.abc import Collection

from hetpipe.spec.events import Evaluated
from hetpipe.spec.ids import Clock, VirtualWorkerIndex
from hetpipe.spec.run import StageEvaluation


class Evaluations:
    """The parts heard so far. A part that comes twice counts once; parts of an incomplete evaluation stay bounded."""

    #: Incomplete evaluations kept; a job has one at a time, a second only while a late part is on its way.
    _MAX_INCOMPLETE = 4

    def __init__(self, members: Collection[VirtualWorkerIndex]) -> None:
        self._members = frozenset(members)
        self._parts: dict[Clock, dict[VirtualWorkerIndex, StageEvaluation]] = {}
        #: The newest complete evaluation.
        self.latest: Evaluated | None = None

    def add(self, vw: VirtualWorkerIndex, part: StageEvaluation) -> Evaluated | None:
        """Add the part of `vw`; the whole evaluation if it was the last missing one."""
        if vw not in self._members or (self.latest is not None and part.clock <= self.latest.clock):
            return None
        parts = self._parts.setdefault(part.clock, {})
        parts[vw] = part
        if parts.keys() != self._members:
            while len(self._parts) > self._MAX_INCOMPLETE:
                del self._parts[min(self._parts)]
            return None
        self._parts = {clock: parts for clock, parts in self._parts.items() if clock > part.clock}
        self.latest = whole(parts)
        return self.latest


def whole(parts: dict[VirtualWorkerIndex, StageEvaluation]) -> Evaluated:
    """One evaluation: sums added in index order, divided once by the number of samples; no values without samples.

    >>> part = StageEvaluation(clock=Clock(3), epoch=0, samples=2, sums={"loss": 1.0})
    >>> whole({VirtualWorkerIndex(1): part, VirtualWorkerIndex(0): part}).values
    {'loss': 0.5}
    """
    ordered = [parts[vw] for vw in sorted(parts)]
    samples = sum(part.samples for part in ordered)
    names = sorted({name for part in ordered for name in part.sums}) if samples else []
    values = {}
    for name in names:
        total = 0.0
        for part in ordered:
            total += part.sums.get(name, 0.0)
        values[name] = total / samples
    return Evaluated(clock=ordered[0].clock, epoch=ordered[0].epoch, samples=samples, values=values)
