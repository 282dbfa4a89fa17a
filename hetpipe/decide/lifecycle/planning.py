"""The plan of a run: given by the job, or computed by the planner for the available devices. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from typing import Protocol

from hetpipe.decide.elastic.freezing import freeze_levels, freezing_of
from hetpipe.decide.elastic.script import member_changes, wave_changes
from hetpipe.decide.lifecycle.configs import Assignment, homes_of
from hetpipe.decide.lifecycle.inspections import Inspected
from hetpipe.decide.lifecycle.known_cluster import PlanningInputs, describe
from hetpipe.decide.planner.assignment import Offered, assign
from hetpipe.decide.planner.choose import choose_plan
from hetpipe.decide.planner.costs import Costs, StagePlace
from hetpipe.decide.planner.cuts import Recompute
from hetpipe.decide.planner.emulation import EmulatedStage, emulations
from hetpipe.decide.planner.layer_memory import choose_policies, least_bytes
from hetpipe.decide.planner.optimizer_slots import slots_of
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.decide.planner.partition import plan_job, with_added_workers
from hetpipe.decide.planner.ranking import Predict
from hetpipe.decide.simulator.documents import (
    costs_of,
    frozen_plan,
    schedule_in,
    simulated_plan,
    weight_policy,
    with_lineup,
)
from hetpipe.decide.simulator.options import SimulationOptions
from hetpipe.decide.simulator.plan import SimulatedPlan
from hetpipe.decide.simulator.prediction import Emulation, predicted, run_forecast
from hetpipe.decide.sync.segment import ScriptedChanges, planned_lengths
from hetpipe.errors import InfeasiblePlan, PlanError
from hetpipe.job.elastic import AddLine, MemoryLine, MoveLine, ScriptLine, ScriptMoment, WavesLine
from hetpipe.job.file import Job
from hetpipe.values.cluster import Cluster
from hetpipe.values.events import Submission
from hetpipe.values.freezing import FreezeCut, lineup_for
from hetpipe.values.ids import Clock, DeviceId, JobId, Term, VirtualWorkerIndex
from hetpipe.values.members import MemberInfo
from hetpipe.values.memory import (
    LayerPolicy,
    MemoryChange,
    changed_policies,
    policies_of,
    stage_memory,
)
from hetpipe.values.plan import ModelReport, Plan, ProofReport, StagePlan, VirtualWorkerPlan
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.profile import Profile
from hetpipe.values.quantities import bytes_text
from hetpipe.values.run import AgentInfo, StageEmulation
from hetpipe.values.sync import DataSpec, Progress, WaveChange


class Planner(Protocol):
    """Computes the plan for a profile on a cluster."""

    def __call__(
        self, profile: Profile, cluster: Cluster, options: PlanOptions, *, predict: Predict = ...
    ) -> PlanDocument:
        """The plan, with the predictions of `predict` for it and its alternatives; the default is the planner's own."""
        ...


#: `memory` of a job → whether the planner's stages recompute, which is refined per layer under `auto`.
_RECOMPUTE: Mapping[str, Recompute] = {"recompute": "on", "auto": "auto"}

#: The planner with the simulator's predictions.
PLANNER: Planner = partial(choose_plan, predict=predicted)


@dataclass(frozen=True, slots=True)
class _Cut:
    """The plan of one virtual worker: its stages, the memory policy of each layer of the model, and N."""

    vw: VirtualWorkerIndex
    bounds: tuple[int, ...]
    policies: tuple[LayerPolicy, ...]
    minibatches_per_wave: int

    def layers(self, stage: int) -> tuple[int, int]:
        """First layer of a stage, and the one after its last."""
        return self.bounds[stage], self.bounds[stage + 1]

    def after(self, line: ScriptLine, names: Sequence[str]) -> _Cut:
        """The same behind a line of a script; `names` are those of the layers."""
        match line:
            case MoveLine() | AddLine() if line.vw == self.vw and line.stages:
                return replace(self, bounds=(0, *accumulate(line.stages)))
            case MemoryLine() if line.vw == self.vw:
                change = MemoryChange(line.layers, line.policy, clock=0)
                return replace(
                    self, policies=changed_policies(self.policies, list(enumerate(names)), [change], p=1, wave=0)
                )
            case WavesLine():
                counts = WaveChange(Clock(line.at.clock), line.counts)
                return replace(self, minibatches_per_wave=counts.of(self.vw))
        return self


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A job with known virtual workers, and its plan."""

    job: Job
    plan: Plan
    described: PlanningInputs | None = None
    """The inputs of planning or emulation; None if the job specifies everything."""
    document: PlanDocument | None = None
    """The forecast, if it was planned."""
    emulations: tuple[tuple[StageEmulation, ...], ...] = ()
    """Per virtual worker and stage; empty without emulation."""
    model: ModelReport | None = None
    """Report of the inspection; None if no longer known."""
    known_proof: ProofReport | None = None
    """Result of the proof from another coordinator, if `model` is no longer known."""

    @property
    def links_sentence(self) -> str:
        """The links used for planning; empty if a cluster file states them all, or nothing was planned."""
        if self.document is None or self.described is None or self.described.known.sources == ("stated",):
            return ""
        return self.described.known.sentence

    @property
    def proof(self) -> ProofReport | None:
        """Result of the proof of the model before training; None if unknown."""
        return self.known_proof if self.model is None else self.model.proof

    def assignment(
        self, submission: Submission, agents: tuple[AgentInfo, ...], shards: tuple[MemberInfo, ...]
    ) -> Assignment:
        """The assignment of the plan to members.

        Args:
            submission: the submission to continue with; its model report is dropped, as the plan contains it.
            agents: agents with the claimed devices.
            shards: its parameter servers, in index order.
        """
        return Assignment(
            job=self.job,
            submission=replace(submission, model=None),
            plan=self.plan,
            agents=agents,
            shards=shards,
            emulations=self.emulations,
            homes=homes_of(self.job, self.plan),
        )


def num_devices_wanted(job: Job) -> int | None:
    """Number of devices to claim for a job; None for all, among which the planner chooses."""
    if job.is_planned:
        return job.num_devices
    if job.cluster.emulate and job.cluster.file is not None:
        return len(job.cluster.file.devices)
    return None


def plan_run(
    job: Job,
    inspected: Inspected,
    agents: Sequence[AgentInfo],
    planner: Planner,
    *,
    term: Term,
    job_id: JobId,
    now: float,
) -> PlannedRun:
    """Plan a job on the devices of `agents`, at `now` seconds since 1970-01-01 UTC.

    Raises:
        PlanError: the model does not fit the requested cut, the profile, or the devices.
        UserError: a device type of the cluster is unknown.
    """
    model = inspected.model
    if job.is_planned and not job.cluster.emulate:
        if job.memory == "auto":
            raise PlanError(
                "memory: is `auto`, which requires the costs of the layers on the devices; use `workers.stages: auto`, "
                "or emulate devices with `cluster.emulate`, or name the policies"
            )
        return PlannedRun(job, plan_job(job, model, agents, term, job_id), model=model)
    described = describe(job, inspected, agents, now=now)
    if job.is_planned:
        plan = _with_policies(job, described, plan_job(job, model, agents, term, job_id))
        return PlannedRun(job, plan, described, emulations=_emulations_of_cut(job, described, plan), model=model)
    if job.cluster.emulate:
        planner = partial(planner, predict=partial(predicted, played=_emulation_of(job)))
    options = options_of(job, reserve_bytes=described.reserve_bytes)
    levels = freeze_levels(model.layers, ignores_ties=job.freeze.tied == "everywhere")
    if job.freeze.layers < len(levels):  # otherwise the job is rejected with its other mistakes
        options = replace(options, frozen_layers=levels[job.freeze.layers])
    document = planner(described.profile, described.cluster, options)
    document = described.known.noted_in(document, described.cluster)
    counts = [[last - first for first, last in (s.layers for s in vw.stages)] for vw in document.virtual_workers]
    plan = assign(document, model, _offered(job, described.cluster, agents), term=term, job_id=job_id)
    planned = job.with_plan(counts, document.minibatches_per_wave, document.staleness)
    plan = with_added_workers(plan, planned, agents)
    played: tuple[tuple[StageEmulation, ...], ...] = ()
    if job.cluster.emulate:
        stages = _emulated_stages(plan, _played_devices(plan, described.cluster, document))
        played = _emulations(job, Costs(described.profile, described.cluster), stages, document.shards)
    return PlannedRun(planned, plan, described, document, played, model)


def with_workers(run: PlannedRun, plan: Plan) -> PlannedRun:
    """The run with a plan that has further lineups on the devices of its own, which play them as its first one does."""
    if run.described is None or not run.emulations:
        return replace(run, plan=plan)
    cluster, document = run.described.cluster, run.document
    stages = _emulated_stages(plan, _played_devices(plan, cluster, document))
    nodes = [node.name for node in cluster.nodes if node.devices]
    shards = [nodes[shard % len(nodes)] for shard in range(plan.num_shards)] if document is None else document.shards
    played = _emulations(run.job, Costs(run.described.profile, cluster), stages, shards)
    return replace(run, plan=plan, emulations=played)


def with_forecast(run: PlannedRun, data: DataSpec, start: Progress) -> PlanDocument | None:
    """The forecast, extended by that of this run's segments from `start` on; None if it was not planned.

    Raises:
        PlanError: the plan cannot be simulated.
    """
    document, described, job = run.document, run.described, run.job
    if document is None or described is None:
        return document
    segments = planned_lengths(
        start,
        data,
        per_wave=[job.minibatches_in(worker) for worker in run.plan.virtual_workers],
        checkpoint_every_waves=job.checkpoint.every_waves,
        plan_clocks=job.elastic.clocks,
        scripted=ScriptedChanges(
            [change for change in wave_changes(job) if change.clock > start.clock], member_changes(job)
        ),
        freezing=freezing_of(job, run.plan),
    )
    first = next(segments, None)
    if first is None:
        return document
    costs = costs_of(document, described.profile, described.cluster)
    forecast = run_forecast(
        simulated_plan(document, costs),
        costs,
        SimulationOptions(
            staleness=document.staleness,
            pull=document.pull,
            minibatches=1,
            weights=weight_policy(document.weights),
            schedule=schedule_in(document),
            deterministic=job.sync.deterministic and document.has_shards,
        ),
        chain([first], segments),
        played=_emulation_of(job) if job.cluster.emulate else None,
        frozen=partial(_frozen_plan, run, document, described),
    )
    return document.model_copy(update={"run": forecast})


def _frozen_plan(
    run: PlannedRun, document: PlanDocument, described: PlanningInputs, frozen_layers: int, lineup: int
) -> tuple[SimulatedPlan, Costs]:
    """The plan of a run while layers are frozen, with those who then train and their cuts, and its costs."""
    is_cached = run.job.freeze.cache == "on"
    plan, costs = frozen_plan(document, described.profile, described.cluster, frozen_layers, is_cached=is_cached)
    frozen, who = run.plan.freeze_levels.index(frozen_layers), lineup_for(run.plan.freeze_lineups, lineup)
    if frozen_layers == document.frozen_layers:
        return plan, costs  # it is made for them
    bounds = cuts_at(frozen, () if who is None else run.plan.virtual_workers, run.plan.freeze_cuts)
    return with_lineup(plan, who, bounds), costs


def cuts_at(
    frozen: int, workers: Sequence[VirtualWorkerPlan], cuts: Sequence[FreezeCut]
) -> Mapping[int, tuple[int, ...]]:
    """The cut of each virtual worker with F = `frozen`: that of `cuts`, which are in order of F, or else its own."""
    return {
        **{worker.index: worker.bounds for worker in workers},
        **{cut.vw: cut.bounds for cut in cuts if cut.frozen <= frozen},
    }


def options_of(job: Job, *, slots: int | None = None, reserve_bytes: int = 0) -> PlanOptions:
    """The planner options of a job.

    Args:
        job: a job to plan, or to check for memory.
        slots: parameter-sized tensors that the optimizer keeps; None to derive them from the job's optimizer.
        reserve_bytes: memory used by the framework on every device.

    Raises:
        PlanError: the memory of the job's optimizer is unknown.
    """
    if slots is None:
        slots = slots_of(job.optimizer, job.weights)
    if slots is None:
        raise PlanError(
            f"the memory that {job.optimizer.name} keeps per parameter is unknown; use another optimizer, or set "
            "workers.stages yourself"
        )
    devices, sync, placement = job.workers.devices, job.sync, job.parameter_servers.placement
    return PlanOptions(
        allocation="explicit" if devices is not None else job.workers.allocation,
        workers=None if devices is None else tuple(tuple(DeviceId(d) for d in group) for group in devices),
        minibatches_per_wave=sync.minibatches_per_wave if isinstance(sync.minibatches_per_wave, int) else None,
        proportional=sync.minibatches_per_wave == "proportional",
        placement=None if placement == "auto" else placement,
        staleness=0 if sync.D == "auto" else sync.D,
        max_staleness=sync.max_D if sync.D == "auto" else None,
        pull=sync.pull,
        compress_pushes=sync.compress_pushes,
        weights=job.weights,
        schedule=job.schedule,
        accumulate=job.gradients.accumulate,
        waits_for_norm=job.gradients.max_norm is not None and job.gradients.clip == "global",
        with_shards=job.has_shards,
        optimizer_slots=slots,
        recompute=_RECOMPUTE.get(job.memory, "off") if isinstance(job.memory, str) else "off",
        chooses_policies=job.memory == "auto",
        host_bytes_per_second=job.cluster.host_bytes_per_second,
        reserve_bytes=reserve_bytes,
        num_shards=job.parameter_servers.count if job.has_shards else None,
    )


def _offered(job: Job, cluster: Cluster, agents: Sequence[AgentInfo]) -> Offered:
    """Map the agents' devices to those of the cluster: by name if the job's file has them, else by order.

    Raises:
        PlanError: there are too few to emulate the cluster, or the job's device names refer to other devices here.
    """
    real = [(agent.agent, DeviceId(device.device)) for agent in agents for device in agent.devices]
    if job.cluster.file is not None and not job.cluster.emulate:
        return {device: (agent, device) for agent, device in real}
    if len(real) < len(cluster.devices):
        raise PlanError(
            f"cluster.file has {len(cluster.devices)} devices to emulate, and {len(real)} are free; start more agents"
        )
    if job.cluster.file is None and job.workers.devices is not None and list(cluster.devices) != [d for _, d in real]:
        raise PlanError(
            "workers.devices names devices of nodes that another job partly uses; wait for its end, or give "
            "cluster.file"
        )
    return dict(zip(cluster.devices, real, strict=False))


def _emulations_of_cut(job: Job, described: PlanningInputs, plan: Plan) -> tuple[tuple[StageEmulation, ...], ...]:
    """Emulated devices of the cluster, assigned in order, virtual worker by virtual worker, stage by stage."""
    cluster = described.cluster
    costs = Costs(described.profile, cluster)
    stages = _emulated_stages(plan, _played_devices(plan, cluster))
    for worker, played in zip(plan.virtual_workers, stages, strict=True):
        kinds, devices = [cluster.devices[stage.device] for stage in played], [stage.device for stage in played]
        cut = _Cut(
            worker.index, worker.bounds, _policies(job, described.profile, worker), job.minibatches_of(worker.index)
        )
        _check_memory(job, costs, cut, kinds, devices, instead="set `memory: auto`, with which")
    nodes = [node.name for node in cluster.nodes if node.devices]
    return _emulations(job, costs, stages, [nodes[shard % len(nodes)] for shard in range(plan.num_shards)])


def _emulation_of(job: Job) -> Emulation:
    stragglers = {DeviceId(name): factor for name, factor in job.cluster.stragglers.items()}
    return Emulation(stragglers, with_links=job.cluster.emulate_links)


def _emulations(
    job: Job, costs: Costs, stages: Sequence[Sequence[EmulatedStage]], shard_nodes: Sequence[str]
) -> tuple[tuple[StageEmulation, ...], ...]:
    cluster, averages = job.cluster, job.sync.traits.averages_gradients

    def replicas(played: Sequence[EmulatedStage]) -> list[list[DeviceId]]:
        """The devices of each stage, of all with as many stages: those that train at one time are cut alike."""
        same = [other for other in stages if len(other) == len(played)]
        return [[stage.device for stage in of] for of in zip(*same, strict=True)] if averages and len(same) > 1 else []

    return tuple(
        emulations(
            costs,
            played,
            shard_nodes,
            with_links=cluster.emulate_links,
            stragglers=cluster.stragglers,
            replicas=replicas(played),
        )
        for played in stages
    )


def _layers(stage: StagePlan) -> tuple[int, int]:
    return int(stage.first_layer), int(stage.last_layer)


def _policies(job: Job, profile: Profile, worker: VirtualWorkerPlan) -> tuple[LayerPolicy, ...]:
    """The memory policy of each layer of the model, wherever it is."""
    given = policies_of(job.memory, [layer.name for layer in profile.layers])
    return tuple(policy for stage in worker.stages for policy in stage.memory or given[slice(*_layers(stage))])


def _played_devices(plan: Plan, cluster: Cluster, document: PlanDocument | None = None) -> list[list[DeviceId]]:
    """The devices of the cluster file, or of the agents, that the stages of each virtual worker compute on or play.

    In the order of the plan document, or without one in that of the cluster; who is added later has those of others.

    Raises:
        PlanError: the cluster has too few.
    """
    names = list(cluster.devices)
    if document is not None:
        names = [stage.device for worker in document.virtual_workers for stage in worker.stages]
    places = dict.fromkeys((stage.agent, stage.device) for worker in plan.virtual_workers for stage in worker.stages)
    if len(names) < len(places):
        raise PlanError(
            f"the job has {len(places)} stages, but cluster.file has {len(names)} devices to emulate; lower "
            "workers.count or workers.stages"
        )
    played = dict(zip(places, names, strict=False))
    return [[played[stage.agent, stage.device] for stage in worker.stages] for worker in plan.virtual_workers]


def _emulated_stages(plan: Plan, devices: Sequence[Sequence[DeviceId]]) -> list[list[EmulatedStage]]:
    return [
        [EmulatedStage(device, *_layers(stage)) for stage, device in zip(worker.stages, played, strict=True)]
        for worker, played in zip(plan.virtual_workers, devices, strict=True)
    ]


def _with_policies(job: Job, described: PlanningInputs, plan: Plan) -> Plan:
    """Under `memory: auto` the plan with the best policies of each stage that fit in its device; else the plan.

    Raises:
        InfeasiblePlan: no policies of a stage fit.
    """
    if job.memory != "auto":
        return plan
    costs, workers = Costs(described.profile, described.cluster), []
    for worker, played in zip(plan.virtual_workers, _played_devices(plan, described.cluster), strict=True):
        types = [described.cluster.devices[device] for device in played]
        chosen = []
        for index, (stage, kind) in enumerate(zip(worker.stages, types, strict=False)):
            place, n = (index, len(worker.stages)), job.minibatches_of(worker.index)
            figures = _place(job, costs, kind, place, n).figures(*_layers(stage))
            found = choose_policies(figures, costs.memory_bytes[kind])
            if found is None:
                raise _too_little(
                    worker.index, index, _layers(stage), f"a {kind}", (least_bytes(figures), costs.memory_bytes[kind])
                )
            chosen.append(replace(stage, memory=found.policies))
        workers.append(replace(worker, stages=(*chosen, *worker.stages[len(chosen) :])))
    return replace(plan, virtual_workers=tuple(workers))


def _place(job: Job, costs: Costs, kind: str, place: tuple[int, int], minibatches_per_wave: int) -> StagePlace:
    """A stage of a job, for its memory policies."""
    options = options_of(job, slots=slots_of(job.optimizer, job.weights) or 0)
    memory, speed = options.memory(minibatches_per_wave), job.cluster.host_bytes_per_second
    return costs.place(kind, place, memory, host_bytes_per_second=speed)


def _check_memory(
    job: Job,
    costs: Costs,
    cut: _Cut,
    kinds: Sequence[str],
    devices: Sequence[DeviceId],
    *,
    instead: str,
    beside: _Cut | None = None,
) -> None:
    """Check that every stage fits in its device's memory, under the memory policies of its layers.

    Args:
        job: with its optimizer and weight policy.
        costs: of the model.
        cut: of one virtual worker.
        kinds: the types of its devices.
        devices: their names.
        instead: what helps where other policies would fit, up to how many bytes these need.
        beside: the cut by which it computes at the same time, as its layers move without a barrier to `cut`.

    Raises:
        InfeasiblePlan: one does not.
    """
    for index, (kind, device) in enumerate(zip(kinds, devices, strict=True)):
        layers, there = cut.layers(index), costs.memory_bytes[kind]
        place = _place(job, costs, kind, (index, len(kinds)), cut.minibatches_per_wave)
        figures = place.figures(*layers)
        needed = stage_memory(figures, cut.policies[slice(*layers)]).num_bytes
        if needed > there:
            error = _too_little(cut.vw, index, layers, f"{device}, a {kind}", (needed, there))
            if (least := least_bytes(figures)) > there:
                raise error
            raise InfeasiblePlan(f"{error}; or {instead} {bytes_text(least, round_up=True)} suffice")
        if beside is None or (others := beside.layers(index)) == layers:
            continue
        # Weights of both; each minibatch in flight has the activations of one.
        before = stage_memory(place.figures(*others), beside.policies[slice(*others)]).num_bytes
        both = max(needed + place.bytes_of_weights(*others), before + place.bytes_of_weights(*layers))
        if both > there:
            raise InfeasiblePlan(
                f"stage {index} of virtual worker {cut.vw} computes by both cuts while layers move without a barrier "
                f"(layers {others[0]} to {others[1] - 1}, then {layers[0]} to {layers[1] - 1}) and needs "
                f"{bytes_text(both)} for it, but {device}, a {kind}, has {bytes_text(there)}; give a `clock`: at a "
                "barrier nothing is in flight meanwhile"
            )


def check_memory_of_both(
    job: Job, costs: Costs, before: VirtualWorkerPlan, after: VirtualWorkerPlan, kinds: Sequence[str]
) -> None:
    """Check that every stage fits in its device's memory by both cuts at once, as layers move without a barrier.

    Args:
        job: with its optimizer and weight policy.
        costs: of the model.
        before, after: the cuts.
        kinds: the types of its devices.

    Raises:
        InfeasiblePlan: one does not.
    """
    old, new = (
        _Cut(one.index, one.bounds, _policies(job, costs.profile, one), job.minibatches_in(one))
        for one in (before, after)
    )
    devices = [stage.device for stage in after.stages]
    _check_memory(job, costs, new, kinds, devices, instead="with other policies of its layers", beside=old)


def check_script_memory(run: PlannedRun, start: Progress) -> None:
    """Check that stages fit in their devices' memory behind each line of the script, where the costs are known.

    A job that freezes layers, which need less from then on, is not checked.

    Args:
        run: planned.
        start: where it begins; lines at or below its clock are done.

    Raises:
        InfeasiblePlan: one does not; the message names the line.
    """
    job, described = run.job, run.described
    if described is None or job.freezes:
        return
    costs, cluster = Costs(described.profile, described.cluster), described.cluster
    names = [layer.name for layer in described.profile.layers]
    devices = _played_devices(run.plan, cluster, run.document)
    cuts = [
        _Cut(worker.index, worker.bounds, _policies(job, described.profile, worker), job.minibatches_in(worker))
        for worker in run.plan.virtual_workers
    ]
    for number, line in enumerate(job.elastic.script):
        cuts, before = [cut.after(line, names) for cut in cuts], cuts
        if isinstance(line.at, ScriptMoment) and line.at.clock <= start.clock:
            continue
        for cut, old, own in zip(cuts, before, devices, strict=True):
            if cut != old:
                try:
                    kinds = [cluster.devices[device] for device in own]
                    _check_memory(
                        job,
                        costs,
                        cut,
                        kinds,
                        own,
                        instead="give its layers other policies before, with which",
                        beside=old if isinstance(line, MoveLine) and line.is_live else None,
                    )
                except InfeasiblePlan as error:
                    raise InfeasiblePlan(f"elastic.script[{number}]: {error}") from error


def _too_little(vw: int, stage: int, layers: tuple[int, int], device: str, sizes: tuple[int, int]) -> InfeasiblePlan:
    """A stage of layers [first, last) that needs `sizes[0]` bytes on a device with `sizes[1]`."""
    needed, there = sizes
    return InfeasiblePlan(
        f"stage {stage} of virtual worker {vw} (layers {layers[0]} to {layers[1] - 1}) needs {bytes_text(needed)}, "
        f"but {device}, has {bytes_text(there)}, {bytes_text(needed - there)} too few; give it fewer "
        "layers or lower sync.minibatches_per_wave"
    )
