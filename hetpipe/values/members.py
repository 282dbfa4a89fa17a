"""Who is in the cluster: what a process tells the coordinator of itself, and what the coordinator tells of it.

A membership lives as long as its lease is renewed. Its `registration` is a token: whoever holds an older token for the
same id is refused, so that a process that was paused beyond its lease cannot act as if nothing had happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from hetpipe.values.commands import StageKey
from hetpipe.values.ids import AgentId, JobId, ShardIndex, Term
from hetpipe.values.link_measurement import MeasuredLinks
from hetpipe.values.run import AgentDevice, AgentInfo

MemberId = NewType("MemberId", str)

#: Token of one registration of one member.
Registration = NewType("Registration", str)

#: The highest term of a process that has seen none.
NO_TERM = Term(0)

#: The highest number of a lead of a process that has seen none.
NO_FENCE = 0


class MemberRole(StrEnum):
    """What a member does."""

    AGENT = "agent"
    PARAMETER_SERVER = "parameter_server"
    WORKER = "worker"


#: How each role is called in a sentence.
ROLE_NAMES: dict[MemberRole, str] = {
    MemberRole.AGENT: "agent",
    MemberRole.PARAMETER_SERVER: "parameter server",
    MemberRole.WORKER: "worker",
}


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """What a process tells of itself when it registers."""

    role: MemberRole
    id: MemberId
    """Unique among members."""
    host: str
    """Address under which other nodes reach the machine."""
    pid: int
    address: str = ""
    """`HOST:PORT` of its own server; empty when it has none."""
    devices: tuple[AgentDevice, ...] = ()
    """Agents only."""
    shard_index: ShardIndex | None = None
    """Wanted position among the shards, or None for "by order of registration". Shards only."""
    highest_term: Term = NO_TERM
    """Highest term it has seen; new terms are above it, even if the store has forgotten them."""
    highest_fence: int = NO_FENCE
    """Highest number of a coordinator's lead it has seen: it refuses lower ones, even if the store has forgotten it."""
    stages: tuple[StageKey, ...] = ()
    """Stages whose processes it has when it registers: one that registers again keeps them. Agents only."""
    links: MeasuredLinks = MeasuredLinks()
    """What was measured of its node's links, and is valid still when it registers. Agents only."""

    @property
    def agent_info(self) -> AgentInfo:
        """The same member as the planner sees it."""
        return AgentInfo(agent=AgentId(self.id), host=self.host, pid=self.pid, devices=self.devices, links=self.links)

    def __str__(self) -> str:
        """Name for a sentence: role, id, and where it runs."""
        return f"{ROLE_NAMES[self.role]} {self.id} (pid {self.pid} on {self.address or self.host})"


@dataclass(frozen=True, slots=True)
class Member:
    """A live member."""

    info: MemberInfo
    order: int
    """Rank in the order of registration; only grows."""
    lease_seconds_left: float


@dataclass(frozen=True, slots=True)
class Lease:
    """The terms of a membership."""

    registration: Registration
    lease_seconds: float
    order: int
    fence: int = NO_FENCE
    """Number of the coordinator's lead; whoever has seen a higher one obeys this coordinator no more."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """The answer to a heartbeat."""

    lease_seconds: float
    ended_jobs: tuple[JobId, ...] = ()
    """Those of the named jobs that have ended or are unknown: stop what is done for them."""
    fence: int = NO_FENCE
    """As of `Lease`."""
