"""Membership, as determined by the heartbeats received by this coordinator, and command mailboxes of agents.

The store has the same members for later coordinators, but liveness is decided here, so that a temporary outage of the
store evicts no member. Each agent has a mailbox with the commands that it has not executed yet. Not thread-safe; every
call takes the monotonic time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from heapq import nsmallest

from hetpipe.errors import MemberReplaced, PermissionDenied, ProtocolViolation, ResourceExhausted, UnknownMember
from hetpipe.storage.store import MemberRecord
from hetpipe.values.bounds import MAX_COUNT
from hetpipe.values.commands import Command, NumberedCommand
from hetpipe.values.ids import AgentId
from hetpipe.values.link_measurement import MeasuredLinks, merged
from hetpipe.values.members import ROLE_NAMES, Member, MemberId, MemberInfo, MemberRole, Registration

#: Maximum number of members: each costs memory, and is sent to every observer. The limits are per role, so that one
#: role cannot exhaust those of another.
MAX_MEMBERS: Mapping[MemberRole, int] = {
    MemberRole.AGENT: 10_000,
    MemberRole.PARAMETER_SERVER: 1_000,
    MemberRole.WORKER: 100,
}

#: Members up to which a lease is as long as configured; beyond, it grows with their number.
MEMBERS_OF_LEAST_LEASE = 500

#: Maximum number of workers per operator.
MAX_WORKERS_OF_OWNER = 25

#: Number of replaced registrations that are remembered; a process with an older one registers again.
_MAX_REPLACED = 1_000


@dataclass(slots=True)
class _Live:
    record: MemberRecord
    expires: float
    departs: bool = False
    """Whether it has announced that it is about to leave."""
    owner: str = ""
    """Identity of its certificate; empty without TLS."""
    has_reported: bool = False
    """Whether it has sent a heartbeat, and thus reported the jobs it serves."""


class Registry:
    """The live members."""

    def __init__(self, lease_seconds: float) -> None:
        #: Lease of a member of a small cluster.
        self.least_lease_seconds = lease_seconds
        self._live: dict[MemberId, _Live] = {}
        self._num_of_role: Counter[MemberRole] = Counter()
        #: Registrations whose id was registered by another process, oldest first.
        self._replaced: deque[Registration] = deque(maxlen=_MAX_REPLACED)
        #: Expired leases, by role.
        self.expired: Counter[MemberRole] = Counter()

    @property
    def lease_seconds(self) -> float:
        """Of a new or renewed lease: longer with many members, so that their heartbeats leave time for calls."""
        return self.least_lease_seconds * max(1.0, len(self._live) / MEMBERS_OF_LEAST_LEASE)

    def check_new(self, info: MemberInfo, *, owner: str = "") -> None:
        """Check that `owner` may register `info`.

        Raises:
            PermissionDenied: a member of another owner has its id.
            ProtocolViolation: a member of another role has its id, as a worker must not replace an agent; or it reports
                resources of others.
            ResourceExhausted: the limit is reached.
        """
        _check_own(info)
        before = self._live.get(info.id)
        if before is not None:
            _check_owner(before, owner)
        if before is not None and before.record.info.role is not info.role:
            raise ProtocolViolation(f"{before.record.info} already has the id {info.id}; give each process its own")
        if before is None:
            self._check_room(info.role, owner)

    def _check_room(self, role: MemberRole, owner: str) -> None:
        if self._num_of_role[role] >= MAX_MEMBERS[role]:
            name = ROLE_NAMES[role]
            raise ResourceExhausted(f"the limit of {MAX_MEMBERS[role]} members of the role {name} is reached")
        if role is not MemberRole.WORKER or not owner:
            return
        own = sum(live.owner == owner for live in self._live.values() if live.record.info.role is role)
        if own >= MAX_WORKERS_OF_OWNER:
            raise ResourceExhausted(f"{owner} has registered {own} workers, which is the limit; remove some of them")

    def put(self, record: MemberRecord, *, now: float, owner: str = "") -> MemberInfo | None:
        """Register a member; returns the one it replaces, if that was another process."""
        before = self._live.get(record.info.id)
        self._live[record.info.id] = _Live(record, now + self.lease_seconds, owner=owner)
        if before is None:
            self._num_of_role[record.info.role] += 1
            return None
        old, new = before.record.info, record.info
        if (old.pid, old.host, old.address) == (new.pid, new.host, new.address):
            return None
        self._replaced.append(before.record.registration)
        return old

    def check(self, member_id: MemberId, registration: Registration, *, owner: str = "") -> MemberRecord:
        """The live member with this registration.

        Raises:
            UnknownMember: there is none.
            MemberReplaced: there is none, because another process has registered its id.
            PermissionDenied: it belongs to another owner.
        """
        live = self._live.get(member_id)
        if live is not None:
            _check_owner(live, owner)
        if live is not None and registration in self._replaced:
            raise MemberReplaced(f"{live.record.info} has registered as {member_id}; give each process its own name")
        if live is None:
            raise UnknownMember(f"{member_id} is not registered, or its lease has expired; register again")
        if live.record.registration != registration:
            raise UnknownMember(f"a newer registration of {member_id} has replaced this one; register again")
        return live.record

    def renew(self, member_id: MemberId, registration: Registration, *, now: float) -> MemberRecord:
        """Renew the lease from `now`.

        Raises:
            UnknownMember: there is no such live member.
            MemberReplaced: there is none, because another process has registered its id.
        """
        record = self.check(member_id, registration)
        live = self._live[member_id]
        live.expires, live.has_reported = now + self.lease_seconds, True
        return record

    def renew_all(self, *, now: float) -> None:
        """Renew all leases from `now`, because heartbeats could not be received."""
        for live in self._live.values():
            live.expires = now + self.lease_seconds

    def depart(self, member_id: MemberId, registration: Registration) -> bool:
        """Record that a member is about to leave, until it registers again; returns False for a duplicate.

        Raises:
            UnknownMember: there is no such live member.
        """
        self.check(member_id, registration)
        live = self._live[member_id]
        is_new, live.departs = not live.departs, True
        return is_new

    def learn_links(self, measured: MeasuredLinks) -> None:
        """Update the link measurements of members."""
        ends = {node for link in measured.links for node in link.between} | {copy.node for copy in measured.copies}
        for end in ends:
            live = self._live.get(MemberId(end))
            if live is not None and live.record.info.role is MemberRole.AGENT:
                info = live.record.info
                info = replace(info, links=merged(info.links, measured.of(end)))
                live.record = replace(live.record, info=info)

    def has_reported(self, member_id: MemberId) -> bool:
        """Whether a member has sent a heartbeat since it registered."""
        live = self._live.get(member_id)
        return live is not None and live.has_reported

    def departs(self, member_id: MemberId) -> bool:
        """Whether a member has announced that it is about to leave."""
        live = self._live.get(member_id)
        return live is not None and live.departs

    def remove(self, member_id: MemberId) -> None:
        """End a membership, if there is one."""
        live = self._live.pop(member_id, None)
        if live is not None:
            self._num_of_role[live.record.info.role] -= 1

    def expire(self, *, now: float) -> list[MemberRecord]:
        """End the memberships whose lease has expired, and return them."""
        gone = [live.record for live in self._live.values() if live.expires <= now]
        for record in gone:
            self.remove(record.info.id)
            self.expired[record.info.role] += 1
        return gone

    def members(self, *, now: float, after: int = -1, limit: int | None = None) -> tuple[Member, ...]:
        """The members in order of registration: at most `limit` of those behind the order `after`."""
        later = (live for live in self._live.values() if live.record.order > after)
        ordered = nsmallest(len(self._live) if limit is None else limit, later, key=lambda live: live.record.order)
        return tuple(Member(live.record.info, live.record.order, live.expires - now) for live in ordered)

    def of_role(self, role: MemberRole) -> list[MemberInfo]:
        """The members of one role in order of registration; shards by their requested index first."""
        ordered = sorted(self._live.values(), key=lambda live: (_wanted_index(live), live.record.order))
        return [live.record.info for live in ordered if live.record.info.role is role]


def _wanted_index(live: _Live) -> float:
    index = live.record.info.shard_index
    return float("inf") if index is None else index


def _check_owner(live: _Live, owner: str) -> None:
    if owner and live.owner and owner != live.owner:
        raise PermissionDenied(f"{live.record.info} is a member of {live.owner}, and not of {owner}")


def _check_own(info: MemberInfo) -> None:
    """Check that a process registers only resources of its role and name.

    Raises:
        ProtocolViolation: it reports others.
    """
    is_agent, is_shard = info.role is MemberRole.AGENT, info.role is MemberRole.PARAMETER_SERVER
    if not is_agent and (info.devices or info.stages or info.links):
        raise ProtocolViolation(f"{info} reports devices, stages or links, which only agents have")
    if not is_shard and info.shard_index is not None:
        raise ProtocolViolation(f"{info} requests an index among the parameter servers, but is none")
    for device in info.devices:
        if device.device.rpartition("/")[0] != info.id:
            raise ProtocolViolation(f"{info} offers device {device.device}, which is not on its node")
    if not info.links.is_of(info.id):
        raise ProtocolViolation(f"{info} reports links of other nodes")


@dataclass(slots=True)
class _Mailbox:
    last_sequence: int = 0
    waiting: list[NumberedCommand] = field(default_factory=list)
    #: Number of the last batch of reports accepted.
    last_batch: int = 0


class Mailboxes:
    """One mailbox per registered agent. It holds at most the commands of the jobs the agent serves."""

    def __init__(self) -> None:
        self._boxes: dict[AgentId, _Mailbox] = {}

    def open(self, agent: AgentId, *, is_new: bool = False) -> None:
        """Start a mailbox for a new registration.

        Commands that the same process has not executed yet are kept and renumbered; for a process that `is_new` they
        are dropped.
        """
        before = self._boxes.pop(agent, None)
        self._boxes[agent] = _Mailbox()
        for numbered in () if before is None or is_new else before.waiting:
            self.post(agent, numbered.command)

    def close(self, agent: AgentId) -> None:
        """Delete the mailbox of an agent that is gone."""
        self._boxes.pop(agent, None)

    def post(self, agent: AgentId, command: Command) -> None:
        """Queue a command; no effect if the agent is gone, since its processes then end on their own."""
        box = self._boxes.get(agent)
        if box is not None:
            box.last_sequence += 1
            box.waiting.append(NumberedCommand(box.last_sequence, command))

    def after(self, agent: AgentId, sequence: int) -> tuple[NumberedCommand, ...]:
        """The commands after number `sequence`, in order.

        Raises:
            ProtocolViolation: there is no such number yet.
        """
        box = self._boxes.get(agent)
        self._check(box, agent, sequence)
        return () if box is None else tuple(command for command in box.waiting if command.sequence > sequence)

    def acknowledge(self, agent: AgentId, sequence: int) -> None:
        """Drop the commands up to number `sequence`, which have been executed.

        Raises:
            ProtocolViolation: there is no such number yet.
        """
        box = self._boxes.get(agent)
        self._check(box, agent, sequence)
        if box is not None:
            box.waiting = [command for command in box.waiting if command.sequence > sequence]

    @staticmethod
    def _check(box: _Mailbox | None, agent: AgentId, sequence: int) -> None:
        last = 0 if box is None else box.last_sequence
        if sequence > last:
            raise ProtocolViolation(
                f"{agent} acknowledges command {sequence}, but the last one of its registration is {last}"
            )

    def take_batch(self, agent: AgentId, batch: int) -> bool:
        """Accept a batch; returns False for a duplicate. Batch numbers of a registration increase.

        Raises:
            ProtocolViolation: the number is invalid.
        """
        if not 0 < batch < MAX_COUNT:
            raise ProtocolViolation(f"agent {agent} numbers a batch of reports {batch}; numbers start at 1")
        box = self._boxes.get(agent)
        if box is None or batch <= box.last_batch:
            return False
        box.last_batch = batch
        return True
