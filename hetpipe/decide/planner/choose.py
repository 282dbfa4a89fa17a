"""Planning: from a profile, a cluster and options to the plan document that `hetpipe plan` shows and a run starts from.

Includes the plan's utilisation of the devices' peak, in total and per stage (`values.utilisation`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from hetpipe.decide.planner.allocation.auto import auto
from hetpipe.decide.planner.allocation.equal_distribution import equal_distribution
from hetpipe.decide.planner.allocation.explicit import explicit
from hetpipe.decide.planner.allocation.hybrid_distribution import hybrid_distribution
from hetpipe.decide.planner.allocation.node_partition import node_partition
from hetpipe.decide.planner.allocation.parallel import parallel
from hetpipe.decide.planner.allocation.policy import Allocation
from hetpipe.decide.planner.baselines import all_reduce, single_devices
from hetpipe.decide.planner.borders import borders_of, forbidden_cuts
from hetpipe.decide.planner.costs import Costs, milliseconds
from hetpipe.decide.planner.host_memory import HostMemory
from hetpipe.decide.planner.job_rate import samples_per_second
from hetpipe.decide.planner.jobs import JobPlan, Jobs, partitioner_for
from hetpipe.decide.planner.options import AllocationName, PlanOptions, schedule_for
from hetpipe.decide.planner.pipelines import Pipeline
from hetpipe.decide.planner.ranking import Predict, RankedPlan, Ranking
from hetpipe.errors import PlanError
from hetpipe.values.cluster import Cluster
from hetpipe.values.fit import check_fits
from hetpipe.values.plan import ModelWork
from hetpipe.values.plan_document import Alternative, PlanDocument, PlannedStage, PlannedWorker, Predicted
from hetpipe.values.profile import Profile
from hetpipe.values.utilisation import model_speed, peak_of_types

ALLOCATIONS: Mapping[AllocationName, Allocation] = {
    "NP": node_partition,
    "ED": equal_distribution,
    "HD": hybrid_distribution,
    "auto": auto,
    "explicit": explicit,
    "parallel": parallel,
}

#: Allocations without further parameters; a plan lists the prediction of each.
_COMPARED: tuple[AllocationName, ...] = ("NP", "ED", "HD", "auto")


def choose_plan(profile: Profile, cluster: Cluster, options: PlanOptions, *, predict: Predict) -> PlanDocument:
    """The plan according to the options, with predictions for the alternatives.

    Args:
        profile: the layers on every type of the cluster.
        cluster: devices and links.
        options: options of the planner.
        predict: predicts the chosen plan and every alternative allocation, so that their figures are comparable.

    Raises:
        PlanError: the model does not fit, or the options contradict each other or the cluster.
        DocumentError: the profile lacks a type of the cluster.
    """
    check_fits(profile, cluster)
    costs = Costs(profile, cluster, options.frozen_layers)
    jobs = Jobs(costs, options, partitioner_for(costs, options))
    if not any(compute[-1] for compute in costs.compute.values()):
        raise PlanError("every layer takes 0 ms in the profile, so no plan can be computed from it; profile again")
    ranking = Ranking(jobs, predict)
    chosen = ranking.of(options.allocation, ALLOCATIONS[options.allocation])
    document = _document(chosen, tuple(_alternatives(ranking, jobs, chosen.predicted)))
    return with_utilisation(document, costs.profile, cluster)


def closed_form(plan: JobPlan, options: PlanOptions, *, waves: int | None = None) -> Predicted:  # noqa: ARG001 - a `Predict`
    """The job rate by closed form, without simulation."""
    return Predicted(
        samples_per_second=plan.rate.samples_per_second,
        cross_node_bytes_per_minibatch=plan.rate.cross_node_bytes_per_minibatch,
    )


def _alternatives(ranking: Ranking, jobs: Jobs, chosen: Predicted) -> Iterator[Alternative]:
    for name in _COMPARED:
        if name == jobs.options.allocation:
            continue
        try:
            found = ranking.of(name, ALLOCATIONS[name])
        except PlanError as error:
            yield Alternative(name=name, samples_per_second=None, reason=str(error))
            continue
        reason = f"{_compared(found.rate, chosen)}; {_limit(found.plan)}"
        yield Alternative(name=name, samples_per_second=found.rate, reason=reason)
    slots = jobs.options.optimizer_slots
    for baseline in (all_reduce(jobs.costs, slots), *single_devices(jobs.costs, slots)):
        rate_or_none, reason = baseline.samples_per_second, baseline.reason
        if rate_or_none is not None:
            reason = f"{_compared(rate_or_none, chosen)}; {reason}"
        yield Alternative(name=baseline.name, samples_per_second=rate_or_none, reason=reason)


def _compared(rate: float, chosen: Predicted) -> str:
    """Comparison of `rate` with the chosen plan, as text.

    >>> _compared(50.0, Predicted(samples_per_second=200.0, cross_node_bytes_per_minibatch=0.0))
    'loses 75.0 %'
    """
    percent = 100 * (rate / chosen.samples_per_second - 1)
    if round(abs(percent), 1) == 0:
        return "as fast"
    return f"loses {-percent:.1f} %" if percent < 0 else f"gains {percent:.1f} %"


def _limit(plan: JobPlan) -> str:
    """The bottleneck of a plan, as text."""
    if plan.rate.network_binds:
        return f"the network card of {plan.rate.busiest_node} is the bottleneck"
    if plan.rate.round_trip_binds:
        return "it waits for the round trip of weights"
    slowest = min(
        range(len(plan.workers)), key=lambda index: plan.workers[index].minibatches_per_tick / plan.waves[index]
    )
    kinds = Counter(stage.kind for stage in plan.workers[slowest].stages)
    mix = " + ".join(f"{count} × {kind}" for kind, count in sorted(kinds.items()))
    if len(plan.workers) == 1:
        return f"it is one virtual worker, {mix}"
    return f"of its {len(plan.workers)} virtual workers number {slowest}, {mix}, is the slowest"


def _document(chosen: RankedPlan, alternatives: tuple[Alternative, ...]) -> PlanDocument:
    plan, options = chosen.plan, chosen.options
    costs = plan.costs
    jobs = Jobs(costs, options, partitioner_for(costs, options))
    groups = [[stage.device for stage in worker.stages] for worker in plan.workers]
    used = {device for group in groups for device in group}
    memory = jobs.memory(max(plan.waves))
    host_memory = HostMemory(costs, memory, plan.placed, staleness=options.staleness)
    return PlanDocument(
        model=costs.profile.model,
        batch_size=costs.profile.batch_size,
        allocation=options.allocation,
        weights=options.weights,
        schedule=schedule_for(options.weights, options.schedule),
        staleness=options.staleness,
        pull=options.pull,
        compress_pushes=options.compress_pushes,
        virtual_workers=tuple(_worker(*each, plan, jobs) for each in zip(plan.workers, plan.waves, strict=True)),
        minibatches_per_wave=plan.own_waves or plan.minibatches_per_wave,
        max_minibatches_per_wave=tuple(jobs.max_minibatches_per_wave(group) for group in groups),
        searched_minibatches_per_wave=chosen.most_minibatches,
        frozen_layers=options.frozen_layers,
        has_shards=options.with_shards,
        shards=plan.placed.shards,
        placement=plan.placed.as_document(),
        placement_policy=jobs.placement,
        idle_devices=tuple(device for device in jobs.devices if device not in used),
        predicted=chosen.predicted,
        host_memory=host_memory.nodes([worker.stages for worker in plan.workers]),
        alternatives=alternatives,
        borders=borders_of([worker.stages for worker in plan.workers], costs, list(map(jobs.memory, plan.waves))),
        forbidden=forbidden_cuts(costs.profile),
    )


def _worker(worker: Pipeline, minibatches_per_wave: int, plan: JobPlan, jobs: Jobs) -> PlannedWorker:
    memory, num_stages = jobs.memory(minibatches_per_wave), len(worker.stages)
    stages = tuple(
        PlannedStage(
            device=stage.device,
            type=stage.kind,
            layers=(stage.first, stage.last),
            time_ms=milliseconds(stage.ticks),
            memory_bytes=stage.memory_bytes,
            receive_ms=milliseconds(stage.receive_ticks),
            recompute=stage.recompute,
            memory=stage.memory,
            in_flight=memory.in_flight(index, num_stages),
        )
        for index, stage in enumerate(worker.stages)
    )
    return PlannedWorker(
        stages=stages,
        bottleneck_ms=milliseconds(worker.bottleneck_ticks),
        samples_per_second=samples_per_second(worker.minibatches_per_tick, plan.costs.profile.batch_size),
    )


def with_utilisation(plan: PlanDocument, profile: Profile, cluster: Cluster) -> PlanDocument:
    """`plan` with tokens/s and MFU at the predicted speed, in total and per stage.

    A stage computes its layers for every sample of its virtual worker. With a staleness bound all virtual workers
    complete waves at the same average rate, so all train samples in proportion to their N_v; without one, each runs
    at its own speed. Idle devices do not count, nor do devices that a run does not use.
    """
    rate, dtype = plan.predicted.samples_per_second, profile.compute_dtype
    if plan.staleness is None:
        together = sum(worker.samples_per_second for worker in plan.virtual_workers)
        shares = [worker.samples_per_second / together if together else 0.0 for worker in plan.virtual_workers]
    else:
        shares = [n / sum(plan.waves) for n in plan.waves]

    def work(first: int, last: int) -> ModelWork | None:
        flops = profile.model_flops(first, last)
        return None if flops is None else ModelWork(profile.tokens_per_sample, flops / profile.batch_size)

    def stage_with(stage: PlannedStage, samples_per_second: float) -> PlannedStage:
        peak = peak_of_types([stage.type], cluster.device_types, dtype)
        speed = model_speed(samples_per_second, work(*stage.layers), peak)
        return stage.model_copy(update={"model_flops_utilisation": speed.model_flops_utilisation})

    def worker_with(worker: PlannedWorker, share: float) -> PlannedWorker:
        return worker.model_copy(update={"stages": tuple(stage_with(stage, rate * share) for stage in worker.stages)})

    kinds = [stage.type for worker in plan.virtual_workers for stage in worker.stages]
    whole = profile.model_flops(0, len(profile.layers))
    all_work = ModelWork(profile.tokens_per_sample, None if not whole else whole / profile.batch_size)
    speed = model_speed(rate, all_work, peak_of_types(kinds, cluster.device_types, dtype))
    reason = speed.model_flops_utilisation_reason
    if whole is None:
        reason = "the profile has no FLOPs of its layers; create it again with this version of `hetpipe profile`"
    predicted = plan.predicted.model_copy(
        update={
            "tokens_per_second": speed.tokens_per_second,
            "model_flops_utilisation": speed.model_flops_utilisation,
            "model_flops_utilisation_reason": reason,
        }
    )
    workers = tuple(worker_with(*each) for each in zip(plan.virtual_workers, shares, strict=True))
    return plan.model_copy(update={"predicted": predicted, "virtual_workers": workers})
