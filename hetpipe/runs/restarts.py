"""The restart policy of services. Pure: times in, a decision out.

A service is restarted with exponential backoff, which is reset after an uptime that was long enough.
One that keeps dying soon is quarantined: an operator has to look at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRules:
    """How often a service may die, and how long it rests; in seconds."""

    first_pause_seconds: float = 0.1
    longest_pause_seconds: float = 5.0
    most_deaths: int = 5
    """So many within `within_seconds` are too many."""
    within_seconds: float = 60.0
    """Also the uptime that resets the backoff."""


RULES = RestartRules()


@dataclass(frozen=True, slots=True)
class RestartAt:
    """Start it again."""

    at_seconds: float
    """Monotonic time."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start it again."""

    reason: str
    """The end of a sentence about its last death."""


def decide(deaths: Sequence[float], rules: RestartRules = RULES) -> RestartAt | GiveUp:
    """The decision after the last of a service's deaths.

    Args:
        deaths: when it has died, in monotonic seconds; the last one has just happened. Older ones may be left out.
        rules: how patient to be.

    >>> decide([10.0])
    RestartAt(at_seconds=10.1)
    >>> decide([10.0, 11.0, 12.0])
    RestartAt(at_seconds=12.4)
    >>> decide([1.0, 2.0, 3.0, 4.0, 5.0])
    GiveUp(reason='it is not started again, as it has died 5 times within 60 s')
    """
    now = deaths[-1]
    recent = sum(now - death < rules.within_seconds for death in deaths)
    if recent >= rules.most_deaths:
        within = f"{rules.within_seconds:.0f} s"
        return GiveUp(f"it is not started again, as it has died {recent} times within {within}")
    streak = 0
    for before, after in pairwise(deaths):
        streak = streak + 1 if after - before < rules.within_seconds else 0
    return RestartAt(now + min(rules.first_pause_seconds * 2**streak, rules.longest_pause_seconds))
