"""`hetpipe repair state`: remove fences and terms from parameter servers' state that no coordinator accepts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetpipe.cli.options import Json
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell

if TYPE_CHECKING:
    from hetpipe.server.shard.job_storage import StateRepair


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Repair the state of parameter servers. Deletes fences and terms that no coordinator accepts."""

    folders: Annotated[tuple[Path, ...], typer.Argument(metavar="DIR", help="Folders given as --state.")]
    forget_fence: Annotated[
        bool, typer.Option("--forget-fence", help="Delete the highest fence seen, whatever it is.")
    ] = False
    as_json: Json = False


def run(options: Options, output: Output, _shell: Shell) -> ExitStatus:
    """Repair the folders of parameter servers."""
    from hetpipe.server.shard.job_storage import repair_state  # torch is slow to import

    repairs = [(folder, repair_state(folder, forget_fence=options.forget_fence)) for folder in options.folders]
    answer = [{"folder": str(folder), **asdict(found)} for folder, found in repairs]
    lines = [line for folder, found in repairs for line in _lines_of_state(folder, found)]
    output.answer({"folders": answer}, *lines)
    return ExitStatus.OK


def _lines_of_state(folder: Path, found: StateRepair) -> Iterator[str]:
    fence = "is not a valid fence" if found.fence is None else str(found.fence)
    yield f"{folder}: fence {fence}" + (", deleted" if found.is_fence_forgotten else "")
    for job in found.jobs:
        resume = f"; resume it from {job.run_dir}" if job.run_dir else ""
        yield f"{folder}: job {job.job_id} in term {job.term}, which no coordinator accepts, deleted{resume}"
