"""`hetpipe logs`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import typer

from hetpipe.cli.deploy.containers import engine_of
from hetpipe.cli.deploy.deployment import Project
from hetpipe.cli.options import Json
from hetpipe.deploy.container_logs import Line, follow_lines, read_lines
from hetpipe.deploy.labels import DEFAULT_PROJECT
from hetpipe.errors import UserError
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Show the logs of the containers of `hetpipe up`."""

    wanted: Annotated[
        tuple[str, ...],
        typer.Argument(metavar="[NAME]...", help="Containers or roles, for example agent.  [default: all]"),
    ] = ()
    project: Project = DEFAULT_PROJECT
    follow: Annotated[bool, typer.Option("--follow", help="Follow the logs.")] = False
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, metavar="N", help="Show only the last N lines of each.")
    ] = None
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Show the logs of containers.

    Raises:
        UserError: there is no Docker engine, or no such container.
    """
    if options.follow and output.machine is not None:
        raise UserError("--json prints one object at the end, and --follow never ends; leave one of them out")
    with engine_of(options.project, output, shell) as engine:
        containers = engine.find(options.project, options.wanted)
        read = follow_lines if options.follow else read_lines
        lines = read(containers, tail=options.tail)
        if output.machine is None:
            _show(lines, output)
        else:
            written: dict[str, list[str]] = {}
            for name, text in lines:
                written.setdefault(name, []).append(text)
            output.answer({"project": options.project, "logs": written})
    return ExitStatus.OK


def _show(lines: Iterator[Line], output: Output) -> None:
    for name, text in lines:
        output.say(f"{name} | {text}")
