"""Evaluations put together from the parts of the virtual workers. Pure."""

from __future__ import annotations

from collections.abc import Collection

from hetpipe.spec.events import Evaluated
from hetpipe.spec.ids import Clock, VirtualWorkerIndex
from hetpipe.spec.run import StageEvaluation


class Evaluations:
    """The parts heard so far. A part that comes twice counts once; parts of an incomplete evaluation stay bounded.

    Who shares the evaluation data is decided at its barrier. An evaluation is whole when its parts cover all samples,
    or when nobody is left who might still give a part: that of a virtual worker that died will not come.
    """

    #: Incomplete evaluations kept; a job has one at a time, a second only while a late part is on its way.
    _MAX_INCOMPLETE = 4

    def __init__(self, num_samples: int | None) -> None:
        """Expect parts that cover `num_samples`; None: nobody has said how many there are."""
        self._num_samples = num_samples
        self._parts: dict[Clock, dict[VirtualWorkerIndex, StageEvaluation]] = {}
        #: Clock of the newest part of each virtual worker; it gives none for an earlier clock.
        self._newest: dict[VirtualWorkerIndex, Clock] = {}
        #: The newest complete evaluation.
        self.latest: Evaluated | None = None

    def add(self, vw: VirtualWorkerIndex, part: StageEvaluation) -> Evaluated | None:
        """Add the part of `vw`; the whole evaluation if it was the last missing one."""
        if self.latest is not None and part.clock <= self.latest.clock:
            return None
        self._newest[vw] = max(part.clock, self._newest.get(vw, part.clock))
        parts = self._parts.setdefault(part.clock, {})
        parts[vw] = part
        if self._num_samples is not None and sum(part.samples for part in parts.values()) >= self._num_samples:
            return self._complete(part.clock)
        while len(self._parts) > self._MAX_INCOMPLETE:
            del self._parts[min(self._parts)]
        return None

    def without(self, possible: Collection[VirtualWorkerIndex]) -> Evaluated | None:
        """The newest evaluation of which no part is missing any more when only `possible` can still give some."""
        for clock in sorted(self._parts, reverse=True):
            if all(self._newest.get(vw, clock - 1) >= clock for vw in possible):
                return self._complete(clock)
        return None

    def _complete(self, clock: Clock) -> Evaluated:
        self.latest = whole(self._parts[clock])
        self._parts = {later: parts for later, parts in self._parts.items() if later > clock}
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
