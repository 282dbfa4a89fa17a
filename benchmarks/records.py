"""Every ratio by commit: what `python -m benchmarks --record` keeps, and the table of it in docs/benchmarks.md.

One line of `ratios.jsonl` for each benchmark of a run. `python -m benchmarks.records` rewrites the table.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "ratios.jsonl"
PAGE = ROOT / "docs" / "benchmarks.md"

BEGIN, END = "<!-- ratios -->\n", "<!-- /ratios -->\n"

#: Runs that the table shows of each benchmark, the newest ones.
SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The ratios that one run of one benchmark found."""

    date: str
    """`YYYY-MM-DD`, UTC."""
    commit: str
    """Short; with `+` where the working tree had changes."""
    machine: str
    """Processor architecture and cores."""
    torch: str
    """Its version."""
    rounds: int
    """Medians of so many."""
    benchmark: str
    """A name of `python -m benchmarks`."""
    ratios: Mapping[str, float]
    """Name → ratio."""

    @property
    def column(self) -> str:
        """What heads its column."""
        return f"{self.commit}, {self.date}, {self.machine}, torch {self.torch}, {self.rounds} rounds"


def record_of(benchmark: str, ratios: Mapping[str, float], *, rounds: int, date: str) -> Record:
    """The ratios that were found here and now.

    Args:
        benchmark: its name.
        ratios: name → ratio.
        rounds: medians of so many.
        date: `YYYY-MM-DD`, UTC.
    """
    return Record(
        date=date,
        commit=_git("rev-parse", "--short=9", "HEAD") + "+" * bool(_git("status", "--porcelain", "-uno")),
        machine=f"{platform.machine()}, {os.cpu_count()} cores",
        torch=torch.__version__,
        rounds=rounds,
        benchmark=benchmark,
        ratios=ratios,
    )


def keep(record: Record, path: Path = RECORDS) -> None:
    """Append it."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")


def kept(path: Path = RECORDS) -> list[Record]:
    """All that were kept, in order."""
    return [Record(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def table(records: Sequence[Record]) -> str:
    """Markdown: of each benchmark a table with a row for each ratio and a column for each of its newest runs."""
    names = list(dict.fromkeys(record.benchmark for record in records))
    return "\n".join(_table([record for record in records if record.benchmark == name][-SHOWN:]) for name in names)


def _table(records: Sequence[Record]) -> str:
    rows = list(dict.fromkeys(name for record in records for name in record.ratios))
    head = ["`" + records[0].benchmark + "`", *(record.column for record in records)]
    lines = [head, ["---"] * len(head)]
    for name in rows:
        found = [record.ratios.get(name) for record in records]
        lines.append([name, *("" if ratio is None else f"{ratio:.3f}" for ratio in found)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_ratios(page: str, records: Sequence[Record]) -> str:
    """The page, its tables made from `records`."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{table(records)}{END}{rest.split(END)[1]}"


def flat(figures: Mapping[str, Any]) -> dict[str, float]:
    """Figures by their path: `{"a": {"b": 1.0}}` is `{"a, b": 1.0}`."""
    return dict(_flat(figures, ()))


def _flat(figures: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flat(value, (*path, name))
        else:
            yield ", ".join((*path, name)), float(value)


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    PAGE.write_text(with_ratios(PAGE.read_text(), kept()))
