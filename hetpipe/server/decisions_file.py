"""The file of a run's automatic decisions, `RUN_DIR/decisions.jsonl` (plan-versions.md §6).

The clock shard appends each move at the barrier at which it takes effect, the coordinator what it has gained. Both may
be restarted and repeat themselves, so a line is written once per `key`. A line is one
write of a file opened for appending.
"""

from __future__ import annotations

from pathlib import Path

from hetpipe.durable import append
from hetpipe.errors import HetpipeError
from hetpipe.observe.log import get_logger
from hetpipe.values import wire
from hetpipe.values.decisions import DECISIONS_FILE, DecisionLine

_log = get_logger(__name__)


def read_decisions(run_dir: Path) -> tuple[DecisionLine, ...]:
    """The decisions of a run so far, in order; a line that is being written is left out."""
    path = run_dir / DECISIONS_FILE
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return tuple(wire.from_json(DecisionLine, line) for line in lines if line.endswith(b"\n"))


def append_decision(run_dir: Path, line: DecisionLine) -> None:
    """Append a line, unless it is there. Never raises: a full disk is no reason to stop training."""
    try:
        if line.key in {one.key for one in read_decisions(run_dir)}:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        text = wire.to_json(DecisionLine, line) + "\n"
        append(run_dir / DECISIONS_FILE, text.encode())
    except (OSError, HetpipeError) as error:
        _log.warning("decision_not_filed", decision=line.key, reason=str(error))
