"""The services of a run: one coordinator, N parameter servers, and one agent, or one on each of several hosts.

They are the programs of a cluster, started here and ended with the run. Dependencies start first and end last: the
coordinator starts first; at the end the agent is ended first, with its stages, then the parameter servers, then the
coordinator.

A service that ends unexpectedly is restarted with the same arguments and port, as decided by `runs.restarts`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import HetpipeError, JobFailed
from hetpipe.forking.environment import SERVICE_ENVIRONMENT
from hetpipe.forking.process import Starter, spawn
from hetpipe.observe.log import get_logger
from hetpipe.phases import LAUNCH
from hetpipe.runs.remote import RemoteShell
from hetpipe.runs.restarts import RULES, GiveUp, RestartRules, decide
from hetpipe.runs.service import Service, ServiceDeath, ServiceSpec, end_services
from hetpipe.server.agent.devices import DeviceOffer
from hetpipe.values.addresses import split_address

_log = get_logger(__name__)

#: From SIGTERM to SIGKILL.
GRACE_SECONDS = 3.0

#: Maximum number of recorded deaths of a service; the backoff is at its maximum before.
_MAX_DEATHS = 16

#: The shell's exit status for a program that cannot be started.
_NOT_STARTED = 127


def _serve(service: str) -> tuple[str, ...]:
    return (*LAUNCH, "hetpipe", "serve", service)


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The programs of the services, without the arguments that the supervisor adds."""

    coordinator: Sequence[str] = field(default_factory=lambda: _serve("coordinator"))
    parameter_server: Sequence[str] = field(default_factory=lambda: _serve("parameter-server"))
    agent: Sequence[str] = field(default_factory=lambda: _serve("agent"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteAgent:
    """An agent on another machine."""

    shell: RemoteShell
    command: Sequence[str]
    """Its program, without the arguments that the supervisor adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The services to start."""

    num_shards: int
    devices: DeviceOffer
    logs: Path
    state: Path
    """The parent folder of the parameter servers' persistent state."""
    programs: Programs = field(default_factory=Programs)
    shard_options: Callable[[int], Sequence[str]] = lambda _index: ()
    """Further arguments of each parameter server."""
    agents: Sequence[RemoteAgent] = ()
    """Agents on other machines, instead of the one on this machine."""
    restart_rules: RestartRules = RULES
    patience_seconds: float = 60.0
    """Timeouts: of silence before one is ready, and of missing resources of the job once all are."""


@dataclass(frozen=True, slots=True)
class ServiceRestart:
    """The death and restart of a service."""

    key: str
    """Key of the service (`ServiceSpec`)."""
    death: ServiceDeath
    pid: int
    """Id of the new process."""

    def __str__(self) -> str:
        """One sentence."""
        return f"{self.death}; it was restarted (pid {self.pid})"


class _Rank(IntEnum):
    """The order in which services start; they end in reverse."""

    COORDINATOR = 0
    PARAMETER_SERVER = 1
    AGENT = 2


@dataclass(slots=True)
class _Kept:
    """A supervised service."""

    rank: _Rank
    spec: ServiceSpec
    service: Service
    #: Its `HOST:PORT`; empty before it is known, and without a server.
    address: str = ""
    #: Times of its deaths, in monotonic seconds.
    deaths: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_DEATHS))
    #: Its last death; None before the first.
    death: ServiceDeath | None = None
    #: Time of its restart; None while it runs, and if it is not restarted any more.
    due: float | None = None


class Supervisor:
    """Supervises the services of one run. Use it in a `with` block, which ends them in any case.

    Not thread-safe (`Service`); `on_death` and `on_restart` are called from other threads.
    """

    def __init__(
        self,
        services: Services,
        *,
        environment: Mapping[str, str],
        on_death: Callable[[ServiceDeath], None],
        on_restart: Callable[[ServiceRestart], None],
        starter: Starter = spawn,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Prepare, without starting anything.

        Args:
            services: to start.
            environment: of the services, before the additions of `SERVICE_ENVIRONMENT`.
            on_death: called when a service has ended unexpectedly and is not restarted.
            on_restart: called when one was restarted.
            starter: launches their processes.
            clock: for backoff and timeouts.
        """
        self._services = services
        self._environment = {**environment, **SERVICE_ENVIRONMENT}
        self._on_death = on_death
        self._on_restart = on_restart
        self._starter = starter
        self._clock = clock
        #: Guards the following attributes; notified when a restart is due, and at the end.
        self._changed = threading.Condition(threading.RLock())
        self._kept: dict[str, _Kept] = {}
        self._is_stopping = False
        #: Time since which all services are ready and the job still waits; None otherwise.
        self._lacking_since: float | None = None
        #: Set once all services are started, or failed; `_outcome` is the coordinator's address or the reason.
        self._begun = threading.Event()
        self._outcome: str | HetpipeError = ""
        #: Set once all services are gone, so that their starting thread may end.
        self._over = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="supervisor", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(grace_seconds=GRACE_SECONDS)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by the services' keys, in the order in which they are ended."""
        with self._changed:
            ordered = sorted(self._kept.items(), key=lambda item: -item[1].rank)
            return {key: kept.service.pid for key, kept in ordered}

    def begin(self) -> None:
        """Start all services, in a thread that lives as long as they do."""
        self._keeper.start()

    def start(self) -> str:
        """Start all services; see `begin` and `wait_started`."""
        self.begin()
        return self.wait_started()

    def wait_started(self) -> str:
        """Wait until all services are started and the coordinator is ready; returns its address.

        The others register once they are ready. This is bounded by the timeout for a silent coordinator.

        Raises:
            JobFailed, DeadlineExceeded: one cannot be started, or the coordinator ends or is silent before it is ready.
        """
        self._begun.wait()
        if isinstance(self._outcome, HetpipeError):
            raise self._outcome
        return self._outcome

    def _start_all(self) -> str:
        """Start all services, unless stopped concurrently; returns the coordinator's address.

        Raises:
            As `wait_started`.
        """
        programs = self._services.programs
        coordinator = self._start(
            _Rank.COORDINATOR, "coordinator", "the coordinator", [*programs.coordinator, "--store", "memory"]
        )
        address = coordinator.wait_ready(patience_seconds=self._services.patience_seconds)
        to_coordinator = ["--coordinator", address]
        for index in range(self._services.num_shards):
            state = self._services.state / f"shard-{index}"
            command = [*programs.parameter_server, *to_coordinator, "--index", str(index), "--state", str(state)]
            command += self._services.shard_options(index)
            name = f"parameter-server-{index}"
            self._start(_Rank.PARAMETER_SERVER, name, f"parameter server {index}", command)
        # The run ends with its agents: there is no further barrier at which a worker could leave.
        at_the_end = ["--drain-seconds", "0"]
        for remote in self._services.agents:
            host = remote.shell.host
            command = [*remote.command, *to_coordinator, *at_the_end]
            self._start(_Rank.AGENT, f"agent-{host}", f"the agent on {host}", command, remote.shell)
        if self._services.agents:
            return address
        offer = self._services.devices
        declared = [] if offer.num_cpu_devices is None else ["--cpu-devices", str(offer.num_cpu_devices)]
        if offer.devices_per_gpu > 1:
            declared += ["--devices-per-gpu", str(offer.devices_per_gpu)]
        command = [*programs.agent, *to_coordinator, *declared, *at_the_end]
        self._start(_Rank.AGENT, "agent", "the agent", command)
        return address

    @property
    def awaited(self) -> str:
        """The services that are not ready yet, with their phases; empty when all are."""
        with self._changed:
            return ", ".join(filter(None, (kept.service.awaited for kept in self._kept.values())))

    def given_up(self, *, is_queued: bool) -> str:
        """The reason to stop waiting, as a sentence; empty without one.

        Args:
            is_queued: the job does not have its devices and parameter servers yet.
        """
        patience = self._services.patience_seconds
        with self._changed:
            kept = tuple(self._kept.values())
            silent = [one.service for one in kept if one.due is None and one.service.silent_seconds >= patience]
            if silent:
                return silent[0].silence
            if not is_queued or self.awaited or any(one.due is not None for one in kept):
                self._lacking_since = None
                return ""
            now = self._clock.monotonic()
            if self._lacking_since is None:
                self._lacking_since = now
            lacking = now - self._lacking_since
        if lacking < patience:
            return ""
        return f"all services of this run are ready, but the job has lacked resources of them for {lacking:.0f} s"

    def stop(self, *, grace_seconds: float) -> None:
        """End all services in the stated order; returns when they are gone. Idempotent."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        # No service is started from now on.
        for rank in sorted(_Rank, reverse=True):
            group = [kept.service for kept in self._kept.values() if kept.rank is rank]
            end_services(group, grace_seconds=grace_seconds)
        self._over.set()
        if self._keeper.is_alive():
            self._keeper.join()

    # -- starting ----------------------------------------------------------------------------------------------------

    def _start(
        self, rank: _Rank, key: str, title: str, command: Sequence[str], remote: RemoteShell | None = None
    ) -> Service:
        spec = ServiceSpec(
            key=key,
            title=title,
            command=command,
            logs=self._services.logs,
            starts_processes=rank is _Rank.AGENT,
            remote=remote,
        )
        with self._changed:
            if self._is_stopping:
                raise JobFailed(f"{title} was not started: the run has ended before")
            service = self._service(spec)
            self._kept[key] = _Kept(rank, spec, service)
        return service

    def _service(self, spec: ServiceSpec) -> Service:
        on_death = partial(self._died, spec.key)
        return Service(spec, environment=self._environment, on_death=on_death, starter=self._starter, clock=self._clock)

    def _start_again(self, kept: _Kept) -> None:
        """Restart a service at its previous address. The lock is held."""
        kept.due = None
        if kept.rank is not _Rank.AGENT:
            kept.address = kept.address or kept.service.address
        port = ["--port", str(split_address(kept.address)[1])] if kept.address else []
        spec = replace(kept.spec, command=[*kept.spec.command, *port])
        try:
            kept.service = self._service(spec)
        except JobFailed as error:
            self._died(spec.key, ServiceDeath(spec.title, 0, _NOT_STARTED, str(error)))
            return
        assert kept.death is not None, "only dead services are restarted"
        restart = ServiceRestart(spec.key, kept.death, kept.service.pid)
        _log.warning("service_started_again", service=spec.key, sentence=str(restart))
        self._on_restart(restart)

    # -- on other threads --------------------------------------------------------------------------------------------

    def _died(self, key: str, death: ServiceDeath) -> None:
        """Handle the unexpected end of a service."""
        with self._changed:
            if self._is_stopping:
                return
            kept = self._kept[key]
            kept.death = death
            kept.deaths.append(self._clock.monotonic())
            decision = decide(tuple(kept.deaths), self._services.restart_rules)
            if not isinstance(decision, GiveUp):
                kept.due = decision.at_seconds
                self._changed.notify_all()
                return
        final = replace(death, verdict=decision.reason)
        _log.error("service_given_up", service=key, sentence=str(final))
        self._on_death(final)

    def _keep(self) -> None:
        """Start all services, and restart due ones. This thread lives as long as its processes (`Service`)."""
        try:
            self._outcome = self._start_all()
        except HetpipeError as error:
            self._outcome = error
        finally:
            self._begun.set()
        with self._changed:
            while not self._is_stopping:
                due = [kept for kept in self._kept.values() if kept.due is not None]
                now = self._clock.monotonic()
                for kept in due:
                    if kept.due is not None and kept.due <= now:
                        self._start_again(kept)
                later = [kept.due - now for kept in due if kept.due is not None]
                self._changed.wait(min(later, default=None))
        self._over.wait()
