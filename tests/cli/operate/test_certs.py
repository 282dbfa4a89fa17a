"""`hetpipe certs` as an operator uses it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hetpipe.certs.folders import read_facts
from hetpipe.cli.app import app
from hetpipe.wire.tls import Tls


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ("certs", *arguments))


def answer(*arguments: str) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    value: dict[str, Any] = json.loads(result.stdout)
    return value


def errors(*arguments: str) -> str:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 2, result.output
    (sentence,) = json.loads(result.stdout)["errors"]
    assert result.stderr == f"error: {sentence}\n"
    return str(sentence)


def test_an_authority_and_certificates_for_everybody() -> None:
    made = invoke("init", "ca")
    assert made.exit_code == 0, made.output
    assert made.stdout.splitlines() == [
        "created an authority in ca; keep ca-key.pem secret: it can impersonate every process",
        "next, for each process: hetpipe certs issue ca coordinator",
    ]
    issued = invoke("issue", "ca", "parameter-server", "0", "1")
    assert issued.exit_code == 0, issued.output
    here = Path.cwd()
    expires = read_facts(Path("ca/parameter-server-0"))[1]
    assert issued.stdout.splitlines() == [
        f"spiffe://hetpipe/parameter-server/{index}: {here}/ca/parameter-server-{index}, until {expires}"
        for index in range(2)
    ]
    for folder in ("parameter-server-0", "parameter-server-1"):
        Tls(here / "ca" / folder)


def test_programs_read_json() -> None:
    assert answer("init", "ca") == {"folder": str(Path("ca").absolute())}
    (entry,) = answer("issue", "ca", "coordinator", "--days", "0.5")["issued"]
    own = Path("ca/coordinator")
    assert entry == {
        "identity": "spiffe://hetpipe/coordinator/coordinator",
        "folder": str(own.absolute()),
        "expires": read_facts(own)[1],
    }
    people = answer("issue", "ca", "operator", "alice", "bob")["issued"]
    assert [Path(person["folder"]).name for person in people] == ["operator-alice", "operator-bob"]


def test_what_cannot_be_done_is_one_sentence() -> None:
    assert errors("issue", "ca", "coordinator").endswith("create one with `hetpipe certs init`")
    answer("init", "ca")
    assert "already contains an authority" in errors("init", "ca")
    assert errors("issue", "ca", "janitor", "joe") == (
        "'janitor' is not a role; use one of coordinator, parameter-server, agent, operator, monitor, redis"
    )
    assert errors("issue", "ca", "stage", "0").endswith("stages get theirs from the coordinator when they start")
    assert errors("issue", "ca", "agent").endswith("hetpipe certs issue DIR agent node-a")
    assert errors("issue", "ca", "parameter-server").endswith("hetpipe certs issue DIR parameter-server 0 1")
    assert "is not a valid name in a certificate" in errors("issue", "ca", "agent", "good", "n/a")
    assert not Path("ca/agent-good").exists(), "nothing is made before all names are good"


def test_without_its_extra_the_program_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert errors("init", "ca") == "certificates need the extra `tls`: pip install 'hetpipe[tls]'"
