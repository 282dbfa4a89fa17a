"""`hetpipe health` against real servers: with TLS, without, and where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hetpipe.cli.app import app
from hetpipe.wire.server import Server
from tests.certs.cluster import MONITOR, SHARD, cluster
from tests.wire.echo import SERVICE, echo_server

NO_SERVER = "127.0.0.1:1"


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    server = echo_server()
    server.start()
    yield server
    server.stop(grace_seconds=0.0)


@pytest.fixture(scope="module")
def secure() -> Iterator[Server]:
    server = echo_server(tls=cluster().tls(SHARD), health_port=0)
    server.start()
    yield server
    server.stop(grace_seconds=0.0)


def invoke(*arguments: str, environment: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, ("health", *arguments), env=environment)


def answer(result: Result) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(result.stdout)
    return value


def monitor() -> str:
    return str(cluster().tls(MONITOR).folder)


def test_what_serves_is_healthy(plain: Server) -> None:
    result = invoke(plain.address)
    assert (result.exit_code, result.stdout) == (0, f"{plain.address}: SERVING\n")
    result = invoke(plain.address, "--service", SERVICE, "--json")
    assert result.exit_code == 0
    assert answer(result) == {"address": plain.address, "service": SERVICE, "status": "SERVING"}


def test_what_it_does_not_know_is_not(plain: Server) -> None:
    result = invoke(plain.address, "--service", "no.Such", "--json")
    assert (result.exit_code, answer(result)["status"]) == (1, "SERVICE_UNKNOWN")


def test_what_ends_is_not() -> None:
    server = echo_server()
    server.start()
    server._health.enter_graceful_shutdown()
    result = invoke(server.address, "--json")
    server.stop(grace_seconds=0.0)
    assert (result.exit_code, answer(result)["status"]) == (1, "NOT_SERVING")


def test_nobody_there() -> None:
    result = invoke(NO_SERVER, "--timeout", "0.2", "--json")
    assert result.exit_code == 1
    assert NO_SERVER in answer(result)["errors"][0]


@pytest.mark.parametrize("how", ["option", "environment"])
def test_with_certificates(secure: Server, how: str) -> None:
    option = ("--tls", monitor()) if how == "option" else ()
    environment = {"HETPIPE_TLS": monitor()} if how == "environment" else None
    asked = (secure.address, "--role", "parameter-server", *option)
    result = invoke(*asked, environment=environment)
    assert (result.exit_code, result.stdout) == (0, f"{secure.address}: SERVING\n"), result.output


def test_a_server_of_another_role(secure: Server) -> None:
    result = invoke(secure.address, "--tls", monitor())
    assert result.exit_code == 1
    assert "its certificate is not that of coordinator.hetpipe" in result.stderr


def test_a_server_that_asks_for_a_certificate(secure: Server) -> None:
    assert invoke(secure.address, "--timeout", "0.5").exit_code == 1


def test_the_port_for_probes_needs_none(secure: Server) -> None:
    assert invoke(secure.health_address).exit_code == 0
    assert invoke(secure.health_address, environment={"HETPIPE_TLS": ""}).exit_code == 0


def test_a_server_without_tls_is_named(plain: Server) -> None:
    result = invoke(plain.address, "--tls", monitor())
    assert result.exit_code == 1
    assert "does not use TLS" in result.stderr


@pytest.mark.parametrize("role", ["janitor", "operator", "stage"])
def test_roles_without_a_server(role: str) -> None:
    result = invoke(NO_SERVER, "--role", role)
    assert result.exit_code == 2
    assert "write coordinator or parameter-server" in result.stderr


def test_a_folder_without_certificates(tmp_path: Path) -> None:
    result = invoke(NO_SERVER, "--tls", str(tmp_path))
    assert result.exit_code == 2
    assert "as `hetpipe certs issue` makes them" in result.stderr


def test_a_probe_imports_next_to_nothing(plain: Server) -> None:
    """Containers run it every few seconds for ever."""
    code = (
        "import sys\n"
        "from hetpipe.cli.main import main\n"
        f"sys.argv = ['hetpipe', 'health', '{plain.address}']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'typer', 'rich', 'torch', 'numpy', 'pydantic', 'structlog', 'google.protobuf', 'docker', 'redis'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{plain.address}: SERVING", "[]"]


def test_an_address_that_is_none() -> None:
    assert invoke("nowhere").exit_code == 2
