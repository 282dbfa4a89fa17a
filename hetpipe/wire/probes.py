"""A plaintext port that serves only health checks, for probes without a certificate."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from hetpipe.wire.channel import message_options, silence_options
from hetpipe.wire.listening import is_loopback, listen

#: Name of the liveness check: it is served from before any slow start-up step until the process exits, while readiness
#: may come later. It is answered on separate threads, so a busy process still counts as alive.
LIVE = "live"

#: Probes are few and small.
_THREADS = 4
_MESSAGE_BYTES = 4_096

_ALL_INTERFACES = "0.0.0.0"  # noqa: S104 - whoever probes a container comes by any of them


class Probes:
    """A health-check port. `start` and `stop` it once."""

    def __init__(self, host: str, port: int, servicer: health.HealthServicer) -> None:
        """Set up the port.

        Args:
            host: the service's own host; if others can reach it, the port is opened on all interfaces.
            port: 0 lets the system choose one.
            servicer: the health state.
        """
        self._host = host if is_loopback(host) else _ALL_INTERFACES
        self._port = port
        self._pool = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="probe")
        self._server = grpc.server(
            self._pool,
            options=[*message_options(_MESSAGE_BYTES), *silence_options(), ("grpc.so_reuseport", 0)],
            maximum_concurrent_rpcs=_THREADS,
        )
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)

    def start(self) -> str:
        """Start answering; returns the address.

        Raises:
            PortInUse: the address is in use.
            UserError: the host is unknown or not this machine's.
        """
        address = listen(self._server, self._host, self._port, None)
        self._server.start()
        return address

    def stop(self) -> None:
        """Stop answering and free the port."""
        self._server.stop(None).wait()
        self._pool.shutdown(wait=False)
