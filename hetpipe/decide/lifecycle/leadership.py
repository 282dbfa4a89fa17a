"""Whether a coordinator may act, as a table. Several may share one store; the one whose lease lasts leads.

The lease lasts from before the store was asked, for less than the store grants: so nobody else can have it while this
coordinator believes that it leads, whatever the network does, if no clock gains a tenth on another. Pure: events with
the monotonic time in, decisions with their reasons out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from hetpipe.errors import InvalidTransition

#: Share of the granted lease that a leader relies on: clocks may differ by the rest, and stopping takes a moment.
_RELIED_ON = 0.9

#: A leader asks so often per lease, a coordinator that stands by twice as often.
_ASKS_PER_LEASE = 5


class Standing(StrEnum):
    """What a coordinator may do."""

    STANDING_BY = "standing_by"
    """Another one leads, or may: only look."""
    LEADING = "leading"
    """Act."""
    HOLDING = "holding"
    """The store is silent for longer than the lease: keep what runs, begin nothing. Nobody else can get the lead from a
    store that is away; if it is not, it will refuse this coordinator."""
    STEPPED_DOWN = "stepped_down"
    """It has led and does not any more: end."""


class LeadStep(StrEnum):
    """What can happen to a standing."""

    GRANTED = "granted"
    """The store gave or renewed the lead."""
    REFUSED = "refused"
    """Another candidate has the lead."""
    UNANSWERED = "unanswered"
    """The store did not answer, or too late."""
    WAITED = "waited"
    """Time went by."""
    RAN_OUT = "ran_out"
    """The lease is over, as far as this coordinator can know."""
    END_ASKED = "end_asked"
    """It has done all it had to do."""


_S = Standing

TABLE: Mapping[Standing, Mapping[LeadStep, Standing]] = {
    _S.STANDING_BY: {
        LeadStep.GRANTED: _S.LEADING,
        LeadStep.REFUSED: _S.STANDING_BY,
        LeadStep.UNANSWERED: _S.STANDING_BY,
        LeadStep.WAITED: _S.STANDING_BY,
        LeadStep.END_ASKED: _S.STEPPED_DOWN,
    },
    _S.LEADING: {
        LeadStep.GRANTED: _S.LEADING,
        LeadStep.REFUSED: _S.STEPPED_DOWN,
        LeadStep.UNANSWERED: _S.LEADING,
        LeadStep.WAITED: _S.LEADING,
        LeadStep.RAN_OUT: _S.HOLDING,
        LeadStep.END_ASKED: _S.STEPPED_DOWN,
    },
    _S.HOLDING: {
        LeadStep.GRANTED: _S.LEADING,
        LeadStep.REFUSED: _S.STEPPED_DOWN,
        LeadStep.UNANSWERED: _S.HOLDING,
        LeadStep.WAITED: _S.HOLDING,
        LeadStep.END_ASKED: _S.STEPPED_DOWN,
    },
    # Answers to what was asked before may still come.
    _S.STEPPED_DOWN: {
        LeadStep.GRANTED: _S.STEPPED_DOWN,
        LeadStep.REFUSED: _S.STEPPED_DOWN,
        LeadStep.UNANSWERED: _S.STEPPED_DOWN,
        LeadStep.WAITED: _S.STEPPED_DOWN,
        LeadStep.END_ASKED: _S.STEPPED_DOWN,
    },
}


@dataclass(frozen=True, slots=True)
class Granted:
    """The store gave or renewed the lead."""

    asked: float
    """Monotonic second before the store was asked."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Another candidate has the lead."""

    why: str


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The store did not answer."""

    why: str


@dataclass(frozen=True, slots=True)
class Waited:
    """Time went by."""


@dataclass(frozen=True, slots=True)
class EndAsked:
    """The coordinator has done all it had to do."""


Event = Granted | Refused | Unanswered | Waited | EndAsked


@dataclass(frozen=True, slots=True)
class Decision:
    """What a coordinator is to do now."""

    standing: Standing
    reason: str
    """A clause for people."""
    left_seconds: float
    """Until the lease is over; 0 without one."""


class Leadership:
    """One coordinator's standing. Not thread-safe."""

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        #: Seconds between two questions to the store.
        self.renew_seconds = lease_seconds / _ASKS_PER_LEASE
        self.retry_seconds = self.renew_seconds / 2
        #: Changed by `take` alone.
        self.standing = Standing.STANDING_BY
        #: Monotonic second until which the lead is held; never falls.
        self._held_until = float("-inf")
        #: Why the store did not answer last time.
        self._silence = "it has not answered yet"

    def take(self, event: Event, *, now: float) -> Decision:
        """What follows from `event` at monotonic second `now`.

        Raises:
            InvalidTransition: the table has no such step; the standing stays.
        """
        if isinstance(event, Granted):
            self._held_until = max(self._held_until, event.asked + _RELIED_ON * self._lease_seconds)
            self._silence = "it has not answered since"
        elif isinstance(event, Unanswered):
            self._silence = event.why
        step, reason = self._judge(event, now)
        following = TABLE[self.standing].get(step)
        if following is None:
            raise InvalidTransition(f"a coordinator that is {self.standing} cannot take {step}")
        self.standing = following
        left = max(0.0, self._held_until - now) if following is Standing.LEADING else 0.0
        return Decision(following, reason, left)

    def _judge(self, event: Event, now: float) -> tuple[LeadStep, str]:
        """Which step `event` is, and a clause that says why."""
        match event:
            case EndAsked():
                return LeadStep.END_ASKED, "it was told to end"
            case Refused(why=why):
                return LeadStep.REFUSED, why
            case _ if now >= self._held_until and self.standing is Standing.LEADING:
                held = _RELIED_ON * self._lease_seconds
                return LeadStep.RAN_OUT, f"the store has not renewed its lead for {held:.1f} s ({self._silence})"
            case Granted():
                late = LeadStep.UNANSWERED, "the store granted the lead too late"
                return late if now >= self._held_until else (LeadStep.GRANTED, "the store grants it the lead")
            case Unanswered(why=why):
                return LeadStep.UNANSWERED, why
            case Waited():
                return LeadStep.WAITED, "nothing has changed"
