"""Whether a run ends before its planned end, and which evaluation was best, by the job's own keys. Pure.

The decision depends on the evaluations and the time of training only, never on what was decided before: a later
coordinator, which has the same evaluations, decides the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hetpipe.job.early import EarlyStoppingSection
from hetpipe.job.file import Job
from hetpipe.values.events import Evaluated


def early_end(job: Job, evaluations: Iterable[Evaluated], *, running_seconds: float) -> str:
    """The reason for ending the run at the next barrier, as a sentence; empty: it continues.

    Args:
        job: the job.
        evaluations: those that led to the current weights, in order.
        running_seconds: since training began, in this run.
    """
    if job.max_time is not None and running_seconds >= job.max_time.total_seconds():
        return f"it has trained for {running_seconds:.0f} s, and `max_time` is {job.max_time.total_seconds():g} s"
    rule = job.early_stopping
    if rule is None:
        return ""
    whole = [one for one in evaluations if one.whole]
    sign = 1.0 if prefers_small(rule, job) else -1.0
    values = [sign * one.values.get(rule.metric, math.nan) for one in whole]
    best = best_of(values, min_delta=rule.min_delta)
    since = len(values) if best is None else len(values) - 1 - best
    if since < rule.patience:
        return ""
    found = "is no finite number" if best is None else _best_text(rule, whole[best])
    return f"{rule.metric} {found}, and {since} evaluations in a row were not better (`early_stopping`)"


def best_evaluation(job: Job, evaluations: Iterable[Evaluated]) -> tuple[str, Evaluated] | None:
    """The metric whose best checkpoint is kept, and its best evaluation; None if there is neither.

    Only evaluations at barriers count, over all of the evaluation data: at each of these there is a checkpoint.
    """
    rule = job.early_stopping
    if job.checkpoint.best is not None:
        rule = EarlyStoppingSection(metric=job.checkpoint.best)
    if rule is None or job.storage is not None:
        return None
    whole = [one for one in evaluations if one.whole and not one.within_epoch]
    sign = 1.0 if prefers_small(rule, job) else -1.0
    best = best_of([sign * one.values.get(rule.metric, math.nan) for one in whole], min_delta=0.0)
    return None if best is None else (rule.metric, whole[best])


def prefers_small(rule: EarlyStoppingSection, job: Job) -> bool:
    """Whether smaller values of the metric are better."""
    if rule.mode == "auto":
        return rule.metric not in job.metrics or "perplexity" in job.metrics[rule.metric]
    return rule.mode == "min"


def best_of(values: Sequence[float], *, min_delta: float) -> int | None:
    """The index of the last improvement, where smaller is better; None if no value is finite.

    >>> best_of([3.0, 2.0, 1.95, 2.5], min_delta=0.1), best_of([float("nan")], min_delta=0.0)
    (1, None)
    """
    best: int | None = None
    for index, value in enumerate(values):
        if math.isfinite(value) and (best is None or value < values[best] - min_delta):
            best = index
    return best


def _best_text(rule: EarlyStoppingSection, best: Evaluated) -> str:
    return f"was best, {best.values[rule.metric]:.4g}, in epoch {best.epoch}"
