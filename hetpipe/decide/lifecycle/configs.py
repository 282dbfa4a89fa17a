"""What each stage and each shard is told, made from the job, the plan and who is there. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetpipe.decide.sync.division import empty_bitmap
from hetpipe.errors import CheckpointError, JobError
from hetpipe.job.file import Job
from hetpipe.values.commands import StartStageCommand
from hetpipe.values.events import Submission
from hetpipe.values.ids import Clock, DeviceId, Incarnation, ShardIndex, StageIndex, VirtualWorkerIndex
from hetpipe.values.members import MemberInfo
from hetpipe.values.plan import ModelReport, Plan, ProofReport, VirtualWorkerPlan
from hetpipe.values.run import AgentInfo, DeviceConfig, StageConfig, StageEmulation
from hetpipe.values.run_document import RunDocument
from hetpipe.values.shard_config import ShardConfig
from hetpipe.values.sync import DataSpec, Membership, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A job, its plan, and who carries it out."""

    job: Job
    submission: Submission
    plan: Plan
    agents: tuple[AgentInfo, ...]
    shards: tuple[MemberInfo, ...]
    """In index order."""
    emulations: tuple[tuple[StageEmulation, ...], ...] = ()
    """Per virtual worker and stage; empty if nothing is played."""

    def with_worker(self, worker: VirtualWorkerPlan, emulations: tuple[StageEmulation, ...] = ()) -> Assignment:
        """The same with another plan of one virtual worker, from its next life on; one beyond the last is added.

        Args:
            worker: its stages.
            emulations: how these play their devices; empty if nothing is played.
        """
        at = worker.index
        workers = (*self.plan.virtual_workers[:at], worker, *self.plan.virtual_workers[at + 1 :])
        played = (*self.emulations[:at], emulations, *self.emulations[at + 1 :]) if self.emulations else ()
        return replace(self, plan=replace(self.plan, virtual_workers=workers), emulations=played)


def agents_of(worker: VirtualWorkerPlan, agents: Sequence[AgentInfo]) -> tuple[AgentInfo, ...]:
    """Of `agents` those on which a virtual worker is, with the devices of its stages alone."""
    used = {(stage.agent, stage.device) for stage in worker.stages}
    found = [
        replace(agent, devices=tuple(device for device in agent.devices if (agent.agent, device.device) in used))
        for agent in agents
    ]
    return tuple(agent for agent in found if agent.devices)


def with_agents(agents: Sequence[AgentInfo], more: Sequence[AgentInfo]) -> tuple[AgentInfo, ...]:
    """The agents and devices of both, none twice: what is claimed already comes first."""
    known = {agent.agent: agent for agent in agents}
    for agent in more:
        before = known.get(agent.agent, replace(agent, devices=()))
        has = {device.device for device in before.devices}
        new = tuple(device for device in agent.devices if device.device not in has)
        known[agent.agent] = replace(before, devices=before.devices + new)
    return tuple(known.values())


def data_of(job: Job, model: ModelReport) -> DataSpec:
    """What is dealt to the virtual workers.

    Raises:
        JobError: the data is smaller than one minibatch.
    """
    if model.train_samples < job.batch_size:
        raise JobError(
            f"batch_size: is {job.batch_size}, but data.train has {model.train_samples} samples; use at most that many"
        )
    return job.data_spec(model.train_samples)


def fresh_progress(num_samples: int) -> Progress:
    """Where a new run starts."""
    return Progress(clock=Clock(0), epoch=0, used=empty_bitmap(num_samples), minibatches=0, samples=0)


def check_progress(progress: Progress, *, folder: str, num_samples: int) -> None:
    """Refuse a checkpoint of another data set.

    Raises:
        CheckpointError: the ledger is not one of `num_samples` samples.
    """
    if len(progress.used) != len(empty_bitmap(num_samples)):
        raise CheckpointError(
            f"checkpoint {folder} is of about {8 * len(progress.used)} samples, but data.train has {num_samples}; "
            "resume with the data the run began with"
        )


def stage_commands(assignment: Assignment) -> list[StartStageCommand]:
    """One command per stage, virtual worker by virtual worker. Emulated devices are dealt in that order too."""
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
            ),
        )
        for vw in plan.virtual_workers
        for index, stage in enumerate(vw.stages)
    ]


def _emulated(job: Job, plan: Plan) -> dict[tuple[VirtualWorkerIndex, int], DeviceConfig]:
    """The emulated device of each stage of the first lives, if there are any; later ones go by their places.

    Virtual workers that joined later get the next ones.
    """
    if not job.cluster.devices:
        return {}
    workers = map(VirtualWorkerIndex, range(job.num_workers))
    places = [(vw, index) for vw in workers for index in range(job.num_stages(vw))]
    later = [(vw.index, index) for vw in plan.virtual_workers[job.num_workers :] for index in range(len(vw.stages))]
    return dict(zip([*places, *later], job.emulated_devices(len(later)), strict=True))


def later_life(
    assignment: Assignment, vw: VirtualWorkerIndex, incarnation: Incarnation, restore: str | None
) -> list[StartStageCommand]:
    """The commands for a later life of one virtual worker.

    Args:
        assignment: the plan and the agents as they are now.
        vw: who.
        incarnation: which life.
        restore: folder of the newest checkpoint of this run; None: there is none, so that of the run's start counts.
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
    """What the clock shard keeps for a coordinator that has never heard of the job.

    Args:
        assignment: the job, its plan, and who carries it out.
        data: what is dealt to the virtual workers.
        start: where the run begins.
        eval_samples: samples of an evaluation; None: nobody has said.
        submitted_wall: when the job was handed in, in seconds since 1970.
        proof: of the model, before training.
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
    """Who carries the plan of `run` out.

    Raises:
        JobError: the job in it cannot be read.
    """
    return Assignment(
        job=Job.model_validate(run.job),
        submission=run.submission,
        plan=run.plan,
        agents=run.agents,
        shards=run.shards,
        emulations=run.emulations,
    )


def shard_configs(job: Job, run: RunDocument) -> list[ShardConfig]:
    """One configuration per shard, in index order; shard 0 is the clock shard, which alone keeps `run`."""
    plan = run.plan
    membership = Membership({vw.index: len(vw.stages) for vw in plan.virtual_workers})
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
        )
        for index in range(plan.num_shards)
    ]
