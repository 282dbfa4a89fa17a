"""The Prometheus registry of this process, built from the list of metrics, and its HTTP endpoint.

Imports prometheus-client, so import it late: `observe.metrics_endpoint` does.
"""

from __future__ import annotations

import errno
import importlib.metadata
import io
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from hetpipe.errors import PortInUse, UserError
from hetpipe.observe.log import get_logger
from hetpipe.observe.metric_names import CALL_BUCKETS, Family, Role, families_of
from hetpipe.observe.readings import Distribution, Reading, Source, sorted_by_family

_log = get_logger(__name__)

#: Maximum number of concurrent scrapes (further connections are closed), and the timeout of a request.
MAX_SCRAPES = 8
REQUEST_SECONDS = 5.0

#: Polling interval for the request to close.
_LOOK_UP_SECONDS = 0.2


def registry_of(role: Role, sources: Sequence[Source]) -> CollectorRegistry:
    """The metrics of a process of that role: those of the sources, `hetpipe_info`, and those of the process itself."""
    registry = CollectorRegistry()
    registry.register(_Collector(role, sources))
    ProcessCollector(registry=registry)
    return registry


class _Collector:
    """Reads the sources at every scrape."""

    def __init__(self, role: Role, sources: Sequence[Source]) -> None:
        self._role = role
        self._sources = (self._info, *sources)

    def describe(self) -> Iterator[Metric]:
        """All possible metrics, without a value; called at registration."""
        for family in families_of(self._role):
            yield _filled(family)

    def collect(self) -> Iterator[Metric]:
        """All metrics with a current value."""
        try:
            found = sorted_by_family((reading for source in self._sources for reading in source()), self._role)
        except Exception:
            _log.exception("scrape_failed")
            raise
        for family, readings in found.items():
            yield _filled(family, readings)

    def _info(self) -> Iterable[Reading]:
        return (Reading("hetpipe_info", 1, (self._role, importlib.metadata.version("hetpipe"))),)


#: The library's families have no common type with `add_metric`.
_KINDS: Mapping[str, Callable[..., Any]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _filled(family: Family, readings: Iterable[Reading] = ()) -> Metric:
    metric = _KINDS[family.kind](family.name, family.help, labels=family.labels)
    for reading in readings:
        labels = [str(value) for value in reading.labels]
        if isinstance(reading.value, Distribution):
            metric.add_metric(labels, _cumulative(reading.value), reading.value.total)
        else:
            metric.add_metric(labels, reading.value)
    return cast("Metric", metric)


def _cumulative(distribution: Distribution) -> list[tuple[str, float]]:
    """Cumulative buckets, in Prometheus's form."""
    so_far, buckets = 0, []
    for end, count in zip((*map(str, CALL_BUCKETS), "+Inf"), distribution.counts, strict=True):
        so_far += count
        buckets.append((end, float(so_far)))
    return buckets


class MetricsServer:
    """The endpoint, `http://HOST:PORT/metrics`, until `close`. Plain HTTP: for a network of your own."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        """Listen and serve.

        Raises:
            PortInUse: the port is in use.
            UserError: the host is unknown or not this machine's.
        """
        self._server = _listening(host, port)
        self._server.set_app(make_wsgi_app(registry))
        #: The actual port, also if 0 was requested.
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_UP_SECONDS,), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port. Idempotent."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _listening(host: str, port: int) -> _HttpServer:
    try:
        family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return _HttpServer(family, (str(target[0]), port))
    except socket.gaierror as error:
        raise UserError(f"cannot serve metrics on {host}: the host name is unknown ({error.strerror})") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(f"address {host}:{port} is in use; choose another with --metrics-port") from error
        raise UserError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_SECONDS

    def log_message(self, *_arguments: object) -> None:
        """No-op: scrapes are not logged."""

    def get_stderr(self) -> io.StringIO:
        """The error stream of a failed scrape, redirected to the log."""
        return io.StringIO()


class _HttpServer(socketserver.ThreadingMixIn, WSGIServer):
    """A server with a bounded number of threads, one per scrape."""

    daemon_threads = True
    request_queue_size = 2 * MAX_SCRAPES

    def __init__(self, family: socket.AddressFamily, address: tuple[str, int]) -> None:
        self.address_family = family
        self._free = threading.BoundedSemaphore(MAX_SCRAPES)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind, without the host-name lookup of the standard HTTP server."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a scrape, or close the connection at the limit."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one scrape."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, _request: Any, client_address: Any) -> None:
        """Ignore a client that disconnects or sends nothing."""
        _log.info("scrape_broken_off", peer=str(client_address), exc_info=True)
