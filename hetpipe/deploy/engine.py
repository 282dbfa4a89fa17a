"""Execution of a deployment by a Docker engine: create, start, list and remove objects with the project's label."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from itertools import groupby
from typing import Any

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import DeviceRequest, EndpointConfig, Healthcheck, LogConfig, Ulimit
from docker.types import Mount as DockerMount
from requests import RequestException

from hetpipe.clock import Clock
from hetpipe.deploy import labels
from hetpipe.deploy.docker_port import ContainerPort, DockerPort
from hetpipe.deploy.topology import GRPC_PORT, MOST_PROCESSES, RESTART_POLICY, STOP_SECONDS, Container, Deployment, Role
from hetpipe.errors import DeadlineExceeded, HetpipeError, JobFailed, PeerUnreachable, UserError
from hetpipe.values.commands import last_words

#: Timeout for a container's readiness, mostly for the first import of torch from a cold disk.
READY_SECONDS = 120.0

#: Polling interval of a container, in seconds.
_POLL_SECONDS = 0.2

#: Timeout for an answer of the engine.
_ANSWER_SECONDS = 120

#: Order of termination: dependants before their dependencies.
_ENDING_ORDER = (Role.SUBMIT, Role.AGENT, Role.PARAMETER_SERVER, Role.COORDINATOR, Role.STORE)

_NANOSECONDS = 1_000_000_000

#: The minimum API of the engine; the SDK negotiates the version.
_API = "1.41"

_ENDED = frozenset({"exited", "dead"})

#: Maximum size of a log file; a container has at most two.
_LOG_OPTIONS = {"max-size": "50m", "max-file": "2"}


@dataclass(frozen=True, slots=True)
class ContainerState:
    """The state of a container."""

    name: str
    role: str
    state: str
    """`running`, `exited (1)`, …"""
    health: str
    """`healthy`, `starting`, `unhealthy`; empty without a health check."""
    address: str
    """`HOST:PORT` of this machine that is mapped to it; empty without one."""
    devices: str
    """Its GPUs."""


def open_client(environment: Mapping[str, str]) -> DockerPort:
    """Connect to the Docker engine named by the environment, by default this machine's.

    Raises:
        UserError: no engine answers.
    """
    where = environment.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    try:
        client: Any = docker.from_env(environment=dict(environment), timeout=_ANSWER_SECONDS)
        client.ping()
    except DockerException as error:
        if "PermissionError" in str(error):
            raise UserError(
                f"the Docker engine at {where} denies access; join its group (usermod -aG docker NAME, then log "
                "in again), or run hetpipe as a user with access"
            ) from error
        raise UserError(
            f"no Docker engine answers at {where}; start docker, or set DOCKER_HOST; without one `hetpipe train` does "
            "the same in plain processes, and `hetpipe render compose` writes a file for a machine that has one"
        ) from error
    opened: DockerPort = client
    return opened


@contextmanager
def answering() -> Iterator[None]:
    """Convert connection errors of the SDK into our own errors.

    Raises:
        PeerUnreachable: the engine does not answer any more.
        JobFailed: an unexpected refusal.
    """
    try:
        yield
    except APIError as error:
        raise JobFailed(f"the Docker engine refused: {_explanation(error)}") from error
    except RequestException as error:
        raise PeerUnreachable(f"the Docker engine does not answer any more ({type(error).__name__})") from error


class Engine:
    """A Docker engine. Not thread-safe."""

    def __init__(
        self,
        client: DockerPort,
        *,
        clock: Clock,
        say: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Wrap a client.

        Args:
            client: connected.
            clock: for deadlines.
            say: called with each step, as a sentence.
            environment: of the caller; the source of the variables named in containers' descriptions.
        """
        self._client = client
        self._clock = clock
        self._say = say
        self._environment = environment or {}

    def check(self, deployment: Deployment) -> None:
        """Reject a deployment that cannot start, before anything is created.

        Raises:
            UserError: the project is already up, or an image is missing.
        """
        project = deployment.project
        if self.containers(project):
            raise UserError(
                f"project {project} is already up; end it with {_command('down', project)}, or name another "
                "with --project"
            )
        for image, role in {container.image: container.role for container in deployment.containers}.items():
            try:
                self._client.images.get(image)
            except ImageNotFound:
                raise UserError(_no_image(image, role)) from None

    def start(self, deployment: Deployment) -> None:
        """Start all containers, in order, and wait until they are ready. On failure the started containers are kept.

        Once all are ready, the engine restarts containers that end unexpectedly; before, such an end is an error.

        Raises:
            UserError: the machine lacks something; the message names the fix.
            JobFailed: a container cannot be started, or ended before it was ready.
            DeadlineExceeded: a container is not ready in time.
        """
        project = deployment.project
        self._client.networks.create(project, driver="bridge", check_duplicate=True, labels={labels.PROJECT: project})
        started: dict[str, ContainerPort] = {}
        described = {container.name: container for container in deployment.containers}
        ready: set[str] = set()
        for container in deployment.containers:
            for name in container.depends_on:
                if name not in ready:
                    self._wait_ready(started[name], described[name], waiting=container.name)
                    ready.add(name)
            started[container.name] = self._start(project, container)
        for name, container in described.items():
            if name not in ready:
                self._wait_ready(started[name], container, waiting="the job")
            if container.restarts:
                started[name].update(restart_policy={"Name": RESTART_POLICY})

    def remove(self, project: str) -> tuple[str, ...]:
        """End and remove all objects with the project's label; returns their names. Idempotent.

        Raises:
            JobFailed: an object could not be removed; the message names it.
        """
        removed = []
        containers = sorted(self.containers(project), key=_ending_place)
        for _, group in groupby(containers, key=_ending_place):
            removed += self._end(tuple(group))
        for network in self._networks(project):
            _unless_gone(network.remove)
            removed.append(network.name)
        left = [c.name for c in self.containers(project)] + [n.name for n in self._networks(project)]
        if left:
            raise JobFailed(f"{', '.join(left)} could not be removed; inspect with: docker inspect {left[0]}")
        return tuple(removed)

    def states(self, project: str) -> tuple[ContainerState, ...]:
        """The states of the project's containers, by name."""
        return tuple(sorted(map(_state, self.containers(project)), key=lambda state: state.name))

    def containers(self, project: str) -> Sequence[ContainerPort]:
        """The project's containers, ended ones included."""
        return self._client.containers.list(all=True, filters={"label": f"{labels.PROJECT}={project}"})

    def find(self, project: str, wanted: Sequence[str]) -> tuple[ContainerPort, ...]:
        """The project's containers with these names or roles, or all, by name.

        Raises:
            UserError: the project has no containers, or none of a given name.
        """
        found = sorted(self.containers(project), key=lambda container: container.name)
        if not found:
            raise UserError(f"project {project} is not up; start it with {_command('up', project)}")
        known = {container: _names(container) for container in found}
        for name in wanted:
            if not any(name in names for names in known.values()):
                all_names = sorted({container.labels.get(labels.NAME, container.name) for container in found})
                raise UserError(f"project {project} has no {name}; it has {', '.join(all_names)}")
        return tuple(c for c, names in known.items() if not wanted or names & set(wanted))

    def _networks(self, project: str) -> Sequence[Any]:
        return self._client.networks.list(filters={"label": f"{labels.PROJECT}={project}"})

    def _start(self, project: str, container: Container) -> ContainerPort:
        self._say(f"starting {container.name}")
        try:
            made = self._client.containers.create(
                container.image, list(container.command[1:]), **create_options(project, container, self._environment)
            )
            made.start()
        except APIError as error:
            raise _refusal(container, error) from error
        return made

    def _wait_ready(self, made: ContainerPort, container: Container, *, waiting: str) -> None:
        deadline = self._clock.monotonic() + READY_SECONDS
        expected = container.ready.encode()
        while expected not in made.logs(stdout=True, stderr=False, tail=100):
            made.reload()
            if made.status in _ENDED:
                code = made.attrs["State"]["ExitCode"]
                raise JobFailed(
                    f"{container.name} ended with exit status {code} before it was ready{_last_words(made)}"
                )
            if self._clock.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{waiting} waits for {container.name}, which was not ready within {READY_SECONDS:.0f} s"
                    f"{_last_words(made)}"
                )
            self._clock.sleep(_POLL_SECONDS)

    def _end(self, group: Sequence[ContainerPort]) -> list[str]:
        """Send SIGTERM to all, and SIGKILL to the rest after the grace period; then remove them."""
        for container in group:
            if container.status == "running":
                _unless_gone(partial(container.kill, "SIGTERM"))
        deadline = self._clock.monotonic() + STOP_SECONDS
        for container in group:
            while self._is_running(container) and self._clock.monotonic() < deadline:
                self._clock.sleep(_POLL_SECONDS)
            _unless_gone(partial(container.remove, v=True, force=True))
        return [container.name for container in group]

    def _is_running(self, container: ContainerPort) -> bool:
        return _unless_gone(container.reload) and container.status == "running"


def create_options(project: str, container: Container, environment: Mapping[str, str]) -> dict[str, Any]:
    """The SDK's options of a container, beside its image and the arguments of its program.

    Args:
        project: name of the project.
        container: its description.
        environment: the source of the variables that are passed on.
    """
    passed = {name: environment[name] for name in container.passed_environment if name in environment}
    health = container.health
    return {
        "name": labels.full_name(project, container.name),
        "hostname": container.name,
        "labels": labels.labels_of(project, container),
        "entrypoint": [container.command[0]],
        "environment": {**passed, **dict(container.environment)},
        "working_dir": container.working_dir or None,
        "user": container.user,
        "network": project,
        "networking_config": {project: EndpointConfig(_API, aliases=[container.name])},
        "ports": {f"{GRPC_PORT}/tcp": ("127.0.0.1", container.published)} if container.published else {},
        "mounts": [DockerMount(m.target, m.source, type="bind", read_only=m.read_only) for m in container.mounts],
        "tmpfs": {path: f"size={size},mode=1777,nosuid,nodev" for path, size in container.scratch},
        "device_requests": [DeviceRequest(device_ids=list(container.gpus), capabilities=[["gpu"]])]
        if container.gpus
        else [],
        "healthcheck": None
        if health is None
        else Healthcheck(
            test=["CMD", *health.command],
            interval=health.interval_seconds * _NANOSECONDS,
            timeout=health.timeout_seconds * _NANOSECONDS,
            retries=health.retries,
            start_period=health.start_seconds * _NANOSECONDS,
        ),
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "init": True,
        "pids_limit": MOST_PROCESSES,
        "shm_size": container.shm_bytes,
        "ulimits": [Ulimit(name="core", soft=0, hard=0)],
        "log_config": LogConfig(type=LogConfig.types.JSON, config=_LOG_OPTIONS),
    }


def _ending_place(container: ContainerPort) -> int:
    role = container.labels.get(labels.ROLE, "")
    return _ENDING_ORDER.index(Role(role)) if role in set(Role) else 0


def _unless_gone(call: Callable[[], object]) -> bool:
    """Run an operation; False if its object no longer exists."""
    try:
        call()
    except NotFound:
        return False
    except APIError as error:
        # It has just ended, or is being removed concurrently: the final listing shows whether it is gone.
        if error.status_code == HTTPStatus.CONFLICT:
            return False
        raise
    return True


def _names(container: ContainerPort) -> set[str]:
    known = container.labels
    return {container.name, known.get(labels.NAME, ""), known.get(labels.ROLE, "")} - {""}


def _state(container: ContainerPort) -> ContainerState:
    status = container.attrs.get("State", {})
    state = container.status
    if state in _ENDED:
        state = f"{state} ({status.get('ExitCode')})"
    published = (container.attrs.get("NetworkSettings", {}).get("Ports") or {}).values()
    places = [place for places in published for place in places or ()]
    return ContainerState(
        name=container.labels.get(labels.NAME, container.name),
        role=container.labels.get(labels.ROLE, ""),
        state=state,
        health=status.get("Health", {}).get("Status", ""),
        address=", ".join(f"{place['HostIp']}:{place['HostPort']}" for place in places),
        devices=container.labels.get(labels.DEVICES, ""),
    )


def _last_words(container: ContainerPort) -> str:
    """The last line of its output, as the end of a sentence."""
    lines = container.logs(stdout=False, stderr=True, tail=5).decode(errors="replace").splitlines()
    words = last_words(lines)
    return f"; its last output: {words}" if words else ""


def _explanation(error: APIError) -> str:
    return str(error.explanation or error).strip().rstrip(".")


def _refusal(container: Container, error: APIError) -> HetpipeError:
    explanation = _explanation(error)
    if "device driver" in explanation or "nvidia" in explanation.lower():
        return UserError(
            f"{container.name} needs GPUs, and this Docker engine does not support them ({explanation}); install the "
            "NVIDIA container toolkit, then nvidia-ctk runtime configure --runtime=docker, and restart docker; or give "
            "--cpu-devices N"
        )
    if "port is already allocated" in explanation or "address already in use" in explanation:
        return UserError(f"port {container.published} of this machine is in use; give another with --port")
    return JobFailed(f"{container.name} could not be started: {explanation}")


def _no_image(image: str, role: Role) -> str:
    if role is Role.STORE:
        return f"there is no image {image}; get it with: docker pull {image}, or name another with --store-image"
    target = "cuda" if image.endswith("cuda") else "cpu"
    return (
        f"there is no image {image}; build it in hetpipe's checkout: docker build --target {target} --tag {image} ."
        ", or name another with --image"
    )


def _command(name: str, project: str) -> str:
    return f"`hetpipe {name}{'' if project == labels.DEFAULT_PROJECT else f' --project {project}'}`"
