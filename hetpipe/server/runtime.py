"""The shared runtime of services: options, logs, signals, the ready line, errors, parent death.

A service prints one JSON line on standard output when it is ready, `{"role", "address", "pid"}`, and nothing else. An
error is one sentence on standard error and exit status 1. SIGTERM or SIGINT shuts it down gracefully, a second one
immediately.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from grpc_health.v1 import health, health_pb2

from hetpipe import failpoints
from hetpipe.errors import HetpipeError, UserError
from hetpipe.observe.log import configure_logging, get_logger
from hetpipe.phases import end_phases, report_phase
from hetpipe.server.parent_death import follow_parent
from hetpipe.values.identity import Role
from hetpipe.wire.listening import is_loopback, refuse_plaintext_beyond_loopback
from hetpipe.wire.probes import LIVE, Probes
from hetpipe.wire.server import MAX_CONCURRENT_CALLS, ServerConfig
from hetpipe.wire.tls import TLS_VARIABLE, Tls

_log = get_logger(__name__)

_WILDCARDS = {"", "0.0.0.0", "::"}  # noqa: S104 - recognised, not bound to


def new_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Create a parser with the options common to all services."""
    parser = argparse.ArgumentParser(prog=f"hetpipe serve {program}", description=description)
    parser.add_argument("--log", metavar="FILE", help="append the log (JSON lines) to FILE instead of standard error")
    parser.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"), help="lowest level (%(default)s)"
    )
    parser.add_argument(
        "--tls",
        type=Path,
        default=os.environ.get(TLS_VARIABLE) or None,
        metavar="DIR",
        help="authenticate this process and its peers with the certificates in DIR, written by `hetpipe certs issue` "
        f"(default: ${TLS_VARIABLE})",
    )
    parser.add_argument(
        "--insecure", action="store_true", help="accept connections from other machines without TLS; logs a warning"
    )
    parser.add_argument(
        "--metrics-port",
        type=port,
        metavar="N",
        help="serve metrics for Prometheus at http://HOST:N/metrics (default: none); 0: a free port, which is logged",
    )
    parser.add_argument(
        "--health-port",
        type=port,
        metavar="N",
        help="answer only health checks on a separate port without TLS, for probes (default: none)",
    )
    parser.add_argument(
        failpoints.OPTION,
        action="store_true",
        help=f"enable the failpoints in ${failpoints.VARIABLE}, for tests; without this option a process with that "
        "variable set does not start",
    )
    parser.add_argument(
        "--exit-with-parent",
        action="store_true",
        help="shut down when standard input is closed or the parent process dies",
    )
    return parser


def add_listening_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a service with a server."""
    parser.add_argument("--host", default="127.0.0.1", help="interface to listen on (%(default)s); 0.0.0.0 for all")
    parser.add_argument("--port", type=port, default=0, help="port to listen on; 0: a free one (default)")
    parser.add_argument("--advertise", metavar="HOST", help="host name for other machines, if not --host")
    parser.add_argument("--reflection", action="store_true", help="enable gRPC server reflection")


def open_tls(options: argparse.Namespace, host: str) -> Tls | None:
    """The certificates of this process; None for plaintext, with a warning if other machines reach it.

    Args:
        options: the parsed options.
        host: the interface on which this process, or a child of it, listens.

    Raises:
        UserError: `host` is reachable from other machines with neither `--tls` nor `--insecure`; or both are given.
    """
    if options.tls is not None:
        if options.insecure:
            raise UserError("--tls and --insecure contradict each other; give one of them")
        return Tls(options.tls)
    if not options.insecure:
        refuse_plaintext_beyond_loopback(host)
    elif not is_loopback(host):
        _log.warning(
            "insecure",
            sentence=f"without TLS (--insecure) everyone who reaches {host} may make any call and read all traffic",
        )
    return None


def certified_name(tls: Tls, role: Role) -> str:
    """The name in this process's certificate.

    Raises:
        UserError: the certificate cannot be read or has another role, or the extra `tls` is not installed.
    """
    try:
        from hetpipe.certs.folders import read_facts
    except ImportError as error:
        raise UserError("--tls needs the extra `tls`: pip install 'hetpipe[tls]'") from error
    peer = read_facts(tls.folder)[0]
    if peer.role is not role:
        raise UserError(
            f"--tls {tls.folder} holds the certificate of {peer}, but this is a process of the role {role}; make one "
            f"with `hetpipe certs issue DIR {role}`"
        )
    return peer.name


def own_name(options: argparse.Namespace, tls: Tls | None, role: Role, *, option: str, given: str) -> str:
    """The name of this process: that of its certificate, else the given one; empty without either.

    Raises:
        UserError: the two differ, or the certificate cannot be used.
    """
    certified = "" if tls is None else certified_name(tls, role)
    if certified and given not in {"", certified}:
        raise UserError(f"{option} {given} is not {certified}, the name in the certificate of {options.tls}")
    return certified or given


@contextmanager
def alive(host: str, health_port: int | None) -> Iterator[Callable[[], None]]:
    """Answer health checks inside the block, for processes without a server: alive, and not yet serving.

    Yields:
        A function that reports it as serving.

    Raises:
        PortInUse: the port is in use.
    """
    if health_port is None:
        yield lambda: None
        return
    servicer = health.HealthServicer()
    servicer.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    probes = Probes(host, health_port, servicer)
    probes.start()
    try:
        yield lambda: servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    finally:
        servicer.enter_graceful_shutdown()
        probes.stop()


def server_config(
    options: argparse.Namespace, tls: Tls | None, *, num_threads: int, max_concurrent_calls: int = MAX_CONCURRENT_CALLS
) -> ServerConfig:
    """The listening configuration of a service, from its options."""
    return ServerConfig(
        host=options.host,
        port=options.port,
        num_threads=num_threads,
        max_concurrent_calls=max_concurrent_calls,
        reflection=options.reflection,
        tls=tls,
        insecure=options.insecure,
        health_port=options.health_port,
    )


def advertised_host(listen_host: str, advertise: str | None) -> str:
    """The host name under which others reach this process: `advertise`, else the interface, else the machine's name."""
    if advertise:
        return advertise
    return socket.gethostname() if listen_host in _WILDCARDS else listen_host


def announce_ready(role: str, address: str) -> None:
    """Print the ready line."""
    end_phases()
    sys.stdout.write(json.dumps({"role": role, "address": address, "pid": os.getpid()}) + "\n")
    sys.stdout.flush()


class Shutdown:
    """Shutdown requests: by a signal, or the end of the parent. Create it once, in the main thread."""

    def __init__(self, *, exit_with_parent: bool) -> None:
        #: Set when the service has to shut down gracefully.
        self.requested = threading.Event()
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        # A handler may interrupt its thread anywhere, also where it holds a lock, so it only writes to a pipe.
        read_end, self._signals = os.pipe()
        threading.Thread(target=self._handle_signals, args=(read_end,), name="signals", daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        if exit_with_parent:
            follow_parent(signal.SIGTERM, self.request)

    def on_request(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the shutdown request, from any thread; immediately if there already was one."""
        with self._lock:
            self._callbacks.append(callback)
            late = self.requested.is_set()
        if late:
            callback()

    def wait(self) -> None:
        """Block until a shutdown is requested."""
        self.requested.wait()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        os.write(self._signals, bytes([number]))

    def _handle_signals(self, read_end: int) -> None:
        os.read(read_end, 1)
        self.request()
        os._exit(128 + os.read(read_end, 1)[0])

    def request(self) -> None:
        """Request a shutdown. Idempotent; may be called from any thread, but not from a signal handler."""
        with self._lock:
            if self.requested.is_set():
                return
            self.requested.set()
            callbacks = tuple(self._callbacks)
        for callback in callbacks:
            callback()


def started(start: Callable[[], object], shutdown: Shutdown) -> bool:
    """Call `start`, which may wait for other processes; False if a shutdown was requested before it was complete.

    Raises:
        HetpipeError: `start` failed without such a request.
    """
    report_phase("registering with the coordinator")
    try:
        start()
    except HetpipeError as error:
        if not shutdown.requested.is_set():
            raise
        _log.info("told_to_end_before_ready", reason=str(error))
        return False
    return True


def run_service(role: str, arguments: argparse.Namespace, serve: Callable[[Shutdown], None]) -> int:
    """Run `serve` with logging and signal handlers set up; returns the exit status. Call it in the main thread."""
    report_phase("opening its store and its ports")
    try:
        configure_logging(Path(arguments.log) if arguments.log else None, role=role, level=arguments.log_level)
    except OSError as error:
        sys.stderr.write(f"cannot write the log {arguments.log}: {error.strerror}\n")
        return 1
    try:
        _arm_failpoints(role, arguments)
        serve(Shutdown(exit_with_parent=arguments.exit_with_parent))
    except HetpipeError as error:
        _log.error("service_failed", error=type(error).__name__, sentence=str(error))
        sys.stderr.write(f"{error}\n")
        return 1
    except Exception as error:  # noqa: BLE001 - the outermost frame: any error is one sentence and an exit status
        _log.exception("service_failed")
        sys.stderr.write(f"{role}: internal error ({type(error).__name__}: {error}), see its log\n")
        return 1
    return 0


def _arm_failpoints(role: str, arguments: argparse.Namespace) -> None:
    """Arm the failpoints of this process, for tests.

    Raises:
        UserError: see `failpoints.arm`.
    """
    names = {name: getattr(arguments, name, None) for name in ("index", "node")}
    failpoints.arm(os.environ, is_allowed=arguments.allow_failpoints, role=role, **names)


def port(text: str) -> int:
    """A port number, for `add_argument(type=…)`."""
    if not text.isascii() or not text.isdigit() or int(text) > 65_535:  # noqa: PLR2004 - the largest port
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; write a number from 0 to 65535")
    return int(text)
