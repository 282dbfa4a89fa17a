"""Supervision of a job's parameter servers: missing ones, and those that lost its state. Pure.

Training stalls while one is missing, but loses nothing: a restarted parameter server has all acknowledged state. One
that lost its state causes a rewind to a checkpoint.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hetpipe.decide.lifecycle.root_cause import Failure, Rank
from hetpipe.errors import JobFailed
from hetpipe.values.events import Waiting
from hetpipe.values.members import MemberId, MemberInfo

#: Consecutive heartbeats without the job after which its state counts as lost.
_BEATS = 2


@dataclass(slots=True)
class _Lost:
    shard: MemberInfo
    sentence: str
    since: float
    noticed: float
    #: A different address at which it was restarted, as a clause; empty if there is none.
    elsewhere: str = ""


class ShardWatch:
    """The missing parameter servers of one job. Not thread-safe; every call takes the monotonic time."""

    def __init__(self, absence_seconds: float, notice_seconds: float) -> None:
        """Start with none missing.

        Args:
            absence_seconds: maximum absence before the job fails.
            notice_seconds: time until a wait is reported, and between two reports.
        """
        self._absence_seconds = absence_seconds
        self._notice_seconds = notice_seconds
        self._lost: dict[MemberId, _Lost] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether any is missing."""
        return bool(self._lost)

    def gone(self, shard: MemberInfo, sentence: str, *, now: float) -> None:
        """Record that a parameter server of the job is missing."""
        self._lost.setdefault(shard.id, _Lost(shard, sentence, now, now))

    def seen(self, info: MemberInfo) -> None:
        """Record a registration: a missing one has returned if its address is unchanged."""
        lost = self._lost.get(info.id)
        if lost is None:
            return
        if info.address == lost.shard.address:
            del self._lost[info.id]
        else:
            lost.elsewhere = f", and not at {info.address}, where it is now"

    def check(self, *, now: float) -> list[Waiting | Failure]:
        """The report that is due, and whether the wait has timed out."""
        found: list[Waiting | Failure] = []
        for lost in self._lost.values():
            waited = now - lost.since
            if waited >= self._absence_seconds:
                sentence = f"{lost.sentence}; it did not return at {lost.shard.address} within {waited:.0f} s"
                found.append(Failure(Rank.GONE, JobFailed.__name__, sentence + lost.elsewhere, lost.since))
            elif now - lost.noticed >= self._notice_seconds:
                lost.noticed = now
                awaited = f"the parameter server to return at {lost.shard.address}{lost.elsewhere}"
                found.append(Waiting(f"the coordinator waits for {awaited}: {lost.sentence}", waited))
        return found


class LostDisks:
    """Detection of parameter servers of a job that have lost its state.

    Each heartbeat lists the jobs that its sender serves. One sent during the configuration of a job does not list it
    yet, so a single omission is not conclusive; two in a row are.
    """

    def __init__(self) -> None:
        #: Consecutive heartbeats without the job.
        self._missed: Counter[MemberId] = Counter()

    def on_heartbeat(self, shard: MemberInfo, *, serves: bool, reason: str) -> str:
        """Process a heartbeat's status of the job.

        Args:
            shard: the sender, a parameter server of the job.
            serves: whether it lists the job.
            reason: why it no longer serves it, if reported.

        Returns:
            The loss, as a sentence; empty if there is none.
        """
        self._missed[shard.id] = 0 if serves else self._missed[shard.id] + 1
        if self._missed[shard.id] < _BEATS:
            return ""
        return f"{shard} has lost its state of the job: {reason or 'its state folder does not contain it'}"
