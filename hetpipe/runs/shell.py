"""The external dependencies of commands as a value, replaced by fakes in tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TextIO

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.deploy.docker_port import DockerPort
from hetpipe.forking.environment import SERVICE_ENVIRONMENT
from hetpipe.forking.fork_server import ForkServer, own_fork_server
from hetpipe.runs.supervisor import Programs
from hetpipe.server.agent.children import Programs as ChildPrograms
from hetpipe.values.events import NumberedEvent
from hetpipe.values.ids import JobId
from hetpipe.values.run import ClockSnapshot
from hetpipe.wire.call import ReplyT, RequestT, Unary
from hetpipe.wire.coordinator_client import CoordinatorClient
from hetpipe.wire.tls import TLS_VARIABLE, Tls


class CoordinatorPort(Protocol):
    """The interface of a `CoordinatorClient` for commands; `wire.calls` has the contracts and errors."""

    def invoke(self, call: Unary[RequestT, ReplyT], request: RequestT) -> ReplyT:
        """Make a call."""
        ...

    def watch_job(self, job_id: JobId | None = None, *, after: int = 0) -> Iterator[NumberedEvent]:
        """The events of a job, until its last."""
        ...

    def watch_clocks(self, job_id: JobId | None = None) -> Iterator[ClockSnapshot]:
        """The clocks of a job, after every change."""
        ...

    def close(self) -> None:
        """End all calls."""
        ...


def _environment() -> Mapping[str, str]:
    return dict(os.environ)


def _fork_server() -> ForkServer:
    return own_fork_server({**os.environ, **SERVICE_ENVIRONMENT})


def _open_docker(environment: Mapping[str, str]) -> DockerPort:
    from hetpipe.deploy.engine import open_client  # most commands do not need the docker SDK

    return open_client(environment)


def _tls_folder() -> Path | None:
    folder = os.environ.get(TLS_VARIABLE)
    return Path(folder) if folder else None


def _open_coordinator(address: str, tls: Tls | None) -> CoordinatorPort:
    return CoordinatorClient(address, tls=tls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shell:
    """The environment of a command."""

    clock: Clock = SYSTEM_CLOCK
    environment: Mapping[str, str] = field(default_factory=_environment)
    current: Path = field(default_factory=Path.cwd)
    """The folder from which user code is imported; displayed paths are relative to it."""
    tls: Path | None = field(default_factory=_tls_folder)
    """Folder with this command's certificates; None: plaintext."""
    open_coordinator: Callable[[str, Tls | None], CoordinatorPort] = _open_coordinator
    """Creates a client of the coordinator at `HOST:PORT`."""
    programs: Programs = field(default_factory=Programs)
    """Programs of the services of a local run."""
    fork_server: ForkServer = field(default_factory=_fork_server)
    """Launches the processes of a local run."""
    inspection: Sequence[str] = ChildPrograms().inspection
    """Program of the inspection of a local run; `--report-fd N` is added."""
    open_docker: Callable[[Mapping[str, str]], DockerPort] = _open_docker
    """Opens the Docker engine named by the environment."""

    def is_screen(self, stream: TextIO) -> bool:
        """Whether `stream` is a terminal on which a live display can be drawn."""
        return stream.isatty() and self.environment.get("TERM") != "dumb"

    def connect(self, address: str) -> CoordinatorPort:
        """Create a client of the coordinator at `HOST:PORT`, which connects at the first call.

        Raises:
            UserError: the address or the folder of certificates is unusable.
        """
        return self.open_coordinator(address, None if self.tls is None else Tls(self.tls))

    def alone(self) -> Shell:
        """The same environment for a local run, whose services listen on loopback without TLS."""
        environment = {name: value for name, value in self.environment.items() if name != TLS_VARIABLE}
        return replace(self, tls=None, environment=environment)
