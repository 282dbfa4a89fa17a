"""The best of all groupings: exact, for clusters with few of them.

The job's rate is bounded by that of each virtual worker by itself, and by the bytes that must cross nodes for any cut.
Groupings, with each N, are evaluated in the order of this bound until it excludes all others. A grouping forms virtual
workers from the devices, some of which may stay idle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product

from hetpipe.decide.planner.job_rate import samples_per_second
from hetpipe.decide.planner.jobs import Groups, JobPlan, Jobs, is_better
from hetpipe.errors import PlanError
from hetpipe.values.cluster import node_of
from hetpipe.values.ids import DeviceId

#: Number of devices from each class.
_Taken = tuple[int, ...]


def every_grouping(devices: Mapping[DeviceId, str], most_workers: int | None = None) -> Iterator[Groups]:
    """Yield groupings, distinct up to exchanging equal devices of one node.

    Args:
        devices: device → type.
        most_workers: maximum number of groups; None for no limit.

    >>> cluster = {DeviceId("n0/0"): "V", DeviceId("n0/1"): "V"}
    >>> [[list(group) for group in groups] for groups in every_grouping(cluster)]
    [[['n0/0', 'n0/1']], [['n0/0']], [['n0/0'], ['n0/1']]]
    """
    classes: dict[tuple[str, str], list[DeviceId]] = {}
    for device, kind in devices.items():
        classes.setdefault((node_of(device), kind), []).append(device)
    members = list(classes.values())
    everything = tuple(len(alike) for alike in members)

    def divide(left: _Taken, most: _Taken, num_groups: int) -> Iterator[list[_Taken]]:
        """Groups in descending order, none above `most`, so that each set of groups occurs once."""
        for group in product(*(range(count, -1, -1) for count in left)):
            if any(group) and group <= most:
                yield [group]
                if num_groups > 1:
                    rest = tuple(count - taken for count, taken in zip(left, group, strict=True))
                    for others in divide(rest, group, num_groups - 1):
                        yield [group, *others]

    for grouping in divide(everything, everything, most_workers or len(devices)):
        yield _with_devices(grouping, members)


def _with_devices(grouping: Sequence[_Taken], members: Sequence[Sequence[DeviceId]]) -> Groups:
    used = [0] * len(members)
    found = []
    for taken in grouping:
        group: list[DeviceId] = []
        for index, count in enumerate(taken):
            group += members[index][used[index] : used[index] + count]
            used[index] += count
        found.append(group)
    return found


#: Limit on groupings for individual evaluation: covers all of 6 unequal devices, more of equal ones.
MOST_GROUPINGS = 1_000

#: Relative tolerance: bounds and rates are computed differently and may differ by rounding.
_ROUNDING = 1e-9


def exhaustive(jobs: Jobs, devices: Mapping[DeviceId, str]) -> JobPlan | None:
    """The best plan of all groupings.

    Args:
        jobs: evaluates groupings.
        devices: usable devices, with their types.

    Returns:
        None if there are more than `MOST_GROUPINGS` groupings, or none is feasible.
    """
    found = list(islice(every_grouping(devices, jobs.most_workers), MOST_GROUPINGS + 1))
    if len(found) > MOST_GROUPINGS:
        return None
    bounds = _Bounds(jobs)
    in_order = sorted(
        (-bound, n, index)
        for index, groups in enumerate(found)
        for n in _choices(jobs, groups)
        if (bound := bounds.of(groups, n))
    )
    best: JobPlan | None = None
    for bound, n, index in in_order:
        if best is not None:
            surplus = -bound - best.rate.samples_per_second
            rounding = _ROUNDING * best.rate.samples_per_second
            if surplus < -rounding:
                break
            if surplus <= rounding and n > best.minibatches_per_wave:
                continue
        plan = _plan(jobs, found[index], n)
        if plan is not None and (best is None or is_better(plan, best)):
            best = plan
    return best


def _choices(jobs: Jobs, groups: Groups) -> Sequence[int]:
    try:
        return jobs.choices(groups)
    except PlanError:
        return ()


def _plan(jobs: Jobs, groups: Groups, minibatches_per_wave: int) -> JobPlan | None:
    try:
        return jobs.best_with(minibatches_per_wave, groups)
    except PlanError:
        return None


class _Bounds:
    """Upper bounds on the samples per second of groupings."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._alone: dict[tuple[tuple[DeviceId, ...], int], float] = {}
        #: Minimum bytes between two stages, forward and backward.
        self._thinnest_cut = min(
            (jobs.costs.cut_bytes[cut] + jobs.costs.returning_bytes[cut] for cut in jobs.costs.allowed), default=0
        )

    def of(self, groups: Groups, minibatches_per_wave: int) -> float:
        """The bound; 0 if a virtual worker does not fit in memory."""
        batch_size = self._jobs.costs.profile.batch_size
        slowest = min(self._rate(group, minibatches_per_wave) for group in groups)
        compute = len(groups) * samples_per_second(slowest, batch_size)
        return min(compute, batch_size * self._network(groups, minibatches_per_wave)) if compute else 0.0

    def _rate(self, group: Sequence[DeviceId], minibatches_per_wave: int) -> float:
        # Beyond N = K only pipelines that drain get faster, while memory gets scarcer.
        drains = self._jobs.options.policy.drains
        n = minibatches_per_wave if drains else min(minibatches_per_wave, len(group))
        key = (tuple(group), n)
        if key not in self._alone:
            self._alone[key] = self._jobs.pipelines.rate(group, n)
        return self._alone[key]

    def _network(self, groups: Groups, minibatches_per_wave: int) -> float:
        """Limit of the network cards, in minibatches per second, if every pipeline had the least possible traffic.

        A virtual worker pulls everything stored on nodes it does not use, as rarely as D permits; one on a single node
        pushes everything stored elsewhere; and between m nodes its activations cross at least m − 1 times.
        """
        jobs = self._jobs
        used = [{node_of(device) for device in group} for group in groups]
        leaving = dict.fromkeys(set().union(*used), 0)
        anywhere = minibatches_per_wave * self._thinnest_cut * sum(len(nodes) - 1 for nodes in used)
        if jobs.placement != "ed_local":
            placed = jobs.place_on(jobs.shards_on(leaving))
            pulls = jobs.options.least_pulls_per_wave
            pulled, pushed = placed.pulled.bytes_on, placed.pushed.bytes_on
            for nodes in used:
                for node in leaving.keys() - nodes:
                    leaving[node] += int(pulled.get(node, 0) * pulls)
                elsewhere = sum(pushed.values()) - sum(pushed.get(node, 0) for node in nodes)
                if len(nodes) == 1:
                    leaving[min(nodes)] += elsewhere
                else:
                    anywhere += elsewhere
        cards = jobs.network_cards
        minibatches = len(groups) * minibatches_per_wave
        together = anywhere + sum(leaving.values())
        return min(
            sum(cards[node] for node in leaving) * minibatches / together if together else math.inf,
            *(cards[node] * minibatches / num_bytes for node, num_bytes in leaving.items() if num_bytes),
            math.inf,
        )
