"""The virtual workers of a plan file as those of a run, for what is decided about them. Pure."""

from __future__ import annotations

from hetpipe.decide.elastic.replanning import Basis
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.decide.simulator.documents import costs_of, schedule_in, weight_policy
from hetpipe.values.cluster import Cluster, node_of
from hetpipe.values.ids import AgentId, LayerIndex, VirtualWorkerIndex
from hetpipe.values.plan import StagePlan, VirtualWorkerPlan
from hetpipe.values.plan_document import PlanDocument, PlannedWorker
from hetpipe.values.profile import Profile


def basis_of(
    document: PlanDocument, profile: Profile, cluster: Cluster, *, optimizer_slots: int = 0
) -> tuple[Basis, tuple[VirtualWorkerPlan, ...]]:
    """What is known of the layers and devices of a plan file, and its virtual workers; nodes stand for agents.

    Args:
        document: the plan file.
        profile: of the model.
        cluster: with the plan's devices.
        optimizer_slots: tensors of optimizer state per parameter.

    Raises:
        PlanError: the plan does not match them.
    """
    workers = tuple(_worker(VirtualWorkerIndex(vw), planned) for vw, planned in enumerate(document.virtual_workers))
    options = PlanOptions(
        weights=weight_policy(document.weights),
        schedule=schedule_in(document),
        optimizer_slots=optimizer_slots,
        with_shards=document.has_shards,
    )
    basis = Basis(
        costs_of(document, profile, cluster).original,
        cluster,
        {(stage.agent, stage.device): stage.device for worker in workers for stage in worker.stages},
        options.memory(document.waves[0]),
        is_forecast=True,
        per_wave={worker.index: n for worker, n in zip(workers, document.waves, strict=True)},
    )
    return basis, workers


def _worker(vw: VirtualWorkerIndex, planned: PlannedWorker) -> VirtualWorkerPlan:
    stages = (
        StagePlan(
            AgentId(node_of(stage.device)), stage.device, LayerIndex(stage.layers[0]), LayerIndex(stage.layers[1])
        )
        for stage in planned.stages
    )
    return VirtualWorkerPlan(vw, tuple(stages))
