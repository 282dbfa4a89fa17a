"""Jobs under way that nobody leads: their coordinator is gone, and this one does not know enough of them yet. Pure.

The store may remember such a job, members may tell of it, or both. Only its clock shard knows what has become of it, so
it is asked as soon as it tells of the job. A job of which no clock shard tells for too long is given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from hetpipe.coordinator.lost_disks import LostDisks
from hetpipe.coordinator.patience import Patience
from hetpipe.coordinator.store import JobRecord
from hetpipe.spec.commands import AgentNews
from hetpipe.spec.events import StopMode
from hetpipe.spec.ids import JobId, Term
from hetpipe.spec.members import MemberInfo

#: News that are kept for a job until somebody leads it, the newest ones.
_MAX_NEWS = 10_000

#: Orphans at a time: members tell of real jobs only, but who knows what a member tells.
MAX_ORPHANS = 1_000


@dataclass(slots=True)
class Orphan:
    """One of them."""

    job_id: JobId
    #: When a clock shard last told of it, or somebody first did; in monotonic seconds.
    heard: float
    #: What the store has of it; None: nothing.
    record: JobRecord | None = None
    #: Its clock shard and the term it told; None before it told of the job.
    clock_shard: MemberInfo | None = None
    term: Term = Term(0)
    #: How a user wants it to stop.
    stop: StopMode | None = None
    #: What agents have told of its processes.
    news: deque[AgentNews] = field(default_factory=lambda: deque(maxlen=_MAX_NEWS))
    #: Whether it is being asked for, or given up; if not, when that may be tried again.
    is_asked: bool = False
    again_at: float = 0.0
    #: Why the clock shard could not be asked the last time.
    refusal: str = ""
    #: What its clock shard, which has registered, has lost of it, as a sentence; empty while that is not known.
    lost: str = ""
    #: What parameter servers say of it.
    disks: LostDisks = field(default_factory=LostDisks)

    @property
    def why_given_up(self) -> str:
        """Why nobody leads it, as a sentence."""
        told = self.lost or "no parameter server tells of it"
        if self.refusal:
            told = f"a new one cannot lead it: {self.refusal}"
        state = "under way" if self.record is None else self.record.state.value
        return f"job {self.job_id} was {state} when its coordinator ended, and {told}"


class Orphans:
    """All of them. Not thread-safe; every call gives the monotonic time."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._orphans: dict[JobId, Orphan] = {}

    def __contains__(self, job_id: JobId) -> bool:
        """Whether it is one of them."""
        return job_id in self._orphans

    def __iter__(self) -> Iterator[Orphan]:
        """In the order in which they were heard of."""
        return iter(list(self._orphans.values()))

    def get(self, job_id: JobId) -> Orphan | None:
        """One of them, if it is one."""
        return self._orphans.get(job_id)

    def hear_of(self, job_id: JobId, *, now: float) -> Orphan | None:
        """Somebody tells of a job that nobody leads; None when there are too many of them."""
        known = self._orphans.get(job_id)
        if known is None and len(self._orphans) < MAX_ORPHANS:
            known = self._orphans[job_id] = Orphan(job_id, now)
        return known

    def clock_told(self, job_id: JobId, shard: MemberInfo, term: Term, *, now: float) -> None:
        """A clock shard tells of it. The one with the highest term is the right one."""
        orphan = self.hear_of(job_id, now=now)
        if orphan is None or term < orphan.term:
            return
        if not orphan.refusal or orphan.clock_shard != shard:
            orphan.heard = now
        orphan.clock_shard, orphan.term = shard, term

    def shard_told(self, job_id: JobId, shard: MemberInfo, *, serves: bool, reason: str) -> None:
        """What a heartbeat of its clock shard says of it: one that has lost it is not waited for any longer."""
        orphan = self._orphans.get(job_id)
        if orphan is not None:
            orphan.lost = orphan.disks.heard(shard, serves=serves, reason=reason)

    def due(self, *, now: float) -> list[Orphan]:
        """Those whose clock shard is to be asked now; they count as asked until `not_adopted` or `pop`."""
        found = [
            orphan
            for orphan in self._orphans.values()
            if orphan.clock_shard is not None and not orphan.is_asked and now >= orphan.again_at
        ]
        for orphan in found:
            orphan.is_asked = True
        return found

    def not_adopted(self, orphan: Orphan, sentence: str, *, is_passing: bool, now: float) -> None:
        """It could not be taken over.

        Args:
            orphan: which.
            sentence: why.
            is_passing: somebody was not reached, and may be later; a refusal is not waited out for ever.
            now: monotonic seconds.
        """
        orphan.is_asked, orphan.again_at = False, now + self._patience.retry_seconds
        orphan.refusal = "" if is_passing else sentence

    def given_up(self, *, now: float) -> list[Orphan]:
        """Those that are waited for no longer; they count as asked until `pop` or `not_adopted`."""
        found = [
            orphan
            for orphan in self
            if not orphan.is_asked and now >= orphan.again_at and self._is_given_up(orphan, now=now)
        ]
        for orphan in found:
            orphan.is_asked = True
        return found

    def _is_given_up(self, orphan: Orphan, *, now: float) -> bool:
        waited = now - orphan.heard
        return waited >= self._patience.adoption_seconds or bool(orphan.lost) or orphan.stop is StopMode.NOW

    def awaited(self, job_id: JobId, *, now: float) -> str:
        """What is waited for before somebody leads it, as a sentence; empty if it is no orphan."""
        orphan = self._orphans.get(job_id)
        if orphan is None:
            return ""
        if orphan.clock_shard is None:
            lasts = self._patience.adoption_seconds
            what = f"waits for a parameter server to tell of it, {now - orphan.heard:.0f} s of {lasts:.0f} s"
        else:
            refusal = f" ({orphan.refusal})" if orphan.refusal else ""
            what = f"asks its clock shard, {orphan.clock_shard}, how far it is{refusal}"
        return f"nobody leads it since its coordinator ended: the new one {what}"

    def pop(self, job_id: JobId) -> Orphan | None:
        """It is one no more."""
        return self._orphans.pop(job_id, None)
