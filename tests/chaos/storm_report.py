"""What a storm has shown: the table by kind of fault, the judges, the verdict. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from tests.chaos.outcome import Outcome, Tally, outcome_to_json

#: Faults for each minute of a storm.
FAULTS_PER_MINUTE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One fault of a storm."""

    number: int
    """From 1."""
    at_seconds: float
    """Since the beginning of the storm."""
    outcome: Outcome
    job: str
    """The run that was under way."""
    screen: Sequence[str] = ()
    """What the follower's screen has said from the fault to the recovery, but for the progress table."""
    bystanders: Sequence[str] = ()
    """Processes that ended, too, although nobody struck them."""

    def to_json(self) -> dict[str, object]:
        """A line of the diary."""
        return {
            "number": self.number,
            "at_seconds": round(self.at_seconds, 1),
            **outcome_to_json(self.outcome),
            "job": self.job,
            "screen": list(self.screen),
            "bystanders": list(self.bystanders),
        }

    def line(self) -> str:
        """The same for people."""
        minutes, seconds = divmod(int(self.at_seconds), 60)
        outcome = self.outcome
        if outcome.survived:
            told = f"survived, whole again after {outcome.recovery_seconds:.1f} s"
        else:
            told = f"NOT SURVIVED: {outcome.sentence}"
        screen = f"; screen: {self.screen[0]}" if self.screen else "; screen: nothing"
        more = f" (and {len(self.screen) - 1} more)" if len(self.screen) > 1 else ""
        others = f"; ended, too: {'; '.join(self.bystanders)}" if self.bystanders else ""
        return f"{minutes:2}:{seconds:02} fault {self.number}: {outcome.case.name}: {told}{screen}{more}{others}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StormReport:
    """A whole storm."""

    entries: Sequence[Entry]
    tally: Tally
    problems: Sequence[str]
    """What is not right, but for faults that were not survived."""
    unproven: Sequence[str]
    """Runs whose history a full disk has ended; their weights were judged all the same."""
    seconds: float
    seed: int
    mounts: str
    """How disks were filled."""
    skipped: Mapping[str, str]
    """What was not tried → why."""
    again: str
    """The command that has the same faults in the same order."""

    @property
    def ok(self) -> bool:
        """Every fault was survived without a person, and every job was right."""
        return not self.problems and self.tally.jobs > 0 and all(entry.outcome.survived for entry in self.entries)

    def lines(self) -> list[str]:
        """The table, the judges, and what is not as it should be."""
        rows = sorted({entry.outcome.case.row for entry in self.entries})
        width = max(map(len, rows), default=0)
        lines = [f"{'':{width}}  survived / tried   recovery: median   longest   told on the screen"]
        lines += [f"{row:{width}}  {self._row(row)}" for row in rows]
        survived = sum(entry.outcome.survived for entry in self.entries)
        count = f"{survived} of {len(self.entries)} faults survived in {self.seconds / 60:.1f} min"
        lines.append(f"all: {count}, {self._recovery(self.entries)}, seed {self.seed}; disks: {self.mounts}")
        lines += self.tally.lines()
        if self.unproven:
            lines.append(f"history ended by a full disk, judged by their weights alone: {', '.join(self.unproven)}")
        lines += [f"not tried: {name}: {reason}" for name, reason in self.skipped.items()]
        for entry in self.entries:
            if not entry.outcome.survived:
                lines.append(f"not survived: fault {entry.number}, {entry.outcome.case.name}: {entry.outcome.sentence}")
        lines += [f"WRONG: {problem}" for problem in self.problems]
        verdict = "everything survived, every sample of every epoch counted once" if self.ok else "NOT survived"
        return [*lines, f"verdict: {verdict}", f"again with: {self.again}"]

    def to_json(self) -> dict[str, object]:
        """The same as JSON-able values."""
        return {
            "ok": self.ok,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "mounts": self.mounts,
            "faults": [entry.to_json() for entry in self.entries],
            "survived": sum(entry.outcome.survived for entry in self.entries),
            "judges": asdict(self.tally),
            "unproven": list(self.unproven),
            "problems": list(self.problems),
            "skipped": dict(self.skipped),
            "again": self.again,
        }

    def _row(self, row: str) -> str:
        entries = [entry for entry in self.entries if entry.outcome.case.row == row]
        survived = [entry for entry in entries if entry.outcome.survived]
        told = sum(bool(entry.screen) for entry in entries)
        times = [entry.outcome.recovery_seconds for entry in survived]
        median, longest = (f"{f(times):.1f} s" if times else "-" for f in (statistics.median, max))
        return f"{f'{len(survived)}/{len(entries)}':>16}   {median:>16}   {longest:>7}   {told}/{len(entries)}"

    @staticmethod
    def _recovery(entries: Sequence[Entry]) -> str:
        times = [entry.outcome.recovery_seconds for entry in entries if entry.outcome.survived]
        return f"recovery {statistics.median(times):.1f} s (median)" if times else "no recovery"
