"""The number of a coordinator's lead, and what members know of others: the own one must be above those.

A store that was wiped counts leads from one again, and members go on refusing what carries a lower number than they
have seen. So they say what they have seen when they register, and the coordinator takes the lead anew above that, as
far as `ControlCounter.check_report` accepts it. The range is counted from the number with which it began to
lead: all reports together move it no further than one may.
"""

from __future__ import annotations

from typing import Protocol

from hetpipe.observe.log import get_logger
from hetpipe.values.counters import FENCES, MAX_REPORTED_AHEAD
from hetpipe.values.members import NO_FENCE, MemberId, MemberInfo, MemberRole

_log = get_logger(__name__)

#: Members that are remembered. Whoever is forgotten may cost a number when it comes back, and nothing else.
_MAX_MET = 10_000


class Election(Protocol):
    """Where a lead comes from: a `Candidate`."""

    @property
    def fence(self) -> int:
        """The number of the lead."""
        ...

    @property
    def outage(self) -> str:
        """Why this coordinator holds, as the store is away; empty while it is there."""
        ...

    def outbid(self, fence: int) -> None:
        """Lead with a number above `fence`."""
        ...


class NoElection:
    """For a coordinator that has no rivals."""

    fence = NO_FENCE
    outage = ""

    def outbid(self, fence: int) -> None:
        """Nobody asks for the number."""


class Fences:
    """Keeps the own number above that of every earlier coordinator. Thread-safe, as `Election` is."""

    def __init__(self, election: Election) -> None:
        self._election = election
        #: The number with which this coordinator began to lead.
        self._first = election.fence
        #: Members that may have their number from this coordinator.
        self._met: set[MemberId] = set()

    @property
    def own(self) -> int:
        """What members are told."""
        return self._election.fence

    @property
    def outage(self) -> str:
        """See `Election.outage`."""
        return self._election.outage

    def meet(self, info: MemberInfo) -> None:
        """Lead with a higher number than `info` has seen of others; before it is made a member.

        A member that comes for the first time and has seen the own number has seen another coordinator with it; that
        costs a number, too, as long as reports have not cost as many as one may.

        Raises:
            ProtocolViolation: it reports one that is too far ahead; nothing has changed.
            NotLeader: another coordinator was faster.
            StoreUnavailable: the store is away.
        """
        if info.role is MemberRole.WORKER:
            return
        seen, own = info.highest_fence, self.own
        if seen > own:
            FENCES.check_report(seen, known=self._first, source=info)
            _log.warning("later_lead_reported", member=str(info), seen=seen, own=own)
        is_anothers = seen == own != NO_FENCE and info.id not in self._met
        if seen > own or (is_anothers and own < self._first + MAX_REPORTED_AHEAD):
            self._election.outbid(seen)
        if len(self._met) >= _MAX_MET:
            self._met.clear()
        self._met.add(info.id)
