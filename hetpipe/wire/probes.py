"""A plaintext port with nothing but health, for probes that have no certificate."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from hetpipe.wire.channel import message_options, silence_options
from hetpipe.wire.listening import is_loopback, listen

#: What is asked for to learn whether a process is alive: it serves that from before anything that takes long until it
#: ends, while what it is there for may have to wait. Threads of its own answer, so being busy is not being dead.
LIVE = "live"

#: Probes are few and small.
_THREADS = 4
_MESSAGE_BYTES = 4_096

_ALL_INTERFACES = "0.0.0.0"  # noqa: S104 - whoever probes a container comes by any of them


class Probes:
    """One such port. `start` and `stop` it once."""

    def __init__(self, host: str, port: int, servicer: health.HealthServicer) -> None:
        """Prepare.

        Args:
            host: where the process listens; where others reach it, all interfaces are listened on.
            port: 0 lets the system choose one.
            servicer: what is told.
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
        """Answer from now on; the address.

        Raises:
            PortInUse: the address is taken.
            UserError: the host is unknown or not this machine's.
        """
        address = listen(self._server, self._host, self._port, None)
        self._server.start()
        return address

    def stop(self) -> None:
        """Answer no more."""
        self._server.stop(None).wait()
        self._pool.shutdown(wait=False)
