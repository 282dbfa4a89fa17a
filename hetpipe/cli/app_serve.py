"""The services of a cluster, as typer sees them: it lists them, and their own parsers read what comes behind the name.

`hetpipe.cli.main` runs them without typer: a coordinator has no use for the command line, and no memory for it.
"""

from __future__ import annotations

from typing import Annotated

import typer

from hetpipe.server import SERVICES, serve

services = typer.Typer(
    help="Run one service of a cluster: what image, Compose file, manifests and `hetpipe train` start.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

#: Everything behind the name is left to the parser of the service, `--help` too.
UNPARSED = {"ignore_unknown_options": True, "allow_interspersed_args": False}

Options = Annotated[list[str] | None, typer.Argument(metavar="[OPTION]...")]

_HELP = {
    "coordinator": "Run the coordinator. One per cluster: membership, jobs, plans.",
    "parameter-server": "Run one parameter-server shard.",
    "agent": "Run the agent of a node. Offers its devices, and starts the stages on them.",
}


def _add(service: str) -> None:
    @services.command(service, help=_HELP[service], context_settings=UNPARSED, add_help_option=False)
    def run(options: Options = None) -> None:
        raise typer.Exit(serve(service, options or []))


for _service in SERVICES:
    _add(_service)
