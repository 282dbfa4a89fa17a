"""Jobs under way that nobody leads: their coordinator is gone, and this one does not know enough of them yet. Pure.

The store may remember such a job, members may tell of it, or both. Only its clock shard knows what has become of it, so
it is asked as soon as it tells of the job. A job of which no clock shard tells for too long is given up.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from hetpipe.decide.lifecycle.patience import Patience
from hetpipe.decide.lifecycle.shard_watch import LostDisks
from hetpipe.storage.store import JobRecord
from hetpipe.values.commands import AgentNews
from hetpipe.values.events import StopMode
from hetpipe.values.ids import AgentId, JobId, Term
from hetpipe.values.members import MemberId, MemberInfo

#: News that are kept of one agent for a job until somebody leads it, the newest ones.
_MAX_NEWS = 2_000

#: Orphans at a time: members tell of real jobs only, but who knows what a member tells.
MAX_ORPHANS = 1_000

#: Of them those that nothing but the word of one member speaks for.
MAX_HEARSAY = 100


def _news_of_agents() -> defaultdict[AgentId, deque[AgentNews]]:
    return defaultdict(lambda: deque(maxlen=_MAX_NEWS))


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
    #: The members that have told of it.
    tellers: set[MemberId] = field(default_factory=set)
    #: Parameter servers that told its clocks and were not reached, and those that do not know the job as who serves it.
    unreached: set[MemberId] = field(default_factory=set)
    refused: set[MemberId] = field(default_factory=set)
    #: What each agent has told of its processes.
    news: defaultdict[AgentId, deque[AgentNews]] = field(default_factory=_news_of_agents)
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
    def is_hearsay(self) -> bool:
        """Whether nothing but the word of members speaks for it: the store knows no such job.

        It may be real, in a store that has lost its memory, or made up: see `Orphans.is_credible`.
        """
        return self.record is None

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

    def __init__(self, patience: Patience, *, now: float) -> None:
        self._patience = patience
        self._orphans: dict[JobId, Orphan] = {}
        #: Until then a job that members alone speak for may be one that the store has lost.
        self._hearsay_until = now + patience.adoption_seconds

    def __contains__(self, job_id: JobId) -> bool:
        """Whether it is one of them."""
        return job_id in self._orphans

    def __iter__(self) -> Iterator[Orphan]:
        """In the order in which they were heard of."""
        return iter(list(self._orphans.values()))

    def get(self, job_id: JobId) -> Orphan | None:
        """One of them, if it is one."""
        return self._orphans.get(job_id)

    def hear_of(self, job_id: JobId, *, now: float, teller: MemberId | None = None) -> Orphan | None:
        """Somebody tells of a job that nobody leads; None when there are too many of them.

        Args:
            job_id: which.
            now: monotonic seconds.
            teller: the member that does; None: the store does.
        """
        known = self._orphans.get(job_id)
        if known is None and len(self._orphans) < MAX_ORPHANS and not self._tells_too_much(teller):
            known = self._orphans[job_id] = Orphan(job_id, now)
        if known is not None and teller is not None:
            known.tellers.add(teller)
        return known

    def _tells_too_much(self, teller: MemberId | None) -> bool:
        """Whether a member alone speaks for so many jobs already that it is not believed in another one."""
        alone = (orphan.is_hearsay and orphan.tellers == {teller} for orphan in self._orphans.values())
        return teller is not None and sum(alone) >= MAX_HEARSAY

    def clock_told(self, job_id: JobId, shard: MemberInfo, term: Term, *, now: float) -> None:
        """A clock shard tells of it. The one with the highest term is the right one, if it can be asked."""
        orphan = self.hear_of(job_id, now=now, teller=shard.id)
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
            orphan.heard = now
        orphan.clock_shard, orphan.term = shard, term

    def shard_told(self, job_id: JobId, shard: MemberInfo, *, serves: bool, reason: str) -> None:
        """What a heartbeat of its clock shard says of it: one that has lost it is not waited for any longer."""
        orphan = self._orphans.get(job_id)
        if orphan is not None:
            orphan.lost = orphan.disks.heard(shard, serves=serves, reason=reason)

    def is_credible(self, orphan: Orphan, *, now: float) -> bool:
        """Whether others are to wait until it is known what a job uses; else it is the tellers' own affair.

        Members that tell of a job which the store does not know are believed when the coordinator has just begun, as
        the store may have lost its memory. Later they may have made it up, and it keeps from others what these members
        themselves have, and nothing else.
        """
        return not orphan.is_hearsay or now < self._hearsay_until

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
        if is_passing and orphan.clock_shard is not None:
            orphan.unreached.add(orphan.clock_shard.id)

    def refuse(self, orphan: Orphan, shard: MemberInfo) -> None:
        """A parameter server told the clocks of a job that it does not serve as its clock shard: it is not asked."""
        orphan.refused.add(shard.id)
        if orphan.clock_shard is not None and orphan.clock_shard.id == shard.id:
            orphan.clock_shard, orphan.term = None, Term(0)

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
