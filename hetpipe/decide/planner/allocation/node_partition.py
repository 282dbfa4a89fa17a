"""NP: each node is a virtual worker (§8.1). Little traffic between nodes, but the slowest node limits all others."""

from __future__ import annotations

from hetpipe.decide.planner.jobs import Groups, JobPlan, Jobs
from hetpipe.values.cluster import node_of
from hetpipe.values.ids import DeviceId


def groups(jobs: Jobs) -> Groups:
    """The devices of each node that has any."""
    found: dict[str, list[DeviceId]] = {}
    for device in jobs.devices:
        found.setdefault(node_of(device), []).append(device)
    return list(found.values())


def node_partition(jobs: Jobs) -> JobPlan:
    """The best plan with one virtual worker per node."""
    return jobs.best(groups(jobs))
