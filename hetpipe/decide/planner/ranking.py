"""Ranking of plans: candidates by closed form, compared by simulation.

A closed form is a bound: it excludes slow plans, but does not predict speed. It is therefore only used to select what
is simulated:

1. Groupings of an allocation; `auto` includes those of all allocations, of each of them on fewer nodes and fewer types,
   and those of its own search. Whatever a smaller cluster achieves is thus a candidate of the larger one as well.
2. Each under each placement (`PLACEMENTS`, or the requested one), with the smallest of a few N that the closed form
   considers sufficient, and larger ones as memory allows.
3. The most promising ones are simulated briefly, as many as `_COMPUTATIONS` allows; the best of these, and the
   allocations by name, for the full length of a prediction.

Of plans within 2 % of the fastest the one with the smallest D is chosen, then with the smallest N: staleness costs
accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, islice
from typing import Protocol, get_args

from hetpipe.decide.planner.allocation import equal_distribution, hybrid_distribution, node_partition
from hetpipe.decide.planner.allocation.auto import auto
from hetpipe.decide.planner.allocation.exhaustive import every_grouping
from hetpipe.decide.planner.costs import Costs
from hetpipe.decide.planner.jobs import Groups, JobPlan, Jobs, partitioner_for
from hetpipe.decide.planner.options import AllocationName, PlanOptions
from hetpipe.decide.planner.partitioner import StageCut
from hetpipe.decide.planner.scale_model import scale_model
from hetpipe.decide.planner.simulation_length import LEAST_WAVES, simulated_waves, work_per_wave
from hetpipe.decide.planner.tiling import tiling_of
from hetpipe.errors import PlanError
from hetpipe.values.cluster import node_of
from hetpipe.values.ids import DeviceId
from hetpipe.values.plan_document import Predicted
from hetpipe.values.policies import PlacementName

#: Placements to try if none is requested.
PLACEMENTS: tuple[PlacementName, ...] = get_args(PlacementName)

#: Factor within which rates count as equal: then the smaller D is preferred, and then the smaller N.
ALIKE = 1.02

#: Waves of a brief simulation, and additional waves per wave of lead that virtual workers may build up.
_SHORT_WAVES, _SHORT_WAVES_PER_LEAD = 12, 6

#: Limits on the forwards and backwards of all brief simulations of one ranking, and on their number.
_COMPUTATIONS, _MOST_SIMULATED = 200_000, 40

#: A candidate is not simulated if its closed-form rate is this factor below the best simulation. The closed form counts
#: transfers in stage times, which the simulation overlaps with computation, so it may be considerably lower.
_HOPELESS = 1.3

#: Limit on candidates simulated for the full length of a prediction, if predictions take few computations.
_FINALISTS = 3

#: Number of groupings up to which all of them are candidates.
_ALL_GROUPINGS = 60

#: Number of nodes up to which all subsets are considered; beyond it, the slowest nodes are removed one by one.
_MOST_NODES_CHOSEN = 4


class Predict(Protocol):
    """Predicts a whole job: the simulator."""

    def __call__(self, plan: JobPlan, options: PlanOptions, *, waves: int | None = None) -> Predicted:
        """Predict a plan.

        Args:
            plan: the plan.
            options: the options it was made with, including the D to run with.
            waves: waves of each virtual worker; None for enough to reach the steady state.
        """
        ...


@dataclass(frozen=True, slots=True)
class RankedPlan:
    """A plan, the options it was made with, and its prediction by simulation."""

    plan: JobPlan
    options: PlanOptions
    """Including the chosen placement and D."""
    predicted: Predicted
    most_minibatches: int | None
    """The largest N tried for these groups; None if N was given."""

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.predicted.samples_per_second


@dataclass(frozen=True)
class _Candidate:
    plan: JobPlan
    jobs: Jobs
    most_minibatches: int | None = None
    """The largest N tried for its groups; None if N was given."""

    @property
    def rate(self) -> float:
        """Samples per second by closed form."""
        return self.plan.rate.samples_per_second

    @cached_property
    def work(self) -> int:
        """Computations of one simulated wave."""
        workers: Sequence[Sequence[StageCut]] = [worker.stages for worker in self.plan.workers]
        waves, placed = self.plan.waves, self.plan.placed
        scale = scale_model(workers, waves, placed, self.plan.costs)
        if scale is not None:
            workers, waves, placed = scale.chosen(workers), scale.chosen(waves), scale.placed
        return work_per_wave(workers, waves, placed)


def preferred(found: Sequence[RankedPlan]) -> RankedPlan:
    """Of the plans within 2 % of the fastest the one with the smallest D, then the smallest N, then the fastest."""
    fastest = max(one.rate for one in found)
    alike = [one for one in found if one.rate * ALIKE >= fastest]
    return min(alike, key=lambda one: (_staleness(one), one.plan.minibatches_per_wave, -one.rate))


def _staleness(one: RankedPlan) -> float:
    return float("inf") if one.options.staleness is None else one.options.staleness


class Ranking:
    """Ranks the plans of one profile on one cluster; caches simulations."""

    def __init__(self, jobs: Jobs, predict: Predict, *, is_brief: bool = False) -> None:
        """Create a ranking.

        Args:
            jobs: evaluates groups by closed form, with the requested options.
            predict: simulates a plan.
            is_brief: whether brief simulations decide, because something else predicts what is chosen.
        """
        self._jobs = jobs
        self._predict = predict
        self._is_brief = is_brief
        self._options = jobs.options
        self._best: dict[AllocationName, RankedPlan] = {}
        self._simulated: dict[tuple[object, ...], Predicted] = {}
        self._tiling = tiling_of(jobs.costs.cluster, jobs.options)

    @cached_property
    def _small(self) -> Ranking:
        """Of the small cluster whose plans are repeated."""
        assert self._tiling is not None, "the cluster is a large one"
        given, options = self._jobs.costs, replace(self._options, placement="balanced")
        costs = Costs(given.original, self._tiling.small, given.frozen_layers)
        return Ranking(Jobs(costs, options, partitioner_for(costs, options)), self._predict, is_brief=True)

    def of(self, name: AllocationName, by_closed_form: Callable[[Jobs], JobPlan]) -> RankedPlan:
        """The best plan of an allocation.

        Args:
            name: name of the allocation.
            by_closed_form: finds its plan by closed form; raises if there is none.

        Raises:
            PlanError: the allocation has no feasible plan.
        """
        if name not in self._best:
            self._best[name] = self._repeated(name, by_closed_form) or self._ranked(name, by_closed_form)
        return self._best[name]

    def _repeated(self, name: AllocationName, by_closed_form: Callable[[Jobs], JobPlan]) -> RankedPlan | None:
        """For a large cluster, copies of the plan of a small one; also with groups of what is left over."""
        if self._tiling is None or name not in _BY_NAME or (self._tiling.rest and name in _OF_WHOLE_CLUSTER):
            return None
        try:
            small = self._small.of(name, by_closed_form)
        except PlanError:
            return None  # the model may need more devices
        jobs = self._jobs.under("balanced", small.options.staleness)
        groupings = [self._tiling.repeated(_groups_of(small.plan))]
        try:
            rest = by_closed_form(jobs.on(self._tiling.rest)) if self._tiling.rest else None
        except PlanError:
            rest = None  # too few
        if rest is not None:
            groupings.append([*groupings[0], *_groups_of(rest)])
        found = []
        for groups in groupings:
            plan = jobs.best_with(small.plan.minibatches_per_wave, groups)
            if plan is not None:
                plan = jobs.in_proportion(plan) if self._options.proportional else plan
                found.append(self._whole(_Candidate(plan, jobs, small.most_minibatches)))
        if found and name == "auto":
            found += self._by_name()
        return preferred(found) if found else None

    def _by_name(self) -> Iterator[RankedPlan]:
        """The plans of the other allocations, as far as they have one."""
        for name in _OTHERS:
            try:
                yield self.of(name, _BY_NAME[name])
            except PlanError:
                continue

    def _ranked(self, name: AllocationName, by_closed_form: Callable[[Jobs], JobPlan]) -> RankedPlan:
        if name == "parallel":
            return self._whole(_Candidate(by_closed_form(self._jobs), self._jobs))
        groupings = self._distinct(self._groupings(name, by_closed_form))
        found = self._search(groupings, self._staleness_bounds[-1])
        if name == "auto":
            found += self._by_name()
        if not found:
            return self._whole(_Candidate(by_closed_form(self._jobs), self._jobs))  # raises the reason
        return preferred(self._with_less_staleness(found))

    @property
    def _placements(self) -> tuple[PlacementName, ...]:
        if self._options.placement is not None:
            return (self._options.placement,)
        return PLACEMENTS if self._options.with_shards else PLACEMENTS[:1]

    @property
    def _staleness_bounds(self) -> tuple[int | None, ...]:
        """Values of D worth trying, ascending."""
        most = self._options.max_staleness
        if most is None:
            return (self._options.staleness,)
        doubled = [0, *(1 << power for power in range(most.bit_length()))]
        return (*(d for d in doubled if d < most), most)

    def _with_less_staleness(self, found: list[RankedPlan]) -> list[RankedPlan]:
        """The same groups under every smaller D, until one is close enough to the fastest."""
        fastest = max(one.rate for one in found)
        best_first = sorted(found, key=lambda one: -one.rate)
        groupings = self._distinct([_groups_of(one.plan) for one in best_first[:_FINALISTS]])
        for staleness in self._staleness_bounds[:-1]:
            here = self._search(groupings, staleness)
            found += here
            if any(one.rate * ALIKE >= fastest for one in here):
                break
        return found

    # -- candidates --------------------------------------------------------------------------------------------------

    def _groupings(self, name: AllocationName, by_closed_form: Callable[[Jobs], JobPlan]) -> Iterator[Groups]:
        """Candidate groupings of an allocation."""
        if name == "auto":
            yield from self._everything()
        if name == "ED":
            yield from equal_distribution.groupings(self._jobs)
        # Groupings are searched without the round trip, for which the search has no effective bound.
        for placement in self._placements:
            try:
                plan = by_closed_form(self._jobs.under(placement, None))
            except PlanError:
                continue
            yield _groups_of(plan)
            return

    def _everything(self) -> Iterator[Groups]:
        """Groupings of every allocation, for these devices and for subsets of them."""
        jobs = self._jobs
        if jobs.most_workers is not None:
            yield from ([tuple(some)] for some in self._fewer())
            return
        few = list(islice(every_grouping(jobs.devices), _ALL_GROUPINGS + 1))
        if len(few) <= _ALL_GROUPINGS:
            yield from few
            return
        for devices in self._fewer():
            part = jobs.on(devices)
            yield node_partition.groups(part)
            yield from equal_distribution.groupings(part)
            yield hybrid_distribution.groups(part)
            yield from _equal_lengths(devices)

    def _fewer(self) -> Iterator[Mapping[DeviceId, str]]:
        """All devices; devices of fewer nodes, and of fewer types."""
        devices = self._jobs.devices
        yield devices
        compute = self._jobs.costs.compute
        for key in (node_of, devices.__getitem__):
            members: dict[str, list[DeviceId]] = {}
            for device in devices:
                members.setdefault(key(device), []).append(device)

            def speed(name: str, members: dict[str, list[DeviceId]] = members) -> float:
                return sum(1 / max(compute[devices[device]][-1], 1) for device in members[name])

            names = sorted(members, key=lambda name: -speed(name))
            chosen: Iterator[tuple[str, ...]]
            if len(names) <= _MOST_NODES_CHOSEN:
                chosen = (some for size in range(len(names) - 1, 0, -1) for some in combinations(names, size))
            else:
                sizes = {len(names) - 1, *(1 << power for power in range((len(names) - 1).bit_length()))}
                chosen = (tuple(names[:size]) for size in sorted(sizes, reverse=True))
            for some in chosen:
                wanted = {device for name in some for device in members[name]}
                yield {device: kind for device, kind in devices.items() if device in wanted}

    def _distinct(self, groupings: Iterator[Groups] | Sequence[Groups]) -> list[Groups]:
        """Remove equivalent groupings."""
        seen: set[tuple[object, ...]] = set()
        kept = []
        for groups in groupings:
            alike = tuple(sorted(tuple(sorted(group)) for group in groups))
            if groups and alike not in seen:
                seen.add(alike)
                kept.append(groups)
        return kept

    def _candidates(self, groups: Groups, staleness: int | None) -> Iterator[_Candidate]:
        """The groups under each placement, with the smallest N sufficient by closed form, and larger ones."""
        for placement in self._placements:
            jobs = self._jobs.under(placement, staleness)
            try:
                ladder = list(jobs.ladder(groups))
                if self._options.proportional:
                    ladder = [jobs.in_proportion(plan) for plan in ladder]
            except PlanError:
                continue
            best = max((plan.rate.samples_per_second for plan in ladder), default=0.0)
            enough = [plan for plan in ladder if plan.rate.samples_per_second * ALIKE >= best]
            given = self._options.minibatches_per_wave is not None
            most = None if given or not ladder else ladder[-1].minibatches_per_wave
            chosen = dict.fromkeys((*enough[:1], *enough[1:4:2], *enough[-1:]))
            yield from (_Candidate(plan, jobs, most) for plan in chosen)

    # -- simulating --------------------------------------------------------------------------------------------------

    def _search(self, groupings: Sequence[Groups], staleness: int | None) -> list[RankedPlan]:
        """The best of these by simulation, unordered."""
        found = [one for groups in groupings for one in self._candidates(groups, staleness)]
        found.sort(key=lambda one: (-one.rate, one.plan.minibatches_per_wave))
        waves = _brief_waves(staleness)
        left, best = _COMPUTATIONS, 0.0
        ranked: list[tuple[float, _Candidate]] = []
        for one in islice(found, _MOST_SIMULATED):
            if one.rate * _HOPELESS < best or (ranked and left <= 0):
                break
            left -= one.work * waves
            rate = self._simulate(one, waves).samples_per_second
            best = max(best, rate)
            ranked.append((rate, one))
        ranked.sort(key=lambda entry: -entry[0])
        if not ranked:
            return []
        affordable = _COMPUTATIONS // (LEAST_WAVES * ranked[0][1].work)
        return [self._whole(one) for _, one in ranked[: max(1, min(affordable, _FINALISTS))]]

    def _whole(self, one: _Candidate) -> RankedPlan:
        options = one.jobs.options
        waves = _brief_waves(options.staleness) if self._is_brief else None
        return RankedPlan(one.plan, options, self._simulate(one, waves), one.most_minibatches)

    def _simulate(self, one: _Candidate, waves: int | None = None) -> Predicted:
        """Predict with a cache: several allocations yield the same groups, and simulations of large plans are cut."""
        plan, options = one.plan, one.jobs.options
        length = simulated_waves(one.work, options.staleness, waves)
        key = (plan.workers, plan.waves, plan.placed.pieces, options.staleness, length)
        found = self._simulated.get(key)
        if found is None:
            found = self._simulated[key] = self._predict(plan, options, waves=waves)
        return found


#: The allocations that `auto` competes with.
_OTHERS: tuple[AllocationName, ...] = ("NP", "ED", "HD")

#: Allocations that divide all devices evenly.
_OF_WHOLE_CLUSTER: tuple[AllocationName, ...] = ("ED", "HD")

_BY_NAME: Mapping[AllocationName, Callable[[Jobs], JobPlan]] = {
    "NP": node_partition.node_partition,
    "ED": equal_distribution.equal_distribution,
    "HD": hybrid_distribution.hybrid_distribution,
    "auto": auto,
}


def _brief_waves(staleness: int | None) -> int:
    """Waves of each virtual worker in a brief simulation."""
    return max(_SHORT_WAVES, _SHORT_WAVES_PER_LEAD * ((staleness or 0) + 2))


def _groups_of(plan: JobPlan) -> list[tuple[DeviceId, ...]]:
    return [tuple(stage.device for stage in worker.stages) for worker in plan.workers]


def _equal_lengths(devices: Mapping[DeviceId, str]) -> Iterator[Groups]:
    """Groups of one device each, and of two and four adjacent ones."""
    names = list(devices)
    for length in (1, 2, 4):
        if len(names) % length == 0:
            yield [names[first : first + length] for first in range(0, len(names), length)]
