"""Counters of the control plane: fences and terms. Only coordinators advance them; members report the highest they saw.

After the loss of its data a store counts from one again, so a coordinator continues above what members report. Each
report comes from a single process and is bounded: by its distance from the values known to the coordinator and its
store, and by a reserve below the limit that no report may reach. No report can therefore exhaust a counter, and a lead
can always be granted. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.errors import ProtocolViolation
from hetpipe.values.bounds import MAX_COUNT

#: Maximum distance between a report and the known value. An empty store lags by all leads (or terms) ever granted: a
#: coordinator that restarts every five seconds needs two months for that many.
MAX_REPORTED_AHEAD = 1_000_000

#: Event numbers of a job reserved for each lead, so that no two coordinators assign the same one.
EVENTS_PER_LEAD = 1_000_000


@dataclass(frozen=True, slots=True)
class ControlCounter:
    """A number that only grows."""

    name: str
    limit: int
    """Exclusive upper bound of its values."""
    option: str
    """The option of `hetpipe repair store` that sets it."""

    @property
    def largest_reported(self) -> int:
        """The largest accepted report; values above are reserved for the store's own increments."""
        return self.limit // 2

    def check_report(self, reported: int, *, known: int, source: object) -> None:
        """Validate the value reported by `source`, given the value `known` to this coordinator or its store.

        Raises:
            ProtocolViolation: it is too far ahead; the message names the fixes.
        """
        allowed = max(known, min(known + MAX_REPORTED_AHEAD, self.largest_reported))
        if reported > allowed:
            sentence = (
                f"{source} reports a {self.name} of {reported}; this coordinator's is {known}, and it accepts "
                f"no report above {allowed}: restart that process (a parameter server with --state DIR after "
                "`hetpipe repair state DIR`)"
            )
            if reported <= self.largest_reported:
                sentence += (
                    "; or, if the store has lost its data, stop the coordinator and run `hetpipe repair store "
                    f"{self.option} {reported} …`"
                )
            raise ProtocolViolation(sentence)


#: The numbers of leads. Every lead numbers events, and event numbers are counts, too.
FENCES = ControlCounter("fence", MAX_COUNT // EVENTS_PER_LEAD, "--fence")

TERMS = ControlCounter("term", MAX_COUNT, "--term")
