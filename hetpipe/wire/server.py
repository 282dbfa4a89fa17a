"""A sync gRPC server with everything a hetpipe service needs around its calls.

Callers are known by their certificates and held to `rpc.access` and `rpc.limits`, and errors become statuses (all in
`rpc.guard`); the port is taken exclusively, messages and concurrent calls are bounded, pings are answered, the standard
health service is there, and `stop` ends the streams first, so that it is prompt.

A call holds a thread of the pool while it runs. Calls that wait must therefore be streams bounded by `rpc.watchers`,
with fewer watchers than threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path

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
from hetpipe.wire.tls import Tls

#: Shortest pause between two pings of one client that the server accepts, in milliseconds; below every client's own.
_MIN_PING_INTERVAL_MS = 2_000

#: What the system calls the threads of the pool, of which there are as many as calls were ever under way at once.
POOL_THREADS = "rpc-pool"

#: Calls of one connection at a time; further ones wait on the client's side. Well above `Limits.calls_per_peer`.
MAX_STREAMS_PER_CONNECTION = 128

#: Seconds between two looks for calls whose peers send nothing.
_LOOK_SECONDS = 1.0

#: Running and queued calls of a server that says nothing else.
MAX_CONCURRENT_CALLS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where a server listens and how much it takes on."""

    host: str = "127.0.0.1"
    """Interface to listen on; `0.0.0.0` for all."""
    port: int = 0
    """0 lets the system choose one."""
    num_threads: int = 16
    """Calls that run at the same time; further ones queue."""
    max_concurrent_calls: int = MAX_CONCURRENT_CALLS
    """Running and queued calls; further ones are refused."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    reflection: bool = False
    """Tells clients which services there are; needs the extra `reflection`."""
    tls: Tls | None = None
    """Whose certificate to serve with, and whom to trust. None: plaintext, and everybody may call everything."""
    insecure: bool = False
    """Listen beyond loopback without TLS."""
    health_port: int | None = None
    """A second, plaintext port with nothing but health, for probes that have no certificate; 0: any."""
    access: Mapping[str, Rule] = field(default_factory=lambda: ACCESS)
    """Who may call what, with TLS."""
    limits: Limits = field(default_factory=Limits)
    """What one peer may have at a time."""


class Server:
    """One server. Add services, `start` it, and `stop` it once; every method is called from one thread."""

    def __init__(self, config: ServerConfig, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Prepare; nothing listens yet. `clock` measures how long peers are waited for."""
        self._config = config
        self._guard = Guard(
            None if config.tls is None else config.access, config.limits, num_threads=config.num_threads, clock=clock
        )
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
        self._pool = ThreadPoolExecutor(config.num_threads, POOL_THREADS, initializer=_name_thread)
        self._server = grpc.server(
            self._pool,
            interceptors=[self._guard],
            options=options,
            maximum_concurrent_rpcs=config.max_concurrent_calls,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        port = config.health_port
        self._probes = None if port is None else Probes(config.host, port, self._health)
        #: `HOST:PORT` once started; the host is the interface, so it may be a wildcard.
        self.address = ""
        #: The same of the port for probes, if there is one.
        self.health_address = ""

    def add(self, service: str, handler: grpc.GenericRpcHandler) -> None:
        """Serve the calls of `service` (its full name). Before `start` only."""
        self._services.append(service)
        self._server.add_generic_rpc_handlers((handler,))

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Call `callback` when `stop` begins; it must end the streams it knows of, and return soon."""
        self._on_stop.append(callback)

    def stand_by(self) -> None:
        """Answer on the port for probes, if there is one, that nothing is served yet. Before `start` only.

        Raises:
            PortInUse: its address is taken.
            UserError: the host is unknown or not this machine's.
        """
        self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        self._health.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
        self._start_probes()

    def start(self) -> str:
        """Listen and serve.

        Returns:
            The address, `HOST:PORT`, with the port the system chose.

        Raises:
            PortInUse: the address is taken.
            UserError: the host is unknown or not this machine's, reflection is asked for and not installed, or others
                could reach a port without TLS and `insecure` is not said.
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
        threading.Thread(target=self._look_after_uploads, name="uploads", daemon=True).start()
        return self.address

    def stop(self, *, grace_seconds: float = 1.0) -> None:
        """Stop taking calls, end the streams, let running calls finish within the grace, and free the port."""
        self._stopped.set()
        self._health.enter_graceful_shutdown()
        for callback in self._on_stop:
            callback()
        self._server.stop(grace_seconds).wait()
        # gRPC leaves the pool to its owner. A handler that still runs, though its call is over, ends on its own.
        self._pool.shutdown(wait=False)
        if self._probes is not None:
            self._probes.stop()

    def in_flight(self, context: grpc.ServicerContext, num_bytes: int) -> AbstractContextManager[None]:
        """For handlers: count `num_bytes` that the peer of `context` has announced, while they come.

        Raises:
            Busy: when entered; there is too much under way.
        """
        return self._guard.in_flight(context, num_bytes)

    def _look_after_uploads(self) -> None:
        while not self._stopped.wait(_LOOK_SECONDS):
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


def _name_thread() -> None:
    """Let tools tell the threads of the pool from all others. Before 3.14, Python does not name them for the system."""
    with suppress(OSError):
        Path("/proc/thread-self/comm").write_text(POOL_THREADS, encoding="ascii")
