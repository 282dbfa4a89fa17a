"""A Docker engine that keeps containers in memory and has the SDK's methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from docker.errors import APIError, ImageNotFound, NotFound
from requests import Response

READY = b'{"role": "any", "address": "x:1", "pid": 1}\n'


def api_error(explanation: str, status: int = 500) -> APIError:
    """What the engine answers when it refuses."""
    response = Response()
    response.status_code = status
    return APIError("refused", response=response, explanation=explanation)


class FakeContainer:
    """`ContainerPort`. Ready and running once started, unless told otherwise."""

    def __init__(self, docker: FakeDocker, image: str, command: Sequence[str], options: Mapping[str, Any]) -> None:
        self._docker = docker
        self.image = image
        self.command = list(command)
        self.options = options
        self.name: str = options["name"]
        self.labels: Mapping[str, str] = options["labels"]
        self.status = "created"
        self.exit_code = 0
        self.stdout = b""
        self.stderr = b"line 1\nline 2\n"
        self.signals: list[str] = []
        #: Empty: it stays ended.
        self.restart_policy = ""
        #: Ends by itself when asked to.
        self.ends = True
        #: What `remove` answers with, once.
        self.refuses: APIError | None = None

    @property
    def attrs(self) -> Mapping[str, Any]:
        published = self.options.get("ports") or {}
        ports = {port: [{"HostIp": host, "HostPort": str(number)}] for port, (host, number) in published.items()}
        return {
            "State": {"ExitCode": self.exit_code, "Health": {"Status": "healthy"}},
            "NetworkSettings": {"Ports": {"7400/tcp": None, **ports}},
        }

    def reload(self) -> None:
        if self not in self._docker.made:
            raise NotFound("gone")

    def start(self) -> None:
        self._docker.happened.append(f"start {self.name}")
        self._docker.on_start(self)
        if self.status == "created":
            self.status, self.stdout = "running", READY

    def update(self, *, restart_policy: Mapping[str, str]) -> None:
        self.restart_policy = restart_policy["Name"]

    def kill(self, signal: str) -> None:
        self.signals.append(signal)
        self._docker.happened.append(f"{signal} {self.name}")
        if self.ends:
            self.status = "exited"

    def remove(self, *, v: bool, force: bool) -> None:
        self.reload()
        if self.refuses is not None:
            raise self.refuses
        self._docker.happened.append(f"remove {self.name}")
        self._docker.made.remove(self)

    def logs(self, *, stream: bool = False, stdout: bool = True, stderr: bool = True, **_: Any) -> Any:
        written = (self.stdout if stdout else b"") + (self.stderr if stderr else b"")
        return self._pieces(written) if stream else written

    def _pieces(self, written: bytes) -> Iterator[bytes]:
        """In pieces that end anywhere."""
        for begin in range(0, len(written), 5):
            yield written[begin : begin + 5]


@dataclass
class FakeNetwork:
    """`NetworkPort`."""

    docker: FakeDocker
    name: str
    options: Mapping[str, Any]

    def remove(self) -> None:
        self.docker.happened.append(f"remove network {self.name}")
        self.docker.nets.remove(self)


@dataclass
class FakeDocker:
    """`DockerPort`; it is its own collection of everything."""

    images_there: set[str] | None = None
    """None: all."""
    on_start: Callable[[FakeContainer], None] = lambda _: None
    made: list[FakeContainer] = field(default_factory=list)
    nets: list[FakeNetwork] = field(default_factory=list)
    happened: list[str] = field(default_factory=list)
    closed: bool = False

    @property
    def containers(self) -> _Containers:
        return _Containers(self)

    @property
    def networks(self) -> _Networks:
        return _Networks(self)

    @property
    def images(self) -> FakeDocker:
        return self

    def get(self, name: str) -> object:
        if self.images_there is not None and name not in self.images_there:
            raise ImageNotFound("no such image")
        return object()

    def close(self) -> None:
        self.closed = True

    def named(self, name: str) -> FakeContainer:
        return next(container for container in self.made if container.name == name)


@dataclass
class _Containers:
    docker: FakeDocker

    def create(self, image: str, command: Sequence[str], **options: Any) -> FakeContainer:
        made = FakeContainer(self.docker, image, command, options)
        self.docker.made.append(made)
        return made

    def list(self, *, all: bool, filters: Mapping[str, str]) -> Sequence[FakeContainer]:  # noqa: A002 - the SDK's word
        assert all, "ended containers count, too"
        return [container for container in self.docker.made if _has(container.labels, filters)]


@dataclass
class _Networks:
    docker: FakeDocker

    def create(self, name: str, **options: Any) -> FakeNetwork:
        made = FakeNetwork(self.docker, name, options)
        self.docker.nets.append(made)
        return made

    def list(self, *, filters: Mapping[str, str]) -> Sequence[FakeNetwork]:
        return [network for network in self.docker.nets if _has(network.options["labels"], filters)]


def _has(labels: Mapping[str, str], filters: Mapping[str, str]) -> bool:
    name, _, value = filters["label"].partition("=")
    return labels.get(name) == value
