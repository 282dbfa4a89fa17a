"""`hetpipe ps`."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hetpipe.cli.deploy.containers import engine_of
from hetpipe.cli.deploy.deployment import Project
from hetpipe.cli.options import Json
from hetpipe.deploy.labels import DEFAULT_PROJECT
from hetpipe.report.text import columns
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Show the containers of `hetpipe up`. With their state, health and GPUs."""

    project: Project = DEFAULT_PROJECT
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Show the containers of a project.

    Raises:
        UserError: there is no Docker engine.
    """
    project = options.project
    with engine_of(project, output, shell) as engine:
        states = engine.states(project)
    rows = [["name", "state", "health", "address", "GPUs"]]
    rows += [[s.name, s.state, s.health or "-", s.address or "-", s.devices or "-"] for s in states]
    lines = columns(rows) if states else [f"project {project} is not up"]
    output.answer({"project": project, "containers": [asdict(state) for state in states]}, *lines)
    return ExitStatus.OK
