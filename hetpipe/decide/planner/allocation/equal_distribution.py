"""ED: every virtual worker has the same mix of devices, so none slows down another (§8.1).

The number of virtual workers is maximal, so each has as few devices of each type as possible: one, if all types have
the same number of devices. Two assignments are compared: each virtual worker gets the same from every node, as in the
paper (where each node has one type); or the same of every type, from any nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hetpipe.decide.planner.jobs import Groups, JobPlan, Jobs, best_of
from hetpipe.errors import PlanError
from hetpipe.values.cluster import node_of
from hetpipe.values.ids import DeviceId

#: Length above which a virtual worker with devices of every node is not considered.
LONGEST = 16


def groupings(jobs: Jobs) -> Sequence[Groups]:
    """Divisions of the cluster into as many equal mixes as possible: node by node, and type by type.

    The former only if its virtual workers are not longer than `LONGEST`, the latter only if it yields more of them.
    Empty if neither divides the cluster.
    """
    by_node = _divided(jobs, lambda device: (node_of(device), jobs.devices[device]))
    by_type = _divided(jobs, lambda device: ("", jobs.devices[device]))
    found = [by_node] if len(by_node[0]) <= LONGEST else []
    if len(by_type) > (len(by_node) if found else 1):
        found.append(by_type)
    return found


def _divided(jobs: Jobs, class_of: Callable[[DeviceId], tuple[str, str]]) -> list[list[DeviceId]]:
    classes: dict[tuple[str, str], list[DeviceId]] = {}
    for device in jobs.devices:
        classes.setdefault(class_of(device), []).append(device)
    num_workers = math.gcd(*(len(members) for members in classes.values()))
    found: list[list[DeviceId]] = [[] for _ in range(num_workers)]
    for members in classes.values():
        share = len(members) // num_workers
        for worker in range(num_workers):
            found[worker] += members[worker * share : (worker + 1) * share]
    return found


def equal_distribution(jobs: Jobs) -> JobPlan:
    """The best plan with equal virtual workers.

    Raises:
        PlanError: the cluster cannot be divided equally, or the model does not fit.
    """
    found = groupings(jobs)
    if not found:
        raise PlanError(
            f"the {len(jobs.devices)} devices cannot be divided into equal virtual workers, since the numbers of "
            "devices of each type have no common divisor; use --allocation auto"
        )
    return best_of(jobs, found)
