"""auto: the best allocation, or a good one found heuristically.

With few devices every grouping is considered, so the plan is optimal, and more devices never make it slower: the
groupings of a smaller cluster are among those of the larger one. With many devices it is a heuristic:

* NP, ED, HD and, up to `LONGEST` devices, one virtual worker of all devices compete with packings of all devices; the
  plan is at least as good as those;
* if the result is well below what the devices could compute, the network is the likely cause, and fewer nodes may be
  faster: each node by itself, with every grouping if these are few, and packings of the best two nodes, four, etc.

Without parameter servers there is one virtual worker: with few devices the best one, with many all of them (the first
`LONGEST`), or those of one node.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetpipe.decide.planner.allocation import equal_distribution, hybrid_distribution, node_partition
from hetpipe.decide.planner.allocation.bound import upper_bound
from hetpipe.decide.planner.allocation.exhaustive import exhaustive
from hetpipe.decide.planner.allocation.packing import LONGEST, packed_groups
from hetpipe.decide.planner.jobs import Groups, JobPlan, Jobs, best_of, is_better
from hetpipe.decide.planner.pipelines import Shape, Shapes
from hetpipe.errors import PlanError
from hetpipe.values.cluster import node_of
from hetpipe.values.ids import DeviceId

#: Share of the upper bound beyond which fewer nodes are not tried.
_CLOSE = 0.9


def auto(jobs: Jobs) -> JobPlan:
    """The best plan found.

    Raises:
        PlanError: nothing fits; states the shortage of one virtual worker with all devices.
    """
    found = exhaustive(jobs, jobs.devices)
    if found is not None:
        return found
    best = best_of(jobs, _groupings(jobs))
    if best.rate.samples_per_second < _CLOSE * upper_bound(jobs):
        for plan in _on_fewer_nodes(jobs):
            if is_better(plan, best):
                best = plan
    return best


def _groupings(jobs: Jobs) -> Iterator[Groups]:
    longest = min(LONGEST, jobs.costs.max_stages)
    if jobs.most_workers is not None:
        yield [tuple(jobs.devices)[:longest]]
        return
    if len(jobs.devices) <= longest:
        yield [tuple(jobs.devices)]  # first, as it has the most memory: if nothing fits, its error is the most useful
    yield node_partition.groups(jobs)
    yield from equal_distribution.groupings(jobs)
    yield hybrid_distribution.groups(jobs)
    yield from packed_groups(jobs, jobs.devices)


def _on_fewer_nodes(jobs: Jobs) -> Iterator[JobPlan]:
    """Plans for single nodes, then for growing sets of the best ones. Equivalent nodes are evaluated once."""
    nodes: dict[str, dict[DeviceId, str]] = {}
    for device, kind in jobs.devices.items():
        nodes.setdefault(node_of(device), {})[device] = kind
    shapes, by_shape = Shapes(jobs.costs.cluster), dict[Shape, JobPlan | None]()
    reached: dict[str, float] = {}
    for node, devices in nodes.items():
        shape, _ = shapes.shape_of(devices)
        if shape not in by_shape:
            plan = by_shape[shape] = exhaustive(jobs, devices) or _packed(jobs, devices)
            if plan is not None:
                yield plan
        alike = by_shape[shape]
        reached[node] = alike.rate.samples_per_second if alike is not None else 0.0
    best_first = sorted(nodes, key=lambda node: -reached[node])
    size = 2
    while size < len(nodes):
        used = set(best_first[:size])
        plan = _packed(jobs, {device: kind for device, kind in jobs.devices.items() if node_of(device) in used})
        if plan is not None:
            yield plan
        size *= 2


def _packed(jobs: Jobs, devices: dict[DeviceId, str]) -> JobPlan | None:
    try:
        return best_of(jobs, packed_groups(jobs, devices))
    except PlanError:
        return None
