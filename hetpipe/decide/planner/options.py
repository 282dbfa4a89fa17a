"""Options of the planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetpipe.decide.planner.costs import MemoryModel
from hetpipe.decide.planner.cuts import Recompute
from hetpipe.errors import PlanError
from hetpipe.values.ids import DeviceId
from hetpipe.values.policies import (
    POLICIES,
    SCHEDULES,
    PlacementName,
    Policy,
    PullTiming,
    Schedule,
    WeightPolicy,
)
from hetpipe.values.suggest import did_you_mean
from hetpipe.values.sync import PushCompression

AllocationName = Literal["NP", "ED", "HD", "auto", "explicit", "parallel"]

#: `auto`: the weight policy's own schedule.
ScheduleChoice = Literal["auto"] | Schedule

SCHEDULE_CHOICES: tuple[ScheduleChoice, ...] = ("auto", *SCHEDULES)


def schedule_for(weights: WeightPolicy, schedule: str) -> Schedule:
    """The schedule that `schedule` stands for under a policy.

    Raises:
        PlanError: there is no schedule of that name, or the policy does not support it.
    """
    if schedule not in SCHEDULE_CHOICES:
        raise PlanError(f"there is no schedule {schedule!r}; {did_you_mean(schedule, SCHEDULE_CHOICES)}")
    try:
        return POLICIES[weights].schedule_of(schedule)
    except ValueError as error:
        raise PlanError(f"the schedule {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `hetpipe plan`, with their defaults."""

    allocation: AllocationName = "auto"
    workers: tuple[tuple[DeviceId, ...], ...] | None = None
    """The devices of each virtual worker; for the allocation `explicit` only, which requires them."""
    minibatches_per_wave: int | None = None
    """N; None for the best."""
    proportional: bool = False
    """Whether every virtual worker has its own N_v, in proportion to its speed; N is then that of the slowest."""
    placement: PlacementName | None = None
    """None for the fastest."""
    staleness: int | None = 0
    """D; None for no bound. Ignored if `max_staleness` is set."""
    max_staleness: int | None = None
    """The largest D; the smallest D with the same speed is chosen. None if D is given."""
    pull: PullTiming = "every_wave"
    """Whether weights are pulled for every wave, or only when D requires it."""
    compress_pushes: PushCompression = "none"
    """Whether pushes of `float32` parameters have half their bytes."""
    weights: WeightPolicy = "wave"
    schedule: ScheduleChoice = "auto"
    accumulate: int = 1
    """Minibatches per update; N is a multiple of it."""
    waits_for_norm: bool = False
    """Whether gradients are clipped by their norm over all stages."""
    with_shards: bool = True
    """Whether parameter servers hold the weights; without them there is one virtual worker."""
    optimizer_slots: int = 0
    """Tensors of parameter size that the optimizer keeps per parameter."""
    recompute: Recompute = "auto"
    chooses_policies: bool = False
    """Whether each stage of the plan has the best memory policies of its layers that fit."""
    host_bytes_per_second: float | None = None
    """Speed of the link to host memory, for these; None: unknown, and nothing is swapped."""
    reserve_bytes: int = 0
    """Memory used by the framework on every device."""
    num_shards: int | None = None
    """Parameter-server shards; None: one on each node that computes."""
    frozen_layers: int = 0
    """The first so many layers of the model are frozen."""
    max_batch: int | None = None
    """The largest acceptable global batch; for the allocation `parallel` only, which requires it."""

    def __post_init__(self) -> None:
        """Validate the options.

        Raises:
            PlanError: the policy does not support the schedule, or D is invalid.
        """
        schedule_for(self.weights, self.schedule)
        if self.max_staleness is not None and self.max_staleness < 0:
            raise PlanError(f"the largest D is {self.max_staleness}; give at least 0")
        if self.pull == "required" and self.staleness is None:
            raise PlanError("D = inf never requires a pull; give a D, or use `pull: every_wave`")

    @property
    def policy(self) -> Policy:
        """The row of `weights`."""
        return POLICIES[self.weights]

    @property
    def least_pulls_per_wave(self) -> float:
        """Minimum pulls per wave of each virtual worker: one per D + 1 waves if pulls are made only when D requires."""
        return 1.0 if self.pull == "every_wave" else 1.0 / ((self.staleness or 0) + 1)

    def memory(self, minibatches_per_wave: int) -> MemoryModel:
        """Memory model of stages for N minibatches per wave."""
        return MemoryModel(
            weights=self.weights,
            minibatches_per_wave=minibatches_per_wave,
            schedule=schedule_for(self.weights, self.schedule),
            accumulate=self.accumulate,
            waits_for_norm=self.waits_for_norm,
            optimizer_slots=self.optimizer_slots,
            reserve_bytes=self.reserve_bytes,
            with_shards=self.with_shards,
        )
