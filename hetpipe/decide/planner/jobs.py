"""Evaluation of groups of devices as whole jobs: pipelines, N, shards, and the resulting rate.

Groups are formed elsewhere (`decide.planner.allocation`). For given groups and N the search is exact over the pipelines
considered by `decide.planner.pipelines` as long as neither a network card nor the round trip of weights is the
bottleneck; the round trip (`decide.planner.round_trip`) is then used to evaluate what was found. If a card is the
bottleneck, the search is that of `decide.planner.combinations`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NoReturn

from hetpipe.decide.planner import waves
from hetpipe.decide.planner.combinations import IMPROVED, Combinations
from hetpipe.decide.planner.costs import Costs, MemoryModel
from hetpipe.decide.planner.job_rate import CardSide, JobRate, bytes_moved, job_rate
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.decide.planner.own_waves import rate_of_own_waves
from hetpipe.decide.planner.partitioner import ChosenPolicies, Partitioner, explain
from hetpipe.decide.planner.pipelines import Pipeline, Pipelines
from hetpipe.decide.planner.round_trip import Exchanges, Places, round_trip
from hetpipe.decide.planner.shard_bytes import PlacedParameters, halved_pushes, place_bytes, shard_nodes
from hetpipe.errors import InfeasiblePlan, PlanError
from hetpipe.values.cluster import node_of
from hetpipe.values.ids import DeviceId
from hetpipe.values.policies import DEFAULT_PLACEMENT, PlacementName

#: One group of devices per virtual worker.
Groups = Sequence[Sequence[DeviceId]]

#: Relative difference below which rates are equal, as rounding depends on the order of sums.
_SAME = 1e-12

#: Rounds in which N_v and the rates of pipelines are made to agree.
_MOST_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A complete plan: stages, N, and the resulting rate."""

    costs: Costs
    """Costs for the planned batch size."""
    workers: tuple[Pipeline, ...]
    minibatches_per_wave: int
    """N; where the virtual workers have their own, the one that these are in proportion to."""
    placed: PlacedParameters
    rate: JobRate
    own_waves: tuple[int, ...] | None = None
    """N_v of each virtual worker; None: N for all."""

    @property
    def waves(self) -> tuple[int, ...]:
        """N_v of each virtual worker."""
        return self.own_waves or (self.minibatches_per_wave,) * len(self.workers)

    @property
    def bottleneck_ticks(self) -> int:
        """The largest stage time of all virtual workers."""
        return max(worker.bottleneck_ticks for worker in self.workers)


def is_better(one: JobPlan, other: JobPlan) -> bool:
    """Whether `one` has the higher rate; on ties the smaller N, then the smaller largest stage time."""
    here, there = one.rate.samples_per_second, other.rate.samples_per_second
    if abs(here - there) > _SAME * max(here, there):
        return here > there
    return (one.minibatches_per_wave, one.bottleneck_ticks) < (other.minibatches_per_wave, other.bottleneck_ticks)


def best_of(jobs: Jobs, groupings: Iterable[Groups]) -> JobPlan:
    """The best plan of several groupings; on ties the first.

    Raises:
        PlanError: none is feasible; the error of the first one.
    """
    best: JobPlan | None = None
    refusal: PlanError | None = None
    for groups in groupings:
        try:
            found = jobs.best(groups)
        except PlanError as error:
            refusal = refusal or error
            continue
        if best is None or is_better(found, best):
            best = found
    if best is None:
        raise refusal or PlanError("there are no devices to form virtual workers from")
    return best


def partitioner_for(costs: Costs, options: PlanOptions) -> Partitioner:
    """The partitioner of these options."""
    chosen = ChosenPolicies(options.host_bytes_per_second) if options.chooses_policies else None
    return Partitioner(costs, recompute=options.recompute, chosen=chosen)


class Jobs:
    """Evaluates groups of devices. Caches results, so one instance serves a whole search."""

    def __init__(self, costs: Costs, options: PlanOptions, partitioner: Partitioner) -> None:
        """Create an evaluator.

        Args:
            costs: the profile on the cluster.
            options: options of the planner.
            partitioner: finds min-max partitions.
        """
        self.costs = costs
        self.options = options
        self.devices = costs.cluster.devices
        self._partitioner = partitioner
        self.pipelines = Pipelines(costs, self.memory, options.recompute, partitioner)
        self.network_cards = {node.name: costs.cluster.network_card(node.name) for node in costs.cluster.nodes}
        self._halved = halved_pushes(costs.original, options.compress_pushes)
        self._relatives: dict[tuple[PlanOptions, tuple[DeviceId, ...]], Jobs] = {}
        self._node_rank = {node.name: rank for rank, node in enumerate(costs.cluster.nodes)}
        #: Many N share the same cuts.
        self._exchanges = lru_cache(maxsize=16)(self._exchanges_between)
        #: Parameters by shards' nodes, for placements that do not depend on pipelines.
        self.place_on = lru_cache(maxsize=64)(self._place_by_shards)

    def under(self, placement: PlacementName, staleness: int | None) -> Jobs:
        """The same for another placement and D; pipelines do not depend on these and are shared."""
        options = replace(self.options, placement=placement, staleness=staleness)
        return self._like(options, self.devices)

    def on(self, devices: Mapping[DeviceId, str]) -> Jobs:
        """The same for fewer devices."""
        return self._like(self.options, devices)

    def _like(self, options: PlanOptions, devices: Mapping[DeviceId, str]) -> Jobs:
        found = self._relatives.get((options, tuple(devices)))
        if found is None:
            found = copy(self)
            found.options, found.devices = options, dict(devices)
            found.place_on = lru_cache(maxsize=64)(found._place_by_shards)  # noqa: SLF001 - of the same class
            self._relatives[options, tuple(devices)] = found
        return found

    def ladder(self, groups: Groups) -> Iterator[JobPlan]:
        """The best plan of these groups for each N worth trying, ascending, in steps of at most one half.

        The last N is the largest that fits in memory, or four times an N with which neither staleness nor a network
        card is the bottleneck: a larger N cannot help.

        Raises:
            PlanError: the given N is invalid, the placement is impossible, or there are several virtual workers without
                parameter servers.
        """
        choices, step = self.choices(groups), self.options.accumulate
        if self.options.minibatches_per_wave is not None:
            plans = (self.best_with(n, groups) for n in choices)
            yield from (plan for plan in plans if plan is not None)
            return
        n, fitting, enough = choices[0] if choices else waves.MOST_MINIBATCHES + 1, 0, None
        while n <= waves.MOST_MINIBATCHES and (plan := self.best_with(n, groups)) is not None:
            yield plan
            fitting = n
            waits = plan.rate.network_binds or plan.rate.round_trip_binds
            if enough is None and not waits and n >= choices[-1] // 4:
                enough = n
            if enough is not None and n >= 4 * enough:
                return
            n += max(n // 2 // step * step, step)
        most = self._largest(groups, fitting, min(n, waves.MOST_MINIBATCHES)) // step * step
        if fitting < most and (plan := self.best_with(most, groups)) is not None:
            yield plan

    def _fit(self, groups: Groups, minibatches_per_wave: int) -> bool:
        return all(self.pipelines.fits(group, minibatches_per_wave) for group in groups)

    def _largest(self, groups: Groups, low: int, beyond: int) -> int:
        """The largest N that fits, from `low`, which fits (or is 0), to below `beyond`."""
        while beyond - low > 1:
            middle = (low + beyond) // 2
            if self._fit(groups, middle):
                low = middle
            else:
                beyond = middle
        return low

    @property
    def most_workers(self) -> int | None:
        """Maximum number of virtual workers; None for no limit."""
        return None if self.options.with_shards else 1

    @property
    def placement(self) -> PlacementName:
        """The placement of the options, or the one that closed-form searches assume if none is given."""
        return self.options.placement or DEFAULT_PLACEMENT

    def memory(self, minibatches_per_wave: int) -> MemoryModel:
        """Memory model of stages for N minibatches per wave."""
        return self.options.memory(minibatches_per_wave)

    def choices(self, groups: Groups) -> Sequence[int]:
        """Every N for which to compare groups, ascending, whether or not it fits in memory.

        Raises:
            PlanError: the given N is invalid, or there are several virtual workers without parameter servers.
        """
        if self.most_workers is not None and len(groups) > self.most_workers:
            raise PlanError(
                f"without parameter servers a job has one virtual worker, and this allocation has {len(groups)}"
            )
        num_stages, options = [len(group) for group in groups], self.options
        if options.minibatches_per_wave is not None:
            waves.check_given(options.minibatches_per_wave, num_stages, options.weights, options.accumulate)
            return [options.minibatches_per_wave]
        searched = [max(waves.SEARCHED_PER_STAGE * k, options.accumulate) for k in num_stages]
        return waves.choices(searched, num_stages, options.weights, options.accumulate)

    def best(self, groups: Groups) -> JobPlan:
        """The plan with the highest rate over all N; on ties the one with the smallest N.

        Raises:
            PlanError: no N fits, the placement is impossible, or `choices` rejects the groups.
        """
        return self._best_waves(groups)

    def best_with(self, minibatches_per_wave: int, groups: Groups) -> JobPlan | None:
        """The plan with the highest rate for this N; on ties the one with the smallest largest stage time.

        Returns:
            None if a virtual worker does not fit in memory.

        Raises:
            PlanError: the placement is impossible.
        """
        fastest = _all_there(self.pipelines.fastest(group, minibatches_per_wave) for group in groups)
        if fastest is None:
            return None
        slowest = min(worker.minibatches_per_tick for worker in fastest)
        if minibatches_per_wave >= max(map(len, groups)) and not self.options.policy.drains:
            chosen = fastest
        else:
            # Not the bottleneck of the job: the largest stage time decides.
            chosen = [self.pipelines.shortest(group, minibatches_per_wave, slowest) for group in groups]
        plan = self.judge(chosen, minibatches_per_wave)
        return self._relieve_network(groups, plan) if plan.rate.network_binds else plan

    def judge(self, workers: Sequence[Pipeline], minibatches_per_wave: int) -> JobPlan:
        """Evaluate these pipelines as a job.

        Raises:
            PlanError: the placement is impossible for them.
        """
        placed = self.place(workers)
        moved = [self._bytes_moved(worker, placed, minibatches_per_wave) for worker in workers]
        rate = job_rate(
            min(worker.minibatches_per_tick for worker in workers),
            moved,
            costs=self.costs,
            minibatches_per_wave=minibatches_per_wave,
            network_cards=self.network_cards,
            trip=round_trip(
                [worker.stages for worker in workers],
                costs=self.costs,
                placed=placed,
                memory=self.memory(minibatches_per_wave),
                staleness=self.options.staleness,
                network_cards=self.network_cards,
                pull=self.options.pull,
                exchanges_of=self._exchanges,
            ),
        )
        return JobPlan(self.costs, tuple(workers), minibatches_per_wave, placed, rate)

    def in_proportion(self, plan: JobPlan) -> JobPlan:
        """The same groups and N, which is now that of the slowest virtual worker; the others have their own N_v.

        N_v is in proportion to the rates of the pipelines, which depend on N_v in turn: a pipeline with few minibatches
        in flight is not full, and one with many has other cuts.
        """
        groups = [tuple(stage.device for stage in worker.stages) for worker in plan.workers]
        policy = self.options.policy
        least = [policy.least_minibatches_per_wave(len(group)) for group in groups]
        largest = [self.max_minibatches_per_wave(group) for group in groups]
        workers, found = list(plan.workers), plan.waves
        for _ in range(_MOST_ROUNDS):
            rates = [worker.minibatches_per_tick for worker in workers]
            wanted = waves.in_proportion(plan.minibatches_per_wave, rates, least, largest, self.options.accumulate)
            if wanted == found:
                break
            found = wanted
            fitting = _all_there(self.pipelines.fastest(group, n) for group, n in zip(groups, found, strict=True))
            assert fitting is not None, "N_v is at most Max_m"
            workers = fitting
        return self._judge_own(workers, plan.minibatches_per_wave, found)

    def _judge_own(self, workers: Sequence[Pipeline], minibatches_per_wave: int, own: tuple[int, ...]) -> JobPlan:
        """Evaluate these pipelines, each with its own N_v, as a job."""
        placed = self.place(workers)
        rate = rate_of_own_waves(
            [worker.stages for worker in workers],
            [worker.minibatches_per_tick for worker in workers],
            own,
            costs=self.costs,
            placed=placed,
            options=self.options,
            network_cards=self.network_cards,
        )
        return JobPlan(self.costs, tuple(workers), minibatches_per_wave, placed, rate, own)

    def place(self, workers: Sequence[Pipeline]) -> PlacedParameters:
        """The parameters on shards: one shard on each node that computes, or the given number, assigned in turn.

        Nodes without work hold no shard, so an idle node cannot slow a job down. Without parameter servers nothing is
        placed.

        Raises:
            PlanError: the placement is impossible for these pipelines.
        """
        shards = self.shards_on({node_of(stage.device) for worker in workers for stage in worker.stages})
        if shards and self.placement == "ed_local":
            return place_bytes(
                self.costs.original,
                shards=shards,
                placement="ed_local",
                workers=[worker.stages for worker in workers],
                frozen_layers=self.costs.frozen_layers,
                halved=self._halved,
            )
        return self.place_on(shards)

    def shards_on(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """The node of each shard, if `nodes` compute."""
        if not self.options.with_shards:
            return ()
        return shard_nodes(sorted(nodes, key=self._node_rank.__getitem__), self.options.num_shards)

    def max_minibatches_per_wave(self, devices: Sequence[DeviceId]) -> int:
        """Max_m of a virtual worker on these devices: the largest N for which a partition fits, at most 1024."""
        return waves.max_minibatches_per_wave(lambda n: self.pipelines.fits(devices, n))

    def _best_waves(self, groups: Groups) -> JobPlan:
        most_stages = max(len(group) for group in groups)
        choices = self.choices(groups)
        if not choices:
            raise PlanError(
                f"the weight policy {self.options.weights} needs {most_stages} minibatches per wave for the longest "
                "virtual worker, more than 4 per stage of the shortest; choose more equal numbers of stages, or "
                "set --minibatches-per-wave"
            )
        best: JobPlan | None = None
        for n in choices:
            found = self.best_with(n, groups)
            if found is None:
                break  # a larger N needs at least as much memory
            if best is None or is_better(found, best):
                best = found
            if n >= most_stages and not self.options.policy.drains and not self._is_held_back(found, n, groups):
                break  # with N ≥ K a larger N only helps the network and the round trip of weights
        return best or self._refuse(choices[0], groups)

    def _is_held_back(self, found: JobPlan, n: int, groups: Groups) -> bool:
        """Whether the network or the round trip limits the job below the speed of its devices, for any cuts."""
        fastest = _all_there(self.pipelines.fastest(group, n) for group in groups)
        assert fastest is not None, "a plan was found"
        return (
            found.rate.network_binds
            or found.rate.round_trip_binds
            or min(worker.minibatches_per_tick for worker in found.workers)
            < min(worker.minibatches_per_tick for worker in fastest)
        )

    def _refuse(self, minibatches_per_wave: int, groups: Groups) -> NoReturn:
        memory = self.memory(minibatches_per_wave)
        for index, group in enumerate(groups):
            if self._partitioner.find(group, memory) is None:
                raise InfeasiblePlan(
                    f"virtual worker {index} ({', '.join(group)}): {explain(self._partitioner, group, memory)}"
                )
        raise AssertionError("a plan that fits was refused")

    def _exchanges_between(self, places: Places, placed: PlacedParameters) -> Exchanges:
        return Exchanges(places, costs=self.costs, placed=placed, network_cards=self.network_cards)

    def _place_by_shards(self, shards: tuple[str, ...]) -> PlacedParameters:
        if not shards:
            return PlacedParameters((), (), self.costs.num_layers)
        costs, placement = self.costs, self.placement
        return place_bytes(
            costs.original,
            shards=shards,
            placement=placement,
            frozen_layers=costs.frozen_layers,
            halved=self._halved,
        )

    def _relieve_network(self, groups: Groups, start: JobPlan) -> JobPlan:
        """The best combination if a network card is the bottleneck; at least as good as `start`."""
        n = start.minibatches_per_wave
        if not len(groups) < sum(self.pipelines.num_several(group) for group in groups) <= IMPROVED:
            return start
        several = [self.pipelines.several(group, n) for group in groups]
        if self.placement == "ed_local":
            # They must share one partition, so they are changed together.
            others: Iterable[tuple[Pipeline, ...]] = zip(*several, strict=False)
        else:
            combinations = Combinations(
                several,
                minibatches_per_wave=n,
                network_cards=self.network_cards,
                bytes_moved=lambda pipeline: self._bytes_moved(pipeline, start.placed, n),
            )
            others = [combinations.best()]
        best = start
        for workers in others:
            found = self.judge(workers, n)
            if is_better(found, best):
                best = found
        return best

    def _bytes_moved(
        self, worker: Pipeline, placed: PlacedParameters, minibatches_per_wave: int
    ) -> dict[CardSide, int]:
        return bytes_moved(
            worker.stages,
            costs=self.costs,
            placed=placed,
            minibatches_per_wave=minibatches_per_wave,
            pulls_per_wave=self.options.least_pulls_per_wave,
        )


def _all_there(workers: Iterable[Pipeline | None]) -> list[Pipeline] | None:
    """The workers; None if one is missing."""
    found: list[Pipeline] = []
    for worker in workers:
        if worker is None:
            return None
        found.append(worker)
    return found
