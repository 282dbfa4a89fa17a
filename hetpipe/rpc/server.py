"""A sync gRPC server with everything a hetpipe service needs around its calls.

Errors become statuses (`rpc.status`), the port is taken exclusively, messages and concurrent calls are bounded, pings
are answered, the standard health service is there, and `stop` ends the streams first, so that it is prompt.

A call holds a thread of the pool while it runs. Calls that wait must therefore be streams bounded by `rpc.watchers`,
with fewer watchers than threads.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from hetpipe.errors import HetpipeError, PortInUse, UserError
from hetpipe.observe.log import get_logger
from hetpipe.rpc.channel import MAX_MESSAGE_BYTES, Options, join_address, keepalive_options, message_options
from hetpipe.rpc.status import INTERNAL_TEXT, metadata_of, status_of, text_of

if TYPE_CHECKING:
    from hetpipe.rpc.method import GenericHandler

_log = get_logger(__name__)

#: Shortest pause between two pings of one client that the server accepts, in milliseconds; below every client's own.
_MIN_PING_INTERVAL_MS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where a server listens and how much it takes on."""

    host: str = "127.0.0.1"
    """Interface to listen on; `0.0.0.0` for all."""
    port: int = 0
    """0 lets the system choose one."""
    num_threads: int = 16
    """Calls that run at the same time; further ones queue."""
    max_concurrent_calls: int = 256
    """Running and queued calls; further ones are refused."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    reflection: bool = False
    """Tells clients which services there are; needs the extra `reflection`."""


class Server:
    """One server. Add services, `start` it, and `stop` it once; every method is called from one thread."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._services: list[str] = []
        self._on_stop: list[Callable[[], None]] = []
        self._health = health.HealthServicer()
        options: Options = [
            *message_options(config.max_message_bytes),
            *keepalive_options(),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
        ]
        self._server = grpc.server(
            ThreadPoolExecutor(max_workers=config.num_threads, thread_name_prefix="rpc"),
            interceptors=[_ErrorsToStatuses()],
            options=options,
            maximum_concurrent_rpcs=config.max_concurrent_calls,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        #: `HOST:PORT` once started; the host is the interface, so it may be a wildcard.
        self.address = ""

    def add(self, service: str, handler: GenericHandler) -> None:
        """Serve the calls of `service` (its full name). Before `start` only."""
        self._services.append(service)
        self._server.add_generic_rpc_handlers((handler,))

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Call `callback` when `stop` begins; it must end the streams it knows of, and return soon."""
        self._on_stop.append(callback)

    def start(self) -> str:
        """Listen and serve.

        Returns:
            The address, `HOST:PORT`, with the port the system chose.

        Raises:
            PortInUse: the address is taken.
            UserError: the host is unknown or not this machine's, or reflection is asked for and not installed.
        """
        if self._config.reflection:
            self._enable_reflection()
        _check_bindable(self._config.host, self._config.port)
        wanted = join_address(self._config.host, self._config.port)
        try:
            port = self._server.add_insecure_port(wanted)
        except RuntimeError as error:
            raise _port_in_use(wanted) from error
        self.address = join_address(self._config.host, port)
        for name in ["", *self._services]:
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._server.start()
        return self.address

    def stop(self, *, grace_seconds: float = 1.0) -> None:
        """Stop taking calls, end the streams, let running calls finish within the grace, and free the port."""
        self._health.enter_graceful_shutdown()
        for callback in self._on_stop:
            callback()
        self._server.stop(grace_seconds).wait()

    def _enable_reflection(self) -> None:
        try:
            from grpc_reflection.v1alpha import reflection
        except ImportError as error:
            raise UserError("reflection needs the extra `reflection`: pip install 'hetpipe[reflection]'") from error
        names = [*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)


def _port_in_use(address: str) -> PortInUse:
    return PortInUse(f"address {address} is taken; choose another with --port")


def _check_bindable(host: str, port: int) -> None:
    """Try what gRPC is about to do: it does not say why it fails, and writes to standard error by itself."""
    address = join_address(host, port)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen(1)
    except socket.gaierror as error:
        raise UserError(f"cannot listen on {address}: the host name is unknown ({error.strerror})") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _port_in_use(address) from error
        raise UserError(f"cannot listen on {address}: {error.strerror}") from error


class _ErrorsToStatuses(grpc.ServerInterceptor):  # type: ignore[type-arg]  # not generic when the program runs
    """Turns what a handler raises into a status; gRPC's own services are left alone."""

    def intercept_service(
        self, continuation: Callable[[Any], Any], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = continuation(handler_call_details)
        call: str = handler_call_details.method
        if handler is None or call.startswith("/grpc."):
            return handler
        shape = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        wrap = _guard_stream if handler.response_streaming else _guard_unary
        make = getattr(grpc, f"{shape}_rpc_method_handler")
        return make(
            wrap(call, getattr(handler, shape)),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


_UnaryBehaviour = Callable[[Any, grpc.ServicerContext], Any]
_StreamBehaviour = Callable[[Any, grpc.ServicerContext], Iterator[Any]]


def _guard_unary(call: str, behaviour: _UnaryBehaviour) -> _UnaryBehaviour:
    def guarded(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return behaviour(request, context)
        except Exception as error:
            _abort(call, context, error)
            raise

    return guarded


def _guard_stream(call: str, behaviour: _StreamBehaviour) -> _StreamBehaviour:
    def guarded(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from behaviour(request, context)
        except Exception as error:
            _abort(call, context, error)
            raise

    return guarded


def _abort(call: str, context: grpc.ServicerContext, error: Exception) -> None:
    """End the call with the status of `error`: `abort` raises. A call that has its status already is left alone."""
    if cast("Any", context).code() is not None:  # the stubs have no `code`
        return
    if isinstance(error, HetpipeError):
        _log.info("call_refused", call=call, peer=context.peer(), error=type(error).__name__, sentence=str(error))
        context.set_trailing_metadata(metadata_of(error))
        context.abort(status_of(error), text_of(error))
    _log.error("call_failed", call=call, peer=context.peer(), exc_info=error)
    context.abort(grpc.StatusCode.INTERNAL, INTERNAL_TEXT)
