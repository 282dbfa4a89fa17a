"""The Prometheus endpoint of a process, if configured; prometheus-client is imported only then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hetpipe.errors import UserError
from hetpipe.observe.log import get_logger
from hetpipe.observe.metric_names import Role
from hetpipe.observe.readings import Source

_log = get_logger(__name__)


@contextmanager
def metrics_endpoint(host: str, port: int | None, role: Role, *sources: Source) -> Iterator[int | None]:
    """Serve the metrics of this process in a `with` block; yields the port, or None if `port` is None.

    Raises:
        PortInUse: the port is in use.
        UserError: the host cannot be listened on, or prometheus-client is not installed.
    """
    if port is None:
        yield None
        return
    try:
        import prometheus_client  # noqa: F401 - availability check
    except ImportError as error:
        raise UserError("--metrics-port needs the extra `metrics`: pip install 'hetpipe[metrics]'") from error
    from hetpipe.observe.prometheus import MetricsServer, registry_of

    server = MetricsServer(host, port, registry_of(role, sources))
    _log.info("metrics_served", host=host, port=server.port)
    try:
        yield server.port
    finally:
        server.close()
