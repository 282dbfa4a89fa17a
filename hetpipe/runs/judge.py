"""The check of a run's history at its end, if its files are local and small enough."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from hetpipe.checker import check_run, history_files
from hetpipe.errors import UserError
from hetpipe.values.rewinds import run_folders

#: Maximum size of histories that are checked here, in about half a minute.
MAX_BYTES = 256 * 1024 * 1024

#: Size above which the check is announced to the user.
_TOLD_BYTES = 8 * 1024 * 1024


def count_violations(run_dir: Path, *, say: Callable[[str], None]) -> int | None:
    """Count the violations in the run's histories; None if one is not local, incomplete, or they are too large."""
    if _is_off(run_dir):
        say("no history was written (`history: off`), so the run cannot be verified")
        return None
    histories = histories_of(run_dir)
    streams = [files for where in histories for files in history_files(where).values()]
    if len(streams) < sum(map(_num_processes, histories)):
        # Some processes wrote theirs on other machines; the local part alone would look incomplete.
        return None
    size = sum(_plain_bytes(file) for files in streams for file in files)
    if size > MAX_BYTES:
        say(f"the history has {size >> 20} MiB, so it is not checked now; check it with: hetpipe check {run_dir}")
        return None
    if size > _TOLD_BYTES:
        say("checking the history of the run")
    try:
        reports = [check_run(where) for where in histories]
    except UserError as error:
        say(f"the history cannot be checked: {error}")
        return None
    for report in reports:
        if report.lacking:
            say(report.lines()[-1])
            return None
    return sum(len(report.violations) for report in reports)


def histories_of(run_dir: Path) -> list[Path]:
    """The folders of a run with a history: its own, and those of rewinds after which it trained."""
    own, *rewinds = run_folders(run_dir)
    return [own, *(where for where in rewinds if any(_stages(where)))]


def _is_off(run_dir: Path) -> bool:
    try:
        job = json.loads((run_dir / "job.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(job, dict) and job.get("history") == "off"


def _plain_bytes(file: Path) -> int:
    """The uncompressed size of a file; a gzip file has it at its end."""
    if file.suffix != ".gz":
        return file.stat().st_size
    with file.open("rb") as packed:
        packed.seek(max(0, packed.seek(0, os.SEEK_END) - 4))
        return int.from_bytes(packed.read(4), "little")


def _stages(run_dir: Path) -> Iterator[str]:
    return (process for process in history_files(run_dir) if not process.startswith("shard-"))


def _num_processes(run_dir: Path) -> int:
    """Shards and stages of the run's plan, each of which writes a file of its own; 1 without a plan."""
    try:
        plan = json.loads((run_dir / "plan.json").read_bytes())
        return int(plan["num_shards"]) + sum(len(worker["stages"]) for worker in plan["virtual_workers"])
    except (OSError, ValueError, KeyError, TypeError):
        return 1
