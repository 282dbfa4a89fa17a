"""Access to the Docker engine with the containers of a project."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hetpipe.deploy.engine import Engine, answering
from hetpipe.deploy.labels import check_project
from hetpipe.runs.outcome import Output
from hetpipe.runs.shell import Shell


@contextmanager
def engine_of(project: str, output: Output, shell: Shell) -> Iterator[Engine]:
    """Connect to the Docker engine for a project.

    Raises:
        UserError: the name is not valid for a project, or there is no Docker engine.
    """
    check_project(project)
    client = shell.open_docker(shell.environment)
    try:
        with answering():
            yield Engine(client, clock=shell.clock, say=output.say)
    finally:
        client.close()
