"""The parameter servers of a job: those that are gone, and those that lost what they kept of it. Pure.

Training stands still without one that is gone, but loses nothing: a parameter server that comes back has all it
acknowledged. One that lost its state sends the job back to a checkpoint.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hetpipe.decide.lifecycle.root_cause import Failure, Rank
from hetpipe.errors import JobFailed
from hetpipe.values.events import Waiting
from hetpipe.values.members import MemberId, MemberInfo

#: Heartbeats in a row without the job after which it is lost.
_BEATS = 2


@dataclass(slots=True)
class _Lost:
    shard: MemberInfo
    sentence: str
    since: float
    noticed: float
    #: Where it has come back instead.
    elsewhere: str = ""


class ShardWatch:
    """The lost parameter servers of one job. Not thread-safe; every call gives the monotonic time."""

    def __init__(self, absence_seconds: float, notice_seconds: float) -> None:
        """Begin with all of them there.

        Args:
            absence_seconds: after so long without one the job fails.
            notice_seconds: until a wait is told, and between two such notices.
        """
        self._absence_seconds = absence_seconds
        self._notice_seconds = notice_seconds
        self._lost: dict[MemberId, _Lost] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether any is missing."""
        return bool(self._lost)

    def gone(self, shard: MemberInfo, sentence: str, *, now: float) -> None:
        """A parameter server of the job is gone."""
        self._lost.setdefault(shard.id, _Lost(shard, sentence, now, now))

    def seen(self, info: MemberInfo) -> None:
        """A process has registered: a lost one is back where everybody knows it."""
        lost = self._lost.get(info.id)
        if lost is None:
            return
        if info.address == lost.shard.address:
            del self._lost[info.id]
        else:
            lost.elsewhere = f", and not at {info.address}, where it is now"

    def check(self, *, now: float) -> list[Waiting | Failure]:
        """What is to be said, and whether it has lasted too long."""
        found: list[Waiting | Failure] = []
        for lost in self._lost.values():
            waited = now - lost.since
            if waited >= self._absence_seconds:
                sentence = f"{lost.sentence}; it did not come back at {lost.shard.address} within {waited:.0f} s"
                found.append(Failure(Rank.GONE, JobFailed.__name__, sentence + lost.elsewhere, lost.since))
            elif now - lost.noticed >= self._notice_seconds:
                lost.noticed = now
                awaited = f"the parameter server to come back at {lost.shard.address}{lost.elsewhere}"
                found.append(Waiting(f"the coordinator waits for {awaited}: {lost.sentence}", waited))
        return found


class LostDisks:
    """The parameter servers of one job that serve it no more although they were to: what they kept of it is lost.

    Each heartbeat names the jobs that its sender serves. One that is under way while a parameter server is told of a
    job does not name it yet, so that one alone proves nothing; two in a row do.
    """

    def __init__(self) -> None:
        #: Heartbeats in a row that did not name the job.
        self._missed: Counter[MemberId] = Counter()

    def heard(self, shard: MemberInfo, *, serves: bool, reason: str) -> str:
        """Take in what a heartbeat says of the job.

        Args:
            shard: the sender, a parameter server of the job.
            serves: whether it names the job among those that it serves.
            reason: why it serves it no more, if it says so.

        Returns:
            What is lost, as a sentence; empty while nothing is.
        """
        self._missed[shard.id] = 0 if serves else self._missed[shard.id] + 1
        if self._missed[shard.id] < _BEATS:
            return ""
        return f"{shard} has lost what it kept of the job: {reason or 'its folder for state holds nothing of it'}"
