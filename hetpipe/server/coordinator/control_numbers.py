"""The two monotonic numbers of the control plane: the fence of the lead, and the highest term of any job.

Both must exceed all values that members have from earlier coordinators. A wiped store counts leads from one again,
and members keep rejecting requests with a lower number than they have seen. So they report the highest one when they
register, and the coordinator takes the lead anew above that (`Fences`), and terms above what they report (`Terms`), as
far as `ControlCounter.check_report` accepts it. The range of leads is counted from the number with which it began to
lead: all reports together move it no further than one may.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Protocol

from hetpipe.errors import ProtocolViolation
from hetpipe.observe.log import get_logger
from hetpipe.storage.store import Store
from hetpipe.values.counters import EVENTS_PER_LEAD, FENCES, MAX_REPORTED_AHEAD, TERMS
from hetpipe.values.ids import JobId
from hetpipe.values.members import NO_FENCE, MemberId, MemberInfo, MemberRole
from hetpipe.values.run import ClockSnapshot
from hetpipe.values.run_document import RunDescription

_log = get_logger(__name__)

#: Limit of remembered members. A forgotten one may cost a number when it registers again, and nothing else.
_MAX_MET = 10_000


#: Restarts of one virtual worker: it is given up after a few in a row, and a restart takes seconds.
_MAX_INCARNATION = 1_000_000


class Election(Protocol):
    """Source of a lead: a `Candidate`."""

    @property
    def fence(self) -> int:
        """Fence of the lead."""
        ...

    @property
    def outage(self) -> str:
        """Reason for holding the lead during a store outage; empty without one."""
        ...

    def raise_fence(self, fence: int) -> None:
        """Acquire the lead with a fence above `fence`."""
        ...


class NoElection:
    """Trivial election of a single coordinator."""

    fence = NO_FENCE
    outage = ""

    def raise_fence(self, fence: int) -> None:
        """No-op."""


class Fences:
    """Keeps this coordinator's fence above that of every earlier one. Thread-safe, as `Election` is."""

    def __init__(self, election: Election) -> None:
        self._election = election
        #: The number with which this coordinator began to lead.
        self._first = election.fence
        #: Members whose number may be from this coordinator.
        self._met: set[MemberId] = set()

    @property
    def own(self) -> int:
        """The fence sent to members."""
        return self._election.fence

    def first_event_number(self) -> int:
        """First number of this coordinator's job events; ranges of different leads do not overlap."""
        return max(0, self.own - 1) * EVENTS_PER_LEAD + 1

    @property
    def outage(self) -> str:
        """Implement `Election.outage`."""
        return self._election.outage

    def meet(self, info: MemberInfo) -> None:
        """Ensure a fence above the highest one that `info` has seen elsewhere; called before registration.

        A new member that has already seen the own number has seen it of another coordinator; that consumes a number,
        too, up to the limit for reports.

        Raises:
            ProtocolViolation: the reported number is too far ahead; state is unchanged.
            NotLeader: another candidate won.
            StoreUnavailable: the store cannot be reached.
        """
        if info.role is MemberRole.WORKER:
            return
        seen, own = info.highest_fence, self.own
        if seen > own:
            FENCES.check_report(seen, known=self._first, source=info)
            _log.warning("later_lead_reported", member=str(info), seen=seen, own=own)
        is_anothers = seen == own != NO_FENCE and info.id not in self._met
        if seen > own or (is_anothers and own < self._first + MAX_REPORTED_AHEAD):
            self._election.raise_fence(seen)
        if len(self._met) >= _MAX_MET:
            self._met.clear()
        self._met.add(info.id)


class Terms:
    """The highest known term. Thread-safe."""

    def __init__(self, store: Store) -> None:
        """Load the term from the store.

        Raises:
            StoreUnavailable: it cannot be reached.
            StoreDamaged: it holds no number.
        """
        self._store = store
        self._lock = threading.Lock()
        self._known = store.term()

    def meet(self, info: MemberInfo) -> None:
        """Validate the term reported by a process before it is registered.

        Raises:
            ProtocolViolation: it is too far ahead.
            StoreUnavailable, StoreDamaged: as above.
        """
        if info.role is not MemberRole.WORKER and info.highest_term > self._known:
            self._learn()
            TERMS.check_report(info.highest_term, known=self._known, source=info)

    def check_clocks(self, clocks: Mapping[JobId, ClockSnapshot], source: MemberId) -> None:
        """Validate the terms of a heartbeat. Does not use the store, which may be unavailable.

        Raises:
            ProtocolViolation: one is too far ahead.
        """
        for snapshot in clocks.values():
            TERMS.check_report(snapshot.term, known=self._known, source=source)

    def check_description(self, description: RunDescription, source: MemberInfo) -> None:
        """Validate the numbers in a clock shard's description of a job before it is adopted.

        The next term goes beyond the job's, and the next incarnation of a virtual worker beyond its newest.

        Raises:
            ProtocolViolation: a number is too far ahead.
            StoreUnavailable, StoreDamaged: as above.
        """
        term = max(description.term, description.run.plan.term)
        if term > self._known:
            self._learn()
            TERMS.check_report(term, known=self._known, source=source)
        for life in description.lives:
            if life.incarnation > _MAX_INCARNATION:
                raise ProtocolViolation(
                    f"{source} reports incarnation {life.incarnation} of virtual worker {life.vw}; the limit is "
                    f"{_MAX_INCARNATION}"
                )

    def _learn(self) -> None:
        term = self._store.term()
        with self._lock:
            self._known = max(self._known, term)
