"""What processes hold, read from /proc: resident memory, threads, open files."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hetpipe.wire.threads import POOL_THREADS

#: What may be added between the beginning and the end of a soak.
GROWTH = 0.02

#: The same for a handful of threads and files, of which two hundredths are less than one.
FEW = 1


@dataclass(frozen=True, slots=True)
class Holding:
    """What one process holds at one time."""

    at: float
    """Seconds, monotonic."""
    resident_bytes: int
    threads: int
    """But those that carry out calls: these stay, and there are as many as calls were ever under way at once."""
    files: int


def holding_of(pid: int, *, at: float) -> Holding | None:
    """What a process holds; None when it is gone."""
    with suppress(OSError, KeyError, ValueError, IndexError):
        folder = Path(f"/proc/{pid}")
        lines = (line.partition(":") for line in (folder / "status").read_text().splitlines())
        status = {name: value.split() for name, _, value in lines}
        files = sum(1 for _ in (folder / "fd").iterdir())
        threads = sum(_thread_name(thread) != POOL_THREADS for thread in (folder / "task").iterdir())
        return Holding(at, int(status["VmRSS"][0]) * 1024, threads, files)
    return None


def _thread_name(thread: Path) -> str:
    with suppress(OSError):
        return (thread / "comm").read_text().strip()
    return ""


class Ledger:
    """Collects holdings by process."""

    def __init__(self) -> None:
        self._found: defaultdict[tuple[str, int], list[Holding]] = defaultdict(list)

    def look(self, pids: Mapping[str, int], *, at: float) -> None:
        """Enter what processes hold now, by a name for each."""
        for name, pid in pids.items():
            holding = holding_of(pid, at=at)
            if holding is not None:
                self._found[name, pid].append(holding)

    def growth(self, *, born: float, since: float, until: float) -> dict[str, tuple[Growth, ...]]:
        """How much more each process holds at the end than at the beginning, by its name.

        Args:
            born: processes that were not there then are left out: they may still be coming to their size.
            since: the beginning, in monotonic seconds.
            until: the end.
        """
        fifth = (until - since) / 5.0
        grown: dict[str, tuple[Growth, ...]] = {}
        for (name, _), holdings in self._found.items():
            first = [each for each in holdings if since <= each.at <= since + fifth]
            last = [each for each in holdings if until - fifth <= each.at <= until]
            if holdings[0].at <= born and first and last:
                grown[name] = tuple(_growth(what, first, last) for what in ("resident_bytes", "threads", "files"))
        return grown


@dataclass(frozen=True, slots=True)
class Growth:
    """What was held for half of the first fifth of a time, and of the last: what is soon gone again is no growth."""

    what: str
    first: float
    last: float

    @property
    def is_flat(self) -> bool:
        """Within `GROWTH`."""
        few = 0 if self.what == "resident_bytes" else FEW
        return self.last - self.first <= max(GROWTH * self.first, few)

    def __str__(self) -> str:
        unit = 1 << 20 if self.what == "resident_bytes" else 1
        name = "resident MiB" if self.what == "resident_bytes" else self.what
        return f"{name} {self.first / unit:.0f} → {self.last / unit:.0f} ({self.last / self.first - 1:+.1%})"


def _growth(what: str, first: Sequence[Holding], last: Sequence[Holding]) -> Growth:
    return Growth(
        what,
        statistics.median_low(getattr(each, what) for each in first),
        statistics.median_low(getattr(each, what) for each in last),
    )
