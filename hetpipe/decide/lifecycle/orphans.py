"""Orphans: running jobs without a leader, whose state this coordinator has not recovered yet. Pure.

An orphan is found in the store, through reports of members, or both. Its clock shard has the authoritative state and is
queried as soon as it reports the job. A job that no clock shard reports for too long is abandoned.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from hetpipe.decide.lifecycle.patience import Patience
from hetpipe.decide.lifecycle.shard_watch import LostDisks
from hetpipe.storage.store import JobRecord
from hetpipe.values.commands import AgentReport
from hetpipe.values.events import StopMode
from hetpipe.values.ids import AgentId, JobId, Term
from hetpipe.values.members import MemberId, MemberInfo

#: Reports of one agent kept for a job until it is led, the newest ones.
_MAX_REPORTS = 2_000

#: Maximum number of orphans: members report only real jobs, but need not be trustworthy.
MAX_ORPHANS = 1_000

#: Maximum number of those based on the reports of a single member only.
MAX_UNCONFIRMED = 100


def _reports_of_agents() -> defaultdict[AgentId, deque[AgentReport]]:
    return defaultdict(lambda: deque(maxlen=_MAX_REPORTS))


@dataclass(slots=True)
class Orphan:
    """One orphan."""

    job_id: JobId
    #: When it was last reported by a clock shard, or first by any process; in monotonic seconds.
    reported_at: float
    #: Its record in the store; None if there is none.
    record: JobRecord | None = None
    #: Its clock shard and the reported term; None before a report.
    clock_shard: MemberInfo | None = None
    term: Term = Term(0)
    #: Requested way to stop.
    stop: StopMode | None = None
    #: The members that have reported it.
    reporters: set[MemberId] = field(default_factory=set)
    #: Parameter servers that reported its clocks but could not be reached, and those that do not serve the job.
    unreached: set[MemberId] = field(default_factory=set)
    refused: set[MemberId] = field(default_factory=set)
    #: Reports of each agent about its processes.
    reports: defaultdict[AgentId, deque[AgentReport]] = field(default_factory=_reports_of_agents)
    #: Whether a query is pending or the orphan is abandoned; if not, when to retry.
    is_asked: bool = False
    again_at: float = 0.0
    #: Why the last query of the clock shard failed.
    refusal: str = ""
    #: Loss of its state reported by its registered clock shard, as a sentence; empty if there is none.
    lost: str = ""
    #: Status reports of parameter servers.
    disks: LostDisks = field(default_factory=LostDisks)

    @property
    def is_unconfirmed(self) -> bool:
        """Whether it is based on reports of members only: the store has no such job.

        It may be real, if the store has lost its data, or forged; cf. `Orphans.is_credible`.
        """
        return self.record is None

    @property
    def why_given_up(self) -> str:
        """The reason why it has no leader, as a sentence."""
        reason = self.lost or "no parameter server reports it"
        if self.refusal:
            reason = f"a new one cannot lead it: {self.refusal}"
        state = "under way" if self.record is None else self.record.state.value
        return f"job {self.job_id} was {state} when its coordinator ended, and {reason}"


class Orphans:
    """All orphans. Not thread-safe; every call takes the monotonic time."""

    def __init__(self, patience: Patience, *, now: float) -> None:
        self._patience = patience
        self._orphans: dict[JobId, Orphan] = {}
        #: Until then, a job reported by members only may be one that the store has lost.
        self._unconfirmed_until = now + patience.adoption_seconds

    def __contains__(self, job_id: JobId) -> bool:
        """Whether a job is an orphan."""
        return job_id in self._orphans

    def __iter__(self) -> Iterator[Orphan]:
        """Iterate in the order of discovery."""
        return iter(list(self._orphans.values()))

    def get(self, job_id: JobId) -> Orphan | None:
        """The orphan with this id, if there is one."""
        return self._orphans.get(job_id)

    def discover(self, job_id: JobId, *, now: float, reporter: MemberId | None = None) -> Orphan | None:
        """Add a job without a leader; None if there are too many.

        Args:
            job_id: its id.
            now: monotonic seconds.
            reporter: the reporting member; None for the store.
        """
        known = self._orphans.get(job_id)
        if known is None and len(self._orphans) < MAX_ORPHANS and not self._exceeds_limit(reporter):
            known = self._orphans[job_id] = Orphan(job_id, now)
        if known is not None and reporter is not None:
            known.reporters.add(reporter)
        return known

    def _exceeds_limit(self, reporter: MemberId | None) -> bool:
        """Whether too many orphans are based on this member's reports alone, so that further ones are ignored."""
        alone = (orphan.is_unconfirmed and orphan.reporters == {reporter} for orphan in self._orphans.values())
        return reporter is not None and sum(alone) >= MAX_UNCONFIRMED

    def on_clock_report(self, job_id: JobId, shard: MemberInfo, term: Term, *, now: float) -> None:
        """Process a clock shard's report. The highest term is authoritative, if that clock shard can be queried."""
        orphan = self.discover(job_id, now=now, reporter=shard.id)
        if orphan is None or shard.id in orphan.refused:
            return
        known = orphan.clock_shard
        if known is not None and (known.id in orphan.unreached) == (shard.id in orphan.unreached):
            is_worse = term < orphan.term
        else:
            is_worse = known is not None and shard.id in orphan.unreached
        if is_worse:
            return
        if not orphan.refusal or orphan.clock_shard != shard:
            orphan.reported_at = now
        orphan.clock_shard, orphan.term = shard, term

    def on_shard_report(self, job_id: JobId, shard: MemberInfo, *, serves: bool, reason: str) -> None:
        """Process a heartbeat of its clock shard: one that has lost the job is no longer waited for."""
        orphan = self._orphans.get(job_id)
        if orphan is not None:
            orphan.lost = orphan.disks.on_heartbeat(shard, serves=serves, reason=reason)

    def is_credible(self, orphan: Orphan, *, now: float) -> bool:
        """Whether other jobs must wait until the resources of this one are known.

        Reports of a job that is not in the store are trusted right after the start of the coordinator, as the store may
        have lost its data. Later they may be forged, and block only the reporting members' own resources.
        """
        return not orphan.is_unconfirmed or now < self._unconfirmed_until

    def due(self, *, now: float) -> list[Orphan]:
        """Orphans whose clock shard is to be queried now; their query is pending until `not_adopted` or `pop`."""
        found = [
            orphan
            for orphan in self._orphans.values()
            if orphan.clock_shard is not None and not orphan.is_asked and now >= orphan.again_at
        ]
        for orphan in found:
            orphan.is_asked = True
        return found

    def not_adopted(self, orphan: Orphan, sentence: str, *, is_passing: bool, now: float) -> None:
        """Record a failed adoption.

        Args:
            orphan: the orphan.
            sentence: the reason.
            is_passing: a process was unreachable and may be reachable later; refusals are retried for a limited time.
            now: monotonic seconds.
        """
        orphan.is_asked, orphan.again_at = False, now + self._patience.retry_seconds
        orphan.refusal = "" if is_passing else sentence
        if is_passing and orphan.clock_shard is not None:
            orphan.unreached.add(orphan.clock_shard.id)

    def refuse(self, orphan: Orphan, shard: MemberInfo) -> None:
        """Record that a parameter server reported clocks of a job it does not serve: it is not queried again."""
        orphan.refused.add(shard.id)
        if orphan.clock_shard is not None and orphan.clock_shard.id == shard.id:
            orphan.clock_shard, orphan.term = None, Term(0)

    def given_up(self, *, now: float) -> list[Orphan]:
        """Orphans that are no longer waited for; they stay pending until `pop` or `not_adopted`."""
        found = [
            orphan
            for orphan in self
            if not orphan.is_asked and now >= orphan.again_at and self._is_given_up(orphan, now=now)
        ]
        for orphan in found:
            orphan.is_asked = True
        return found

    def _is_given_up(self, orphan: Orphan, *, now: float) -> bool:
        waited = now - orphan.reported_at
        return waited >= self._patience.adoption_seconds or bool(orphan.lost) or orphan.stop is StopMode.NOW

    def awaited(self, job_id: JobId, *, now: float) -> str:
        """The condition that its adoption waits for, as a sentence; empty if it is not an orphan."""
        orphan = self._orphans.get(job_id)
        if orphan is None:
            return ""
        if orphan.clock_shard is None:
            lasts = self._patience.adoption_seconds
            what = f"waits for a parameter server to report it, {now - orphan.reported_at:.0f} s of {lasts:.0f} s"
        else:
            refusal = f" ({orphan.refusal})" if orphan.refusal else ""
            what = f"asks its clock shard, {orphan.clock_shard}, for its state{refusal}"
        return f"its coordinator ended, and the new one {what}"

    def pop(self, job_id: JobId) -> Orphan | None:
        """Remove an orphan."""
        return self._orphans.pop(job_id, None)
