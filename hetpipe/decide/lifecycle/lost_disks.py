"""Parameter servers that serve a job no more although they were to: what they kept of it is lost. Pure.

Each heartbeat names the jobs that its sender serves. One that is under way while a parameter server is told of a job
does not name it yet, so that one alone proves nothing; two in a row do.
"""

from __future__ import annotations

from collections import Counter

from hetpipe.values.members import MemberId, MemberInfo

#: Heartbeats in a row without the job after which it is lost.
_BEATS = 2


class LostDisks:
    """The parameter servers of one job, from the moment that all of them were told of it."""

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
