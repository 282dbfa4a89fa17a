"""The coordinator's persistent state behind one interface. Implementations: `memory_store`, `redis_store`.

Only data that can be rebuilt or displayed later is stored: members and their order, the highest term, jobs and their
events. Clocks and weights are not: the shards are authoritative for those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NewType, Protocol

from hetpipe.values.events import JobState, NumberedEvent, StopMode, Submission
from hetpipe.values.ids import JobId, Term
from hetpipe.values.members import MemberId, MemberInfo, Registration

#: One incarnation of one coordinator.
CandidateId = NewType("CandidateId", str)

#: Number of a lead: higher than that of every lead before.
Fence = NewType("Fence", int)

#: Newest events kept per job.
MAX_EVENTS = 10_000

#: Seconds that an ended job and its events are kept.
ENDED_JOB_SECONDS = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A membership whose lease has not expired."""

    info: MemberInfo
    registration: Registration
    order: int
    """Rank in the order of registration; only grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """The persistent part of a job."""

    job_id: JobId
    name: str
    state: JobState
    run_dir: str
    submitted_wall: float
    """Seconds since 1970."""
    submission: Submission | None = None
    """The submission; None where the job was recovered from a shard."""
    stop: StopMode | None = None
    """Requested way to stop; None without a request."""
    failure: str = ""
    shards: tuple[MemberId, ...] = ()
    """Its parameter servers in index order, the clock shard first; empty until they are claimed."""
    version: int = 1
    """Incremented with every replacement."""

    def at(self, state: JobState, *, failure: str) -> JobRecord:
        """A copy in another state."""
        return replace(self, state=state, failure=failure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repairs:
    """Findings and actions of `Store.repair`."""

    jobs: tuple[JobId, ...] = ()
    """Jobs added to the index, which did not contain their records."""
    members: tuple[MemberId, ...] = ()
    """Members, likewise."""
    dropped_jobs: tuple[JobId, ...] = ()
    """Jobs removed from the index because they have expired or their records are lost."""
    renumbered: tuple[JobId, ...] = ()
    """Jobs whose events had invalid numbers and were renumbered."""
    lost_jobs: tuple[JobId, ...] = ()
    """Jobs with events but no record: they must be submitted again."""
    unreadable: tuple[str, ...] = ()
    """Keys of records that are neither indexed nor readable; they are left in place."""

    def __bool__(self) -> bool:
        """Whether there was anything to repair."""
        return any(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class Lead:
    """The right to act as the coordinator of this store, as long as its lease lasts."""

    candidate: CandidateId
    """The candidate that holds it."""
    name: str
    """Its name, for messages."""
    fence: Fence


#: Returns the fence under which writes are made; it may increase.
FenceSource = Callable[[], Fence]


class LeadStore(Protocol):
    """The part of a `Store` that elects a leader among coordinators."""

    def acquire_lead(self, candidate: CandidateId, name: str, *, above: Fence, lease_seconds: float) -> Lead:
        """Take the lead if it is free; returns the current lead. For the leader itself the lease is renewed.

        A new lead has a fence higher than every one before and than `above`.

        Raises:
            StoreDamaged: no such fence is left below the limit of `FENCES`.
        """
        ...

    def renew_lead(self, lead: Lead, *, lease_seconds: float) -> None:
        """Extend the lease to `lease_seconds` from now, even after its expiry if there was no other leader since.

        Raises:
            NotLeader: another candidate has or had the lead since.
        """
        ...

    def release_lead(self, lead: Lead) -> None:
        """Release the lead. No effect when another candidate has it."""
        ...

    def close(self) -> None:
        """Release connections. No other method may be called afterwards."""
        ...


class Store(LeadStore, Protocol):
    """Persistent state of coordinators.

    Guarantees of every implementation:

    * Thread-safe. Each method is atomic and as durable as the implementation: when it returns, every later call on any
      store of the same place sees its effect.
    * Idempotent: a method repeated with the same arguments, because its reply was lost, returns the same result and has
      no further effect (`next_term` alone may skip terms).
    * Leases use the store's own clock, which is monotonic: `memory`: of the process, `redis`: of the server.
    * `StoreUnavailable` when the place is unreachable; the method may or may not have taken effect.
    * A store opened with a fence accepts writes only under the newest lead, and otherwise raises `NotLeader`. In memory
      there is only one coordinator, so no write is rejected.
    """

    def put_member(self, info: MemberInfo, registration: Registration, *, lease_seconds: float) -> MemberRecord:
        """Register a member, or replace the registration of a live one, which keeps its rank."""
        ...

    def renew_member(self, member_id: MemberId, registration: Registration, *, lease_seconds: float) -> None:
        """Extend the lease to `lease_seconds` from now.

        Raises:
            UnknownMember: there is no live member with this id and this registration.
        """
        ...

    def remove_member(self, member_id: MemberId, registration: Registration) -> None:
        """End a membership. No effect when there is none with this registration."""
        ...

    def members(self) -> tuple[MemberRecord, ...]:
        """The live members in order of registration."""
        ...

    def next_term(self, *, above: Term) -> Term:
        """Allocate a term higher than every one before and than `above`.

        Raises:
            StoreDamaged: no such term is left below the limit of `TERMS`.
        """
        ...

    def term(self) -> Term:
        """The highest term allocated so far; 0 before the first."""
        ...

    def create_job(self, record: JobRecord) -> JobRecord:
        """Store a new job at version 1. If there is one with this id already, it is returned instead."""
        ...

    def replace_job(self, record: JobRecord, *, keep_seconds: float | None = None) -> JobRecord:
        """Replace the version `record.version` of a job by `record`; the result has the next version.

        With `keep_seconds` the job and its events expire after that time.

        Raises:
            VersionConflict: the job has another version, or does not exist.
        """
        ...

    def job(self, job_id: JobId) -> JobRecord | None:
        """One job, or None."""
        ...

    def jobs(self) -> tuple[JobRecord, ...]:
        """All jobs in order of creation."""
        ...

    def append_event(self, job_id: JobId, event: NumberedEvent) -> None:
        """Append to the events of a job. Sequence numbers grow; at most `MAX_EVENTS` events are kept.

        No effect when the number is not above the last one: the event has been appended before.

        Raises:
            VersionConflict: the job does not exist.
        """
        ...

    def events(self, job_id: JobId, *, after: int = 0, limit: int = 1_000) -> tuple[NumberedEvent, ...]:
        """Up to `limit` events with numbers above `after`, in order."""
        ...

    def repair(self) -> Repairs:
        """Restore consistency after a partial loss of data. Called by a new leader before it reads anything else.

        Afterwards every record is indexed, jobs are in order of submission, and events have valid numbers.
        """
        ...


def all_events(store: Store, job_id: JobId) -> tuple[NumberedEvent, ...]:
    """All stored events of a job, in order.

    Raises:
        StoreUnavailable: the place is unreachable.
    """
    found: list[NumberedEvent] = []
    while page := store.events(job_id, after=found[-1].sequence if found else 0):
        found += page
    return tuple(found)
