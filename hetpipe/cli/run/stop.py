"""`hetpipe stop`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hetpipe.checkpoint.locations import has_checkpoint_at
from hetpipe.cli.options import Coordinator, JobOfCoordinator, Json, RunDir, RunsDir, TlsFolder
from hetpipe.cli.run.job_connection import is_over, job_connection
from hetpipe.errors import UserError
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.run_folder import RUNS, RunFolder
from hetpipe.runs.shell import Shell
from hetpipe.runs.training import resume_command
from hetpipe.values.events import JobState, JobStatus, StopMode
from hetpipe.wire.calls import GET_STATUS, STOP_JOB, GetStatusRequest, StopJobRequest

#: Progress messages for people.
_AWAITED = {
    StopMode.CHECKPOINT: "waiting for the next barrier and its checkpoint",
    StopMode.NOW: "waiting for its processes to end",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Stop a run, attached or detached. At the next barrier, with a checkpoint to resume from."""

    run_dir: RunDir = None
    now: Annotated[bool, typer.Option("--now", help="Stop immediately, without a checkpoint.")] = False
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it has stopped.")] = True
    timeout: Annotated[float, typer.Option(metavar="S", min=0, help="Timeout in seconds.")] = 600
    coordinator: Coordinator = None
    job: JobOfCoordinator = None
    runs_dir: RunsDir = RUNS
    tls: TlsFolder = None
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Request a job to stop and, with `--wait`, wait until it has. No effect on a job that has ended."""
    mode = StopMode.NOW if options.now else StopMode.CHECKPOINT
    with job_connection(options, shell) as there:
        status = there.client.invoke(GET_STATUS, GetStatusRequest(there.job_id))
        if status.job_id is None:
            raise UserError("the coordinator has no job yet: there is nothing to stop")
        if not is_over(status):
            there.client.invoke(STOP_JOB, StopJobRequest(mode, status.job_id))
            status = there.client.invoke(GET_STATUS, GetStatusRequest(status.job_id))
        if options.wait and not is_over(status):
            output.note(_AWAITED[mode])
            late = partial(_late, timeout_seconds=options.timeout)
            again = partial(there.client.invoke, STOP_JOB, StopJobRequest(mode, status.job_id))
            status = there.wait(status, is_over, late, output.note, shell, timeout_seconds=options.timeout, again=again)
    way_on = _way_on(status, there.cluster, shell)
    output.answer(
        {
            "job_id": status.job_id,
            "state": None if status.state is None else status.state.value,
            "run_dir": status.run_dir,
            "resume": way_on or None,
        },
        _sentence(status) + (f"; resume with: {way_on}" if way_on else ""),
    )
    return ExitStatus.FAILED if status.state is JobState.FAILED else ExitStatus.OK


def _late(status: JobStatus, timeout_seconds: float) -> str:
    return (
        f"{_sentence(status)}, and has not stopped within {timeout_seconds:.0f} s; `hetpipe clocks` shows which "
        "workers do not advance, and `hetpipe stop --now` stops it without a checkpoint"
    )


def _sentence(status: JobStatus) -> str:
    name = f"{status.name} (job {status.job_id})"
    if status.state is None or not is_over(status):
        awaited = f": {status.failure}" if status.failure else ""
        return f"{name} is {'going' if status.state is None else status.state.value}{awaited}"
    return f"{name} has {status.state.value}" + (f": {status.failure}" if status.failure else "")


def _way_on(status: JobStatus, cluster: str | None, shell: Shell) -> str:
    """The command that resumes a stopped job, if its folder is readable here; else empty."""
    run_dir = Path(status.run_dir)
    stopped = status.state in {JobState.STOPPED, JobState.FAILED}
    return (
        resume_command(run_dir, shell.current, cluster)
        if stopped and has_checkpoint_at(RunFolder(run_dir).place)
        else ""
    )
