"""The queue of jobs that wait for devices and parameter servers. Pure.

By priority (job key `priority`), and within a priority first in, first out: no job overtakes one before it, not even a
smaller one that would fit. There is one exception: a job that needs more than all registered members offer does not
block others, as it is unknown whether further members will register. It keeps its position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from hetpipe.decide.lifecycle.planning import num_devices_wanted
from hetpipe.job.file import Job
from hetpipe.values.ids import JobId
from hetpipe.values.members import MemberInfo
from hetpipe.values.run import AgentInfo

T = TypeVar("T")

#: Maximum number of jobs listed in a message.
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Resources for a new job."""

    agents: tuple[AgentInfo, ...]
    """In order of registration, each with its free devices."""
    busy_devices: int
    """Devices used by other jobs."""
    shards: tuple[MemberInfo, ...]
    """Parameter servers, by requested index, then in order of registration."""
    unled: tuple[JobId, ...] = ()
    """Running jobs without a leader: the resources they use are unknown."""
    held: tuple[tuple[JobId, int], ...] = ()
    """Number of busy devices of each job; may be empty where not needed."""
    is_settled: bool = True
    """Whether members of an earlier coordinator have had the time to register again."""

    @property
    def free_devices(self) -> int:
        """Devices that no job uses."""
        return sum(len(agent.devices) for agent in self.agents)

    @property
    def all_devices(self) -> int:
        """Devices of all registered agents."""
        return self.free_devices + self.busy_devices


@dataclass(frozen=True, slots=True)
class Turn:
    """Position of one job in the queue."""

    position: int = 1
    """Among all waiting jobs; 1 is next."""
    behind: JobId | None = None
    """The job ahead; None if there is none."""


def in_turn(waiting: Iterable[T], job_of: Callable[[T], Job]) -> list[T]:
    """The waiting jobs, given oldest first, in the order of the queue: the highest priority first, then the oldest."""
    return sorted(waiting, key=lambda each: -job_of(each).priority)


def turns(waiting: Sequence[tuple[JobId, Job]], cluster: ClusterView) -> list[Turn]:
    """The position of each job.

    Args:
        waiting: the waiting jobs, in the order of the queue (`in_turn`).
        cluster: the resources. Until members have had the time to register (`is_settled`), the total is unknown, and no
            job is overtaken.
    """
    found, first = [], None
    for position, (job_id, job) in enumerate(waiting, start=1):
        found.append(Turn(position, first))
        if first is None and (not cluster.is_settled or could_fit(job, cluster)):
            first = job_id
    return found


def could_fit(job: Job, cluster: ClusterView) -> bool:
    """Whether the registered members would suffice for the job alone."""
    return _least(job) <= cluster.all_devices and job.parameter_servers.count <= len(cluster.shards)


def missing(job: Job, cluster: ClusterView) -> str:
    """Missing resources, as the end of a sentence; empty if nothing is missing."""
    if cluster.unled:
        return f"waits for {unknown_usage(cluster.unled[0])}"
    needs = []
    if cluster.free_devices < _least(job):
        needs.append(f"{_devices_wanted(job)} {_devices_there(job, cluster)}")
    wanted = job.parameter_servers.count
    if len(cluster.shards) < wanted:
        needs.append(
            f"needs {_count(wanted, 'parameter server')}, {len(cluster.shards) or 'none'} registered: start "
            f"{wanted - len(cluster.shards)} more"
        )
    return ", and ".join(needs)


def unknown_usage(job_id: JobId) -> str:
    """The reason why free resources are unknown while a running job has no leader."""
    return f"the parameter servers to report what job {job_id} uses, which continues without a coordinator"


def claim_devices(num_devices: int | None, agents: Sequence[AgentInfo]) -> tuple[AgentInfo, ...]:
    """The first `num_devices` devices in order, as agents with those devices only; agents without any are omitted.

    None claims all devices.
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


def _least(job: Job) -> int:
    """The minimum number of devices."""
    wanted = num_devices_wanted(job)
    return 1 if wanted is None else wanted


def _devices_wanted(job: Job) -> str:
    wanted = num_devices_wanted(job)
    return "needs at least 1 device," if wanted is None else f"needs {_count(wanted, 'device')}, one per stage,"


def _devices_there(job: Job, cluster: ClusterView) -> str:
    """Available devices, and the jobs that hold the others."""
    if not cluster.agents:
        return "and no agent is registered"
    if _least(job) > cluster.all_devices:
        agents = _count(len(cluster.agents), "registered agent")
        have = "has" if len(cluster.agents) == 1 else "have"
        return f"more than the {agents} {have} ({cluster.all_devices}): start more agents, or stop this job"
    named = cluster.held[:_MAX_NAMED]
    rest = len(cluster.held) - len(named)
    who = ", ".join(f"job {job_id} holds {number}" for job_id, number in named) + (f" and {rest} more" if rest else "")
    are = "is" if cluster.free_devices == 1 else "are"
    return f"and {cluster.free_devices} of {cluster.all_devices} {are} free" + (f" ({who})" if who else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
