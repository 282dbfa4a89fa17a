"""Planning of an additional virtual worker of a run: selection of free devices and cut. Pure.

It takes as many devices as the virtual worker with the fewest has, or all if fewer are free, and more only if the model
does not fit into their memory. If possible all devices belong to one agent, the smallest that has enough; else to the
agents with the most. The cut is based on a profile of their types. Without one it is that of a virtual worker with as
many stages, if there is one, or based on the sizes of layers, if that fits. Where virtual workers have waves of
different numbers of minibatches, it gets that of the one that is most alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from hetpipe.decide.elastic.replanning import basis_of_others, best_cut, fits, layers_of
from hetpipe.decide.lifecycle.exchange import NewWorker
from hetpipe.decide.lifecycle.job_queue import claim_devices
from hetpipe.decide.lifecycle.planning import PlannedRun
from hetpipe.decide.planner.partition import equal_cost_cut, layer_cost
from hetpipe.errors import UserError
from hetpipe.values.bounds import MAX_STAGES
from hetpipe.values.ids import DeviceId, LayerIndex, VirtualWorkerIndex
from hetpipe.values.plan import Plan, StagePlan, VirtualWorkerPlan
from hetpipe.values.policies import POLICIES
from hetpipe.values.run import AgentInfo


def new_worker(run: PlannedRun, plan: Plan, free: Sequence[AgentInfo]) -> NewWorker:
    """Plan the next virtual worker of a run.

    Args:
        run: the job and how it was planned.
        plan: the current plan.
        free: agents in order of registration, with their free devices.

    Raises:
        UserError: no devices are free, or the model does not fit on them; or the job follows a script.
    """
    if run.job.elastic.script or run.job.freeze.compress:
        raise UserError(
            f"job {plan.job_id} follows a script of changes (elastic.script), which knows only its "
            f"{len(plan.virtual_workers)} virtual workers; start a job without a script to add others"
        )
    free = [agent for agent in free if agent.devices]
    counts = [len(worker.stages) for worker in plan.virtual_workers]
    num_free = sum(len(agent.devices) for agent in free)
    if not free:
        raise UserError(
            f"all virtual workers of job {plan.job_id} are active, and no device is free for another one; start "
            "an agent (`hetpipe serve agent`), or free devices of other jobs"
        )
    num_layers = plan.virtual_workers[0].stages[-1].last_layer
    most = min(num_free, len(_blocks(run, num_layers)), MAX_STAGES - sum(counts))
    for count in range(min(*counts, num_free), most + 1):
        agents = _together(count, free)
        num_in_wave = _num_in_wave(run, plan, count)
        stages = _stages(run, plan, agents, num_in_wave)
        if stages is not None:
            return NewWorker(VirtualWorkerPlan(VirtualWorkerIndex(len(counts)), stages, num_in_wave), agents)
    if most < 1:
        raise UserError(f"job {plan.job_id} has {sum(counts)} stages, and at most {MAX_STAGES} are allowed")
    raise UserError(
        f"job {plan.job_id} cannot have another virtual worker: the {num_free} free devices do not have enough memory "
        "for the model; start an agent with more, or larger ones"
    )


def _num_in_wave(run: PlannedRun, plan: Plan, depth: int) -> int | None:
    """N_v of a new virtual worker of `depth` stages where those of the others differ; None if all have the same.

    It is that of the one with the most similar number of stages, the smallest of several, or more where the policy
    needs more for its stages.
    """
    waves = run.job.minibatches_by_worker(plan.virtual_workers)
    if not waves:
        return None
    step = run.job.gradients.accumulate
    alike = min(plan.virtual_workers, key=lambda other: (abs(len(other.stages) - depth), waves[other.index]))
    least = max(waves[alike.index], POLICIES[run.job.weights].least_minibatches_per_wave(depth))
    return -(-least // step) * step


def _together(count: int, free: Sequence[AgentInfo]) -> tuple[AgentInfo, ...]:
    """The requested number of devices on as few agents as possible."""
    enough = [agent for agent in free if len(agent.devices) >= count]
    if enough:
        return claim_devices(count, [min(enough, key=lambda agent: len(agent.devices))])
    return claim_devices(count, sorted(free, key=lambda agent: -len(agent.devices)))


def _stages(
    run: PlannedRun, plan: Plan, agents: Sequence[AgentInfo], num_in_wave: int | None
) -> tuple[StagePlan, ...] | None:
    """The cut for all devices of `agents`; None if it does not fit in their memory."""
    stages = tuple(_usual(run, plan, agents))
    basis = basis_of_others(run, agents)
    if basis is None:
        return stages
    if num_in_wave is not None:
        basis = replace(basis, memory=replace(basis.memory, minibatches_per_wave=num_in_wave))
    # Sizes are not times and cannot be weighed against transfers.
    return best_cut(basis, stages) if basis.is_forecast or not fits(basis, stages) else stages


def _usual(run: PlannedRun, plan: Plan, agents: Sequence[AgentInfo]) -> Iterator[StagePlan]:
    """The cut of a virtual worker with as many stages, or one based on the sizes of layers."""
    places = [(agent.agent, DeviceId(device.device)) for agent in agents for device in agent.devices]
    like = next((worker for worker in plan.virtual_workers if len(worker.stages) == len(places)), None)
    if like is not None:
        for stage, (agent, device) in zip(like.stages, places, strict=True):
            yield replace(stage, agent=agent, device=device)
        return
    layers = layers_of(plan) if run.model is None else run.model.layers
    ends = [0, *accumulate(_blocks(run, len(layers)))]
    costs = [sum(map(layer_cost, layers[first:last])) for first, last in pairwise(ends)]
    cuts = [ends[done] for done in accumulate(equal_cost_cut(costs, len(places)), initial=0)]
    for (agent, device), (first, last) in zip(places, pairwise(cuts), strict=True):
        yield StagePlan(agent, device, LayerIndex(first), LayerIndex(last))


def _blocks(run: PlannedRun, num_layers: int) -> tuple[int, ...]:
    """The model's layers, counted between one allowed cut and the next."""
    known = () if run.described is None else run.described.profile.layers
    forbidden = {cut for cut, layer in enumerate(known, 1) if layer.no_cut}
    ends = [*(cut for cut in range(1, num_layers) if cut not in forbidden), num_layers]
    return tuple(stop - start for start, stop in pairwise([0, *ends]))
