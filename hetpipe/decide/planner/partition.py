"""Cuts and devices of a plan without a profile. Pure.

A stage costs the elements of its parameters plus those of its activations, the best available estimate of its share of
time and memory. The cut is exact: it minimises the most expensive stage and, among such cuts, the sum of squared costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from hetpipe.decide.planner.borders import too_few_cuts
from hetpipe.decide.planner.placement import PLACEMENTS, ParameterBytes, Placement
from hetpipe.errors import PlanError
from hetpipe.job.file import Job
from hetpipe.values.ids import AgentId, DeviceId, JobId, LayerIndex, ShardIndex, Term, VirtualWorkerIndex
from hetpipe.values.plan import (
    DTYPE_BYTES,
    ForbiddenPlaces,
    LayerReport,
    ModelReport,
    Plan,
    SlicePlan,
    StagePlan,
    TensorSpec,
    VirtualWorkerPlan,
)
from hetpipe.values.policies import DEFAULT_PLACEMENT
from hetpipe.values.run import AgentInfo
from hetpipe.values.suggest import join_names


def layer_cost(layer: LayerReport) -> int:
    """Parameter elements plus activation elements of one layer."""
    return sum(parameter.num_elements for parameter in layer.parameters) + layer.activation_elements


def equal_cost_cut(costs: Sequence[int], num_stages: int, forbidden: Sequence[ForbiddenPlaces] = ()) -> tuple[int, ...]:
    """Number of consecutive layers per stage, at least one each, that minimises the most expensive stage.

    Ties are broken by the least sum of squared costs, then by the longest first stages.

    Args:
        costs: cost of each layer, ≥ 0.
        num_stages: 1 … len(costs).
        forbidden: places within layers where the model cannot be cut; for the error.

    Raises:
        PlanError: there are more stages than layers; lists the reasons of forbidden cuts.

    >>> equal_cost_cut([1, 1, 1, 3], 2)
    (3, 1)
    >>> equal_cost_cut([5, 1, 1, 5], 3)
    (1, 2, 1)
    """
    if not 1 <= num_stages <= len(costs):
        fix = f"set workers.stages to at most {len(costs)}"
        raise PlanError(too_few_cuts(num_stages, len(costs), forbidden, fix=fix))
    return _evenest_cut(costs, num_stages, limit=_least_limit(costs, num_stages))


def plan_job(job: Job, report: ModelReport, agents: Sequence[AgentInfo], term: Term, job_id: JobId) -> Plan:
    """The complete plan of a job.

    Devices are assigned in the order of `agents` and, within an agent, of its devices: virtual worker by virtual
    worker, stage by stage.

    Args:
        job: the job.
        report: report on the model.
        agents: the agents in order of registration, each with its free devices.
        term: the term of the plan.
        job_id: the job's id.

    Raises:
        PlanError: more stages than layers, given layer counts with a wrong sum, too few devices, or a placement that
            only the planner supports.
    """
    layers = report.layers
    devices = [(agent.agent, DeviceId(device.device)) for agent in agents for device in agent.devices]
    if len(devices) < job.num_initial_devices:
        raise PlanError(
            f"the job needs {job.num_initial_devices} devices, one per stage, and {len(devices)} are free; lower "
            "workers.count or workers.stages, or start more agents"
        )
    free = iter(devices)
    virtual_workers = []
    for index in range(job.num_workers):
        vw = VirtualWorkerIndex(index)
        counts = job.layer_counts(vw)
        if counts is None:
            forbidden = [places for layer in layers for places in layer.forbidden]
            counts = equal_cost_cut([layer_cost(layer) for layer in layers], job.num_stages(vw), forbidden)
        elif sum(counts) != len(layers):
            raise PlanError(_wrong_counts(vw, counts, len(layers)))
        virtual_workers.append(VirtualWorkerPlan(vw, _stages(counts, [next(free) for _ in counts])))
    num_shards = job.parameter_servers.count
    placement = PLACEMENTS.get(DEFAULT_PLACEMENT if (name := job.parameter_servers.placement) == "auto" else name)
    if placement is None:
        raise PlanError(
            f"parameter_servers.placement: {job.parameter_servers.placement} puts parameters on the node that computes "
            f"them, which requires the planner; set workers.stages: auto, or use {join_names(PLACEMENTS, 'or')}"
        )
    plan = Plan(
        job_id=job_id,
        term=term,
        virtual_workers=tuple(virtual_workers),
        slices=_slices(layers, placement, num_shards) if job.has_shards else (),
        num_shards=num_shards,
        model_digest=report.digest,
    )
    return with_added_workers(plan, job, agents)


def with_added_workers(plan: Plan, job: Job, agents: Sequence[AgentInfo]) -> Plan:
    """The plan with the virtual workers that only the script of the job adds, on devices of the others or further ones.

    Raises:
        PlanError: a line is not possible; the message names it.
    """
    places = [(stage.agent, stage.device) for worker in plan.virtual_workers for stage in worker.stages]
    free = [(agent.agent, DeviceId(device.device)) for agent in agents for device in agent.devices]
    # An emulated device has the speed that the cluster file gives to one of the plan.
    places += [] if job.cluster.emulate else [place for place in free if place not in places]
    num_used = job.num_initial_devices
    num_layers = plan.virtual_workers[0].bounds[-1]
    workers = list(plan.virtual_workers)
    for number, line in job.elastic.added:
        counts, devices = line.stages or (), line.devices or ()
        wrong = ""
        if line.vw != len(workers):
            wrong = f"adds virtual worker {line.vw} with `devices`, but the next index is {len(workers)}; use that"
        elif max(devices, default=0) >= len(places):
            use = f"use 0 to {len(places) - 1}, or start agents"
            wrong = f"names device {max(devices)}, but the run has {len(places)}; {use}"
        elif gaps := sorted(set(range(num_used, max(devices, default=0))).difference(devices)):
            wrong = f"names device {max(devices)}, but no line has device {gaps[0]}; number further devices on end"
        elif sum(counts) != num_layers:
            wrong = f"has {sum(counts)} layers, but the model has {num_layers}; give each of them to a stage"
        elif not isinstance(n := job.minibatches_per_wave, int) and len(n) <= line.vw:
            wrong = f"adds virtual worker {line.vw}, but sync.minibatches_per_wave has {len(n)} numbers; add its own"
        if wrong:
            raise PlanError(f"elastic.script[{number}]: {wrong}")
        num_used = max(num_used, 1 + max(devices, default=0))
        stages = _stages(counts, [places[device] for device in devices])
        workers.append(VirtualWorkerPlan(VirtualWorkerIndex(line.vw), stages))
    return replace(plan, virtual_workers=tuple(workers))


def _slices(layers: Sequence[LayerReport], placement: Placement, num_shards: int) -> tuple[SlicePlan, ...]:
    """Slices of `placement` in elements, in chain order."""
    specs: dict[str, TensorSpec] = {spec.name: spec for layer in layers for spec in layer.parameters}
    parameters = [
        ParameterBytes(spec.name, layer.index, spec.num_bytes) for layer in layers for spec in layer.parameters
    ]
    found: list[SlicePlan] = []
    for piece in placement(parameters, num_shards):
        spec = specs[piece.name]
        size = DTYPE_BYTES[spec.dtype]
        layer, shard = LayerIndex(piece.layer), ShardIndex(piece.shard)
        found.append(SlicePlan(spec, layer, shard, piece.start // size, piece.stop // size))
    return tuple(found)


def _stages(counts: Sequence[int], devices: Sequence[tuple[AgentId, DeviceId]]) -> tuple[StagePlan, ...]:
    ends = accumulate(counts)
    return tuple(
        StagePlan(agent, device, LayerIndex(end - count), LayerIndex(end))
        for (agent, device), count, end in zip(devices, counts, ends, strict=True)
    )


def _wrong_counts(vw: VirtualWorkerIndex, counts: Sequence[int], num_layers: int) -> str:
    difference = num_layers - sum(counts)
    fix = f"add {difference}" if difference > 0 else f"remove {-difference}"
    return (
        f"workers.stages gives virtual worker {vw} the layer counts {list(counts)}, which sum to {sum(counts)}, but "
        f"the model has {num_layers} layers; {fix} so that they sum to {num_layers}"
    )


def _least_limit(costs: Sequence[int], num_stages: int) -> int:
    """Minimum cost of the most expensive stage over all cuts, by bisection over the answer (costs are integers)."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _fewest_stages(costs, middle) <= num_stages:
            high = middle
        else:
            low = middle + 1
    return low


def _fewest_stages(costs: Sequence[int], limit: int) -> int:
    """Number of stages needed if none may cost more than `limit`, which no single layer exceeds."""
    num_stages, stage_cost = 1, 0
    for cost in costs:
        if stage_cost + cost > limit:
            num_stages, stage_cost = num_stages + 1, 0
        stage_cost += cost
    return num_stages


def _evenest_cut(costs: Sequence[int], num_stages: int, *, limit: int) -> tuple[int, ...]:
    """The cut with the least sum of squared stage costs among those whose stages cost at most `limit`.

    Dynamic programming from the back: `best[start]` is the least sum for the layers from `start` on in the remaining
    stages, with the length of the first of them.
    """
    num_layers = len(costs)
    best: dict[int, tuple[int, int]] = {num_layers: (0, 0)}
    tables = []
    for stages_left in range(1, num_stages + 1):
        table: dict[int, tuple[int, int]] = {}
        for start in range(num_layers - stages_left, num_stages - stages_left - 1, -1):
            stage_cost = 0
            for stop in range(start + 1, num_layers + 1):
                stage_cost += costs[stop - 1]
                if stage_cost > limit:
                    break
                if stop in best:
                    total = stage_cost**2 + best[stop][0]
                    if start not in table or total <= table[start][0]:
                        table[start] = (total, stop - start)
        best = table
        tables.append(table)
    counts: list[int] = []
    for table in reversed(tables):
        counts.append(table[sum(counts)][1])
    return tuple(counts)
