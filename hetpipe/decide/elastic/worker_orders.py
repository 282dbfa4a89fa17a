"""What the clock shard and the agents are told of one virtual worker. Pure."""

from __future__ import annotations

from collections.abc import Collection

from hetpipe.decide.elastic.worker_life import WorkerLife
from hetpipe.decide.lifecycle.configs import Assignment, agents_of
from hetpipe.decide.lifecycle.exchange import Admit, Drain, Evict, NewPlan, SendCommand
from hetpipe.decide.lifecycle.stage_table import StageTable
from hetpipe.values.commands import StopVirtualWorkerCommand
from hetpipe.values.ids import AgentId
from hetpipe.values.life_state import LifeState
from hetpipe.values.members import MemberInfo, MemberRole
from hetpipe.values.plan import Plan

#: Seconds that a life by a new plan waits for the checkpoint with its optimizer state; then an older one has to do.
CHECKPOINT_SECONDS = 20.0


def question(worker: WorkerLife, assignment: Assignment) -> Evict | Admit | Drain:
    """What the clock shard is to be told: that its newest life is over or is to leave, or of the next one."""
    plan, clock_shard = assignment.plan, assignment.shards[0]
    if worker.state is LifeState.ADMITTING:
        by = plan.virtual_workers[worker.vw]
        agents = agents_of(by, assignment.agents)
        until = worker.since + CHECKPOINT_SECONDS
        new = NewPlan(plan, agents, assignment.emulations, worker.left_at, until) if worker.is_replanned else None
        return Admit(worker.vw, worker.incarnation, len(by.stages), plan.term, clock_shard, new)
    kind = Drain if worker.state is LifeState.LEAVING else Evict
    return kind(worker.vw, worker.incarnation, plan.term, clock_shard)


def kills(
    worker: WorkerLife, assignment: Assignment, stages: StageTable, *, absent: Collection[AgentId]
) -> list[SendCommand]:
    """End what is left of its processes, on all agents but the absent ones."""
    plan = assignment.plan
    command = StopVirtualWorkerCommand(plan.job_id, worker.vw, worker.incarnation, plan.term)
    agents = {life.agent for life in stages.of(worker.vw)}.difference(absent)
    return [SendCommand(agent, command) for agent in sorted(agents)]


def has_devices(info: MemberInfo, plan: Plan) -> bool:
    """Whether a member is an agent with all devices that the plan gives the agent of its name."""
    stages = [stage for vw in plan.virtual_workers for stage in vw.stages if stage.agent == AgentId(info.id)]
    offered = {device.device for device in info.devices}
    return info.role is MemberRole.AGENT and {stage.device for stage in stages} <= offered
