"""Traffic of a plan: all flows of a job with source, destination and frequency, as values.

Per minibatch: activations to the next stage, and the gradients of those that need one in return. Per wave: each stage
pushes its update to every shard with a part of it, and pulls that part of the published weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from hetpipe.decide.planner.costs import Costs
from hetpipe.decide.planner.job_rate import bytes_leaving, bytes_moved
from hetpipe.decide.simulator.plan import SimulatedPlan, SimulatedStage
from hetpipe.values.cluster import node_of


class Traffic(Enum):
    """Kind of a flow."""

    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"
    PUSH = "push"
    PULL = "pull"


@dataclass(frozen=True, slots=True)
class FlowSpec:
    """One flow: a stage to a neighbour, a stage to a shard, or a shard to a stage."""

    traffic: Traffic
    vw: int
    stage: int
    """The sending stage; for a pull, the requesting stage."""
    shard: int | None
    source: str
    """The source node."""
    target: str
    """The destination node."""
    num_bytes: int
    """Bytes of each message."""


def flows_of(plan: SimulatedPlan, costs: Costs) -> Iterator[FlowSpec]:
    """Every flow of the job, in the order of virtual workers and stages; empty flows to and from shards are omitted."""
    on_shards = list(zip(plan.placed.pushed.by_shard, plan.placed.pulled.by_shard, strict=True))
    for vw, stages in enumerate(plan.workers):
        for index, stage in enumerate(stages):
            node = node_of(stage.device)
            if index + 1 < len(stages):
                behind, cut = node_of(stages[index + 1].device), stage.last
                yield FlowSpec(Traffic.ACTIVATIONS, vw, index, None, node, behind, costs.cut_bytes[cut])
                yield FlowSpec(Traffic.GRADIENTS, vw, index + 1, None, behind, node, costs.returning_bytes[cut])
            for shard, (pushed, pulled) in enumerate(on_shards):
                if num_bytes := pulled[stage.last] - pulled[stage.first]:
                    there, update = plan.placed.shards[shard], pushed[stage.last] - pushed[stage.first]
                    yield FlowSpec(Traffic.PUSH, vw, index, shard, node, there, update)
                    yield FlowSpec(Traffic.PULL, vw, index, shard, there, node, num_bytes)


def cross_node_bytes_per_minibatch(
    plan: SimulatedPlan, costs: Costs, *, pulls_per_wave: Sequence[Sequence[float]] | None = None
) -> float:
    """All bytes that leave a node, averaged over the job's minibatches, each counted once.

    Counts one push per wave, and the given number of pulls of each stage of each virtual worker, by default one. All
    virtual workers complete the same number of waves.
    """
    pulls_of_each = pulls_per_wave or [(1.0,) * len(stages) for stages in plan.workers]
    total = 0.0
    for stages, n, pulls in zip(plan.workers, plan.minibatches_per_wave, pulls_of_each, strict=True):
        moved = bytes_moved(stages, costs=costs, placed=plan.placed, minibatches_per_wave=n, pulls_per_wave=0)
        total += bytes_leaving(moved)
        total += sum(times * _pulled_across(stage, plan) for stage, times in zip(stages, pulls, strict=True))
    return total / sum(plan.minibatches_per_wave)


def _pulled_across(stage: SimulatedStage, plan: SimulatedPlan) -> int:
    """Bytes of a pull of a stage that come from other nodes."""
    pulled = plan.placed.pulled
    whole = pulled.bytes_of(stage.first, stage.last)
    return whole - pulled.local_bytes(node_of(stage.device), stage.first, stage.last)
