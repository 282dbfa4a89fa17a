"""Which of several failures is the one to tell. Pure.

When one process of a run dies, its neighbours fail too, and their reports may come first. So the coordinator listens on
for a moment after the first failure and then names the deepest one. If all it heard are echoes, something must have
died that cannot report itself, and the lease of that process is given the time to run out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class Rank(IntEnum):
    """How near a failure is to the cause; lower is nearer."""

    KILLED = 0
    """A process was ended by a signal."""
    REPORTED = 1
    """A process failed and said why."""
    EXITED = 2
    """A process ended without a word, or for want of what another life may find."""
    GONE = 3
    """A member stopped answering, or left; or a process hangs."""
    ECHO = 4
    """A process failed because another was gone."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing that went wrong."""

    rank: Rank
    error: str
    """Class name in `hetpipe.errors`, or of a Python exception."""
    sentence: str
    at: float
    """Monotonic seconds."""
    problems: tuple[str, ...] = ()
    calls_for_rewind: bool = False
    """Whether the job can go on from its newest checkpoint, and only from there."""
    is_notice: bool = False
    """Whether nothing failed: somebody goes who has said so, and the newest checkpoint has all that was trained."""


def decision_time(failures: Sequence[Failure], *, settle_seconds: float, echo_seconds: float) -> float:
    """When to stop listening, in monotonic seconds, given at least one failure.

    `settle_seconds` after the first failure; `echo_seconds` after it while there are echoes only.

    >>> echo = Failure(Rank.ECHO, "LinkClosed", "its neighbour is gone", at=10.0)
    >>> decision_time([echo], settle_seconds=1.0, echo_seconds=6.5)
    16.5
    >>> killed = Failure(Rank.KILLED, "JobFailed", "it was killed", at=10.4)
    >>> decision_time([echo, killed], settle_seconds=1.0, echo_seconds=6.5)
    11.0
    """
    only_echoes = all(failure.rank is Rank.ECHO for failure in failures)
    return min(failure.at for failure in failures) + (echo_seconds if only_echoes else settle_seconds)


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure nearest to the cause; the earliest among equals, and the first heard among those."""
    return min(failures, key=lambda failure: (failure.rank, failure.at))
