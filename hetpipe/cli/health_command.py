"""`hetpipe health`: does a service answer, and say that it serves? For people, and for probes of containers."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hetpipe.cli.outcome import ExitStatus, Output
from hetpipe.cli.shell import Shell
from hetpipe.rpc.connection import Connection, Target
from hetpipe.rpc.tls import Tls
from hetpipe.spec.identity import Role, server_name


def health(
    address: str, output: Output, shell: Shell, *, service: str, role: str, timeout_seconds: float
) -> ExitStatus:
    """Ask once; only SERVING is good."""
    tls = None if shell.tls is None else Tls(shell.tls)
    target = Target(address=address, role=role, tls=tls, server_name=server_name(Role(role)))
    status = ask_health(target, shell, service=service, timeout_seconds=timeout_seconds)
    output.answer({"address": address, "service": service, "status": status}, f"{address}: {status}")
    return ExitStatus.OK if status == "SERVING" else ExitStatus.FAILED


def ask_health(target: Target, shell: Shell, *, service: str, timeout_seconds: float) -> str:
    """The status a server tells of itself, or of one of its services: `SERVING`, `NOT_SERVING`, ….

    Raises:
        HetpipeError: it does not answer, or refuses to.
    """
    connection = Connection(target, clock=shell.clock)
    started = shell.clock.monotonic()
    try:
        with connection.channel() as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_seconds)
    except grpc.RpcError as error:
        if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.NOT_FOUND:
            return "SERVICE_UNKNOWN"
        raise connection.translated(error, "Check", started) from error
    finally:
        connection.close()
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
