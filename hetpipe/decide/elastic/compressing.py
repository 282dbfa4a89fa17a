"""Who trains with how many frozen layers: pipelines of half as many stages, and twice as many of them. Pure.

PipeTransformer's AutoPipe and AutoDP (docs/semantics/freezing.md §4). All of it is planned before the run, for every
number of frozen layers; the clock shard only looks it up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from hetpipe.decide.elastic.freezing import freeze_levels_of
from hetpipe.decide.elastic.plan_files import basis_of
from hetpipe.decide.elastic.replanning import (
    Basis,
    basis_if_known,
    best_cut,
    best_of_all,
    fits,
    freeze_cuts,
    rate_of,
    recut_workers,
    with_cut_of,
)
from hetpipe.decide.lifecycle.planning import PlannedRun, with_workers
from hetpipe.decide.simulator.documents import weight_policy
from hetpipe.errors import PlanError
from hetpipe.job.file import Job
from hetpipe.values.cluster import Cluster
from hetpipe.values.freezing import CompressMeasure, FreezeCut, FreezeLineup, LineupWorker
from hetpipe.values.ids import VirtualWorkerIndex
from hetpipe.values.plan import StagePlan, VirtualWorkerPlan
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.policies import POLICIES, Policy
from hetpipe.values.profile import Profile
from hetpipe.values.run import AgentInfo

#: A trained parameter counts as many times a frozen one where parameters stand for memory: 1 / λ of the paper.
_TRAINED_TO_FROZEN = 6

#: Where N may change, it is at most so many times K.
_MOST_WAVES_PER_STAGE = 6

Stages = tuple[StagePlan, ...]


@dataclass(frozen=True, slots=True)
class CompressionRule:
    """How the pipelines of a job may be compressed."""

    policy: Policy
    alike: bool
    """Whether all virtual workers are cut alike."""
    staleness: int | None
    """D; None: they do not wait for each other."""
    unit: int = 1
    """N is a multiple of it."""
    by: CompressMeasure = "memory"
    keep_global_batch: bool = True
    frozen: int = 0
    """F at the start."""

    @classmethod
    def of(cls, job: Job) -> Self:
        """The rule of a planned job."""
        policy = POLICIES[job.weights]
        return cls(
            policy,
            alike=job.sync.traits.averages_gradients,
            staleness=0 if job.sync.traits.averages_gradients else job.staleness,
            unit=1 if policy.one_update_per_wave else job.gradients.accumulate,
            by=job.freeze.compress_by,
            keep_global_batch=job.freeze.keep_global_batch,
            frozen=job.freeze.layers,
        )


@dataclass(frozen=True, slots=True)
class Compressed:
    """Lineups of a run."""

    lineups: tuple[FreezeLineup, ...]
    workers: tuple[VirtualWorkerPlan, ...]
    """All virtual workers of all lineups, in index order."""
    cuts: tuple[FreezeCut, ...]


@dataclass(frozen=True, slots=True)
class _Team:
    """Virtual workers that train together, and the minibatches of their waves."""

    pipelines: tuple[Stages, ...]
    minibatches_per_wave: int

    def basis(self, at: Basis) -> Basis:
        """`at` with the memory for N."""
        return replace(at, memory=replace(at.memory, minibatches_per_wave=self.minibatches_per_wave))

    def rate(self, at: Basis, rule: CompressionRule) -> float:
        """Minibatches per second of all of them."""
        rates = [rate_of(self.basis(at), stages) for stages in self.pipelines]
        return sum(rates) if rule.staleness is None else min(rates) * len(rates)

    def largest(self, at: Basis, by: CompressMeasure) -> int:
        """What the device that has most has: bytes of memory, or of parameters, where a trained one counts λ⁻¹-fold."""
        costs, memory = at.costs, self.basis(at).memory

        def parameters(stage: StagePlan) -> int:
            layers = range(stage.first_layer, stage.last_layer)
            sizes = ((layer, at.profile.layers[layer].parameter_bytes) for layer in layers)
            return sum(size * (_TRAINED_TO_FROZEN if layer >= at.frozen_layers else 1) for layer, size in sizes)

        return max(
            parameters(stage)
            if by == "parameters"
            else costs.stage_bytes(
                stage.first_layer, stage.last_layer, stage=index, num_stages=len(stages), memory=memory
            )
            for stages in self.pipelines
            for index, stage in enumerate(stages)
        )


def with_freeze_plans(run: PlannedRun, agents: Sequence[AgentInfo]) -> PlannedRun:
    """The run with the cuts, and with whoever trains, for its frozen layers, if its job asks for them.

    Where its devices are not known nothing changes, except that pipelines cannot be compressed.

    Raises:
        PlanError: they are to be.
    """
    freeze = run.job.freeze
    basis = basis_if_known(run, agents) if freeze.recuts and run.plan.freeze_levels else None
    if basis is None:
        if freeze.compress and run.plan.freeze_levels:
            raise PlanError(
                "freeze.compress: needs the memory of all devices, which an agent does not report; give `cluster.file`"
            )
        return run
    basis = replace(basis, is_cached=freeze.cache == "on")
    plan, workers = run.plan, run.plan.virtual_workers
    if not freeze.compress:
        alike = run.job.sync.traits.averages_gradients
        return replace(
            run, plan=replace(plan, freeze_cuts=freeze_cuts(basis, workers, plan.freeze_levels, alike=alike))
        )
    found = compressed(basis, workers, plan.freeze_levels, CompressionRule.of(run.job))
    plan = replace(plan, freeze_cuts=found.cuts, freeze_lineups=found.lineups, virtual_workers=found.workers)
    return with_workers(run, plan)


def planned_for_freezing(
    document: PlanDocument,
    profile: Profile,
    cluster: Cluster,
    *,
    compress: bool,
    optimizer_slots: int = 0,
    is_cached: bool = False,
) -> Compressed:
    """The cuts of the virtual workers of a plan file for each number of frozen layers; with `compress`, who trains.

    Without `compress` there are no lineups: all virtual workers train.

    Args:
        document: the plan file.
        profile: of the model.
        cluster: with the plan's devices.
        compress: whether pipelines are compressed; else layers move only.
        optimizer_slots: tensors of optimizer state per parameter.
        is_cached: whether what enters the layer behind frozen ones is read from a cache.

    Raises:
        PlanError: virtual workers whose waves have different lengths cannot be compressed.
    """
    levels, policy, waves = freeze_levels_of(profile), POLICIES[weight_policy(document.weights)], document.waves
    basis, workers = basis_of(document, profile, cluster, optimizer_slots=optimizer_slots)
    basis = replace(basis, is_cached=is_cached)
    alike = not document.has_shards
    if not compress:
        return Compressed((), workers, freeze_cuts(basis, workers, levels, alike=alike))
    if len(set(waves)) > 1:
        raise PlanError(
            f"virtual workers have waves of {', '.join(map(str, waves))} minibatches; pipelines are compressed where "
            "all have the same number"
        )
    frozen = levels.index(document.frozen_layers) if document.frozen_layers in levels else 0
    rule = CompressionRule(policy, alike=alike, staleness=document.staleness, frozen=frozen)
    return compressed(basis, workers, levels, rule)


def compressed(
    basis: Basis, workers: Sequence[VirtualWorkerPlan], levels: Sequence[int], rule: CompressionRule
) -> Compressed:
    """Who trains with how many frozen layers, and how they are cut.

    Args:
        basis: data on layers and devices, with the N of all virtual workers.
        workers: as planned, in index order.
        levels: `Freezing.levels`.
        rule: of the job.
    """
    used = tuple(stage for worker in workers for stage in worker.stages)
    places = [(stage.agent, stage.device) for stage in used]
    everybody, present = list(workers), list(workers)
    team = _Team(tuple(worker.stages for worker in workers), basis.memory.minibatches_per_wave)
    most = team.largest(replace(basis, frozen_layers=levels[rule.frozen]), rule.by)

    def lineup(frozen: int) -> FreezeLineup:
        of = (
            LineupWorker(each.index, tuple(places.index((stage.agent, stage.device)) for stage in each.stages))
            for each in present
        )
        return FreezeLineup(frozen, tuple(of), team.minibatches_per_wave)

    lineups, cuts = [lineup(rule.frozen)], list[FreezeCut]()
    for frozen in sorted({levels.index(level) for level in levels if level > levels[rule.frozen]}):
        at = replace(basis, frozen_layers=levels[frozen])
        recut = recut_workers([team.basis(at)] * len(team.pipelines), team.pipelines, alike=rule.alike)
        team, before = replace(team, pipelines=recut), len(team.pipelines[0])
        team = _compressed(at, team, used, rule, most)
        if len(team.pipelines[0]) < before:
            indices = range(len(everybody), len(everybody) + len(team.pipelines))
            present = [
                VirtualWorkerPlan(VirtualWorkerIndex(index), stages)
                for index, stages in zip(indices, team.pipelines, strict=True)
            ]
            everybody += present
            lineups.append(lineup(frozen))
        present = [replace(worker, stages=of) for worker, of in zip(present, team.pipelines, strict=True)]
        cuts += [FreezeCut(frozen, worker.index, worker.bounds) for worker in present]
    return Compressed(tuple(lineups), tuple(everybody), tuple(cuts))


def _compressed(at: Basis, team: _Team, devices: Stages, rule: CompressionRule, most: int) -> _Team:
    """The fastest team of those with K, ⌊K/2⌋, … stages whose devices have no more than at the start.

    Of equally fast ones that with the fewest stages.

    Args:
        at: data on layers and devices, with the frozen layers.
        team: so far.
        devices: all of the job.
        rule: of the job.
        most: what the device that has most may have, as `_Team.largest`.
    """
    best, num_stages = (team.rate(at, rule), team), min(map(len, team.pipelines))
    while num_stages > 1:
        num_stages //= 2
        shorter = [half for half in _shorter(at, team, devices, num_stages, rule) if half.largest(at, rule.by) <= most]
        rates = [half.rate(at, rule) for half in shorter]
        if rates and max(rates) >= best[0]:
            best = max(rates), shorter[rates.index(max(rates))]
    return best[1]


def _shorter(at: Basis, team: _Team, devices: Stages, num_stages: int, rule: CompressionRule) -> Iterator[_Team]:
    """The teams of pipelines with so many stages: by how devices go together, and by N."""
    least = rule.policy.least_minibatches_per_wave(num_stages)
    for pipelines in _regrouped(at, team, devices, num_stages):
        if rule.keep_global_batch:
            total = team.minibatches_per_wave * len(team.pipelines)
            shares = ((count, *divmod(total, count)) for count in range(len(pipelines), 0, -1))
            choices = [(count, n) for count, n, rest in shares if not rest and n >= least and not n % rule.unit][:1]
        else:
            numbers = range(max(least, num_stages), _MOST_WAVES_PER_STAGE * num_stages + 1)
            choices = [(len(pipelines), n) for n in numbers if not n % rule.unit]
        for count, n in choices:
            own = _Team(pipelines, n).basis(at)
            cut = _cut(own, pipelines, alike=rule.alike)
            if cut is not None:
                fastest = sorted(sorted(cut, key=lambda stages: -rate_of(own, stages))[:count], key=cut.index)
                yield _Team(tuple(fastest), n)


def _cut(basis: Basis, pipelines: Sequence[Stages], *, alike: bool) -> tuple[Stages, ...] | None:
    """The pipelines with their best cuts; None where one does not fit."""
    best = [best_cut(basis, stages) for stages in pipelines]
    found = [stages for stages in best if stages is not None]
    if len(found) < len(best):
        return None
    if not alike:
        return tuple(found)
    of_all = best_of_all([basis] * len(found), found, found)
    equal = tuple(with_cut_of(of_all, stages) for stages in found)
    return equal if all(fits(basis, stages) for stages in equal) else None


def _regrouped(at: Basis, team: _Team, devices: Stages, num_stages: int) -> Iterator[tuple[Stages, ...]]:
    """The devices as shorter pipelines: parts of each, evenly spread over each, and slow with fast ones of all."""
    counts = [len(stages) // num_stages for stages in team.pipelines]
    parts = [
        (stages, count, part) for stages, count in zip(team.pipelines, counts, strict=True) for part in range(count)
    ]
    yield tuple(stages[part * num_stages :][:num_stages] for stages, _, part in parts)
    yield tuple(stages[part::count][:num_stages] for stages, count, part in parts)
    times, count = at.costs.compute, len(devices) // num_stages
    ranked = sorted(range(count * num_stages), key=lambda place: (-times[at.kind(devices[place])][-1], place))
    rows = [ranked[first : first + count] for first in range(0, len(ranked), count)]
    turned = [row if number % 2 == 0 else row[::-1] for number, row in enumerate(rows)]
    yield tuple(tuple(devices[place] for place in sorted(column)) for column in zip(*turned, strict=True))
