"""How services are told to work with certificates, and what they refuse; their programs run in this process."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from hetpipe.server import SERVICES, runtime
from tests.certs.cluster import AGENT, COORDINATOR, SHARD, cluster

Run = Callable[..., str]


class NoSignals:
    """A `Shutdown` that leaves this process's signals alone."""

    def __init__(self, *, exit_with_parent: bool) -> None:
        """Nothing to watch."""


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a service that does not come up; what it says."""
    monkeypatch.setattr(runtime, "Shutdown", NoSignals)
    monkeypatch.delenv("HETPIPE_TLS", raising=False)

    def run(name: str, *options: str) -> str:
        module = importlib.import_module(SERVICES[name])
        if name == "parameter-server":
            monkeypatch.setattr(module, "settle_memory", lambda **_: None)
            options = (*options, "--threads", "1")
        if name != "coordinator":
            options = (*options, "--coordinator", "127.0.0.1:1")
        assert module.main(["--log", "/dev/null", *options]) == 1
        output, errors = capsys.readouterr()
        assert (output, errors.count("\n")) == ("", 1), errors
        return errors

    return run


def folder_of(service: str) -> str:
    peer = {"coordinator": COORDINATOR, "parameter-server": SHARD, "agent": AGENT}[service]
    return str(cluster().tls(peer).folder)


@pytest.mark.parametrize("service", SERVICES)
def test_nobody_is_secure_and_insecure(refused: Run, service: str) -> None:
    said = refused(service, "--tls", folder_of(service), "--insecure")
    assert said == "--tls and --insecure contradict each other; give one of them\n"


@pytest.mark.parametrize("service", SERVICES)
def test_beyond_this_machine_somebody_must_choose(refused: Run, service: str) -> None:
    said = refused(service, "--host", "0.0.0.0")
    assert said.startswith("0.0.0.0 can be reached by other machines, so it needs TLS: give --tls DIR")
    assert "or --insecure" in said


@pytest.mark.parametrize("service", SERVICES)
def test_a_folder_that_is_not_there(refused: Run, service: str) -> None:
    said = refused(service, "--tls", "/no/such/folder")
    assert said.startswith("--tls /no/such/folder: cannot read /no/such/folder/ca.pem (No such file or directory)")
    assert "as `hetpipe certs issue` makes them" in said


@pytest.mark.parametrize("service", SERVICES)
def test_the_environment_names_it_too(refused: Run, service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETPIPE_TLS", "/no/such/folder")
    assert refused(service).startswith("--tls /no/such/folder: cannot read")


@pytest.mark.parametrize(
    ("service", "other"), [("coordinator", "agent"), ("parameter-server", "agent"), ("agent", "parameter-server")]
)
def test_nobody_plays_another_role(refused: Run, service: str, other: str) -> None:
    said = refused(service, "--tls", folder_of(other))
    assert f"but this is a process of the role {service}; make one with `hetpipe certs issue DIR {service}`" in said


def test_a_shard_is_who_its_certificate_says(refused: Run) -> None:
    folder = folder_of("parameter-server")
    assert refused("parameter-server", "--tls", folder, "--index", "1") == (
        f"--index 1 is not 0, the name in the certificate of {folder}\n"
    )


def test_an_agent_is_who_its_certificate_says(refused: Run) -> None:
    folder = folder_of("agent")
    assert refused("agent", "--tls", folder, "--node", "n1") == (
        f"--node n1 is not n0, the name in the certificate of {folder}\n"
    )


def test_a_coordinator_without_a_signer_certifies_nobody(refused: Run, tmp_path: Path) -> None:
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (tmp_path / name).write_bytes((Path(folder_of("coordinator")) / name).read_bytes())
    said = refused("coordinator", "--tls", str(tmp_path))
    assert said.endswith("create one with `hetpipe certs issue DIR coordinator`\n")


def test_insecurity_is_logged(tmp_path: Path, refused: Run) -> None:
    log = tmp_path / "log"
    refused("coordinator", "--host", "0.0.0.0", "--insecure", "--store", "mysql://x", "--log", str(log))
    assert "everyone who reaches 0.0.0.0 may make any call" in log.read_text()
