"""Configurations of stages and shards, derived from the job, the plan and the members. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetpipe.decide.elastic.freezing import freezing_of
from hetpipe.decide.elastic.script import member_changes, plan_changes, wave_changes
from hetpipe.decide.sync.division import empty_bitmap
from hetpipe.errors import CheckpointError, JobError
from hetpipe.job.file import Job
from hetpipe.values.cluster import node_of
from hetpipe.values.commands import StartStageCommand
from hetpipe.values.events import Submission
from hetpipe.values.ids import Clock, DeviceId, Incarnation, ShardIndex, StageIndex, VirtualWorkerIndex
from hetpipe.values.members import MemberInfo
from hetpipe.values.plan import ModelReport, Plan, ProofReport, VirtualWorkerPlan
from hetpipe.values.run import AgentInfo, DeviceConfig, StageConfig, StageEmulation
from hetpipe.values.run_document import RunDocument
from hetpipe.values.shard_config import ShardConfig
from hetpipe.values.sync import DataSpec, Membership, PlanVersion, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A job, its plan, and the members that run it."""

    job: Job
    submission: Submission
    plan: Plan
    agents: tuple[AgentInfo, ...]
    shards: tuple[MemberInfo, ...]
    """In index order."""
    emulations: tuple[tuple[StageEmulation, ...], ...] = ()
    """Per virtual worker and stage; empty without emulation."""
    homes: tuple[int, ...] = ()
    """Of the run's data specification, whatever devices virtual workers get later."""

    def with_worker(self, worker: VirtualWorkerPlan, emulations: tuple[StageEmulation, ...] = ()) -> Assignment:
        """A copy with another plan for one virtual worker, from its next incarnation on; a new index is added.

        Args:
            worker: the plan of its stages.
            emulations: their emulations; empty without emulation.
        """
        at = worker.index
        workers = (*self.plan.virtual_workers[:at], worker, *self.plan.virtual_workers[at + 1 :])
        played = (*self.emulations[:at], emulations, *self.emulations[at + 1 :]) if self.emulations else ()
        return replace(self, plan=replace(self.plan, virtual_workers=workers), emulations=played)


def agents_of(worker: VirtualWorkerPlan, agents: Sequence[AgentInfo]) -> tuple[AgentInfo, ...]:
    """The `agents` used by a virtual worker, with the devices of its stages only."""
    used = {(stage.agent, stage.device) for stage in worker.stages}
    found = [
        replace(agent, devices=tuple(device for device in agent.devices if (agent.agent, device.device) in used))
        for agent in agents
    ]
    return tuple(agent for agent in found if agent.devices)


def with_agents(agents: Sequence[AgentInfo], more: Sequence[AgentInfo]) -> tuple[AgentInfo, ...]:
    """The union of agents and devices; already claimed ones come first."""
    known = {agent.agent: agent for agent in agents}
    for agent in more:
        before = known.get(agent.agent, replace(agent, devices=()))
        has = {device.device for device in before.devices}
        new = tuple(device for device in agent.devices if device.device not in has)
        known[agent.agent] = replace(before, devices=before.devices + new)
    return tuple(known.values())


def data_of(job: Job, model: ModelReport) -> DataSpec:
    """The data specification of the run.

    Raises:
        JobError: the data is smaller than one minibatch.
    """
    if model.train_samples < job.batch_size:
        raise JobError(
            f"batch_size: is {job.batch_size}, but data.train has {model.train_samples} samples; use at most that many"
        )
    return job.data_spec(model.train_samples)


def homes_of(job: Job, plan: Plan) -> tuple[int, ...]:
    """`homes` of the data specification: empty unless the job has samples belong to nodes."""
    if job.data.division != "by_node":
        return ()
    nodes = [node_of(worker.stages[0].device) for worker in plan.virtual_workers]
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    return tuple(numbers[node] for node in nodes)


def fresh_progress(num_samples: int) -> Progress:
    """The initial progress of a new run."""
    return Progress(clock=Clock(0), epoch=0, used=empty_bitmap(num_samples), minibatches=0, samples=0)


def check_progress(progress: Progress, *, folder: str, num_samples: int) -> None:
    """Check that a checkpoint belongs to the data set.

    Raises:
        CheckpointError: the ledger is not for `num_samples` samples.
    """
    if len(progress.used) != len(empty_bitmap(num_samples)):
        raise CheckpointError(
            f"checkpoint {folder} is for about {8 * len(progress.used)} samples, but data.train has {num_samples}; "
            "resume with the data the run began with"
        )


def stage_commands(assignment: Assignment) -> list[StartStageCommand]:
    """One command per stage, virtual worker by virtual worker. Emulated devices are assigned in the same order."""
    job, plan, submission, agents = assignment.job, assignment.plan, assignment.submission, assignment.agents
    hosts = {agent.agent: agent.host for agent in agents}
    torch_devices = {DeviceId(device.device): device.torch_device for agent in agents for device in agent.devices}
    emulated = _emulated(job, plan)
    job_json = job.model_dump(mode="json")
    return [
        StartStageCommand(
            plan.job_id,
            StageConfig(
                job=job_json,
                plan=plan,
                vw=vw.index,
                stage=StageIndex(index),
                incarnation=Incarnation(0),
                device=emulated.get((vw.index, index)) or DeviceConfig(torch_devices[stage.device]),
                shard_addresses=tuple(shard.address for shard in assignment.shards),
                run_dir=submission.run_dir,
                import_path=submission.import_path,
                host=hosts[stage.agent],
                restore=submission.restore,
                shard_ids=tuple(shard.id for shard in assignment.shards),
                emulation=assignment.emulations[vw.index][index] if assignment.emulations else None,
                homes=assignment.homes,
            ),
            submission.code_digest,
        )
        for vw in plan.virtual_workers
        for index, stage in enumerate(vw.stages)
    ]


def _emulated(job: Job, plan: Plan) -> dict[tuple[VirtualWorkerIndex, int], DeviceConfig]:
    """Emulated device of each stage, if any; later incarnations use those of their index.

    Virtual workers that join later use the following devices, or those of the others whose devices they have.
    """
    if not job.cluster.devices:
        return {}
    workers = map(VirtualWorkerIndex, range(job.num_workers))
    places = [(vw, index) for vw in workers for index in range(job.num_stages(vw))]
    added = {VirtualWorkerIndex(line.vw): line.devices or () for _, line in job.elastic.added}
    added |= {worker.vw: worker.devices for lineup in plan.freeze_lineups[1:] for worker in lineup.workers}
    joined = [worker for worker in plan.virtual_workers[job.num_workers :] if worker.index not in added]
    later = [(worker.index, index) for worker in joined for index in range(len(worker.stages))]
    emulated = job.emulated_devices(len(later))
    found = dict(zip(places, emulated, strict=False)) | dict(zip(later, emulated[job.num_devices :], strict=True))
    return found | {(vw, index): emulated[at] for vw, devices in added.items() for index, at in enumerate(devices)}


def later_life(
    assignment: Assignment, vw: VirtualWorkerIndex, incarnation: Incarnation, restore: str | None
) -> list[StartStageCommand]:
    """The commands for a later incarnation of one virtual worker.

    Args:
        assignment: the plan and the current agents.
        vw: its index.
        incarnation: the new incarnation.
        restore: folder of the newest checkpoint of this run; None if there is none, and the one given at the start of
            the run is used.
    """
    return [
        replace(
            command,
            config=replace(command.config, incarnation=incarnation, restore=restore or assignment.submission.restore),
        )
        for command in stage_commands(assignment)
        if command.config.vw == vw
    ]


def run_document(
    assignment: Assignment,
    data: DataSpec,
    start: Progress,
    *,
    eval_samples: int | None,
    submitted_wall: float,
    proof: ProofReport | None = None,
) -> RunDocument:
    """Create the run document, stored at the clock shard for future coordinators.

    Args:
        assignment: the job, its plan, and its members.
        data: the data specification.
        start: progress at the start of the run.
        eval_samples: samples of an evaluation; None if unknown.
        submitted_wall: submission time, in seconds since 1970.
        proof: proof of the model, before training.
    """
    return RunDocument(
        job=assignment.job.model_dump(mode="json"),
        submission=assignment.submission,
        plan=assignment.plan,
        agents=assignment.agents,
        shards=assignment.shards,
        emulations=assignment.emulations,
        data=data,
        start=start,
        eval_samples=eval_samples,
        submitted_wall=submitted_wall,
        proof=proof,
    )


def assignment_of(run: RunDocument) -> Assignment:
    """The assignment described by `run`.

    Raises:
        JobError: its job cannot be parsed.
    """
    return Assignment(
        job=Job.model_validate(run.job),
        submission=run.submission,
        plan=run.plan,
        agents=run.agents,
        shards=run.shards,
        emulations=run.emulations,
        homes=run.data.homes,
    )


def shard_configs(job: Job, run: RunDocument) -> list[ShardConfig]:
    """One configuration per shard, in index order; only shard 0, the clock shard, stores `run`."""
    plan = run.plan
    workers = plan.virtual_workers
    membership = Membership(
        {vw.index: len(vw.stages) for vw in workers},
        job.minibatches_by_worker(workers),
        {vw.index: PlanVersion.following(run.start.plans.get(vw.index), vw.bounds) for vw in workers},
    )
    return [
        ShardConfig(
            job_id=plan.job_id,
            term=plan.term,
            shard=ShardIndex(index),
            num_shards=plan.num_shards,
            clock_shard_address=run.shards[0].address,
            membership=membership,
            slices=tuple(part for part in plan.slices if part.shard == index),
            sync=job.sync_spec(),
            data=run.data,
            checkpoint_every_waves=job.checkpoint.every_waves,
            checkpoint_keep=job.checkpoint.keep,
            last_checkpoint_seconds=job.patience.last_checkpoint.total_seconds(),
            run_dir=run.submission.run_dir,
            progress=run.start,
            run=None if index else run,
            clock_shard_id=run.shards[0].id,
            keeps_history=job.history != "off",
            plan_changes=plan_changes(job, plan),
            wave_changes=wave_changes(job),
            member_changes=member_changes(job),
            freezing=freezing_of(job, plan),
            activations=plan.activations,
            storage=job.storage,
        )
        for index in range(plan.num_shards)
    ]
