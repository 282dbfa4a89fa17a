"""A deployment as a Compose file, for Compose v2 and docker-compose 1.29. Pure.

The file says the same as `deploy.engine` does, down to the labels: `hetpipe ps`, `logs` and `down` work on what Compose
has started. Differences are Compose's: it waits for health checks, and `submit` submits the job from a container.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hetpipe.deploy import labels
from hetpipe.deploy.topology import GRPC_PORT, MOST_PROCESSES, RESTART_POLICY, STOP_SECONDS, Container, Deployment, Role
from hetpipe.deploy.yaml_text import to_yaml

#: Longest interval of health checks: dependants of a container start only after its first one.
_INTERVAL_SECONDS = 10

_HEADING = "# Made by `hetpipe render compose`. Needs Compose v2, or docker-compose from 1.29 on.\n"


def compose_file(deployment: Deployment, submission: Container | None = None) -> str:
    """The text of the file.

    Args:
        deployment: the containers.
        submission: the container that submits the job, under the profile `submit`.
    """
    containers = (*deployment.containers, *(() if submission is None else (submission,)))
    project = deployment.project
    value = {
        "services": {container.name: _service(project, container) for container in containers},
        "networks": {"default": {"name": project, "labels": {labels.PROJECT: project}}},
    }
    return _HEADING + to_yaml(value)


def _service(project: str, container: Container) -> dict[str, Any]:
    service: dict[str, Any] = {
        "image": container.image,
        "container_name": labels.full_name(project, container.name),
        "hostname": container.name,
        "entrypoint": [container.command[0]],
        "command": _escaped(container.command[1:]),
        "user": container.user,
        "labels": labels.labels_of(project, container),
        # Without a value Compose takes that of its own environment, so that the file contains none.
        "environment": {**dict.fromkeys(container.passed_environment), **dict(container.environment)},
        "init": True,
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "pids_limit": MOST_PROCESSES,
        "shm_size": container.shm_bytes,
        "stop_grace_period": f"{STOP_SECONDS}s",
        "tmpfs": [f"{path}:size={size},mode=1777" for path, size in container.scratch],
        "volumes": [
            {"type": "bind", "source": mount.source, "target": mount.target, "read_only": mount.read_only}
            for mount in container.mounts
        ],
    }
    return {**service, **_optional(container)}


def _optional(container: Container) -> Mapping[str, Any]:
    """The optional keys of a container."""
    found: dict[str, Any] = {}
    if container.working_dir:
        found["working_dir"] = container.working_dir
    if container.role is Role.SUBMIT:
        found["profiles"] = [str(Role.SUBMIT)]
    if container.restarts:
        found["restart"] = RESTART_POLICY
    if container.depends_on:
        found["depends_on"] = {name: {"condition": "service_healthy"} for name in container.depends_on}
    if container.published is not None:
        found["ports"] = [f"127.0.0.1:{container.published}:{GRPC_PORT}"]
    if container.gpus:
        device = {"driver": "nvidia", "device_ids": list(container.gpus), "capabilities": ["gpu"]}
        found["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    health = container.health
    if health is not None:
        found["healthcheck"] = {
            "test": ["CMD", *_escaped(health.command)],
            "interval": f"{min(_INTERVAL_SECONDS, health.interval_seconds)}s",
            "timeout": f"{health.timeout_seconds}s",
            "retries": health.retries,
            "start_period": f"{health.start_seconds}s",
        }
    return found


def _escaped(words: Iterable[str]) -> list[str]:
    """Escape dollar signs, at which Compose substitutes variables."""
    return [word.replace("$", "$$") for word in words]
