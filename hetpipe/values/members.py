"""Members of the cluster: what a process registers, and what the coordinator returns.

A membership lives as long as its lease is renewed. Its `registration` is a token: a process with an older token for the
same id is rejected, so one that was paused beyond its lease cannot continue as if nothing had happened.
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

#: The highest fence of a process that has seen none.
NO_FENCE = 0


class MemberRole(StrEnum):
    """Role of a member."""

    AGENT = "agent"
    PARAMETER_SERVER = "parameter_server"
    WORKER = "worker"


#: Name of each role in messages.
ROLE_NAMES: dict[MemberRole, str] = {
    MemberRole.AGENT: "agent",
    MemberRole.PARAMETER_SERVER: "parameter server",
    MemberRole.WORKER: "worker",
}


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """The registration of a process."""

    role: MemberRole
    id: MemberId
    """Unique among members."""
    host: str
    """Address at which other nodes reach the machine."""
    pid: int
    address: str = ""
    """`HOST:PORT` of its own server; empty when it has none."""
    devices: tuple[AgentDevice, ...] = ()
    """Agents only."""
    shard_index: ShardIndex | None = None
    """Requested index among the shards, or None for the order of registration. Shards only."""
    highest_term: Term = NO_TERM
    """Highest term it has seen; new terms are above it, even if the store has lost its data."""
    highest_fence: int = NO_FENCE
    """Highest fence of a coordinator it has seen: it rejects lower ones, even if the store has lost its data."""
    stages: tuple[StageKey, ...] = ()
    """Stages whose processes it has when it registers: after a re-registration they keep running. Agents only."""
    links: MeasuredLinks = MeasuredLinks()
    """Measurements of its node's links that are valid when it registers. Agents only."""

    @property
    def agent_info(self) -> AgentInfo:
        """The member in the form used by the planner."""
        return AgentInfo(agent=AgentId(self.id), host=self.host, pid=self.pid, devices=self.devices, links=self.links)

    def __str__(self) -> str:
        """Name for messages: role, id, and where it runs."""
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
    """Fence of the coordinator's lead; a process that has seen a higher one rejects this coordinator."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """Reply to a heartbeat."""

    lease_seconds: float
    ended_jobs: tuple[JobId, ...] = ()
    """Those of the named jobs that have ended or are unknown: stop working on them."""
    fence: int = NO_FENCE
    """As for `Lease`."""
