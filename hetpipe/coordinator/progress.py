"""How fast a running job goes: stage reports in, the progress table out. Pure; the time is an argument."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hetpipe.spec.events import ProgressTable, StageRow, VirtualWorkerRow
from hetpipe.spec.ids import Clock, StageIndex, VirtualWorkerIndex
from hetpipe.spec.plan import Plan, VirtualWorkerPlan
from hetpipe.spec.run import ClockSnapshot, StageProgress
from hetpipe.spec.sync import DataSpec, Progress

#: Span over which rates are measured.
RATE_SECONDS = 10.0

#: Time without a report after which a rate begins to fall; reports come about once a second.
STALE_SECONDS = 3.0


def total_samples(data: DataSpec) -> int:
    """Samples the whole run commits; an upper bound by less than a batch per pass for a run given by minibatches.

    >>> total_samples(DataSpec(num_samples=10, batch_size=4, seed=0, epochs=3, total_minibatches=None))
    30
    >>> total_samples(DataSpec(num_samples=10, batch_size=4, seed=0, epochs=None, total_minibatches=5))
    20
    """
    if data.epochs is not None:
        return data.epochs * data.num_samples
    return (data.total_minibatches or 0) * data.batch_size


@dataclass(slots=True)
class _Rate:
    """Samples per second of one virtual worker over the last `RATE_SECONDS`."""

    points: deque[tuple[float, int]]
    """(monotonic seconds, samples so far); never empty."""

    def add(self, now: float, samples: int) -> None:
        self.points.append((now, samples))
        # One point beyond the span stays, so that slow reports still span an interval.
        while len(self.points) > 2 and self.points[1][0] <= now - RATE_SECONDS:  # noqa: PLR2004 - an interval has two ends
            self.points.popleft()

    def per_second(self, now: float) -> float:
        (start, first), (end, last) = self.points[0], self.points[-1]
        if now - end > STALE_SECONDS:
            # Nothing was heard for a while, so nothing was done.
            end = now
        return (last - first) / (end - start) if end > start else 0.0


class ProgressBoard:
    """The newest report of every stage of one job, and the rates behind them."""

    def __init__(self, plan: Plan, data: DataSpec, start: Progress, staleness: int | None, *, now: float) -> None:
        """Begin when training begins, at monotonic second `now`, from `start`."""
        self._plan = plan
        self._data = data
        self._start = start
        self._staleness = staleness
        self._started = now
        self._rates = {vw.index: _Rate(deque([(now, 0)])) for vw in plan.virtual_workers}
        #: The newest report per stage.
        self.reports: dict[tuple[VirtualWorkerIndex, StageIndex], StageProgress] = {}

    def add(self, vw: VirtualWorkerIndex, stage: StageIndex, report: StageProgress, *, now: float) -> None:
        """Take a stage's report; the last stage's samples make the rate."""
        self.reports[vw, stage] = report
        if stage == len(self._plan.virtual_workers[vw].stages) - 1:
            self._rates[vw].add(now, report.samples)

    def running_seconds(self, *, now: float) -> float:
        """Since training began."""
        return now - self._started

    def local_clock(self, vw: VirtualWorkerIndex, clocks: ClockSnapshot | None) -> Clock:
        """Waves `vw` has committed, as far as is known."""
        if clocks is not None and vw in clocks.local:
            return clocks.local[vw]
        first = self.reports.get((vw, StageIndex(0)))
        return self._start.clock if first is None else first.clock

    def table(self, clocks: ClockSnapshot | None, *, now: float) -> ProgressTable:
        """The picture at `now`."""
        locals_ = {vw.index: self.local_clock(vw.index, clocks) for vw in self._plan.virtual_workers}
        slowest = min(locals_.values())
        rows = tuple(self._row(vw, locals_[vw.index], slowest, now=now) for vw in self._plan.virtual_workers)
        rate = sum(row.samples_per_second for row in rows)
        samples = self._start.samples if clocks is None else clocks.samples
        total = total_samples(self._data)
        return ProgressTable(
            rows=rows,
            running_seconds=self.running_seconds(now=now),
            epoch=self._start.epoch if clocks is None else clocks.epoch,
            samples=samples,
            total_samples=total,
            samples_per_second=rate,
            eta_seconds=max(0, total - samples) / rate if rate > 0.0 else None,
            staleness=self._staleness,
            global_clock=slowest,
        )

    def _row(self, vw: VirtualWorkerPlan, clock: Clock, slowest: Clock, *, now: float) -> VirtualWorkerRow:
        first = self.reports.get((vw.index, StageIndex(0)))
        last = self.reports.get((vw.index, StageIndex(len(vw.stages) - 1)))
        running = self.running_seconds(now=now)
        reports = [report for (index, _), report in self.reports.items() if index == vw.index]
        return VirtualWorkerRow(
            vw=vw.index,
            stages=tuple(StageRow(stage.first_layer, stage.last_layer, stage.device) for stage in vw.stages),
            clock=clock,
            distance=clock - slowest,
            samples_per_second=self._rates[vw.index].per_second(now),
            loss=None if last is None else last.loss,
            waiting_share=0.0 if first is None or running <= 0.0 else min(1.0, first.waiting_seconds / running),
            memory_bytes=sum(report.weight_bytes + report.activation_bytes for report in reports),
        )
