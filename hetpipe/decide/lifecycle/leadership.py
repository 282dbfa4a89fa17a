"""Leadership of a coordinator, as a state table. Several may share one store; the holder of the lease leads.

The lease is counted from before the request to the store, and for less than the granted time. No other coordinator can
therefore hold it while this one considers itself the leader, whatever the network does, if clock rates differ by less
than a tenth. Pure: events with the monotonic time in, decisions with reasons out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from hetpipe.errors import InvalidTransition

#: Share of the granted lease that a leader relies on: the rest allows for clock drift and for the time to stop.
_RELIED_ON = 0.9

#: Renewals per lease by a leader; a standby candidate sends requests twice as often.
_RENEWALS_PER_LEASE = 5


class LeadershipState(StrEnum):
    """Permission of a coordinator to act."""

    STANDING_BY = "standing_by"
    """Another one leads, or may: read only."""
    LEADING = "leading"
    """Leader: act."""
    HOLDING = "holding"
    """The store has not responded for longer than the lease: keep running jobs, start nothing. No other candidate can
    get the lead from an unreachable store; if it becomes reachable, it will reject this coordinator.
    """
    STEPPED_DOWN = "stepped_down"
    """It has lost the lead: exit."""


class LeadStep(StrEnum):
    """Events of leadership."""

    GRANTED = "granted"
    """The store granted or renewed the lead."""
    REFUSED = "refused"
    """Another candidate has the lead."""
    UNANSWERED = "unanswered"
    """The store did not answer, or too late."""
    WAITED = "waited"
    """Time passed."""
    RAN_OUT = "ran_out"
    """The lease has expired, as far as this coordinator can tell."""
    END_REQUESTED = "end_requested"
    """It has finished all its work."""


_S = LeadershipState

TABLE: Mapping[LeadershipState, Mapping[LeadStep, LeadershipState]] = {
    _S.STANDING_BY: {
        LeadStep.GRANTED: _S.LEADING,
        LeadStep.REFUSED: _S.STANDING_BY,
        LeadStep.UNANSWERED: _S.STANDING_BY,
        LeadStep.WAITED: _S.STANDING_BY,
        LeadStep.END_REQUESTED: _S.STEPPED_DOWN,
    },
    _S.LEADING: {
        LeadStep.GRANTED: _S.LEADING,
        LeadStep.REFUSED: _S.STEPPED_DOWN,
        LeadStep.UNANSWERED: _S.LEADING,
        LeadStep.WAITED: _S.LEADING,
        LeadStep.RAN_OUT: _S.HOLDING,
        LeadStep.END_REQUESTED: _S.STEPPED_DOWN,
    },
    _S.HOLDING: {
        LeadStep.GRANTED: _S.LEADING,
        LeadStep.REFUSED: _S.STEPPED_DOWN,
        LeadStep.UNANSWERED: _S.HOLDING,
        LeadStep.WAITED: _S.HOLDING,
        LeadStep.END_REQUESTED: _S.STEPPED_DOWN,
    },
    # Replies to earlier requests may still arrive.
    _S.STEPPED_DOWN: {
        LeadStep.GRANTED: _S.STEPPED_DOWN,
        LeadStep.REFUSED: _S.STEPPED_DOWN,
        LeadStep.UNANSWERED: _S.STEPPED_DOWN,
        LeadStep.WAITED: _S.STEPPED_DOWN,
        LeadStep.END_REQUESTED: _S.STEPPED_DOWN,
    },
}


@dataclass(frozen=True, slots=True)
class LeadGranted:
    """The store granted or renewed the lead."""

    requested: float
    """Monotonic second before the request."""


@dataclass(frozen=True, slots=True)
class LeadRefused:
    """Another candidate has the lead."""

    why: str


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """The store did not answer."""

    why: str


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time passed."""


@dataclass(frozen=True, slots=True)
class ShutdownRequested:
    """The coordinator has finished all its work."""


Event = LeadGranted | LeadRefused | NoAnswer | TimePassed | ShutdownRequested


@dataclass(frozen=True, slots=True)
class Decision:
    """The resulting decision."""

    standing: LeadershipState
    reason: str
    """Reason, as a clause for messages."""
    left_seconds: float
    """Time until the lease expires; 0 without one."""


class Leadership:
    """The leadership state machine of one coordinator. Not thread-safe."""

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        #: Seconds between two requests to the store.
        self.renew_seconds = lease_seconds / _RENEWALS_PER_LEASE
        self.retry_seconds = self.renew_seconds / 2
        #: Changed by `take` only.
        self.standing = LeadershipState.STANDING_BY
        #: Monotonic second until which the lead is held; never decreases.
        self._held_until = float("-inf")
        #: Why the store did not answer the last request.
        self._silence = "it has not answered yet"

    def take(self, event: Event, *, now: float) -> Decision:
        """Apply `event` at monotonic second `now`.

        Raises:
            InvalidTransition: the table has no such step; the standing is unchanged.
        """
        if isinstance(event, LeadGranted):
            self._held_until = max(self._held_until, event.requested + _RELIED_ON * self._lease_seconds)
            self._silence = "it has not answered since"
        elif isinstance(event, NoAnswer):
            self._silence = event.why
        step, reason = self._step_of(event, now)
        following = TABLE[self.standing].get(step)
        if following is None:
            raise InvalidTransition(f"a coordinator that is {self.standing} cannot take {step}")
        self.standing = following
        left = max(0.0, self._held_until - now) if following is LeadershipState.LEADING else 0.0
        return Decision(following, reason, left)

    def _step_of(self, event: Event, now: float) -> tuple[LeadStep, str]:
        """The step of an event, with the reason as a clause."""
        match event:
            case ShutdownRequested():
                return LeadStep.END_REQUESTED, "it is shutting down"
            case LeadRefused(why=why):
                return LeadStep.REFUSED, why
            case _ if now >= self._held_until and self.standing is LeadershipState.LEADING:
                held = _RELIED_ON * self._lease_seconds
                return LeadStep.RAN_OUT, f"the store has not renewed its lead for {held:.1f} s ({self._silence})"
            case LeadGranted():
                late = LeadStep.UNANSWERED, "the store granted the lead too late"
                return late if now >= self._held_until else (LeadStep.GRANTED, "the store grants it the lead")
            case NoAnswer(why=why):
                return LeadStep.UNANSWERED, why
            case TimePassed():
                return LeadStep.WAITED, "nothing has changed"
