"""The command that watches a cluster, as typer sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetpipe.cli import looking
from hetpipe.cli.execution import Json, TlsFolder, execute
from hetpipe.cli.look import top as top_module
from hetpipe.runs.run_folder import RUNS


def top(
    ctx: typer.Context,
    run_dir: Annotated[
        Path | None, typer.Argument(metavar="RUN_DIR", help="Folder of the run.  [default: the newest run]")
    ] = None,
    *,
    coordinator: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Ask this coordinator for its newest job instead.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
    runs_dir: Annotated[Path, typer.Option(metavar="DIR", help="Where to look for the newest run.")] = RUNS,
    tls: TlsFolder = None,
    as_json: Json = False,
) -> None:
    """Watch a run and its cluster, every second. Clocks, speed, loss, waiting, memory; members and their leases."""
    which = looking.Which(run_dir=run_dir, coordinator=coordinator, runs_dir=runs_dir)
    execute(ctx, lambda output, shell: top_module.top(which, output, shell, once=once), as_json=as_json, tls=tls)
