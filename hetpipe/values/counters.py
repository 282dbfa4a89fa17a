"""Counters of the control plane: fences and terms. Coordinators alone advance them; members report what they have seen.

A store that was wiped counts from one again, so a coordinator goes beyond what members report. That report is the word
of one process, and is bounded: by the distance from what the coordinator and its store know, and by a reserve below the
limit that no report reaches. So no report can use a counter up, and the lead can always be taken. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.errors import ProtocolViolation
from hetpipe.values.bounds import MAX_COUNT

#: How far a report may be ahead of what is known. A wiped store is behind by all leads (or terms) there have ever been:
#: a coordinator that is restarted every five seconds needs two months for so many.
MAX_REPORTED_AHEAD = 1_000_000

#: Numbers of a job's events that belong to one lead, so that no two coordinators give the same one.
EVENTS_PER_LEAD = 1_000_000


@dataclass(frozen=True, slots=True)
class ControlCounter:
    """A number that only grows."""

    name: str
    limit: int
    """Values stay below it."""
    option: str
    """Of `hetpipe repair store`, that sets it."""

    @property
    def largest_reported(self) -> int:
        """The largest value that is taken from a report; what is above is a reserve for the store's own steps."""
        return self.limit // 2

    def check_report(self, reported: int, *, known: int, source: object) -> None:
        """Accept what `source` reports to have seen, where this coordinator or its store knows `known`.

        Raises:
            ProtocolViolation: it is too far ahead; the message names the fixes.
        """
        allowed = max(known, min(known + MAX_REPORTED_AHEAD, self.largest_reported))
        if reported > allowed:
            sentence = (
                f"{source} reports a {self.name} of {reported}; this coordinator knows {known} and accepts no report "
                f"above {allowed}: restart that process (a parameter server with --state DIR after "
                f"`hetpipe repair state DIR`)"
            )
            if reported <= self.largest_reported:
                sentence += (
                    "; or, if it is the store that has forgotten so much, stop the coordinator and run "
                    f"`hetpipe repair store {self.option} {reported} …`"
                )
            raise ProtocolViolation(sentence)


#: The numbers of leads. Every lead numbers events, and those numbers are counts, too.
FENCES = ControlCounter("fence", MAX_COUNT // EVENTS_PER_LEAD, "--fence")

TERMS = ControlCounter("term", MAX_COUNT, "--term")
