"""`hetpipe health`: the health check of a service, for people and for probes of containers.

Containers run it every few seconds, so it imports little more than gRPC: no typer, no torch, no protobuf. It has a
parser of its own, which `hetpipe.cli.main` calls without the rest of the command line. Slow imports are limited to the
explanation of errors.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from hetpipe.certs.files import CA_FILE, CERT_FILE, KEY_FILE
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import HetpipeError, UserError
from hetpipe.runs.outcome import ExitStatus, Output, sentences_of, status_of
from hetpipe.values.identity import Role, server_name
from hetpipe.wire.channel import open_channel

#: Copied from `hetpipe.wire.tls`, which imports far more.
_TLS_VARIABLE = "HETPIPE_TLS"

_METHOD = "/grpc.health.v1.Health/Check"

#: `grpc.health.v1.HealthCheckResponse.ServingStatus`, by number.
_STATUSES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")

_SERVED = (Role.COORDINATOR, Role.PARAMETER_SERVER)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthQuery:
    """A health check: the address, the service, and the credentials."""

    address: str
    """`HOST:PORT`."""
    service: str = ""
    """The service within the process; empty: all."""
    role: Role = Role.COORDINATOR
    """The expected identity of the server, under TLS."""
    tls: Path | None = None
    """Folder of certificates; None: plaintext."""
    timeout_seconds: float = 3.0


def query_health(query: HealthQuery) -> str:
    """The health status of a server, or of one of its services: `SERVING`, `NOT_SERVING`, ….

    Raises:
        HetpipeError: no answer, or a refusal; or the certificates or the address cannot be used.
    """
    started = SYSTEM_CLOCK.monotonic()
    channel = open_channel(query.address, credentials=_credentials(query.tls), server_name=server_name(query.role))
    try:
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_METHOD)
        return status_in(check(_request(query.service), timeout=query.timeout_seconds))
    except grpc.RpcError as error:
        if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.NOT_FOUND:
            return "SERVICE_UNKNOWN"
        raise _explained(query, error, started) from error
    finally:
        channel.close()


def status_in(answer: bytes) -> str:
    r"""The status in a `HealthCheckResponse`: its field 1, a number; absent where it is 0.

    >>> status_in(b"\x08\x01"), status_in(b"\x08\x02"), status_in(b""), status_in(b"\x08\x7f")
    ('SERVING', 'NOT_SERVING', 'UNKNOWN', 'UNKNOWN')
    """
    number = answer[1] if len(answer) > 1 and answer[0] == 0x08 else 0  # noqa: PLR2004 - field 1, a varint
    return _STATUSES[number] if number < len(_STATUSES) else _STATUSES[0]


def _request(service: str) -> bytes:
    """A `HealthCheckRequest`: its field 1 is the name, with its length before it."""
    name = service.encode()
    if len(name) > 127:  # noqa: PLR2004 - lengths of one byte
        raise UserError(f"--service {service[:20]}… is too long for the name of a service; write at most 127 bytes")
    return b"\x0a" + bytes([len(name)]) + name if name else b""


def _credentials(folder: Path | None) -> grpc.ChannelCredentials | None:
    if folder is None:
        return None
    try:
        ca, cert, key = ((folder / name).read_bytes() for name in (CA_FILE, CERT_FILE, KEY_FILE))
    except OSError as error:
        from hetpipe.wire.tls import Tls

        Tls(folder)  # raises the same, as a sentence
        raise UserError(f"--tls {folder}: {error}") from error
    return grpc.ssl_channel_credentials(ca, key, cert)


def _explained(query: HealthQuery, error: grpc.RpcError, started: float) -> HetpipeError:
    """The error message, in the format of all commands."""
    from hetpipe.wire.connection import Connection, Target
    from hetpipe.wire.tls import Tls

    tls = None if query.tls is None else Tls(query.tls)
    target = Target(address=query.address, role=query.role, tls=tls, server_name=server_name(query.role))
    connection = Connection(target)
    try:
        return connection.translated(error, "Check", started)
    finally:
        connection.close()


def main(arguments: Sequence[str]) -> int:
    """Run one check and print its result; the exit status is 0 only for SERVING."""
    options = _parser().parse_args(arguments)
    output = Output(
        people=sys.stderr if options.json else sys.stdout,
        complaints=sys.stderr,
        machine=sys.stdout if options.json else None,
    )
    try:
        if options.role not in _SERVED:
            raise UserError(
                f"--role {options.role!r} is not a role with a server; write coordinator or parameter-server"
            )
        query = HealthQuery(
            address=options.address,
            service=options.service,
            role=Role(options.role),
            tls=options.tls,
            timeout_seconds=options.timeout,
        )
        status = query_health(query)
    except HetpipeError as error:
        output.complain(sentences_of(error))
        return status_of(error)
    answer = {"address": options.address, "service": options.service, "status": status}
    output.answer(answer, f"{options.address}: {status}")
    return ExitStatus.OK if status == "SERVING" else ExitStatus.FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hetpipe health",
        description="Check the health of a service. Exits with 0 only if it is serving; for probes and scripts.",
    )
    parser.add_argument("address", metavar="HOST:PORT", help="address of the service")
    parser.add_argument(
        "--service", default="", metavar="NAME", help="service within the process (default: all); `live`: liveness only"
    )
    parser.add_argument(
        "--role",
        default=Role.COORDINATOR.value,
        metavar="ROLE",
        help="with --tls: the expected role of the server, coordinator (default) or parameter-server",
    )
    parser.add_argument("--timeout", type=float, default=3.0, metavar="S", help="timeout in seconds (%(default)s)")
    parser.add_argument(
        "--tls",
        type=Path,
        default=os.environ.get(_TLS_VARIABLE) or None,
        metavar="DIR",
        help=f"certificates for a service with TLS, made by `hetpipe certs issue` (default: ${_TLS_VARIABLE})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line of standard output")
    return parser
