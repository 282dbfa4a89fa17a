"""Options of a simulation, and their validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetpipe.decide.planner.costs import APPLY_BYTES_PER_SECOND
from hetpipe.decide.planner.options import ScheduleChoice, schedule_for
from hetpipe.decide.simulator.plan import SimulatedPlan
from hetpipe.errors import PlanError
from hetpipe.values.ids import DeviceId
from hetpipe.values.policies import POLICIES, PullTiming, WeightPolicy
from hetpipe.values.suggest import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """Options of a simulation."""

    staleness: int | None
    """D; None for ∞."""
    minibatches: int
    """Minibatches of each virtual worker."""
    weights: WeightPolicy = "wave"
    schedule: ScheduleChoice = "auto"
    """`auto`: the policy's default."""
    deterministic: bool = False
    """W* is the required clock, instead of the newest published."""
    pull: PullTiming = "every_wave"
    """`required`: the clock in use is kept as long as D permits, and weights are pulled only then."""
    jitter_cv: float = 0.0
    """Coefficient of variation of the time of every computation; lognormal with unchanged mean."""
    seed: int = 0
    """Seed of the jitter. A minibatch's draw at a stage does not depend on any other event."""
    stragglers: Mapping[DeviceId, float] = field(default_factory=dict)
    """Device → slowdown factor."""
    staggered: bool = False
    """Whether virtual workers start one after another, spread evenly over the slowest stage's time per minibatch. If
    started simultaneously, equal virtual workers stay synchronised, and may keep a faster rhythm than real ones, which
    never start at the same instant.
    """
    contention: bool = True
    """Whether transfers share network cards and PCIe roots; if not, each takes its uncontended time."""
    local_shards: bool = True
    """Whether weights that stay on a node pass no network card. In a scale model they pass it, as nearly all weights of
    a large job do.
    """
    apply_bytes_per_second: float = APPLY_BYTES_PER_SECOND
    """Rate at which a shard adds updates."""
    exchange_seconds: float = 0.0
    """Overhead of a wave's round trip to the shards beyond transfers and additions: calls, checks and logs. Measured by
    `benchmarks/prediction.py`.
    """


def check_options(plan: SimulatedPlan, options: SimulationOptions) -> None:
    """Validate the options.

    Raises:
        PlanError: an option is out of range or refers to nothing, or the policy requires another schedule, N or D.
    """
    schedule_for(options.weights, options.schedule)
    _check_stragglers(plan, options)
    for stages, n in zip(plan.workers, plan.minibatches_per_wave, strict=True):
        least = POLICIES[options.weights].least_minibatches_per_wave(len(stages))
        if n < least:
            raise PlanError(f"{options.weights} with {len(stages)} stages needs N of at least {least}, not {n}")
    if options.minibatches < 1:
        raise PlanError(f"minibatches must be at least 1, not {options.minibatches}")
    if options.staleness is not None and options.staleness < 0:
        raise PlanError(f"D must be at least 0, not {options.staleness}")
    if options.staleness is None and options.deterministic:
        raise PlanError("D = inf has no required clock to use; give a D, or drop `deterministic`")
    if options.staleness is None and options.pull == "required":
        raise PlanError("D = inf never requires a pull; give a D, or use `pull: every_wave`")
    if options.jitter_cv < 0:
        raise PlanError(f"the jitter must be at least 0, not {options.jitter_cv}")
    if options.apply_bytes_per_second <= 0:
        raise PlanError(f"a shard must add more than 0 bytes per second, not {options.apply_bytes_per_second:g}")
    if options.exchange_seconds < 0:
        raise PlanError(f"an exchange must take at least 0 seconds, not {options.exchange_seconds}")


def _check_stragglers(plan: SimulatedPlan, options: SimulationOptions) -> None:
    used = {stage.device for stages in plan.workers for stage in stages}
    for device, factor in options.stragglers.items():
        if device not in used:
            raise PlanError(f"the plan uses no device {device!r}; {did_you_mean(device, used)}")
        if factor <= 0:
            raise PlanError(f"{device} cannot take {factor} times as long; give a factor above 0")
