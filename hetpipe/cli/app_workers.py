"""The virtual workers of a run, as typer sees the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetpipe.cli.execution import Json, TlsFolder, execute
from hetpipe.cli.run.asking import WhichJob
from hetpipe.cli.run.workers import list as workers_command
from hetpipe.runs.run_folder import RUNS

workers = typer.Typer(
    help="Virtual workers of a run. Show them, have one leave, have one join.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

RunDir = Annotated[
    Path | None, typer.Option("--run-dir", metavar="DIR", help="Folder of the run.  [default: the newest run]")
]
Asked = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Ask this coordinator instead.")]
JobOf = Annotated[
    str | None, typer.Option("--job", metavar="ID", help="With --coordinator: which job.  [default: its newest]")
]
RunsDir = Annotated[Path, typer.Option(metavar="DIR", help="Where to look for the newest run.")]


@workers.command("list")
def list_workers(
    ctx: typer.Context,
    *,
    run_dir: RunDir = None,
    coordinator: Asked = None,
    job: JobOf = None,
    runs_dir: RunsDir = RUNS,
    tls: TlsFolder = None,
    as_json: Json = False,
) -> None:
    """Show the virtual workers of a run. Life, state, clock, and which layers are on which device."""
    which = WhichJob(run_dir=run_dir, coordinator=coordinator, job=job, runs_dir=runs_dir)
    execute(ctx, lambda output, shell: workers_command.list_workers(which, output, shell), as_json=as_json, tls=tls)


@workers.command("drain")
def drain(  # noqa: PLR0913 - one for each option
    ctx: typer.Context,
    vws: Annotated[list[int], typer.Argument(metavar="VW", min=0, help="Virtual workers, counted from 0.")],
    *,
    wait: Annotated[bool, typer.Option("--wait", help="Return when they have left.")] = False,
    timeout: Annotated[float, typer.Option(metavar="S", min=0, help="With --wait: longest wait, in seconds.")] = 600,
    run_dir: RunDir = None,
    coordinator: Asked = None,
    job: JobOf = None,
    runs_dir: RunsDir = RUNS,
    tls: TlsFolder = None,
    as_json: Json = False,
) -> None:
    """Have virtual workers leave a run. At the next barrier; what they did counts, and the others go on."""
    which = WhichJob(run_dir=run_dir, coordinator=coordinator, job=job, runs_dir=runs_dir)
    execute(
        ctx,
        lambda output, shell: workers_command.drain(vws, which, output, shell, wait=wait, timeout_seconds=timeout),
        as_json=as_json,
        tls=tls,
    )


@workers.command("add")
def add(
    ctx: typer.Context,
    vws: Annotated[
        list[int] | None,
        typer.Argument(metavar="VW", min=0, help="Virtual workers, counted from 0.  [default: all out, or one more]"),
    ] = None,
    *,
    run_dir: RunDir = None,
    coordinator: Asked = None,
    job: JobOf = None,
    runs_dir: RunsDir = RUNS,
    tls: TlsFolder = None,
    as_json: Json = False,
) -> None:
    """Have virtual workers join a run. All that are out come back; if none is, a new one takes free devices."""
    which = WhichJob(run_dir=run_dir, coordinator=coordinator, job=job, runs_dir=runs_dir)
    execute(ctx, lambda output, shell: workers_command.add(vws or (), which, output, shell), as_json=as_json, tls=tls)
