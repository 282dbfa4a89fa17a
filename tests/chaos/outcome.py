"""What is tried and how it went, the same for failpoints and for partitions; and the table of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Protocol, TypeVar


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


CaseT = TypeVar("CaseT", bound=Case)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a case went."""

    case: Case
    survived: bool
    sentence: str = ""
    """Why not."""
    judged: bool = True
    """Its job came to an end that the judges could read; otherwise nothing is known, and it does not count as
    survived."""
    again: bool = False
    """It was played a second time, in a job of its own or with others of its kind, because its first job broke off."""
    seconds: float = 0.0
    recovery_seconds: float = 0.0
    """From the end of the fault to a whole cluster whose clock moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What the judges have looked at and found, of one job or of several."""

    jobs: int = 0
    waves: int = 0
    """Committed."""
    samples: int = 0
    """Committed, and looked for in the final weights of every layer."""
    doubled_waves: int = 0
    """Applied more than once by a shard, by the history."""
    torn_waves: int = 0
    """Applied by some shards and not by others, by the history."""
    stale: int = 0
    """Violations of the bounds on staleness, by the history."""
    violations: int = 0
    """Of every kind, by the history."""
    lost_samples: int = 0
    """Committed and missing from a layer of the final weights."""
    doubled_samples: int = 0
    """More often in a layer of the final weights than committed."""
    torn_layers: int = 0
    """Layers of the final weights that differ from the first one."""

    def __add__(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})

    def lines(self) -> list[str]:
        """A line for each judge."""
        history = (
            f"{self.doubled_waves} waves doubled, {self.torn_waves} torn, {self.stale} beyond the bound of staleness"
        )
        weights = f"{self.lost_samples} lost, {self.doubled_samples} doubled, {self.torn_layers} layers torn"
        return [
            f"history checker: {self.violations} violations in {self.waves} waves of {self.jobs} jobs; {history}",
            f"witness weights: {self.samples} samples; {weights}",
        ]


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
    tally: Tally = Tally()
    missing: Sequence[str] = ()
    """Names of cases that were asked for and not played: somebody broke off."""

    @property
    def ok(self) -> bool:
        """Everything that was asked for was survived."""
        return not self.missing and all(outcome.survived for outcome in self.outcomes)

    def lines(self) -> list[str]:
        """The table, the verdicts, and a line for each that was not survived."""
        tried = Counter((outcome.case.row, outcome.case.column) for outcome in self.outcomes)
        survived = Counter((outcome.case.row, outcome.case.column) for outcome in self.outcomes if outcome.survived)
        rows = sorted({row for row, _ in tried})
        columns = sorted({column for _, column in tried})
        width = max(map(len, rows), default=0)
        lines = [f"{'':{width}} " + "".join(f"{column:>12}" for column in columns) + "   survived / tried"]
        for row in rows:
            shares = [_share(survived[row, column], tried[row, column]) for column in columns]
            lines.append(f"{row:{width}} " + "".join(f"{share:>12}" for share in shares))
        count = f"{survived.total()} of {tried.total()} survived"
        lines.append(f"all: {count} in {self.seconds:.0f} s, seed {self.seed}")
        lines += self.tally.lines()
        lines += [f"skipped: {count} because {reason}" for reason, count in Counter(self.skipped.values()).items()]
        return [*lines, *self._told()]

    def to_json(self) -> dict[str, object]:
        """The same as JSON-able values."""
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "tried": len(self.outcomes),
            "survived": sum(outcome.survived for outcome in self.outcomes),
            "missing": list(self.missing),
            "skipped": dict(self.skipped),
            "judges": asdict(self.tally),
            "cases": [outcome_to_json(outcome) for outcome in self.outcomes],
        }

    def _told(self) -> list[str]:
        """Which cases are not as they should be, or were played twice."""
        lines = []
        if self.missing:
            lines.append(f"not played, because this was broken off: {', '.join(self.missing)}")
        if twice := [outcome.case.name for outcome in self.outcomes if outcome.again]:
            lines.append(f"played a second time, because their first job broke off: {', '.join(twice)}")
        for outcome in self.outcomes:
            if not outcome.survived:
                word = "not survived" if outcome.judged else "no verdict"
                lines.append(f"{word}: {outcome.case.name}: {outcome.sentence}")
                lines.append(f"  again with: {self.again} {outcome.case.name}")
        return lines


def outcome_to_json(outcome: Outcome) -> dict[str, object]:
    """An outcome as JSON-able values."""
    return {
        "case": outcome.case.name,
        "survived": outcome.survived,
        "sentence": outcome.sentence,
        "judged": outcome.judged,
        "again": outcome.again,
        "seconds": round(outcome.seconds, 2),
        "recovery_seconds": round(outcome.recovery_seconds, 2),
    }


def _share(survived: int, tried: int) -> str:
    return f"{survived}/{tried}" if tried else "-"
