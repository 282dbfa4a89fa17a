"""Certificates and health, as typer sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetpipe.cli.execution import Json, execute
from hetpipe.errors import UserError
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell

certificates = typer.Typer(
    help="Certificates for a cluster that others can reach: a private authority, one certificate per process.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

Authority = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the authority.")]


@certificates.command("init")
def init(ctx: typer.Context, folder: Authority, *, as_json: Json = False) -> None:
    """Make a private authority. Its key signs all certificates and stays in that folder."""

    def command(output: Output, _shell: Shell) -> ExitStatus:
        _check_installed()
        from hetpipe.cli.operate.certs import issue as certs_command

        return certs_command.init(folder, output)

    execute(ctx, command, as_json=as_json)


@certificates.command("issue")
def issue(
    ctx: typer.Context,
    folder: Authority,
    role: Annotated[
        str, typer.Argument(metavar="ROLE", help="coordinator, parameter-server, agent, operator, monitor or redis.")
    ],
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="A shard's index, an agent's node, a person's name, a host."),
    ] = None,
    *,
    days: Annotated[float, typer.Option(metavar="N", min=0.001, max=3650, help="How long they last.")] = 365,
    as_json: Json = False,
) -> None:
    """Make keys and certificates. Each process gets a folder of its own, DIR/ROLE-NAME, for its option --tls."""

    def command(output: Output, _shell: Shell) -> ExitStatus:
        _check_installed()
        from hetpipe.cli.operate.certs import issue as certs_command

        return certs_command.issue(folder, role, list(names or ()), days, output)

    execute(ctx, command, as_json=as_json)


def health(arguments: Annotated[list[str] | None, typer.Argument(metavar="HOST:PORT [OPTION]...")] = None) -> None:
    """Ask a service whether it serves. Exits with 0 only if it does; for probes and scripts."""
    from hetpipe.cli.operate import health as health_command

    raise typer.Exit(health_command.main(arguments or []))


def _check_installed() -> None:
    try:
        import cryptography  # noqa: F401 - only asked whether it is there
    except ImportError as error:
        raise UserError("certificates need the extra `tls`: pip install 'hetpipe[tls]'") from error
