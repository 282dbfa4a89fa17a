"""What a planned job will do, by simulation: the `predict` of `planner.choose`."""

from __future__ import annotations

from hetpipe.planner.jobs import JobPlan
from hetpipe.planner.options import PlanOptions
from hetpipe.simulator.options import SimulationOptions
from hetpipe.simulator.plan import SimulatedPlan, SimulatedStage
from hetpipe.simulator.simulate import simulate
from hetpipe.spec.plan_document import Predicted

#: At least so many waves, and so many for each wave that virtual workers may get ahead: the second half, which is what
#: counts, then lies behind the time in which the fast ones use up their lead.
_LEAST_WAVES = 64
_WAVES_PER_LEAD = 16

#: Forwards and backwards after which a prediction has to end: some seconds. The waves that count then are fewer.
_MOST_COMPUTATIONS = 200_000
_FEWEST_WAVES = 12


def steady_waves(staleness: int | None) -> int:
    """Waves of each virtual worker after which a run has been in its steady state for a good while.

    >>> steady_waves(0), steady_waves(8), steady_waves(None)
    (64, 160, 64)
    """
    return max(_LEAST_WAVES, _WAVES_PER_LEAD * (staleness + 2) if staleness is not None else 0)


def predicted(plan: JobPlan, options: PlanOptions) -> Predicted:
    """Speed and traffic of `plan` in the steady state.

    Args:
        plan: what the planner found.
        options: what it was asked for.

    Raises:
        PlanError: the plan cannot be run so.
    """
    n = plan.minibatches_per_wave
    computations_per_wave = 2 * n * sum(len(worker.stages) for worker in plan.workers)
    affordable = max(_MOST_COMPUTATIONS // computations_per_wave, _FEWEST_WAVES)
    result = simulate(
        _simulated(plan),
        plan.costs,
        SimulationOptions(
            staleness=options.staleness,
            minibatches=n * min(steady_waves(options.staleness), affordable),
            weights=options.weights,
        ),
    )
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
