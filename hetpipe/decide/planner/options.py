"""What a user may ask of the planner."""

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

AllocationName = Literal["NP", "ED", "HD", "auto", "explicit", "parallel"]

#: `auto`: the weight policy's own.
ScheduleChoice = Literal["auto"] | Schedule

SCHEDULE_CHOICES: tuple[ScheduleChoice, ...] = ("auto", *SCHEDULES)


def schedule_for(weights: WeightPolicy, schedule: str) -> Schedule:
    """The schedule that `schedule` means under a policy.

    Raises:
        PlanError: there is none of that name, or the policy cannot use it.
    """
    if schedule not in SCHEDULE_CHOICES:
        raise PlanError(f"there is no schedule {schedule!r}; {did_you_mean(schedule, SCHEDULE_CHOICES)}")
    try:
        return POLICIES[weights].schedule_of(schedule)
    except ValueError as error:
        raise PlanError(f"the schedule {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The choices of `hetpipe plan`, with their defaults."""

    allocation: AllocationName = "auto"
    workers: tuple[tuple[DeviceId, ...], ...] | None = None
    """The devices of each virtual worker; needed by `explicit`, and only there."""
    minibatches_per_wave: int | None = None
    """N; None: the best."""
    placement: PlacementName | None = None
    """None: the fastest."""
    staleness: int | None = 0
    """D; None: no bound. Of no meaning beside `max_staleness`."""
    max_staleness: int | None = None
    """The largest D; the smallest with which the job is as fast as with this one is chosen. None: D is given."""
    pull: PullTiming = "every_wave"
    """Whether weights are fetched for every wave, or where D requires it."""
    weights: WeightPolicy = "wave"
    schedule: ScheduleChoice = "auto"
    accumulate: int = 1
    """Minibatches whose gradients make one update together; N is a multiple of it."""
    waits_for_norm: bool = False
    """Whether gradients are clipped by their norm over all stages."""
    with_shards: bool = True
    """Whether parameter servers hold the weights, too; without them there is one virtual worker."""
    optimizer_slots: int = 0
    """Tensors of parameter size that the optimizer keeps per parameter."""
    recompute: Recompute = "auto"
    reserve_bytes: int = 0
    """What the framework takes on every device."""
    num_shards: int | None = None
    """Parameter-server shards; None: one on each node that computes."""
    max_batch: int | None = None
    """The largest global batch that is safe; needed by `parallel`, and only there."""

    def __post_init__(self) -> None:
        """Refuse a schedule that the policy cannot use.

        Raises:
            PlanError: saying which it can.
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
        """Pulls that each virtual worker makes at least: one per D + 1 waves where only D requires them."""
        return 1.0 if self.pull == "every_wave" else 1.0 / ((self.staleness or 0) + 1)

    def memory(self, minibatches_per_wave: int) -> MemoryModel:
        """What stages keep with N minibatches per wave."""
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
