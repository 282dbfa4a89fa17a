"""The weight policies, schedules and placements a job can name, and which of them go together (`policies.md`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from hetpipe.values.suggest import join_names

#: Which weights a minibatch sees: HetPipe · PipeDream · PipeDream's vertical sync · PipeDream-2BW · PipeDream-Flush and
#: GPipe · PipeOptim · SpecTrain.
WeightPolicy = Literal["wave", "stash", "vertical", "double_buffer", "flush", "predict", "spectrain"]

#: In which order a stage computes.
Schedule = Literal["1f1b", "fifo", "gpipe"]

HistoryDetail = Literal["full", "summary", "off"]
"""How much of what it does a run writes down."""

#: When published weights are fetched: for every wave, or where the staleness bound forbids the ones in use.
PullTiming = Literal["every_wave", "required"]

#: What carries frames between two stages.
LinkKind = Literal["gloo", "grpc"]

#: What a job says of its links.
AskedLink = Literal["auto", LinkKind]

#: Which parameters lie on which shard; defined in `planner.placement`.
PlacementName = Literal["balanced", "round_robin", "ed_local"]

#: Of a job file, of `hetpipe plan`, and of a plan without either.
DEFAULT_PLACEMENT: PlacementName = "balanced"

WEIGHT_POLICIES: tuple[WeightPolicy, ...] = get_args(WeightPolicy)
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)

#: Policies that make one update per wave, from the average of its gradients.
ONE_UPDATE_PER_WAVE: tuple[WeightPolicy, ...] = ("double_buffer", "flush")

#: Policies that compute with weights they expect, not with weights they have.
PREDICTING: tuple[WeightPolicy, ...] = ("predict", "spectrain")

#: Policies whose step may wait for the norm of a gradient over all stages; the others' pipeline would stand still.
CLIPS_GLOBALLY: tuple[WeightPolicy, ...] = ("wave", "vertical", "double_buffer", "flush")

#: The schedules of each policy; `auto` means the first.
SCHEDULES_OF: Mapping[WeightPolicy, tuple[Schedule, ...]] = {
    "wave": ("1f1b", "fifo"),
    "stash": ("1f1b",),
    "vertical": ("1f1b",),
    "double_buffer": ("1f1b",),
    "flush": ("1f1b", "gpipe", "fifo"),
    "predict": ("1f1b",),
    "spectrain": ("1f1b",),
}

#: Policies whose versions are defined by the strict 1F1B order of a pipeline that never drains.
_NEEDS_FULL_WAVES = ("stash", "vertical", "double_buffer", "predict", "spectrain")


def schedule_of(weights: WeightPolicy, schedule: str = "auto") -> Schedule:
    """The schedule that `schedule` means under a policy.

    Raises:
        ValueError: the policy cannot use it; the message says why, and which it can.

    >>> schedule_of("flush"), schedule_of("flush", "gpipe")
    ('1f1b', 'gpipe')
    """
    allowed = SCHEDULES_OF[weights]
    if schedule == "auto":
        return allowed[0]
    for known in allowed:
        if schedule == known:
            return known
    raise ValueError(f"is {schedule}, but {_why_not(weights, schedule)}; use {join_names(('auto', *allowed))}")


def least_minibatches_per_wave(weights: WeightPolicy, num_stages: int) -> int:
    """The smallest N under which a policy is defined (`policies.md`).

    >>> least_minibatches_per_wave("stash", 4), least_minibatches_per_wave("wave", 4)
    (4, 1)
    """
    return num_stages if weights in _NEEDS_FULL_WAVES else 1


def _why_not(weights: WeightPolicy, schedule: str) -> str:
    if schedule == "gpipe" and weights == "wave":
        return "`gpipe` drains the pipeline after each wave, which is what `weights: flush` is for"
    return f"the weight versions of `{weights}` are defined by the strict 1F1B order"
