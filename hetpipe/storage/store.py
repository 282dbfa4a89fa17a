"""What the coordinator must not forget, and the question where it is kept. Siblings: `memory_store`, `redis_store`.

Kept is only what can be rebuilt or shown later: who is a member and in which order, the highest term, the jobs and
their events. Clocks and weights are not: the shards are the truth about those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NewType, Protocol

from hetpipe.values.events import JobState, NumberedEvent, StopMode, Submission
from hetpipe.values.ids import JobId, Term
from hetpipe.values.members import MemberId, MemberInfo, Registration

#: One life of one coordinator.
CandidateId = NewType("CandidateId", str)

#: Number of a lead: higher than that of every lead before.
Fence = NewType("Fence", int)

#: Newest events kept per job.
MAX_EVENTS = 10_000

#: Seconds that an ended job and its events are kept.
ENDED_JOB_SECONDS = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A membership whose lease has not run out."""

    info: MemberInfo
    registration: Registration
    order: int
    """Rank in the order of registration; only grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job, as far as it outlives its coordinator."""

    job_id: JobId
    name: str
    state: JobState
    run_dir: str
    submitted_wall: float
    """Seconds since 1970."""
    submission: Submission | None = None
    """What was handed in; None where a shard alone has told of the job."""
    stop: StopMode | None = None
    """How a user wants it to stop; None while nobody does."""
    failure: str = ""
    shards: tuple[MemberId, ...] = ()
    """Its parameter servers in index order, the clock shard first; empty before they were claimed."""
    version: int = 1
    """Grows by one with every replacement."""

    def at(self, state: JobState, *, failure: str) -> JobRecord:
        """The same job in another state."""
        return replace(self, state=state, failure=failure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repairs:
    """What `Store.repair` has found and done."""

    jobs: tuple[JobId, ...] = ()
    """Their records were in no index, and are again."""
    members: tuple[MemberId, ...] = ()
    """The same."""
    dropped_jobs: tuple[JobId, ...] = ()
    """An index named them, and named them no more: their time was over, or their records are lost."""
    renumbered: tuple[JobId, ...] = ()
    """Their events had numbers that nobody counts to, and have others."""
    lost_jobs: tuple[JobId, ...] = ()
    """Their events are there and their records are not: whoever handed them in must do so again."""
    unreadable: tuple[str, ...] = ()
    """Places of records that no index names and that cannot be read; they stay as they are."""

    def __bool__(self) -> bool:
        """Whether there was anything to repair."""
        return any(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class Lead:
    """The right to act as the coordinator of this store, as long as its lease lasts."""

    candidate: CandidateId
    """Who has it."""
    name: str
    """The same, for people."""
    fence: Fence


#: Gives the fence of the lead under which somebody acts; it may rise.
FenceSource = Callable[[], Fence]


class LeadStore(Protocol):
    """The part of a `Store` that says which of several coordinators acts."""

    def acquire_lead(self, candidate: CandidateId, name: str, *, above: Fence, lease_seconds: float) -> Lead:
        """Take the lead if nobody has it; who has it now. The leader itself gets what it has, its lease renewed.

        A lead that is taken has a fence higher than every one before and than `above`.

        Raises:
            StoreDamaged: no such fence is left below the limit of `FENCES`.
        """
        ...

    def renew_lead(self, lead: Lead, *, lease_seconds: float) -> None:
        """Let the lease last `lease_seconds` from now, even one that ran out, if nobody has led since.

        Raises:
            NotLeader: another candidate has the lead, or had it since.
        """
        ...

    def release_lead(self, lead: Lead) -> None:
        """Give the lead back. Nothing happens when another candidate has it."""
        ...

    def close(self) -> None:
        """Give up connections. Nothing else is called afterwards."""
        ...


class Store(LeadStore, Protocol):
    """The coordinator's memory.

    Guarantees of every implementation:

    * Thread-safe. Each method is atomic and durable as far as the implementation is: when it returns, every later call
      on any store of the same place sees its effect.
    * Idempotent: a method repeated with the same arguments, because its answer was lost, gives the same answer and has
      no further effect (`next_term` alone may skip terms).
    * Leases run by the store's own clock, which is monotonic: `memory`: of the process, `redis`: of the server.
    * `StoreUnavailable` when the place cannot be reached; then nothing is known about the effect.
    * A store that was opened with a fence takes writes under the newest lead only, and raises `NotLeader` else. In
      memory there is one coordinator, and nothing to refuse.
    """

    def put_member(self, info: MemberInfo, registration: Registration, *, lease_seconds: float) -> MemberRecord:
        """Make a member, or replace the registration of a live one, which keeps its order."""
        ...

    def renew_member(self, member_id: MemberId, registration: Registration, *, lease_seconds: float) -> None:
        """Let the lease last `lease_seconds` from now.

        Raises:
            UnknownMember: there is no live member with this id and this registration.
        """
        ...

    def remove_member(self, member_id: MemberId, registration: Registration) -> None:
        """End a membership. Nothing happens when there is none with this registration."""
        ...

    def members(self) -> tuple[MemberRecord, ...]:
        """The live members in order of registration."""
        ...

    def next_term(self, *, above: Term) -> Term:
        """A term higher than every one before and than `above`.

        Raises:
            StoreDamaged: no such term is left below the limit of `TERMS`.
        """
        ...

    def term(self) -> Term:
        """The highest term given so far; 0 before the first."""
        ...

    def create_job(self, record: JobRecord) -> JobRecord:
        """Keep a new job at version 1. If there is one with this id already, that one is the answer."""
        ...

    def replace_job(self, record: JobRecord, *, keep_seconds: float | None = None) -> JobRecord:
        """Replace the version `record.version` of a job by `record`; the answer has the next version.

        With `keep_seconds` the job and its events are forgotten after that time.

        Raises:
            VersionConflict: the job has another version, or is not there.
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

        Nothing happens when the number is not above the last one: then the event is there already.

        Raises:
            VersionConflict: the job is not there.
        """
        ...

    def events(self, job_id: JobId, *, after: int = 0, limit: int = 1_000) -> tuple[NumberedEvent, ...]:
        """Up to `limit` events after number `after`, in order."""
        ...

    def repair(self) -> Repairs:
        """Make whole again what the place has kept only in part. For a new leader, before it reads anything else.

        Every record is in its index, jobs in order of submission, and events have numbers that can be.
        """
        ...


def all_events(store: Store, job_id: JobId) -> tuple[NumberedEvent, ...]:
    """Every event that is kept of a job, in order.

    Raises:
        StoreUnavailable: the place cannot be reached.
    """
    found: list[NumberedEvent] = []
    while page := store.events(job_id, after=found[-1].sequence if found else 0):
        found += page
    return tuple(found)
