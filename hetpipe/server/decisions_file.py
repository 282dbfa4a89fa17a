"""The file of a run's automatic decisions, `RUN_DIR/decisions.jsonl` (plan-versions.md §6).

The clock shard appends each decision at the barrier at which it takes effect, the coordinator what a move has gained.
Both may be restarted and repeat themselves, so a line is written once per `key`. A line is one write of a file opened
for appending.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args, get_type_hints

from hetpipe.decide.elastic.repeating import MemberEvent, Past
from hetpipe.decide.elastic.script import DecidedSince, over_rewinds
from hetpipe.decide.sync.segment import ends_run
from hetpipe.durable import append
from hetpipe.errors import HetpipeError, UserError
from hetpipe.observe.clock_curve import clock_shard_file
from hetpipe.observe.log import get_logger
from hetpipe.observe.segments import read_lines, segments_of
from hetpipe.values import wire
from hetpipe.values.barrier_reasons import BarrierReasons
from hetpipe.values.decisions import DECISIONS_FILE, DecisionLine
from hetpipe.values.ids import Clock
from hetpipe.values.rewinds import run_folders

#: File in the folder of a run, and of each rewind: where it begins, among others.
_FACTS = "facts.json"

#: Lines of the clock shard's history about members, and where they are.
_MEMBER_EVENTS = tuple(f'"event":"{event}"'.encode() for event in get_args(get_type_hints(MemberEvent)["event"]))

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
    own, *rewinds = _begun(run_dir)
    since = (DecidedSince(*_beginning(folder), read_decisions(folder)) for folder in rewinds)
    return over_rewinds(read_decisions(own), since)


def pasts_of_run(run_dir: Path) -> tuple[Past, ...]:
    """What has happened to the members of a run, and of its rewinds; none where that is not known.

    Raises:
        HetpipeError: a file is damaged.
    """
    folders = _begun(run_dir)
    if not all(segments_of(clock_shard_file(folder)) for folder in folders):
        return ()  # `history: off`
    return tuple(Past(*_beginning(folder), tuple(_member_events(folder))) for folder in folders)


def _member_events(folder: Path) -> Iterator[MemberEvent]:
    for raw in read_lines(clock_shard_file(folder)):
        if any(event in raw for event in _MEMBER_EVENTS) and raw.endswith(b"\n"):
            line = json.loads(raw)
            yield MemberEvent(
                line["event"],
                Clock(line["clock"]),
                line.get("vw"),
                tuple(line.get("bounds", ())),
                ends_run=ends_run(BarrierReasons.parse(line.get("reason", ""))),
            )


def _begun(run_dir: Path) -> list[Path]:
    """The folder of a run, and those of the rewinds that were not abandoned."""
    own, *rewinds = run_folders(run_dir)
    return [own, *(folder for folder in rewinds if (folder / _FACTS).exists())]


def _beginning(folder: Path) -> tuple[Clock, int]:
    """The clock at which the run begins in a folder, and the number of its virtual workers there."""
    try:
        start = Clock(int(json.loads((folder / _FACTS).read_bytes())["start"]["clock"]))
        num_workers = len(json.loads((folder / "plan.json").read_bytes())["virtual_workers"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{folder / _FACTS} and plan.json do not say how the run begins there"
        raise UserError(f"{why} ({type(error).__name__}: {error}); restore them") from error
    return start, num_workers


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
