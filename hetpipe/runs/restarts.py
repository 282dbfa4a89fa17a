"""The restart policy of services. Pure.

A service is restarted with exponential backoff, which is reset after a sufficient uptime. A service that keeps dying
is not restarted, until an operator intervenes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRules:
    """The limits of restarts and the backoff, in seconds."""

    first_pause_seconds: float = 0.1
    longest_pause_seconds: float = 5.0
    most_deaths: int = 5
    """Number of deaths within `within_seconds` after which there are no more restarts."""
    within_seconds: float = 60.0
    """Also the uptime that resets the backoff."""


RULES = RestartRules()


@dataclass(frozen=True, slots=True)
class RestartAt:
    """Restart the service."""

    at_seconds: float
    """Monotonic time."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not restart the service."""

    reason: str
    """The end of a sentence about its last death."""


def decide(deaths: Sequence[float], rules: RestartRules = RULES) -> RestartAt | GiveUp:
    """Decide after the last of a service's deaths.

    Args:
        deaths: times of its deaths, in monotonic seconds; the last one has just happened. Older ones may be omitted.
        rules: the limits.

    >>> decide([10.0])
    RestartAt(at_seconds=10.1)
    >>> decide([10.0, 11.0, 12.0])
    RestartAt(at_seconds=12.4)
    >>> decide([1.0, 2.0, 3.0, 4.0, 5.0])
    GiveUp(reason='it is not restarted, as it has died 5 times within 60 s')
    """
    now = deaths[-1]
    recent = sum(now - death < rules.within_seconds for death in deaths)
    if recent >= rules.most_deaths:
        within = f"{rules.within_seconds:.0f} s"
        return GiveUp(f"it is not restarted, as it has died {recent} times within {within}")
    streak = 0
    for before, after in pairwise(deaths):
        streak = streak + 1 if after - before < rules.within_seconds else 0
    return RestartAt(now + min(rules.first_pause_seconds * 2**streak, rules.longest_pause_seconds))
