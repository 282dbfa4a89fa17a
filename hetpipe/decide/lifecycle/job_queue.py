"""The queue of jobs that wait for devices and parameter servers: what each needs, what is free, whose turn it is. Pure.

First in, first out: nobody overtakes a job that comes before it, also not a smaller one for which there is room. There
is one exception: a job that needs more than all registered members have holds nobody up, as nobody knows whether those
will ever register. It keeps its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetpipe.decide.lifecycle.planning import num_devices_wanted
from hetpipe.job.file import Job
from hetpipe.values.ids import JobId
from hetpipe.values.members import MemberInfo
from hetpipe.values.run import AgentInfo

#: Jobs that a sentence names one by one.
_MAX_NAMED = 3


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
    held: tuple[tuple[JobId, int], ...] = ()
    """How many of the busy devices each job uses; may be empty where that is not of interest."""
    is_settled: bool = True
    """Whether whoever was a member of an earlier coordinator has had the time to register again."""

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
    """Where one job stands in the queue."""

    position: int = 1
    """Among all that wait; 1 is the oldest."""
    behind: JobId | None = None
    """Who goes first; None: nobody does."""


def turns(waiting: Sequence[tuple[JobId, Job]], cluster: ClusterView) -> list[Turn]:
    """Where each job stands.

    Args:
        waiting: the jobs that wait, oldest first.
        cluster: what is there for them. While members may still be on their way (`is_settled`), nobody knows what they
            will have in all, and nobody overtakes anybody.
    """
    found, first = [], None
    for position, (job_id, job) in enumerate(waiting, start=1):
        found.append(Turn(position, first))
        if first is None and (not cluster.is_settled or could_fit(job, cluster)):
            first = job_id
    return found


def could_fit(job: Job, cluster: ClusterView) -> bool:
    """Whether the registered members would do for the job, if it had them for itself."""
    return _least(job) <= cluster.all_devices and job.parameter_servers.count <= len(cluster.shards)


def missing(job: Job, cluster: ClusterView) -> str:
    """What the job needs and what is there, as the end of a sentence; empty when everything is there."""
    if cluster.unled:
        return f"waits for {untold(cluster.unled[0])}"
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


def _least(job: Job) -> int:
    """The fewest devices that will do."""
    wanted = num_devices_wanted(job)
    return 1 if wanted is None else wanted


def _devices_wanted(job: Job) -> str:
    wanted = num_devices_wanted(job)
    return "needs at least 1 device," if wanted is None else f"needs {_count(wanted, 'device')}, one per stage,"


def _devices_there(job: Job, cluster: ClusterView) -> str:
    """What there is of them, and who has the others."""
    if not cluster.agents:
        return "and no agent is registered"
    if _least(job) > cluster.all_devices:
        agents = _count(len(cluster.agents), "registered agent")
        have = "has" if len(cluster.agents) == 1 else "have"
        return f"which are more than the {agents} {have} ({cluster.all_devices}): start more agents, or stop this job"
    named = cluster.held[:_MAX_NAMED]
    rest = len(cluster.held) - len(named)
    who = ", ".join(f"job {job_id} holds {number}" for job_id, number in named) + (f" and {rest} more" if rest else "")
    are = "is" if cluster.free_devices == 1 else "are"
    return f"and {cluster.free_devices} of {cluster.all_devices} {are} free" + (f" ({who})" if who else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
