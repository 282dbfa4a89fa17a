"""Whether the cluster has what a job needs, and if not, what is missing. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetpipe.coordinator.planning import num_devices_wanted
from hetpipe.spec.ids import JobId
from hetpipe.spec.job import Job
from hetpipe.spec.members import MemberInfo
from hetpipe.spec.run import AgentInfo


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What is there for a new job."""

    agents: tuple[AgentInfo, ...]
    """In order of registration, each with the devices that are free."""
    busy_devices: int
    """Devices that other jobs use."""
    shards: tuple[MemberInfo, ...]
    """Parameter servers, by wanted index, then in order of registration."""
    unled: tuple[JobId, ...] = ()
    """Jobs that are under way and that nobody leads yet: what they use is not known, and may be any of this."""


def missing(job: Job, cluster: ClusterView) -> str:
    """What the job still needs, as the end of a sentence; empty when everything is there."""
    if cluster.unled:
        return untold(cluster.unled[0])
    needs = []
    free = sum(len(agent.devices) for agent in cluster.agents)
    wanted = num_devices_wanted(job)
    least = 1 if wanted is None else wanted
    if free < least:
        lack = _count(least - free, "more device")
        busy = f", {cluster.busy_devices} used by other jobs" if cluster.busy_devices else ""
        agents = _count(len(cluster.agents), "agent") + (" offers" if len(cluster.agents) == 1 else " offer")
        needs.append(f"{lack} (it needs {_purpose(wanted)}; {agents} {free} free{busy})")
    wanted_shards = job.parameter_servers.count
    if len(cluster.shards) < wanted_shards:
        lack = _count(wanted_shards - len(cluster.shards), "more parameter server")
        needs.append(f"{lack} (it needs {wanted_shards}; {len(cluster.shards)} registered)")
    return " and ".join(needs)


def untold(job_id: JobId) -> str:
    """What somebody waits for who wants to know what is free, while nobody leads a job that is under way."""
    return f"the parameter servers to tell what job {job_id} uses, which goes on without a coordinator"


def claim_devices(num_devices: int | None, agents: Sequence[AgentInfo]) -> tuple[AgentInfo, ...]:
    """The first `num_devices` devices in order, as agents with those devices only; agents without any are left out.

    None: all devices.
    """
    if num_devices is None:
        num_devices = sum(len(agent.devices) for agent in agents)
    claimed = []
    for agent in agents:
        devices = agent.devices[:num_devices]
        num_devices -= len(devices)
        if devices:
            claimed.append(replace(agent, devices=devices))
    return tuple(claimed)


def _purpose(wanted: int | None) -> str:
    return "at least 1" if wanted is None else f"{wanted}, one per stage"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
