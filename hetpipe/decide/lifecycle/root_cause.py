"""Root-cause analysis: selects the failure to report among several. Pure.

When one process of a run dies, its neighbours fail too, and their reports may come first. The coordinator therefore
keeps collecting for a moment after the first failure and then reports the one closest to the cause. If all reports are
consequences, a process must have died silently, and its lease is given the time to expire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from hetpipe.errors import ScriptFailed


class Rank(IntEnum):
    """Distance of a failure from the root cause; lower is closer."""

    KILLED = 0
    """A process was ended by a signal."""
    REPORTED = 1
    """A process failed and reported why."""
    EXITED = 2
    """A process ended without a report, or for a reason that a restart may fix."""
    GONE = 3
    """A member stopped responding, or left; or a process hangs."""
    ECHO = 4
    """A process failed because another one was gone."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure."""

    rank: Rank
    error: str
    """Class name in `hetpipe.errors`, or of a Python exception."""
    sentence: str
    at: float
    """Monotonic seconds."""
    problems: tuple[str, ...] = ()
    calls_for_rewind: bool = False
    """Whether the job can continue from its newest checkpoint, and only from there."""
    is_notice: bool = False
    """Whether it is not a failure but an announced departure, and the newest checkpoint contains all progress."""

    @property
    def ends_at_barrier(self) -> bool:
        """Whether the job ends at the next barrier, with a checkpoint, if a virtual worker can reach it."""
        return self.error == ScriptFailed.__name__


def decision_time(failures: Sequence[Failure], *, settle_seconds: float, echo_seconds: float) -> float:
    """When to stop collecting, in monotonic seconds, given at least one failure.

    `settle_seconds` after the first failure; `echo_seconds` after it while there are only consequences.

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
    """The failure closest to the cause; the earliest of equal rank, and the first reported among those."""
    return min(failures, key=lambda failure: (failure.rank, failure.at))
