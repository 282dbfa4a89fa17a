"""The services of a run on this machine: one coordinator, N parameter servers, one agent.

They are the same programs that a cluster is made of, started here and ended with the run. Order: whoever is used by
another starts first and ends last, so the coordinator starts first; at the end the agent goes first, with its stages,
then the parameter servers, then the coordinator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from hetpipe.cli.service import Service, ServiceDeath, ServiceSpec, end_services
from hetpipe.deploy.topology import SERVICE_ENVIRONMENT

#: How long the coordinator may take to be ready; the others are waited for by the coordinator, which tells of it.
READY_SECONDS = 30.0

#: From SIGTERM to SIGKILL.
GRACE_SECONDS = 3.0


def _module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """What the services run, without the arguments the supervisor adds."""

    coordinator: Sequence[str] = field(default_factory=lambda: _module("services.coordinator"))
    parameter_server: Sequence[str] = field(default_factory=lambda: _module("services.parameter_server"))
    agent: Sequence[str] = field(default_factory=lambda: _module("services.agent"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What to start."""

    num_shards: int
    num_cpu_devices: int | None
    """CPU devices that the agent declares; None: it offers the CUDA devices it finds."""
    logs: Path
    programs: Programs = field(default_factory=Programs)


class Supervisor:
    """Keeps the services of one run. Use it in a `with` block, which ends them however it is left.

    Belongs to one thread (`Service`); `on_death` is called from others.
    """

    def __init__(
        self, services: Services, *, environment: Mapping[str, str], on_death: Callable[[ServiceDeath], None]
    ) -> None:
        """Prepare; nothing is started.

        Args:
            services: what to start.
            environment: the services', before the additions of `SERVICE_ENVIRONMENT`.
            on_death: hears of a service that ends unasked.
        """
        self._services = services
        self._environment = {**environment, **SERVICE_ENVIRONMENT}
        self._on_death = on_death
        self._coordinator: Service | None = None
        self._parameter_servers: list[Service] = []
        self._agent: Service | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(grace_seconds=GRACE_SECONDS)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by the services' keys."""
        return {service.spec.key: service.pid for group in self._groups() for service in group}

    def start(self) -> str:
        """Start all services; the coordinator's address, which answers. The others register as they come up.

        Raises:
            JobFailed, DeadlineExceeded: one cannot be started, or the coordinator does not become ready.
        """
        programs = self._services.programs
        self._coordinator = self._start("coordinator", "the coordinator", [*programs.coordinator, "--store", "memory"])
        address = self._coordinator.wait_ready(deadline_seconds=READY_SECONDS)
        to_coordinator = ["--coordinator", address]
        for index in range(self._services.num_shards):
            command = [*programs.parameter_server, *to_coordinator, "--index", str(index)]
            name = f"parameter-server-{index}"
            self._parameter_servers.append(self._start(name, f"parameter server {index}", command))
        devices = self._services.num_cpu_devices
        declared = [] if devices is None else ["--cpu-devices", str(devices)]
        self._agent = self._start("agent", "the agent", [*programs.agent, *to_coordinator, *declared])
        return address

    def stop(self, *, grace_seconds: float) -> None:
        """End all services in the stated order; returns when they are gone. Idempotent."""
        for group in self._groups():
            end_services(group, grace_seconds=grace_seconds)

    def _groups(self) -> list[list[Service]]:
        """The services that are there, in the order in which they are ended."""
        agent = [] if self._agent is None else [self._agent]
        coordinator = [] if self._coordinator is None else [self._coordinator]
        return [agent, self._parameter_servers, coordinator]

    def _start(self, key: str, title: str, command: Sequence[str]) -> Service:
        spec = ServiceSpec(key=key, title=title, command=command, logs=self._services.logs)
        return Service(spec, environment=self._environment, on_death=self._on_death)
