"""Which stages take longer than planned, and have for a while. Pure: reports in, names out.

A report of a stage that has finished a wave since its last one closes a *window*: seconds of computing per minibatch.
A window is compared with what was foreseen for the stage. Where nothing was foreseen, with the fastest window so far of
any stage that is alike: the same layers on the same kind of device, the stage itself among them. And it is compared
with how the other stages fare: where everything takes twice as long, nothing straggles, and moving layers would not
help.

A stage straggles when that has been off by the factor for as many windows in a row as patience says, and it does until
it has been clearly below for as many.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from hetpipe.decide.lifecycle.progress import StagePlace
from hetpipe.values.commands import StageKey
from hetpipe.values.events import Straggling
from hetpipe.values.ids import Incarnation, StageIndex, VirtualWorkerIndex
from hetpipe.values.run import StageProgress


@dataclass(frozen=True, slots=True)
class Expected:
    """What a stage is compared with."""

    alike: Hashable
    """Equal for stages that are to take as long as each other."""
    seconds: float | None = None
    """What was foreseen for a minibatch; None if nothing was."""


@dataclass(slots=True)
class _Watched:
    """One stage of the newest life of its virtual worker."""

    expected: Expected
    #: (seconds, minibatches) of the latest windows.
    windows: deque[tuple[float, int]]
    #: How far each of them is off.
    factors: deque[float]
    incarnation: Incarnation = Incarnation(0)
    #: The report that ended the latest window; None before the first one of this life, which counts nothing.
    last: StageProgress | None = None
    #: Windows off in a row, to either side; windows in a row that are well.
    off: int = 0
    calm: int = 0
    straggles: bool = False


class Stragglers:
    """All stages of one job. Not thread-safe."""

    def __init__(
        self, expected: Mapping[VirtualWorkerIndex, Sequence[Expected]], *, factor: float, patience_windows: int
    ) -> None:
        """Begin.

        Args:
            expected: per virtual worker, of each stage.
            factor: off by so much, or by its inverse, is off; > 1.
            patience_windows: so many in a row count; ≥ 1.
        """
        self._factor = factor
        self._patience = patience_windows
        self._stages: dict[StagePlace, _Watched] = {}
        #: The fastest window so far of stages that are alike, in seconds per minibatch.
        self._fastest: dict[Hashable, float] = {}
        for vw, stages in expected.items():
            self.expect(vw, stages)

    def expect(self, vw: VirtualWorkerIndex, stages: Sequence[Expected]) -> None:
        """A virtual worker computes by another plan from here on: nothing is known of it yet."""
        for place in [place for place in self._stages if place[0] == vw]:
            del self._stages[place]
        for index, one in enumerate(stages):
            self._stages[vw, StageIndex(index)] = self._watched(one, Incarnation(0))

    def add(self, key: StageKey, report: StageProgress) -> bool:
        """Take a report; whether it closed a window."""
        stage = self._stages.get((key.vw, key.stage))
        if stage is None or key.incarnation < stage.incarnation:
            return False
        if key.incarnation > stage.incarnation:
            # Another process: what it says is counted from its own start.
            stage = self._stages[key.vw, key.stage] = self._watched(stage.expected, key.incarnation)
        last = stage.last
        if last is None and report.minibatches:
            # What it did so far is its start, in which everything is slow.
            stage.last = report
        if last is None or report.clock <= last.clock or report.minibatches <= last.minibatches:
            return False
        stage.last = report
        minibatches = report.minibatches - last.minibatches
        stage.windows.append((report.compute_seconds - last.compute_seconds, minibatches))
        self._judge(stage)
        return True

    @property
    def straggling(self) -> tuple[Straggling, ...]:
        """Those that are named, in order, with how far the worst of their latest windows was off.

        One of these was not well, else they were named no more; the latest alone may have been.
        """
        named = {place: stage for place, stage in self._stages.items() if stage.straggles}
        return tuple(Straggling(*place, max(stage.factors)) for place, stage in named.items())

    def is_off(self, vw: VirtualWorkerIndex) -> bool:
        """Whether a stage of it has left the plan, to either side, for as long as patience says."""
        return any(stage.off >= self._patience for place, stage in self._stages.items() if place[0] == vw)

    def seconds(self, vw: VirtualWorkerIndex) -> tuple[float, ...] | None:
        """Seconds per minibatch of each stage over the latest windows; None while there are not enough."""
        stages = [stage for place, stage in self._stages.items() if place[0] == vw]
        if any(len(stage.windows) < self._patience for stage in stages):
            return None
        return tuple(
            sum(seconds for seconds, _ in stage.windows) / sum(minibatches for _, minibatches in stage.windows)
            for stage in stages
        )

    def reference(self, vw: VirtualWorkerIndex) -> tuple[float, ...] | None:
        """What each stage is compared with, in seconds per minibatch; None while that is not known."""
        found = [self._foreseen(stage) for place, stage in self._stages.items() if place[0] == vw]
        return None if None in found else tuple(one for one in found if one is not None)

    def _watched(self, expected: Expected, incarnation: Incarnation) -> _Watched:
        return _Watched(expected, deque(maxlen=self._patience), deque(maxlen=self._patience), incarnation)

    def _judge(self, stage: _Watched) -> None:
        seconds, minibatches = stage.windows[-1]
        alike = stage.expected.alike
        self._fastest[alike] = min(seconds / minibatches, self._fastest.get(alike, seconds / minibatches))
        factor = self._relative(stage)
        stage.factors.append(factor)
        is_slow = factor >= self._factor
        stage.off = stage.off + 1 if is_slow or factor <= 1.0 / self._factor else 0
        # Half way back, so that noise around the factor names nobody on and off.
        stage.calm = stage.calm + 1 if factor < (1.0 + self._factor) / 2.0 else 0
        if is_slow and stage.off >= self._patience:
            stage.straggles = True
        elif stage.calm >= self._patience:
            stage.straggles = False

    def _relative(self, stage: _Watched) -> float:
        """How far its latest window is off, after what all others are off by alike."""
        ratios = [ratio for other in self._stages.values() if (ratio := self._ratio(other)) is not None]
        own = self._ratio(stage)
        return 1.0 if own is None else own / max(1.0, statistics.median_low(ratios))

    def _ratio(self, stage: _Watched) -> float | None:
        if not stage.windows:
            return None
        seconds, minibatches = stage.windows[-1]
        foreseen = self._foreseen(stage)
        return seconds / minibatches / foreseen if foreseen else None

    def _foreseen(self, stage: _Watched) -> float | None:
        return stage.expected.seconds or self._fastest.get(stage.expected.alike)
