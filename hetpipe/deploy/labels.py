"""The labels of hetpipe's containers and networks, created by `deploy.engine` or by Compose from a rendered file."""

from __future__ import annotations

import re

from hetpipe.deploy.topology import Container
from hetpipe.errors import UserError

PROJECT = "org.hetpipe.project"
ROLE = "org.hetpipe.role"
NAME = "org.hetpipe.name"
DEVICES = "org.hetpipe.devices"

DEFAULT_PROJECT = "hetpipe"

_PROJECT_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,40}")


def check_project(name: str) -> str:
    """Validate the name of a project; returns it unchanged.

    Raises:
        UserError: it is not valid.
    """
    if not _PROJECT_NAME.fullmatch(name):
        raise UserError(
            f"--project {name!r} is a prefix of containers' names; use up to 41 small letters, digits, dashes or "
            "underscores, the first one a letter or a digit"
        )
    return name


def labels_of(project: str, container: Container) -> dict[str, str]:
    """The labels of a container."""
    labels = {PROJECT: project, ROLE: str(container.role), NAME: container.name}
    return {**labels, DEVICES: ",".join(container.gpus)} if container.gpus else labels


def full_name(project: str, name: str) -> str:
    """The name of a container on this machine."""
    return f"{project}-{name}"
