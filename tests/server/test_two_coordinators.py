"""Two coordinators over one Redis, as programs: one acts, the other stands by."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hetpipe.storage import redis_keys
from tests.server.test_programs import Program
from tests.storage.redis_server import Server, needs_redis

pytestmark = [pytest.mark.processes, needs_redis]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def health(port: int) -> int:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=30.0, wait_for_ready=True)
        status: int = answer.status
        return status


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    programs: list[Program] = []
    yield programs
    for program in programs:
        program.process.kill()
        program.process.communicate()


def test_the_second_acts_when_the_first_ends_and_ends_when_it_leads_no_more(
    server: Server, tmp_path: Path, programs: list[Program]
) -> None:
    def start(port: int) -> Program:
        options = ("--store", server.url, "--leader-lease", "2", "--health-port", str(port))
        programs.append(Program("coordinator", *options, "--log", str(tmp_path / f"{port}.log")))
        return programs[-1]

    ports = (free_port(), free_port())
    first = start(ports[0])
    first.ready()
    assert health(ports[0]) == health_pb2.HealthCheckResponse.SERVING
    second = start(ports[1])
    assert health(ports[1]) == health_pb2.HealthCheckResponse.NOT_SERVING

    first.process.send_signal(signal.SIGTERM)
    assert first.end() == (0, "", "")
    second.ready()
    assert health(ports[1]) == health_pb2.HealthCheckResponse.SERVING

    server.redis.hset(redis_keys.LEADER, mapping={"candidate": "third", "name": "the third one"})
    status, output, errors = second.end()
    assert (status, output) == (1, "")
    assert errors.endswith("has lost the lead: the third one has the lead\n")
    assert errors.count("\n") == 1
