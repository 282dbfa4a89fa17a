"""The store of a single coordinator on one machine: its contents end with the process."""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass, field, replace

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import NotLeader, StoreDamaged, UnknownMember, VersionConflict
from hetpipe.storage.store import MAX_EVENTS, CandidateId, Fence, JobRecord, Lead, MemberRecord, Repairs
from hetpipe.values.counters import FENCES, TERMS, ControlCounter
from hetpipe.values.events import NumberedEvent
from hetpipe.values.ids import JobId, Term
from hetpipe.values.members import MemberId, MemberInfo, Registration


@dataclass(slots=True)
class _Leased:
    record: MemberRecord
    expires: float


@dataclass(slots=True)
class _Job:
    record: JobRecord
    events: deque[NumberedEvent] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    expires: float | None = None


class MemoryStore:
    """`Store` in this process's memory; leases use `clock`."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._members: dict[MemberId, _Leased] = {}
        self._num_orders = 0
        #: No entry expires before: thousands of members are not looked through at every heartbeat.
        self._next_expiry = math.inf
        self._term = Term(0)
        self._jobs: dict[JobId, _Job] = {}
        #: The newest lead and its time of expiry.
        self._lead = Lead(CandidateId(""), "", Fence(0))
        self._lead_expires = self._clock.monotonic()

    def acquire_lead(self, candidate: CandidateId, name: str, *, above: Fence, lease_seconds: float) -> Lead:
        """Take the lead if it is free; see `Store` for the contract."""
        with self._lock:
            now = self._clock.monotonic()
            if now >= self._lead_expires:
                self._lead = Lead(candidate, name, Fence(_next(FENCES, max(self._lead.fence, above))))
            if self._lead.candidate == candidate:
                self._lead_expires = now + lease_seconds
            return self._lead

    def renew_lead(self, lead: Lead, *, lease_seconds: float) -> None:
        """Renew the lease of a lead."""
        with self._lock:
            if self._lead != lead:
                raise NotLeader(f"{self._lead.name} has the lead")
            self._lead_expires = self._clock.monotonic() + lease_seconds

    def release_lead(self, lead: Lead) -> None:
        """Release a lead."""
        with self._lock:
            if self._lead == lead:
                self._lead_expires = self._clock.monotonic()

    def put_member(self, info: MemberInfo, registration: Registration, *, lease_seconds: float) -> MemberRecord:
        """Register a member."""
        with self._lock:
            now = self._forget_expired()
            known = self._members.get(info.id)
            if known is None:
                self._num_orders += 1
            order = self._num_orders if known is None else known.record.order
            record = MemberRecord(info, registration, order)
            self._members[info.id] = _Leased(record, self._expiry(now + lease_seconds))
            return record

    def renew_member(self, member_id: MemberId, registration: Registration, *, lease_seconds: float) -> None:
        """Renew the lease of a member."""
        with self._lock:
            now = self._forget_expired()
            known = self._members.get(member_id)
            if known is None or known.record.registration != registration:
                raise UnknownMember(f"{member_id} is not registered with this token; register again")
            known.expires = self._expiry(now + lease_seconds)

    def remove_member(self, member_id: MemberId, registration: Registration) -> None:
        """Remove a member."""
        with self._lock:
            known = self._members.get(member_id)
            if known is not None and known.record.registration == registration:
                del self._members[member_id]

    def members(self) -> tuple[MemberRecord, ...]:
        """The live members in order of registration."""
        with self._lock:
            self._forget_expired()
            return tuple(sorted((leased.record for leased in self._members.values()), key=lambda record: record.order))

    def next_term(self, *, above: Term) -> Term:
        """Allocate a new term."""
        with self._lock:
            self._term = Term(_next(TERMS, max(self._term, above)))
            return self._term

    def term(self) -> Term:
        """The highest term allocated."""
        with self._lock:
            return self._term

    def create_job(self, record: JobRecord) -> JobRecord:
        """Store a new job at version 1."""
        with self._lock:
            self._forget_expired()
            return self._jobs.setdefault(record.job_id, _Job(replace(record, version=1))).record

    def replace_job(self, record: JobRecord, *, keep_seconds: float | None = None) -> JobRecord:
        """Replace one version of a job by the next."""
        with self._lock:
            now = self._forget_expired()
            job = self._jobs.get(record.job_id)
            following = replace(record, version=record.version + 1)
            if job is None or (job.record != following and job.record.version != record.version):
                raise VersionConflict(f"job {record.job_id} does not have version {record.version}")
            job.record = following
            job.expires = None if keep_seconds is None else self._expiry(now + keep_seconds)
            return following

    def job(self, job_id: JobId) -> JobRecord | None:
        """One job, or None."""
        with self._lock:
            self._forget_expired()
            job = self._jobs.get(job_id)
            return None if job is None else job.record

    def jobs(self) -> tuple[JobRecord, ...]:
        """All jobs in order of creation."""
        with self._lock:
            self._forget_expired()
            return tuple(job.record for job in self._jobs.values())

    def append_event(self, job_id: JobId, event: NumberedEvent) -> None:
        """Append to the events of a job."""
        with self._lock:
            self._forget_expired()
            job = self._jobs.get(job_id)
            if job is None:
                raise VersionConflict(f"job {job_id} is not stored, so its event {event.sequence} cannot be appended")
            last = job.events[-1].sequence if job.events else 0
            if event.sequence > last:
                job.events.append(event)

    def events(self, job_id: JobId, *, after: int = 0, limit: int = 1_000) -> tuple[NumberedEvent, ...]:
        """Events of a job after a sequence number."""
        with self._lock:
            self._forget_expired()
            job = self._jobs.get(job_id)
            events = () if job is None else tuple(event for event in job.events if event.sequence > after)
            return events[:limit]

    def repair(self) -> Repairs:
        """Nothing to repair: memory is consistent or lost as a whole."""
        return Repairs()

    def close(self) -> None:
        """Nothing to release."""

    def _forget_expired(self) -> float:
        """Drop expired entries; returns the time."""
        now = self._clock.monotonic()
        if now >= self._next_expiry:
            self._members = {key: leased for key, leased in self._members.items() if leased.expires > now}
            self._jobs = {key: job for key, job in self._jobs.items() if job.expires is None or job.expires > now}
            expiries = [leased.expires for leased in self._members.values()]
            expiries += [job.expires for job in self._jobs.values() if job.expires is not None]
            self._next_expiry = min(expiries, default=math.inf)
        return now

    def _expiry(self, expires: float) -> float:
        """Note that an entry expires then."""
        self._next_expiry = min(self._next_expiry, expires)
        return expires


def _next(counter: ControlCounter, highest: int) -> int:
    if highest + 1 >= counter.limit:
        raise StoreDamaged(f"no {counter.name} is left below {counter.limit}: {highest} was allocated or reported")
    return highest + 1
