"""The result of a run, as printed by `hetpipe train --json`. Pure.

Sums over the cluster are computed here: losses, evaluation, bytes, waiting. All counts are for this run alone, so that
`samples / wall_seconds` is its rate even after `--resume`; clocks are those of the whole training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hetpipe.decide.lifecycle.evaluations import EvaluationHistory
from hetpipe.decide.lifecycle.progress import cache_use
from hetpipe.job.file import Job
from hetpipe.values.conditions import Condition
from hetpipe.values.events import Evaluated
from hetpipe.values.freezing import FrozenSince
from hetpipe.values.ids import Clock, StageIndex, VirtualWorkerIndex
from hetpipe.values.plan import DEFAULT_DTYPE, Plan, ProofReport
from hetpipe.values.run import AgentInfo, CacheUse, ClockSnapshot, StageProgress, type_of
from hetpipe.values.sync import Progress
from hetpipe.values.utilisation import ModelSpeed, Peak, model_speed, peak_of_types
from hetpipe.values.wire import plain


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """Data of a finished run."""

    run_dir: str
    plan: Plan
    start: Progress
    reported_clocks: ClockSnapshot | None
    """Final clocks from the clock shard; None if it reported none."""
    reports: Mapping[tuple[VirtualWorkerIndex, StageIndex], StageProgress]
    """The last report of every stage."""
    evaluations: EvaluationHistory
    running_seconds: float
    """Time from when all stages were ready to the end of the last one; excludes the startup."""
    staleness: int | None
    """D; None for `asp`."""
    deaths: Mapping[VirtualWorkerIndex, int]
    """Incarnations of each virtual worker that ended before the run."""
    rewinds: int = 0
    """Number of rewinds of the job."""
    conditions: tuple[Condition, ...] = ()
    """Conditions of the run."""
    proof: ProofReport | None = None
    """Proof of the model, before training; None if unknown."""
    peak: Peak = Peak(None)
    """Combined peak of all devices in use."""

    @property
    def clocks(self) -> ClockSnapshot:
        """The final clocks, if known."""
        return self.reported_clocks or clocks_from_reports(self.plan, self.start, self.reports.values())


def result_object(record: FinishedRun) -> dict[str, Any]:
    """The JSON object of a run. Non-finite numbers, which JSON lacks, become null.

    `loss`: mean over the virtual workers of the mean losses of each one's first and last wave. `losses`: the same by
    name, of a job with several. `waiting_seconds`: time that each virtual worker's first stage waited for a required
    clock. `idle_seconds`: mean over each one's stages.
    `deaths`: incarnations of each virtual worker that ended before the run; sums cover all incarnations.
    `conditions`: conditions of the run, by the time they were raised; those without `cleared` were active at the end.
    `skipped_updates`: of each virtual worker, as a gradient overflowed at the scale of its loss.
    `rewinds`: number of rewinds of the job. Everything else refers to the time after the last one, except the
    evaluations, which include those before it that led to the weights.
    `eval`: the last evaluation over the whole evaluation data.
    `evaluations`: their number, the best, and a list of all or of some of them (see `EvaluationHistory.listed`).
    `cache`: use of the caches behind frozen layers, summed over the stages: minibatches read and computed, bytes read.
    `frozen`: the frozen layers, one entry per barrier at which they became more.
    `proof`: proof of the model, before training; null if unknown.
    `stages`: those with reports, by virtual worker and stage; peak bytes, and the newest norm and rate.
    `violations` is null: only a check of the history can determine it.
    """
    clocks, start, seconds = record.clocks, record.start, record.running_seconds
    samples = clocks.samples - start.samples
    members = [vw.index for vw in record.plan.virtual_workers]
    last_stages = [_report(record, vw, -1) for vw in members]
    bound = None if record.staleness is None else record.staleness + 1
    return {
        "run_dir": record.run_dir,
        "waves": clocks.waves,
        "minibatches": clocks.minibatches - start.minibatches,
        "samples": samples,
        "wall_seconds": round(seconds, 3),
        "samples_per_second": round(samples / seconds, 3) if seconds > 0.0 else 0.0,
        "loss": {
            "first": _mean(report.first_loss for report in last_stages if report is not None),
            "last": _mean(report.loss for report in last_stages if report is not None),
        },
        "losses": {
            name: {
                "first": _mean(report.first_losses.get(name) for report in last_stages if report is not None),
                "last": _mean(report.losses.get(name) for report in last_stages if report is not None),
            }
            for name in sorted({name for report in last_stages if report is not None for name in report.losses})
        },
        "eval": _evaluation(record.evaluations.last_whole),
        "staleness": {
            "bound_clock_distance": bound,
            "max_clock_distance": clocks.max_distance,
            "violations": None,
        },
        "clocks": {str(vw): clocks.local.get(vw, _last_clock(record, vw)) for vw in members},
        "global_clock": clocks.global_clock,
        "frozen": [plain(FrozenSince, one) for one in clocks.frozen],
        "bytes": {
            "pushed": sum(report.pushed_bytes for report in record.reports.values()),
            "pulled": sum(report.pulled_bytes for report in record.reports.values()),
        },
        "cache": _cache(record),
        "waiting_seconds": {str(vw): _waiting_seconds(record, vw) for vw in members},
        "idle_seconds": {str(vw): _idle_seconds(record, vw) for vw in members},
        "evaluations": _evaluations(record.evaluations),
        "deaths": {str(vw): record.deaths.get(vw, 0) for vw in members},
        "skipped_updates": {str(vw): _skipped_updates(record, vw) for vw in members},
        "rewinds": record.rewinds,
        "conditions": [plain(Condition, one) for one in record.conditions],
        "proof": None if record.proof is None else plain(ProofReport, record.proof),
        **plain(ModelSpeed, speed_of(record.proof, samples / seconds if seconds > 0.0 else 0.0, record.peak)),
        "stages": [_stage(vw, stage, report) for (vw, stage), report in sorted(record.reports.items())],
    }


def speed_of(proof: ProofReport | None, samples_per_second: float, peak: Peak) -> ModelSpeed:
    """Convert samples/s to tokens/s and the share of the devices' peak, using the work counted before training."""
    return model_speed(samples_per_second, None if proof is None else proof.work, peak)


def peak_of(plan: Plan, agents: Iterable[AgentInfo], job: Job, proof: ProofReport | None) -> Peak:
    """Combined peak operations per second of all devices of a plan.

    The type of a device is that given by the job's `cluster.file`, else the reported one.
    """
    cluster = job.cluster.file
    if job.cluster.emulate:
        return Peak(
            None, "the devices are emulated (`cluster.emulate`): their times are not those of actual computation"
        )
    named = {} if cluster is None else cluster.devices
    offered = {device.device: device for agent in agents for device in agent.devices}
    kinds = [
        named.get(stage.device) or (type_of(offered[stage.device]) if stage.device in offered else stage.device)
        for worker in plan.virtual_workers
        for stage in worker.stages
    ]
    dtype = DEFAULT_DTYPE if proof is None or proof.work is None else proof.work.compute_dtype
    return peak_of_types(kinds, {} if cluster is None else cluster.device_types, dtype)


def clocks_from_reports(record_plan: Plan, start: Progress, reports: Iterable[StageProgress]) -> ClockSnapshot:
    """Clocks of a run whose clock shard reported none: the start, advanced by the stages' clocks."""
    published = max((report.published for report in reports), default=start.clock)
    return ClockSnapshot(
        term=record_plan.term,
        published=published,
        global_clock=published,
        local={vw.index: published for vw in record_plan.virtual_workers},
        max_distance=0,
        epoch=start.epoch + 1,
        minibatches=start.minibatches,
        samples=start.samples,
        barrier=published,
        barrier_reason="",
        waves=(published - start.clock) * len(record_plan.virtual_workers),
    )


def _report(record: FinishedRun, vw: VirtualWorkerIndex, stage: int) -> StageProgress | None:
    num_stages = len(record.plan.virtual_workers[vw].stages)
    return record.reports.get((vw, StageIndex(stage % num_stages)))


def _last_clock(record: FinishedRun, vw: VirtualWorkerIndex) -> Clock:
    """The final clock of a virtual worker that is not a member at the end."""
    report = _report(record, vw, 0)
    return record.start.clock if report is None else report.clock


def _cache(record: FinishedRun) -> dict[str, int | str]:
    use = cache_use(record.reports, record.plan) or CacheUse(0, 0, 0, 0)
    return {"reads": use.reads, "computed": use.computed, "read_bytes": use.read_bytes, "stopped": use.stopped}


def _waiting_seconds(record: FinishedRun, vw: VirtualWorkerIndex) -> float:
    report = _report(record, vw, 0)
    return 0.0 if report is None else round(report.waiting_seconds, 3)


def _skipped_updates(record: FinishedRun, vw: VirtualWorkerIndex) -> int:
    report = _report(record, vw, 0)
    return 0 if report is None else report.skipped_updates


def _idle_seconds(record: FinishedRun, vw: VirtualWorkerIndex) -> float:
    idle = [report.idle_seconds for (of_vw, _), report in sorted(record.reports.items()) if of_vw == vw]
    return round(sum(idle) / len(idle), 3) if idle else 0.0


def _stage(vw: VirtualWorkerIndex, stage: StageIndex, report: StageProgress) -> dict[str, Any]:
    return {
        "vw": vw,
        "stage": stage,
        "weight_bytes": report.weight_bytes,
        "activation_bytes": report.activation_bytes,
        "gradient_norm": None if report.gradient_norm is None else _finite(report.gradient_norm),
        "learning_rate": None if report.learning_rate is None else _finite(report.learning_rate),
    }


def _evaluation(evaluated: Evaluated | None) -> dict[str, Any]:
    if evaluated is None:
        return {}
    last = evaluated.to_object()
    return {"epoch": last["epoch"], "clock": last["clock"], "samples": last["samples"], **last["values"]}


def _evaluations(history: EvaluationHistory) -> dict[str, Any]:
    summary = history.summary
    best = None if summary is None or summary.best is None else summary.best.to_object()
    number = 0 if summary is None else summary.number
    return {"number": number, "best": best, "listed": [one.to_object() for one in history.listed]}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _finite(sum(known) / len(known)) if known else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
