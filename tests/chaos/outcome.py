"""What is tried and how it went, the same for failpoints and for partitions; and the table of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class Case(Protocol):
    """One fault."""

    @property
    def name(self) -> str:
        """For the table, and to run it again."""
        ...

    @property
    def row(self) -> str:
        """Its row in the table."""
        ...

    @property
    def column(self) -> str:
        """Its column in the table."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a case went."""

    case: Case
    survived: bool
    sentence: str = ""
    """Why not."""
    seconds: float = 0.0
    recovery_seconds: float = 0.0
    """From the end of the fault to a whole cluster whose clock moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """All outcomes of one command."""

    outcomes: Sequence[Outcome]
    skipped: Mapping[str, str]
    """Name → reason."""
    seconds: float
    seed: int
    again: str
    """The command that runs one case again, before its name."""

    @property
    def ok(self) -> bool:
        """Everything that was tried was survived."""
        return all(outcome.survived for outcome in self.outcomes)

    def lines(self) -> list[str]:
        """The table, and a line for each that was not survived."""
        tried = Counter((outcome.case.row, outcome.case.column) for outcome in self.outcomes)
        survived = Counter((outcome.case.row, outcome.case.column) for outcome in self.outcomes if outcome.survived)
        rows = list(dict.fromkeys(row for row, _ in tried))
        columns = list(dict.fromkeys(column for _, column in tried))
        width = max(map(len, rows), default=0)
        lines = [f"{'':{width}} " + "".join(f"{column:>12}" for column in columns) + "   survived / tried"]
        for row in rows:
            shares = [_share(survived[row, column], tried[row, column]) for column in columns]
            lines.append(f"{row:{width}} " + "".join(f"{share:>12}" for share in shares))
        count = f"{survived.total()} of {tried.total()} survived"
        lines.append(f"all: {count} in {self.seconds:.0f} s, seed {self.seed}")
        lines += [f"skipped: {count} because {reason}" for reason, count in Counter(self.skipped.values()).items()]
        for outcome in self.outcomes:
            if not outcome.survived:
                lines.append(f"not survived: {outcome.case.name}: {outcome.sentence}")
                lines.append(f"  again with: {self.again} {outcome.case.name}")
        return lines

    def to_json(self) -> dict[str, object]:
        """The same as JSON-able values."""
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "tried": len(self.outcomes),
            "survived": sum(outcome.survived for outcome in self.outcomes),
            "skipped": dict(self.skipped),
            "cases": [
                {
                    "case": outcome.case.name,
                    "survived": outcome.survived,
                    "sentence": outcome.sentence,
                    "seconds": round(outcome.seconds, 2),
                    "recovery_seconds": round(outcome.recovery_seconds, 2),
                }
                for outcome in self.outcomes
            ],
        }


def _share(survived: int, tried: int) -> str:
    return f"{survived}/{tried}" if tried else "-"
