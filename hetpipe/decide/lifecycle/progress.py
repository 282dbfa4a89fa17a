"""Progress of a running job: stage reports in, progress table out. Pure; the time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetpipe.values.commands import StageKey
from hetpipe.values.events import ProgressTable, StageRow, VirtualWorkerRow
from hetpipe.values.ids import AgentId, Clock, Incarnation, StageIndex, VirtualWorkerIndex
from hetpipe.values.life_state import UP, WORKING, LifeState
from hetpipe.values.plan import Plan, VirtualWorkerPlan
from hetpipe.values.run import CacheUse, ClockSnapshot, StageProgress
from hetpipe.values.sync import DataSpec, Progress

#: Span over which rates are measured.
RATE_SECONDS = 10.0

#: Time without a report after which a rate begins to fall; reports arrive about once a second.
STALE_SECONDS = 3.0

#: Share of waiting time from which on a virtual worker counts as held up.
HELD_UP_SHARE = 0.5

StagePlace = tuple[VirtualWorkerIndex, StageIndex]
"""A stage, regardless of its incarnation."""


def total_samples(data: DataSpec) -> int:
    """Samples that the whole run commits; for a run given by minibatches an upper bound, by less than a batch per pass.

    >>> total_samples(DataSpec(num_samples=10, batch_size=4, seed=0, epochs=3, total_minibatches=None))
    30
    >>> total_samples(DataSpec(num_samples=10, batch_size=4, seed=0, epochs=None, total_minibatches=5))
    20
    """
    if data.epochs is not None:
        return data.epochs * data.num_samples
    return (data.total_minibatches or 0) * data.batch_size


def continued(report: StageProgress, before: StageProgress | None) -> StageProgress:
    """`report` of a later incarnation, added to the counts `before`; first and maximum values are kept."""
    if before is None:
        return report
    return replace(
        report,
        minibatches=report.minibatches + before.minibatches,
        samples=report.samples + before.samples,
        loss=before.loss if report.loss is None else report.loss,
        first_loss=report.first_loss if before.first_loss is None else before.first_loss,
        losses=report.losses or before.losses,
        first_losses=before.first_losses or report.first_losses,
        waiting_seconds=report.waiting_seconds + before.waiting_seconds,
        idle_seconds=report.idle_seconds + before.idle_seconds,
        compute_seconds=report.compute_seconds + before.compute_seconds,
        pushed_bytes=report.pushed_bytes + before.pushed_bytes,
        pulled_bytes=report.pulled_bytes + before.pulled_bytes,
        weight_bytes=max(report.weight_bytes, before.weight_bytes),
        activation_bytes=max(report.activation_bytes, before.activation_bytes),
        cache=_continued_use(report.cache, before.cache),
    )


def _continued_use(use: CacheUse | None, before: CacheUse | None) -> CacheUse | None:
    """The counts of a stage's earlier incarnations added; what is kept is that of the last one with a cache."""
    if use is None or before is None:
        return use or before
    return CacheUse(
        reads=use.reads + before.reads,
        computed=use.computed + before.computed,
        read_bytes=use.read_bytes + before.read_bytes,
        kept_bytes=use.kept_bytes,
        stopped=use.stopped,
    )


def cache_use(reports: Mapping[StagePlace, StageProgress], plan: Plan) -> CacheUse | None:
    """Use of the caches behind frozen layers, summed over the stages; None where no stage uses one.

    What a node keeps counts once, by the report of the stage that tells most. Of several stages that keep nothing more,
    the first one says why.
    """
    uses = {place: report.cache for place, report in reports.items() if report.cache is not None}
    kept: dict[AgentId, int] = {}
    for worker in plan.virtual_workers:
        for index, stage in enumerate(worker.stages):
            use = uses.get((worker.index, StageIndex(index)))
            kept[stage.agent] = max(kept.get(stage.agent, 0), 0 if use is None else use.kept_bytes)
    found = CacheUse(
        reads=sum(use.reads for use in uses.values()),
        computed=sum(use.computed for use in uses.values()),
        read_bytes=sum(use.read_bytes for use in uses.values()),
        kept_bytes=sum(kept.values()),
        stopped=next(
            (
                f"stage {stage} of virtual worker {vw}: {uses[vw, stage].stopped}"
                for vw, stage in sorted(uses)
                if uses[vw, stage].stopped
            ),
            "",
        ),
    )
    return found if uses else None


@dataclass(slots=True)
class _Rate:
    """Rate of a count of one virtual worker over the last `RATE_SECONDS`."""

    points: deque[tuple[float, float]]
    """(monotonic seconds, amount so far); never empty."""

    def add(self, now: float, amount: float, *, begins: bool) -> None:
        """Add a point. The initial amount does not contribute to the rate."""
        if begins or amount < self.points[-1][1]:
            self.points.clear()
        self.points.append((now, amount))
        # One point before the window is kept, so that slow reports still span an interval.
        while len(self.points) > 2 and self.points[1][0] <= now - RATE_SECONDS:  # noqa: PLR2004 - an interval has two ends
            self.points.popleft()

    def per_second(self, now: float) -> float:
        (start, first), (end, last) = self.points[0], self.points[-1]
        if now - end > STALE_SECONDS:
            # Without reports no progress is assumed.
            end = now
        return (last - first) / (end - start) if end > start else 0.0


class ProgressBoard:
    """The newest report of every stage of one job, and the resulting rates."""

    def __init__(
        self,
        plan: Plan,
        data: DataSpec,
        start: Progress,
        staleness: int | None,
        *,
        now: float,
        is_adopted: bool = False,
    ) -> None:
        """Start with the training, at monotonic second `now`, from `start`.

        For an adopted job the start of the training is derived from its longest-running stage.
        """
        #: Of the newest incarnations.
        self.plan = plan
        self._data = data
        self._start = start
        self._staleness = staleness
        self._started = now
        self._is_adopted = is_adopted
        #: Samples of each last stage, and seconds for which each first stage waited for a clock.
        self._rates = {vw.index: _Rate(deque([(now, 0.0)])) for vw in plan.virtual_workers}
        self._waits = {vw.index: _Rate(deque([(now, 0.0)])) for vw in plan.virtual_workers}
        #: The newest report per stage, with counts over all incarnations.
        self.reports: dict[StagePlace, StageProgress] = {}
        #: Counts of earlier incarnations, and the newest incarnation of each virtual worker.
        self._before: dict[StagePlace, StageProgress] = {}
        self._lives: dict[VirtualWorkerIndex, Incarnation] = {}

    def follow(self, plan: Plan, *, now: float) -> None:
        """Change the plan: a virtual worker has a new cut, or was added."""
        self.plan = plan
        for vw in plan.virtual_workers:
            self._rates.setdefault(vw.index, _Rate(deque([(now, 0.0)])))
            self._waits.setdefault(vw.index, _Rate(deque([(now, 0.0)])))

    def add(self, key: StageKey, report: StageProgress, *, now: float) -> None:
        """Add a stage's report; the last stage's samples determine the rate."""
        vw, stage = key.vw, key.stage
        if key.incarnation > self._lives.setdefault(vw, Incarnation(0)):
            self._lives[vw] = key.incarnation
            self._before.update({place: said for place, said in self.reports.items() if place[0] == vw})
        is_unknown = self._is_adopted and (vw, stage) not in self.reports
        if is_unknown:
            self._started = min(self._started, now - report.compute_seconds - report.idle_seconds)
        report = self.reports[vw, stage] = continued(report, self._before.get((vw, stage)))
        if stage == len(self.plan.virtual_workers[vw].stages) - 1:
            self._rates[vw].add(now, report.samples, begins=is_unknown)
        if stage == 0:
            self._waits[vw].add(now, report.waiting_seconds, begins=is_unknown)

    def running_seconds(self, *, now: float) -> float:
        """Seconds since training began."""
        return now - self._started

    def local_clock(self, vw: VirtualWorkerIndex, clocks: ClockSnapshot | None) -> Clock:
        """Waves that `vw` has committed, if known."""
        if clocks is not None and vw in clocks.local:
            return clocks.local[vw]
        first = self.reports.get((vw, StageIndex(0)))
        return self._start.clock if first is None else first.clock

    def table(
        self,
        clocks: ClockSnapshot | None,
        *,
        states: Mapping[VirtualWorkerIndex, LifeState],
        now: float,
        device_bytes: Mapping[str, int] | None = None,
    ) -> ProgressTable:
        """The progress table at `now`, given the `states` of the virtual workers and the memory of their devices.

        Distances are relative to the slowest member; a virtual worker that is restarting is not a member.
        """
        locals_ = {vw.index: self.local_clock(vw.index, clocks) for vw in self.plan.virtual_workers}
        up = {vw: clock for vw, clock in locals_.items() if states[vw] in UP}
        members = {vw: clock for vw, clock in up.items() if clocks is None or vw in clocks.local}
        counting = members or up or locals_
        slowest = min(counting.values())
        rows = tuple(
            self._row(vw, locals_[vw.index], slowest, states[vw.index], now=now) for vw in self.plan.virtual_workers
        )
        if clocks is not None:
            versions = {vw: plan.version for vw, plan in clocks.plans.items()}
            rows = tuple(replace(row, version=versions.get(row.vw, 0)) for row in rows)
        if device_bytes is not None:
            rows = tuple(
                replace(
                    row,
                    stages=tuple(replace(each, device_bytes=device_bytes.get(each.device, 0)) for each in row.stages),
                )
                for row in rows
            )
        rate = sum(row.samples_per_second for row in rows)
        samples = self._start.samples if clocks is None else clocks.samples
        total = total_samples(self._data)
        return ProgressTable(
            rows=rows,
            running_seconds=self.running_seconds(now=now),
            epoch=self._epoch(clocks),
            samples=samples,
            total_samples=total,
            samples_per_second=rate,
            eta_seconds=max(0, total - samples) / rate if rate > 0.0 else None,
            staleness=self._staleness,
            global_clock=slowest,
            straggler=self._straggler(counting, now=now),
            cache=cache_use(self.reports, self.plan),
        )

    def _epoch(self, clocks: ClockSnapshot | None) -> int:
        """The epoch, from 1; at the end of the run its last one."""
        epoch = self._start.epoch + 1 if clocks is None else clocks.epoch
        return epoch if self._data.epochs is None else min(epoch, self._data.epochs)

    def _straggler(self, clocks: Mapping[VirtualWorkerIndex, Clock], *, now: float) -> VirtualWorkerIndex | None:
        """The virtual worker that is behind and does not wait, while all others mostly do."""
        last = min(clocks, key=lambda vw: clocks[vw])
        waits = {vw: self._waits[vw].per_second(now) for vw in clocks}
        others = [share for vw, share in waits.items() if vw != last]
        return last if others and min(others) >= HELD_UP_SHARE > 2 * waits[last] else None

    def _stage_row(self, vw: VirtualWorkerIndex, stage: StageIndex) -> StageRow:
        planned, report = self.plan.stage(vw, stage), self.reports.get((vw, stage))
        row = StageRow(planned.first_layer, planned.last_layer, planned.device)
        if report is None:
            return row
        # Right after a move the newest report may be of the cut before.
        is_current = len(report.memory) == planned.last_layer - planned.first_layer
        memory = report.memory if is_current else ()
        return replace(row, memory=memory, memory_bytes=report.weight_bytes + report.activation_bytes)

    def _row(
        self, vw: VirtualWorkerPlan, clock: Clock, slowest: Clock, state: LifeState, *, now: float
    ) -> VirtualWorkerRow:
        first = self.reports.get((vw.index, StageIndex(0)))
        last = self.reports.get((vw.index, StageIndex(len(vw.stages) - 1)))
        running = self.running_seconds(now=now)
        reports = [report for (index, _), report in self.reports.items() if index == vw.index]
        return VirtualWorkerRow(
            vw=vw.index,
            stages=tuple(self._stage_row(vw.index, StageIndex(stage)) for stage in range(len(vw.stages))),
            clock=clock,
            distance=max(0, clock - slowest),
            samples_per_second=self._rates[vw.index].per_second(now) if state in WORKING else 0.0,
            loss=None if last is None else last.loss,
            waiting_share=0.0 if first is None or running <= 0.0 else min(1.0, first.waiting_seconds / running),
            memory_bytes=sum(report.weight_bytes + report.activation_bytes for report in reports),
            state=state,
            losses={} if last is None else last.losses,
        )
