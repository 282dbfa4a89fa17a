"""What a planned job will do, by simulation: the `predict` of `planner.choose`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetpipe.planner.costs import Costs
from hetpipe.planner.jobs import JobPlan
from hetpipe.planner.options import PlanOptions
from hetpipe.simulator.options import SimulationOptions
from hetpipe.simulator.plan import SimulatedPlan, SimulatedStage
from hetpipe.simulator.simulate import simulate
from hetpipe.spec.cluster import Links, LinkSpec
from hetpipe.spec.ids import DeviceId
from hetpipe.spec.plan_document import Predicted

#: At least so many waves, and so many for each wave that virtual workers may get ahead: the second half, which is what
#: counts, then lies behind the time in which the fast ones use up their lead.
_LEAST_WAVES = 64
_WAVES_PER_LEAD = 16

#: Forwards and backwards after which a prediction has to end: some seconds. The waves that count then are fewer.
_MOST_COMPUTATIONS = 200_000
_FEWEST_WAVES = 12

#: No link at all, as far as time goes.
_INSTANT = LinkSpec(bandwidth_bytes_per_second=1e15, latency_seconds=0.0)
_INSTANT_LINKS = Links(intra_node=_INSTANT, inter_node=_INSTANT)


def steady_waves(staleness: int | None) -> int:
    """Waves of each virtual worker after which a run has been in its steady state for a good while.

    >>> steady_waves(0), steady_waves(8), steady_waves(None)
    (64, 160, 64)
    """
    return max(_LEAST_WAVES, _WAVES_PER_LEAD * (staleness + 2) if staleness is not None else 0)


@dataclass(frozen=True, slots=True)
class Played:
    """Devices that are played in real time: their links do not contend, each flow takes the time it takes alone."""

    stragglers: Mapping[DeviceId, float]
    """Device → how many times longer it computes."""
    with_links: bool
    """Whether links are played, too; those that are not take no time."""


def predicted(
    plan: JobPlan, options: PlanOptions, *, played: Played | None = None, waves: int | None = None
) -> Predicted:
    """Speed and traffic of `plan` in the steady state.

    Args:
        plan: what the planner found.
        options: what it was asked for.
        played: how its devices are played; None: they are real.
        waves: of each virtual worker; None: as many as reach the steady state.

    Raises:
        PlanError: the plan cannot be run so.
    """
    simulated, costs = _simulated(plan), plan.costs
    stragglers: Mapping[DeviceId, float] = {}
    if played is not None:
        used = {stage.device for stages in simulated.workers for stage in stages}
        stragglers = {device: factor for device, factor in played.stragglers.items() if device in used}
        if not played.with_links:
            costs = Costs(costs.profile, costs.cluster.model_copy(update={"links": _INSTANT_LINKS}))
    n = plan.minibatches_per_wave
    computations_per_wave = 2 * n * sum(len(worker.stages) for worker in plan.workers)
    affordable = max(_MOST_COMPUTATIONS // computations_per_wave, _FEWEST_WAVES)
    how = SimulationOptions(
        staleness=options.staleness,
        minibatches=n * min(steady_waves(options.staleness) if waves is None else waves, affordable),
        weights=options.weights,
        schedule=options.schedule,
        stragglers=stragglers,
        staggered=True,
        contention=played is None,
    )
    result = simulate(simulated, costs, how)
    return Predicted(
        samples_per_second=result.samples_per_second,
        cross_node_bytes_per_minibatch=result.cross_node_bytes_per_minibatch,
    )


def _simulated(plan: JobPlan) -> SimulatedPlan:
    return SimulatedPlan(
        workers=tuple(
            tuple(
                SimulatedStage(stage.device, stage.kind, stage.first, stage.last, stage.recompute)
                for stage in worker.stages
            )
            for worker in plan.workers
        ),
        minibatches_per_wave=plan.minibatches_per_wave,
        placed=plan.placed,
    )
