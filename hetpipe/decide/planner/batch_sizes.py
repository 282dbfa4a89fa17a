"""Minibatch sizes that fit on a cluster, with their speed and what memory policies cost; `memory-search.md` §3. Pure.

The profile is scaled in proportion, as layers' times and activations are close to, and every size is planned by closed
form.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.decide.planner.choose import ALLOCATIONS
from hetpipe.decide.planner.costs import Costs, milliseconds
from hetpipe.decide.planner.jobs import JobPlan, Jobs, partitioner_for
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.decide.planner.scaled_profile import scaled_profile
from hetpipe.errors import InfeasiblePlan
from hetpipe.values.cluster import Cluster
from hetpipe.values.fit import check_fits
from hetpipe.values.memory import LayerPolicy, stage_memory
from hetpipe.values.profile import Profile

#: Sizes are doubled up to this one.
MOST_SAMPLES = 1 << 20

#: The largest size that fits is found up to this share.
_PRECISION = 16


@dataclass(frozen=True, slots=True)
class BatchSize:
    """One size of minibatches."""

    batch_size: int
    """Samples per minibatch."""
    samples_per_second: float | None
    """Of the whole job, by closed form; None: it does not fit."""
    minibatches_per_wave: int | None = None
    """N of that plan."""
    fullest: float | None = None
    """Largest share of a device's memory in use."""
    swapped_bytes: int = 0
    """Moved to host memory and back by all stages of the job, per minibatch of each virtual worker."""
    recomputed_ms: float = 0.0
    """Second forwards, likewise."""
    reason: str = ""
    """Why it does not fit, with the missing memory and what helps."""


def batch_sizes(profile: Profile, cluster: Cluster, options: PlanOptions) -> tuple[BatchSize, ...]:
    """Sizes from that of the profile, doubled until none fits, then bisected; halved if it does not fit itself.

    Raises:
        PlanError: the options contradict each other or the cluster.
        DocumentError: the profile lacks a type of the cluster.
    """
    check_fits(profile, cluster)
    found: dict[int, BatchSize] = {}

    def fits(size: int) -> bool:
        if size not in found:
            found[size] = _planned(Costs(scaled_profile(profile, size), cluster, options.frozen_layers), options)
        return found[size].samples_per_second is not None

    size = profile.batch_size
    if fits(size):
        while size < MOST_SAMPLES and fits(2 * size):
            size *= 2
        low, high = size, 2 * size
    else:
        while size > 1 and not fits(size):
            size //= 2
        low, high = (size, 2 * size) if fits(size) else (0, 1)
    while 0 < low < MOST_SAMPLES and high - low > max(1, low // _PRECISION):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return tuple(found[size] for size in sorted(found))


def _planned(costs: Costs, options: PlanOptions) -> BatchSize:
    size = costs.profile.batch_size
    jobs = Jobs(costs, options, partitioner_for(costs, options))
    try:
        plan = ALLOCATIONS[options.allocation](jobs)
    except InfeasiblePlan as error:
        return BatchSize(size, None, reason=str(error))
    swapped, recomputed = _spent(plan, options)
    stages = [stage for worker in plan.workers for stage in worker.stages]
    return BatchSize(
        size,
        plan.rate.samples_per_second,
        minibatches_per_wave=plan.minibatches_per_wave,
        fullest=max(stage.memory_bytes / max(1, costs.memory_bytes[stage.kind]) for stage in stages),
        swapped_bytes=swapped,
        recomputed_ms=milliseconds(recomputed),
    )


def _spent(plan: JobPlan, options: PlanOptions) -> tuple[int, int]:
    """Swapped bytes and ticks of second forwards, over all stages."""
    swapped = recomputed = 0
    for worker, n in zip(plan.workers, plan.waves, strict=True):
        memory = options.memory(n)
        for index, stage in enumerate(worker.stages):
            figures = plan.costs.place(stage.kind, (index, len(worker.stages)), memory).figures(stage.first, stage.last)
            whole: LayerPolicy = "recompute" if stage.recompute else "keep"
            cost = stage_memory(figures, stage.memory or [whole for _ in figures.layers])
            swapped, recomputed = swapped + cost.swapped_bytes, recomputed + cost.recomputed_ticks
    return swapped, recomputed
