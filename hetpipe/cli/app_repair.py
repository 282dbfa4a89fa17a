"""`hetpipe repair` as typer sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetpipe.cli.execution import Json, execute
from hetpipe.rpc.tls import TLS_VARIABLE
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell

repairs = typer.Typer(
    help="Repair what processes keep between restarts, while they do not run.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@repairs.command("store")
def store(
    ctx: typer.Context,
    *,
    url: Annotated[str, typer.Option("--store", metavar="URL", help="The coordinator's Redis, as it is given it.")],
    password_file: Annotated[
        Path | None, typer.Option("--store-password-file", metavar="FILE", help="Its password is the text in FILE.")
    ] = None,
    ca: Annotated[
        Path | None, typer.Option("--store-ca", metavar="FILE", help="Authority that signed its certificate.")
    ] = None,
    tls: Annotated[
        Path | None,
        typer.Option(
            "--tls", metavar="DIR", envvar=TLS_VARIABLE, help="Certificate to show to Redis: the coordinator's folder."
        ),
    ] = None,
    fence: Annotated[
        int | None,
        typer.Option(metavar="N", help="Set the fence: the next lead is above N.  [default: kept if it can be right]"),
    ] = None,
    term: Annotated[
        int | None,
        typer.Option(metavar="N", help="Set the term: the next plan is above N.  [default: kept if it can be right]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Repair the coordinator's store. Its counters and indexes; no coordinator may lead meanwhile."""

    def command(output: Output, _shell: Shell) -> ExitStatus:
        from hetpipe.cli.operate.repair import store as repair_command

        options = repair_command.StoreOptions(
            url=url, password_file=password_file, ca=ca, tls=tls, fence=fence, term=term
        )
        return repair_command.store(options, output)

    execute(ctx, command, as_json=as_json)


@repairs.command("state")
def state(
    ctx: typer.Context,
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="Folders that --state names.")],
    *,
    forget_fence: Annotated[
        bool, typer.Option("--forget-fence", help="Forget the highest fence that was seen, whatever it is.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Repair the state of parameter servers. Forgets numbers that no coordinator could lead by."""

    def command(output: Output, _shell: Shell) -> ExitStatus:
        from hetpipe.cli.operate.repair import store as repair_command

        return repair_command.state(folders, output, forget_fence=forget_fence)

    execute(ctx, command, as_json=as_json)
