"""Assembly of evaluations from the parts of the virtual workers, and the evaluation history of a job. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable

from hetpipe.storage.store import MAX_EVENTS
from hetpipe.values.events import Evaluated, EvaluationSummary, NumberedEvent, Rewound
from hetpipe.values.ids import Clock, VirtualWorkerIndex
from hetpipe.values.run import RatioSums, StageEvaluation


class Evaluations:
    """Parts received so far. Duplicate parts count once; the number of incomplete evaluations is bounded.

    The division of the evaluation data is decided at its barrier. An evaluation is complete when its parts cover all
    samples, or when no further part can arrive, because the missing virtual workers have died.
    """

    #: Incomplete evaluations kept; a job has one at a time, a second only while a late part is in transit.
    _MAX_INCOMPLETE = 4

    def __init__(self, num_samples: int | None) -> None:
        """Expect parts that cover `num_samples`; None if unknown."""
        self._num_samples = num_samples
        self._parts: dict[Clock, dict[VirtualWorkerIndex, StageEvaluation]] = {}
        #: Clock of the newest part of each virtual worker, which sends none for an earlier clock.
        self._newest: dict[VirtualWorkerIndex, Clock] = {}
        #: The newest complete evaluation.
        self.latest: Evaluated | None = None

    def add(self, vw: VirtualWorkerIndex, part: StageEvaluation) -> Evaluated | None:
        """Add the part of `vw`; returns the evaluation if it is now complete."""
        if part.within_epoch:
            return whole({vw: part})
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
        """The newest evaluation that is complete if only `possible` can still send parts."""
        for clock in sorted(self._parts, reverse=True):
            if all(self._newest.get(vw, clock - 1) >= clock for vw in possible):
                return self._complete(clock)
        return None

    def _complete(self, clock: Clock) -> Evaluated:
        self.latest = whole(self._parts[clock])
        self._parts = {later: parts for later, parts in self._parts.items() if later > clock}
        return self.latest


def whole(parts: dict[VirtualWorkerIndex, StageEvaluation]) -> Evaluated:
    """Combine parts: sums are added in index order and divided once, by the weights of all or as ratios.

    >>> part = StageEvaluation(clock=Clock(3), epoch=0, samples=2, sums={"loss": 1.0})
    >>> whole({VirtualWorkerIndex(1): part, VirtualWorkerIndex(0): part}).values
    {'loss': 0.5}
    """
    ordered = [parts[vw] for vw in sorted(parts)]
    samples = sum(part.samples for part in ordered)
    weight = sum(part.samples if part.weight is None else part.weight for part in ordered)
    names = sorted({name for part in ordered for name in part.sums}) if samples else []
    values = {}
    for name in names:
        total = 0.0
        for part in ordered:
            total += part.sums.get(name, 0.0)
        values[name] = total / weight if weight else math.nan
    ratios: dict[str, RatioSums] = {}
    for name, found in ((name, found) for part in ordered for name, found in part.ratios.items()):
        ratios[name] = ratios[name] + found if name in ratios else found
    values = dict(sorted({**values, **{name: found.value for name, found in ratios.items()}}.items()))
    first = ordered[0]
    return Evaluated(
        first.clock,
        first.epoch,
        samples,
        values,
        minibatches=first.minibatches,
        within_epoch=first.within_epoch,
        whole=first.whole,
    )


#: Maximum evaluations listed in a result.
MAX_LISTED = 100


class EvaluationHistory:
    """All evaluations of a job, across rewinds and coordinators.

    It contains the evaluations that led to the current weights: a rewind drops later ones. Only the newest `MAX_EVENTS`
    are kept, as for all events of a job; only evaluations within epochs can reach this limit.
    """

    def __init__(self) -> None:
        #: Ordered by clock, without duplicates.
        self._held: list[Evaluated] = []

    def recall(self, events: Iterable[NumberedEvent]) -> None:
        """Start from the events sent by earlier coordinators, in order."""
        for numbered in events:
            match numbered.event:
                case Evaluated() as evaluated:
                    self.add(evaluated)
                case Rewound() as rewound:
                    self.rewind(rewound.to_clock)
                case _:
                    """other events are irrelevant here"""

    def add(self, evaluated: Evaluated) -> bool:
        """Add an evaluation; False for a duplicate: stages repeat their reports to a new coordinator.

        An evaluation within an epoch may precede that of the previous barrier, whose last part is from another node.
        """
        place = bisect_left(self._held, evaluated.clock, key=lambda held: held.clock)
        is_known = place < len(self._held) and self._held[place].clock == evaluated.clock
        if is_known or (place == 0 and len(self._held) == MAX_EVENTS):
            return False
        self._held.insert(place, evaluated)
        del self._held[:-MAX_EVENTS]
        return True

    def rewind(self, clock: Clock) -> None:
        """Drop evaluations after `clock`."""
        while self._held and self._held[-1].clock > clock:
            self._held.pop()

    @property
    def all(self) -> tuple[Evaluated, ...]:
        """The kept evaluations, in order."""
        return tuple(self._held)

    @property
    def summary(self) -> EvaluationSummary | None:
        """Number, best and last; None if there are none."""
        held = self._held
        best = min((one for one in held if one.whole), key=_loss_of, default=None)
        return EvaluationSummary(len(held), best, held[-1]) if held else None

    @property
    def last_whole(self) -> Evaluated | None:
        """The last one over the whole evaluation data."""
        return next((one for one in reversed(self._held) if one.whole), None)

    @property
    def listed(self) -> tuple[Evaluated, ...]:
        """All in order, or `MAX_LISTED` of them evenly spaced, including the first, the best and the last."""
        held, summary = self._held, self.summary
        if summary is None or len(held) <= MAX_LISTED:
            return tuple(held)
        best = 0 if summary.best is None else held.index(summary.best)
        spaced = [round(place * (len(held) - 1) / (MAX_LISTED - 1)) for place in range(MAX_LISTED)]
        if best not in spaced:
            # It replaces its nearest neighbour, except the first and the last.
            spaced[min(range(1, MAX_LISTED - 1), key=lambda place: abs(spaced[place] - best))] = best
        return tuple(held[place] for place in sorted(spaced))


def _loss_of(evaluated: Evaluated) -> float:
    loss = evaluated.values.get("loss", math.inf)
    return loss if math.isfinite(loss) else math.inf
