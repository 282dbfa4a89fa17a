"""Histories and logs that a running process may still be writing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetpipe.observe.segments import read_lines


def whole_lines(path: Path, wanted: bytes = b"") -> Iterator[dict[str, Any]]:
    """The records of a stream of JSON lines, over all its segments; a last line that is half written is left out.

    Args:
        path: the stream; none if it does not exist.
        wanted: only lines that hold these bytes are parsed.
    """
    return (json.loads(line) for line in read_lines(path) if line.endswith(b"\n") and wanted in line)


def whole_lines_of(log: bytes) -> Iterator[dict[str, Any]]:
    """The records of what a log holds so far; a last line that is half written is left out."""
    return (json.loads(line) for line in log.splitlines(keepends=True) if line.endswith(b"\n"))


def history_lines(run_dir: Path, event: str, *, shard: int = 0) -> list[dict[str, Any]]:
    """What the history of a shard says of an event, in its order."""
    path = run_dir / "history" / f"shard-{shard}.jsonl"
    return [line for line in whole_lines(path, f'"{event}"'.encode()) if line["event"] == event]
