"""What a run's folder tells while it runs: the clock, straight from the history, whoever is down."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class _Read:
    offset: int = 0
    rest: bytes = b""


class HistoryTail:
    """Reads the decision log's lines as they are written."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._folder = run_dir / "history"
        self._read: dict[Path, _Read] = {}
        #: The newest published clock; -1 before any.
        self.published = -1
        #: Waves committed, by virtual worker and life.
        self.committed: dict[tuple[int, int], int] = {}
        #: Virtual workers that count now, with the number of their life.
        self.members: dict[int, int] = {}
        #: Lives that were evicted.
        self.evicted: set[tuple[int, int]] = set()
        #: F → (the first clock with so many frozen layers, how many layers of the chain that is).
        self.frozen: dict[int, tuple[int, int]] = {}

    def look(self) -> None:
        """Take in what is new."""
        for path in sorted(self._folder.glob("shard-*.jsonl")):
            for record in self._new_lines(path):
                self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        match record.get("event"):
            case "publish":
                self.published = max(self.published, record["clock"])
            case "commit":
                self.committed[record["vw"], record["incarnation"]] = record["wave"] + 1
            case "evict":
                self.evicted.add((record["vw"], record["incarnation"]))
                if self.members.get(record["vw"]) == record["incarnation"]:
                    del self.members[record["vw"]]
            case "freeze":
                self.frozen.setdefault(record["frozen"], (record["clock"], record["layers"]))
            case "leave":
                self.members.pop(record["vw"], None)
            case "join":
                self.members[record["vw"]] = record["incarnation"]

    def _new_lines(self, path: Path) -> Iterator[dict[str, Any]]:
        read = self._read.setdefault(path, _Read())
        with path.open("rb") as file:
            file.seek(read.offset)
            found = file.read()
        read.offset += len(found)
        *lines, read.rest = (read.rest + found).split(b"\n")
        for line in lines:
            record = json.loads(line)
            if isinstance(record, dict):
                yield record
