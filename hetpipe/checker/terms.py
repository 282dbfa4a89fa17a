"""Verify that terms never decrease, in every process and along the decision log."""

from __future__ import annotations

from collections.abc import Iterable

from hetpipe.checker.events import Decision, Event
from hetpipe.checker.report import Findings, Kind


class TermVerifier:
    """Verifies all events, by file in line order."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._terms: dict[str, int] = {}
        self._reported: set[str] = set()

    def see(self, event: Event) -> None:
        """Verify that the term does not decrease within a file; one report per file."""
        origin = event.origin
        newest = self._terms.get(origin.file, 0)
        if origin.term >= newest:
            self._terms[origin.file] = origin.term
        elif origin.file not in self._reported:
            self._reported.add(origin.file)
            message = f"{origin.role} on {origin.host} writes in term {origin.term} after term {newest}"
            self._findings.add(Kind.OLD_TERM, message, origin)

    def see_decisions(self, decisions: Iterable[Decision]) -> None:
        """Verify that the term does not decrease from one file of decisions to the next."""
        newest, file = 0, ""
        for decision in decisions:
            origin = decision.origin
            if origin.term < newest and origin.file != file:
                message = f"a decision of term {origin.term} follows one of term {newest}"
                self._findings.add(Kind.OLD_TERM, message, origin)
            newest, file = max(newest, origin.term), origin.file
