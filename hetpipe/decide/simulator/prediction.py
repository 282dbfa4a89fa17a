"""Prediction of a planned job by simulation: the `predict` of `decide.planner.choose`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from hetpipe.decide.planner import simulation_length
from hetpipe.decide.planner.costs import Costs
from hetpipe.decide.planner.jobs import JobPlan
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.decide.planner.scale_model import ScaleModel, scale_model
from hetpipe.decide.planner.simulation_length import simulated_waves, work_per_wave
from hetpipe.decide.simulator.options import SimulationOptions
from hetpipe.decide.simulator.plan import SimulatedPlan, SimulatedStage
from hetpipe.decide.simulator.result import SimulationResult
from hetpipe.decide.simulator.simulate import simulate
from hetpipe.decide.simulator.traffic import cross_node_bytes_per_minibatch
from hetpipe.decide.sync.division import mean_minibatches
from hetpipe.decide.sync.segment import SegmentLength
from hetpipe.values.cluster import Links, LinkSpec
from hetpipe.values.ids import DeviceId
from hetpipe.values.plan_document import Predicted, RunForecast

#: Maximum number of simulated segments of a run; later ones are assumed equally fast.
_MOST_SEGMENTS = 10_000

#: A link that takes no time.
_INSTANT = LinkSpec(bandwidth_bytes_per_second=1e15, latency_seconds=0.0)
_INSTANT_LINKS = Links(intra_node=_INSTANT, inter_node=_INSTANT)


#: Number of frozen layers → the plan of the run with them, and its costs.
FrozenPlans = Callable[[int, int], tuple[SimulatedPlan, Costs]]


@dataclass(frozen=True, slots=True)
class Emulation:
    """Emulated devices: their links have no contention, each flow takes its uncontended time."""

    stragglers: Mapping[DeviceId, float]
    """Device → slowdown factor."""
    with_links: bool
    """Whether links are emulated as well; links that are not take no time."""


def predicted(
    plan: JobPlan, options: PlanOptions, *, played: Emulation | None = None, waves: int | None = None
) -> Predicted:
    """Speed and traffic of `plan` in the steady state; the speed of a large one from its scale model.

    Args:
        plan: the planner's result.
        options: the planner's options.
        played: emulation of its devices; None for real devices.
        waves: waves of each virtual worker; None for enough to reach the steady state.

    Raises:
        PlanError: the plan cannot be run with these options.
    """
    whole, costs, stragglers = _as_emulated(planned(plan), plan.costs, played)
    scale = None if played is not None else scale_model(whole.workers, whole.minibatches_per_wave, whole.placed, costs)
    simulated = whole if scale is None else at_scale(whole, scale)
    how = SimulationOptions(
        staleness=options.staleness,
        pull=options.pull,
        minibatches=_steady_minibatches(simulated, options.staleness, waves),
        weights=options.weights,
        schedule=options.schedule,
        stragglers=stragglers,
        staggered=True,
        contention=played is None,
        local_shards=scale is None,
    )
    result = simulate(simulated, costs, how)
    if scale is None:
        return Predicted(
            samples_per_second=result.samples_per_second,
            cross_node_bytes_per_minibatch=result.cross_node_bytes_per_minibatch,
        )
    return Predicted(
        samples_per_second=sum(scale.expanded(result.worker_samples_per_second)),
        cross_node_bytes_per_minibatch=cross_node_bytes_per_minibatch(
            whole, costs, pulls_per_wave=scale.expanded(result.pulls_per_wave)
        ),
    )


def run_forecast(
    plan: SimulatedPlan,
    costs: Costs,
    options: SimulationOptions,
    segments: Iterable[SegmentLength],
    *,
    played: Emulation | None = None,
    frozen: FrozenPlans | None = None,
) -> RunForecast:
    """Predict the speed of one run: every segment is simulated from barrier to barrier, with its actual length.

    The measured figure of a run has the same definition: its samples divided by the time from when all stages are ready
    to the end of the last one. It also includes costs that are not simulated: the optimizer's steps, reading data,
    evaluation and writing checkpoints.

    Segments of equal length are simulated once. A segment longer than needed to reach the steady state is simulated up
    to there and extrapolated at its steady rate; so is the rest of a run with very many segments, or with segments of
    very many different lengths.

    Args:
        plan: the simulated plan.
        costs: the profile and the cluster.
        options: options of the simulation; `minibatches`, `stragglers`, `contention` and `staggered` are ignored.
        segments: segments of the run, in order; at least one minibatch in all.
        played: emulation of its devices; None for real devices.
        frozen: number of frozen layers, and F of those who train → plan and costs with them, for segments that have
            some; None: none have.

    Raises:
        PlanError: the plan cannot be run with these options.
    """
    counts: dict[tuple[int, int], Counter[SegmentLength]] = defaultdict(Counter)
    for length in islice(segments, _MOST_SEGMENTS):
        counts[length.frozen_layers, length.lineup][length] += 1
    samples = sum(length.samples * times for each in counts.values() for length, times in each.items())
    seconds = 0.0
    for (layers, lineup), each in counts.items():
        with_them = (plan, costs) if frozen is None or not layers else frozen(layers, lineup)
        seconds += _seconds(*_as_emulated(*with_them, played), options, each, played, share=len(counts))
    return RunForecast(samples_per_second=samples / seconds, seconds=seconds)


def _seconds(
    plan: SimulatedPlan,
    costs: Costs,
    stragglers: Mapping[DeviceId, float],
    options: SimulationOptions,
    counts: Mapping[SegmentLength, int],
    played: Emulation | None,
    *,
    share: int,
) -> float:
    """Seconds of all segments; see `run_forecast`. `share`: of how many equal parts of the budget this is one."""
    most = _steady_minibatches(plan, options.staleness)
    budget = simulation_length.MOST_COMPUTATIONS // share
    simulated: dict[int, SimulationResult] = {}
    # The longest one first: others can be derived from it.
    for minibatches in sorted({min(length.minibatches, most) for length in counts}, reverse=True):
        cost = 2 * minibatches * sum(len(stages) for stages in plan.workers)
        if simulated and cost > budget:
            continue
        budget -= cost
        how = replace(
            options,
            minibatches=minibatches,
            stragglers=stragglers,
            contention=played is None,
            staggered=played is None,  # synchronised, they would compete for links, as real ones do only briefly
        )
        simulated[minibatches] = simulate(plan, costs, how)
    samples_per_minibatch = len(plan.workers) * costs.profile.batch_size
    seconds = 0.0
    for length, times in counts.items():
        nearest = min(simulated, key=lambda minibatches: abs(minibatches - length.minibatches))
        result, beyond = simulated[nearest], length.minibatches - nearest
        seconds += times * (result.seconds + beyond * samples_per_minibatch / result.samples_per_second)
    return seconds


def _steady_minibatches(plan: SimulatedPlan, staleness: int | None, waves: int | None = None) -> int:
    """Minibatches per virtual worker: those of `waves`, or enough for the steady state, within a limit."""
    work = work_per_wave(plan.workers, plan.minibatches_per_wave, plan.placed)
    return mean_minibatches(simulated_waves(work, staleness, waves), plan.minibatches_per_wave)


def _as_emulated(
    plan: SimulatedPlan, costs: Costs, played: Emulation | None
) -> tuple[SimulatedPlan, Costs, dict[DeviceId, float]]:
    """The plan, its costs with emulated links, and the stragglers among its devices."""
    if played is None:
        return plan, costs, {}
    used = {stage.device for stages in plan.workers for stage in stages}
    stragglers = {device: factor for device, factor in played.stragglers.items() if device in used}
    if not played.with_links:
        cluster = costs.cluster.model_copy(update={"links": _INSTANT_LINKS})
        costs = Costs(costs.original, cluster, costs.frozen_layers)
    return plan, costs, stragglers


def at_scale(plan: SimulatedPlan, scale: ScaleModel) -> SimulatedPlan:
    """The scale model as a plan."""
    return SimulatedPlan(
        workers=scale.chosen(plan.workers),
        minibatches_per_wave=scale.chosen(plan.minibatches_per_wave),
        placed=scale.placed,
    )


def planned(plan: JobPlan) -> SimulatedPlan:
    """The part of a plan that affects time."""
    return SimulatedPlan(
        workers=tuple(
            tuple(
                SimulatedStage(
                    stage.device, stage.kind, stage.first, stage.last, stage.recompute, stage.memory, stage.policy_ticks
                )
                for stage in worker.stages
            )
            for worker in plan.workers
        ),
        minibatches_per_wave=plan.waves,
        placed=plan.placed,
    )
