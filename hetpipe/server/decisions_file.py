"""The file of a run's automatic decisions, `RUN_DIR/decisions.jsonl` (plan-versions.md §6).

The clock shard appends each decision at the barrier at which it takes effect, the coordinator what a move has gained.
Both may be restarted and repeat themselves, so a line is written once per `key`. A line is one write of a file opened
for appending.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hetpipe.decide.elastic.script import DecidedSince, over_rewinds
from hetpipe.durable import append
from hetpipe.errors import HetpipeError, UserError
from hetpipe.observe.log import get_logger
from hetpipe.values import wire
from hetpipe.values.decisions import DECISIONS_FILE, DecisionLine
from hetpipe.values.ids import Clock
from hetpipe.values.rewinds import run_folders

#: File in the folder of a run, and of each rewind: where it begins, among others.
_FACTS = "facts.json"

_log = get_logger(__name__)


def read_decisions(run_dir: Path) -> tuple[DecisionLine, ...]:
    """The decisions of a run so far, in order; a line that is being written is left out."""
    path = run_dir / DECISIONS_FILE
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return tuple(wire.from_json(DecisionLine, line) for line in lines if line.endswith(b"\n"))


def decisions_of_run(run_dir: Path) -> tuple[DecisionLine, ...]:
    """The decisions that have led to the current weights of a run, also over rewinds (`over_rewinds`).

    Raises:
        HetpipeError: a file is damaged.
    """
    own, *rewinds = run_folders(run_dir)
    begun = [folder for folder in rewinds if (folder / _FACTS).exists()]  # others were abandoned
    return over_rewinds(read_decisions(own), map(_decided_since, begun))


def _decided_since(folder: Path) -> DecidedSince:
    """What was decided in the folder of a rewind."""
    try:
        start = Clock(int(json.loads((folder / _FACTS).read_bytes())["start"]["clock"]))
        num_workers = len(json.loads((folder / "plan.json").read_bytes())["virtual_workers"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{folder / _FACTS} and plan.json do not say how the rewind begins"
        raise UserError(f"{why} ({type(error).__name__}: {error}); restore them") from error
    return DecidedSince(start, num_workers, read_decisions(folder))


def append_decision(run_dir: Path | None, line: DecisionLine) -> None:
    """Append a line, unless it is there. Never raises: a full disk is no reason to stop training."""
    append_decisions(run_dir, lambda _: (line,))


def append_decisions(run_dir: Path | None, decide: Callable[[Sequence[DecisionLine]], Iterable[DecisionLine]]) -> None:
    """Append the lines that follow from those so far, unless they are there. Never raises either.

    Without a folder nothing is written: an empty path would be the current folder.
    """
    if run_dir is None:
        return
    try:
        before = read_decisions(run_dir)
        known = {one.key for one in before}
        for line in decide(before):
            if line.key not in known:
                run_dir.mkdir(parents=True, exist_ok=True)
                append(run_dir / DECISIONS_FILE, (wire.to_json(DecisionLine, line) + "\n").encode())
    except (OSError, HetpipeError) as error:
        _log.warning("decision_not_filed", reason=str(error))
