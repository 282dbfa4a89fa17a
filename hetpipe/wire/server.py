"""A sync gRPC server with the features that every hetpipe service needs.

Callers are identified by their certificates and checked against `wire.calls` and `wire.limits`, and errors become
statuses (all in `wire.guard`); the port is bound exclusively, messages and concurrent calls are bounded, keepalive
pings are answered, the standard health service is included, and `stop` ends the streams first, so that it returns
quickly.

A call occupies a thread of the pool while it runs (`wire.threads`). Calls that wait must therefore be streams bounded
by `wire.watchers`, with fewer watchers than threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import UserError
from hetpipe.wire.call import Rule
from hetpipe.wire.calls import ACCESS
from hetpipe.wire.channel import MAX_MESSAGE_BYTES, Options, keepalive_options, message_options, silence_options
from hetpipe.wire.guard import Guard
from hetpipe.wire.limits import Limits
from hetpipe.wire.listening import listen, refuse_plaintext_beyond_loopback
from hetpipe.wire.probes import LIVE, Probes
from hetpipe.wire.threads import ServerThreads
from hetpipe.wire.tls import Tls

#: Minimum interval between pings of one client that the server accepts, in milliseconds; below every client's own.
_MIN_PING_INTERVAL_MS = 2_000

#: Maximum concurrent calls per connection; further ones wait on the client's side. Well above `Limits.calls_per_peer`.
MAX_STREAMS_PER_CONNECTION = 128

#: Seconds between two checks for calls whose peers have stopped sending.
_POLL_SECONDS = 1.0

#: Default limit on running and queued calls.
MAX_CONCURRENT_CALLS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Address and capacity of a server."""

    host: str = "127.0.0.1"
    """Interface to listen on; `0.0.0.0` for all."""
    port: int = 0
    """0 lets the system choose one."""
    num_threads: int = 16
    """Calls that run at the same time; further ones queue."""
    max_concurrent_calls: int = MAX_CONCURRENT_CALLS
    """Running and queued calls; further ones are rejected."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    reflection: bool = False
    """Enables gRPC server reflection; requires the extra `reflection`."""
    tls: Tls | None = None
    """Certificates to serve with and to trust. None: plaintext, and anonymous callers may make every call."""
    insecure: bool = False
    """Allow listening beyond loopback without TLS."""
    health_port: int | None = None
    """Port of a second, plaintext server with only health checks, for probes without a certificate; 0: any."""
    access: Mapping[str, Rule] = field(default_factory=lambda: ACCESS)
    """The access table, with TLS."""
    limits: Limits = field(default_factory=Limits)
    """Limits of one peer."""


class Server:
    """A gRPC server. Add services, `start` it, and `stop` it once; every method is called from one thread."""

    def __init__(self, config: ServerConfig, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Set up the server; `start` opens the port. `clock` measures how long peers take to send."""
        self._config = config
        self._threads = ServerThreads(config.num_threads, clock)
        access = None if config.tls is None else config.access
        self._guard = Guard(access, config.limits, threads=self._threads, clock=clock)
        self._stopped = threading.Event()
        self._services: list[str] = []
        self._on_stop: list[Callable[[], None]] = []
        self._health = health.HealthServicer()
        options: Options = [
            *message_options(config.max_message_bytes),
            *keepalive_options(),
            *silence_options(),
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
            ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
        ]
        self._server = grpc.server(
            cast("Any", self._threads),
            interceptors=[self._guard],
            options=options,
            maximum_concurrent_rpcs=config.max_concurrent_calls,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        port = config.health_port
        self._probes = None if port is None else Probes(config.host, port, self._health)
        #: `HOST:PORT` once started; the host is the interface and may be a wildcard.
        self.address = ""
        #: Likewise for the probe port, if any.
        self.health_address = ""

    def add(self, service: str, handler: grpc.GenericRpcHandler) -> None:
        """Register the handlers of `service` (its full name). Before `start` only."""
        self._services.append(service)
        self._server.add_generic_rpc_handlers((handler,))

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Register `callback` to be called when `stop` begins; it must end its streams and return quickly."""
        self._on_stop.append(callback)

    def stand_by(self) -> None:
        """Report "not serving" on the probe port, if any. Before `start` only.

        Raises:
            PortInUse: its address is in use.
            UserError: the host is unknown or not this machine's.
        """
        self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        self._health.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
        self._start_probes()

    def start(self) -> str:
        """Open the port and serve.

        Returns:
            The address, `HOST:PORT`, with the port chosen by the system.

        Raises:
            PortInUse: the address is in use.
            UserError: the host is unknown or not this machine's, reflection is enabled but not installed, or a port
                without TLS is reachable by others and `insecure` is not set.
        """
        config = self._config
        if config.tls is None and not config.insecure:
            refuse_plaintext_beyond_loopback(config.host)
        if config.reflection:
            self._enable_reflection()
        credentials = None if config.tls is None else config.tls.server_credentials()
        self.address = listen(self._server, config.host, config.port, credentials)
        self._start_probes()
        for name in ["", LIVE, *self._services]:
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._server.start()
        threading.Thread(target=self._end_stalled_uploads, name="uploads", daemon=True).start()
        return self.address

    def stop(self, *, grace_seconds: float = 1.0) -> None:
        """Reject new calls, end the streams, let running calls finish within the grace period, and free the port."""
        self._stopped.set()
        self._health.enter_graceful_shutdown()
        for callback in self._on_stop:
            callback()
        self._server.stop(grace_seconds).wait()
        # gRPC does not shut the pool down. A handler still running after the end of its call finishes on its own.
        self._threads.shutdown()
        if self._probes is not None:
            self._probes.stop()

    def in_flight(self, context: grpc.ServicerContext, num_bytes: int) -> AbstractContextManager[None]:
        """For handlers: count `num_bytes` announced by the peer of `context` while they are transferred.

        Raises:
            Busy: on entry, if too many bytes are in flight.
        """
        return self._guard.in_flight(context, num_bytes)

    def _end_stalled_uploads(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            self._guard.end_overdue()

    def _start_probes(self) -> None:
        if self._probes is not None and not self.health_address:
            self.health_address = self._probes.start()

    def _enable_reflection(self) -> None:
        try:
            from grpc_reflection.v1alpha import reflection
        except ImportError as error:
            raise UserError("reflection needs the extra `reflection`: pip install 'hetpipe[reflection]'") from error
        names = [*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)
