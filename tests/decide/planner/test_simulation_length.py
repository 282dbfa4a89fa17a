"""How long a job is simulated: what counts as work."""

from __future__ import annotations

from hetpipe.decide.planner.jobs import JobPlan
from hetpipe.decide.planner.simulation_length import work_per_wave
from tests.decide.planner.job_cases import chain, cluster_of, jobs_for


def plan_of(num_nodes: int, layers: int = 2) -> JobPlan:
    """One virtual worker on each device, a shard on each node."""
    profile = chain([1.0] * layers, {"V": 1.0}, parameters=64 << 20)
    jobs = jobs_for(profile, cluster_of(["V"] * num_nodes, gib={"V": 8}))
    plan = jobs.best_with(2, [(device,) for device in jobs.devices])
    assert plan is not None
    return plan


def work(plan: JobPlan) -> int:
    return work_per_wave([worker.stages for worker in plan.workers], plan.waves, plan.placed)


def test_of_few_shards_computations_are_the_work() -> None:
    assert work(plan_of(4)) == 4 * 2 * 2


def test_of_many_shards_messages_are() -> None:
    """Each of 32 stages pushes to 32 shards, and pulls from as many: 2,048 messages beside 128 computations."""
    plan = plan_of(32)

    assert len({piece.shard for piece in plan.placed.pieces}) == 32
    assert work(plan) == 2 * 32 * 32 // 4 > 2 * 2 * 32
