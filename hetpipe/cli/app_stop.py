"""`hetpipe stop`, as typer sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetpipe.cli.app_workers import Asked, JobOf, RunsDir
from hetpipe.cli.execution import Json, TlsFolder, execute
from hetpipe.cli.run import stop as stop_command
from hetpipe.cli.run.asking import WhichJob
from hetpipe.runs.run_folder import RUNS
from hetpipe.values.events import StopMode


def stop(  # noqa: PLR0913 - one for each option
    ctx: typer.Context,
    run_dir: Annotated[
        Path | None, typer.Argument(metavar="RUN_DIR", help="Folder of the run.  [default: the newest run]")
    ] = None,
    *,
    now: Annotated[bool, typer.Option("--now", help="At once, without a checkpoint.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when it has stopped.")] = True,
    timeout: Annotated[float, typer.Option(metavar="S", min=0, help="Longest wait, in seconds.")] = 600,
    coordinator: Asked = None,
    job: JobOf = None,
    runs_dir: RunsDir = RUNS,
    tls: TlsFolder = None,
    as_json: Json = False,
) -> None:
    """Stop a run, also one that nobody follows. At the next barrier, with a checkpoint to resume it from."""
    which = WhichJob(run_dir=run_dir, coordinator=coordinator, job=job, runs_dir=runs_dir)
    mode = StopMode.NOW if now else StopMode.CHECKPOINT
    execute(
        ctx,
        lambda output, shell: stop_command.stop(which, mode, output, shell, wait=wait, timeout_seconds=timeout),
        as_json=as_json,
        tls=tls,
    )
