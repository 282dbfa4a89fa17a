"""`hetpipe down`, `ps` and `logs`: what there is of a project on this machine, and its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from hetpipe.cli.deploy.deployment import state_folder
from hetpipe.deploy.container_logs import Line, follow_lines, read_lines
from hetpipe.deploy.engine import Engine, answering
from hetpipe.deploy.labels import check_project
from hetpipe.deploy.secrets import remove_secrets
from hetpipe.errors import UserError
from hetpipe.report.text import columns
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """The options of `hetpipe logs`."""

    project: str
    wanted: tuple[str, ...] = ()
    """Names or roles of containers; empty: all."""
    follow: bool = False
    tail: int | None = None
    """Lines of each container; None: all."""


def down(project: str, output: Output, shell: Shell) -> ExitStatus:
    """Remove all of a project. Runs stay.

    Raises:
        UserError: there is no Docker engine.
        JobFailed: something is left.
    """
    with _engine(project, output, shell) as engine:
        removed = engine.remove(project)
    remove_secrets(state_folder(shell.environment, project))
    what = f"removed {', '.join(removed)}" if removed else f"there was nothing of project {project}"
    output.answer({"project": project, "removed": list(removed)}, what)
    return ExitStatus.OK


def ps(project: str, output: Output, shell: Shell) -> ExitStatus:
    """Show the containers of a project.

    Raises:
        UserError: there is no Docker engine.
    """
    with _engine(project, output, shell) as engine:
        states = engine.states(project)
    rows = [["name", "state", "health", "address", "GPUs"]]
    rows += [[s.name, s.state, s.health or "-", s.address or "-", s.devices or "-"] for s in states]
    lines = columns(rows) if states else [f"project {project} is not up"]
    output.answer({"project": project, "containers": [asdict(state) for state in states]}, *lines)
    return ExitStatus.OK


def logs(options: LogOptions, output: Output, shell: Shell) -> ExitStatus:
    """Show what containers have written.

    Raises:
        UserError: there is no Docker engine, or no such container.
    """
    if options.follow and output.machine is not None:
        raise UserError("--json is one object at the end, and --follow has no end; leave one of them out")
    with _engine(options.project, output, shell) as engine:
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


@contextmanager
def _engine(project: str, output: Output, shell: Shell) -> Iterator[Engine]:
    check_project(project)
    client = shell.open_docker(shell.environment)
    try:
        with answering():
            yield Engine(client, clock=shell.clock, say=output.say)
    finally:
        client.close()
