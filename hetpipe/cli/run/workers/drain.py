"""`hetpipe workers drain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from hetpipe.cli.options import Coordinator, JobOfCoordinator, Json, RunDirOption, RunsDir, TlsFolder
from hetpipe.cli.run.job_connection import job_connection
from hetpipe.cli.run.workers.answers import answer, line_of, one_by_one
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.run_folder import RUNS
from hetpipe.runs.shell import Shell
from hetpipe.values.events import JobStatus, WorkerStatus
from hetpipe.values.ids import VirtualWorkerIndex
from hetpipe.values.life_state import LifeState
from hetpipe.wire.calls import DRAIN_WORKER, GET_STATUS, DrainWorkerRequest, GetStatusRequest

#: Final states of a worker after a request to leave.
_GONE = frozenset({LifeState.OUT, LifeState.DONE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Drain virtual workers. They leave at the next barrier; their work counts, and the others continue."""

    vws: Annotated[tuple[int, ...], typer.Argument(metavar="VW", min=0, help="Virtual workers, counted from 0.")]
    wait: Annotated[bool, typer.Option("--wait", help="Wait until they have left.")] = False
    timeout: Annotated[float, typer.Option(metavar="S", min=0, help="With --wait: timeout in seconds.")] = 600
    run_dir: RunDirOption = None
    coordinator: Coordinator = None
    job: JobOfCoordinator = None
    runs_dir: RunsDir = RUNS
    tls: TlsFolder = None
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Request virtual workers to leave and, with `--wait`, wait until they have."""
    vws = options.vws
    with job_connection(options, shell) as there:

        def drain(vw: int) -> Sequence[WorkerStatus]:
            return (there.client.invoke(DRAIN_WORKER, DrainWorkerRequest(VirtualWorkerIndex(vw), there.job_id)),)

        statuses = one_by_one(vws, drain, output)
        if options.wait:
            output.note("waiting for the next barrier")
            status = there.wait(
                there.client.invoke(GET_STATUS, GetStatusRequest(there.job_id)),
                lambda status: not _late(status, vws),
                lambda status: _sentence(status, options),
                output.note,
                shell,
                timeout_seconds=options.timeout,
            )
            statuses = [worker for worker in status.workers if worker.vw in vws]
    answer(statuses, output)
    return ExitStatus.OK


def _late(status: JobStatus, vws: Sequence[int]) -> list[WorkerStatus]:
    """The virtual workers of `vws` that have not left."""
    return [worker for worker in status.workers if worker.vw in vws and worker.state not in _GONE]


def _sentence(status: JobStatus, options: Options) -> str:
    late = "; ".join(map(line_of, _late(status, options.vws)))
    return f"not all workers have left within {options.timeout:.0f} s: {late}"
