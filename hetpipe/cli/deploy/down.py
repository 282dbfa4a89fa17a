"""`hetpipe down`."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.cli.deploy.containers import engine_of
from hetpipe.cli.deploy.deployment import Project, state_folder
from hetpipe.cli.options import Json
from hetpipe.deploy.labels import DEFAULT_PROJECT
from hetpipe.deploy.secrets import remove_secrets
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.shell import Shell


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Remove the cluster that `hetpipe up` started. Removes containers, network and certificates; runs are kept."""

    project: Project = DEFAULT_PROJECT
    as_json: Json = False


def run(options: Options, output: Output, shell: Shell) -> ExitStatus:
    """Remove the containers, network and certificates of a project. Runs are kept.

    Raises:
        UserError: there is no Docker engine.
        JobFailed: not everything could be removed.
    """
    project = options.project
    with engine_of(project, output, shell) as engine:
        removed = engine.remove(project)
    remove_secrets(state_folder(shell.environment, project))
    what = f"removed {', '.join(removed)}" if removed else f"project {project} has no containers"
    output.answer({"project": project, "removed": list(removed)}, what)
    return ExitStatus.OK
