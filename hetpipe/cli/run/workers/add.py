"""`hetpipe workers add`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from hetpipe.cli.options import Coordinator, JobOfCoordinator, Json, RunDirOption, RunsDir, TlsFolder
from hetpipe.cli.run.job_connection import job_connection
from hetpipe.cli.run.workers.answers import answer, one_by_one
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.run_folder import RUNS
from hetpipe.runs.shell import Shell
from hetpipe.values.events import WorkerStatus
from hetpipe.values.ids import VirtualWorkerIndex
from hetpipe.wire.calls import ADD_WORKER, AddWorkerRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Add virtual workers to a run. Restarts all that are out; if none is, adds a new one on free devices."""

    vws: Annotated[
        tuple[int, ...],
        typer.Argument(metavar="VW", min=0, help="Virtual workers, counted from 0.  [default: all out, or one more]"),
    ] = ()
    run_dir: RunDirOption = None
    coordinator: Coordinator = None
    job: JobOfCoordinator = None
    runs_dir: RunsDir = RUNS
    tls: TlsFolder = None
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Restart the named virtual workers; without names all that are out, or if none is, add another one."""
    with job_connection(options, shell) as there:

        def add(vw: int | None) -> Sequence[WorkerStatus]:
            named = None if vw is None else VirtualWorkerIndex(vw)
            return there.client.invoke(ADD_WORKER, AddWorkerRequest(named, there.job_id)).workers

        statuses = one_by_one(options.vws, add, output)
        statuses += () if options.vws else add(None)
    answer(statuses, output)
    return ExitStatus.OK
