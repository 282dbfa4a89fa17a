"""`hetpipe down`, `ps` and `logs`, with an engine that is played."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hetpipe.cli.app import app
from hetpipe.deploy.engine import Engine
from tests.cli.fakes import FakeCoordinator, shell_with
from tests.deploy.deployments import ON_GPUS, deployment
from tests.deploy.fake_docker import FakeDocker
from tests.support.fake_clock import FakeClock


@pytest.fixture
def docker() -> FakeDocker:
    docker = FakeDocker()
    Engine(docker, clock=FakeClock(auto_advance=True), say=lambda _: None).start(deployment(agents=ON_GPUS))
    return docker


@pytest.fixture
def state(tmp_path: Path) -> Path:
    state = tmp_path / "hetpipe" / "mine"
    state.mkdir(parents=True)
    return state


def invoke(docker: FakeDocker, *arguments: str, state: Path | None = None) -> Result:
    shell = replace(shell_with(FakeCoordinator(), Path.cwd()), open_docker=lambda _: docker)
    if state is not None:
        shell = replace(shell, environment={"XDG_STATE_HOME": str(state.parent.parent)})
    result = CliRunner().invoke(app, arguments, obj=shell)
    assert docker.closed
    return result


def last_line(result: Result) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return value


def test_down_removes_everything_once(docker: FakeDocker, state: Path) -> None:
    result = invoke(docker, "down", "--project", "mine", "--json", state=state)
    assert result.exit_code == 0, result.output
    assert len(last_line(result)["removed"]) == 6
    assert (docker.made, docker.nets) == ([], [])
    assert not state.exists()
    again = invoke(docker, "down", "--project", "mine", state=state)
    assert again.exit_code == 0
    assert again.stdout == "project mine has no containers\n"


def test_down_is_about_one_project(docker: FakeDocker, state: Path) -> None:
    assert invoke(docker, "down", "--project", "other", state=state).exit_code == 0
    assert len(docker.made) == 5
    assert state.exists()


def test_a_project_name_that_would_lead_elsewhere(docker: FakeDocker, state: Path) -> None:
    shell = replace(shell_with(FakeCoordinator(), Path.cwd()), open_docker=lambda _: docker)
    result = CliRunner().invoke(app, ["down", "--project", "../mine"], obj=shell)
    assert result.exit_code == 2
    assert state.exists()


def test_ps(docker: FakeDocker) -> None:
    result = invoke(docker, "ps", "--project", "mine")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["name", "state", "health", "address", "GPUs"]
    assert lines[1].split() == ["agent-0", "running", "healthy", "-", "GPU-1,GPU-0"]
    assert lines[3].split() == ["coordinator", "running", "healthy", "127.0.0.1:7400", "-"]


def test_ps_as_json(docker: FakeDocker) -> None:
    told = last_line(invoke(docker, "ps", "--project", "mine", "--json"))
    assert [container["role"] for container in told["containers"]] == [
        "agent",
        "agent",
        "coordinator",
        "parameter-server",
        "parameter-server",
    ]


def test_ps_of_nothing(docker: FakeDocker) -> None:
    assert invoke(docker, "ps").stdout == "project hetpipe is not up\n"


@pytest.mark.parametrize("more", [(), ("--follow",), ("--tail", "5")])
def test_logs_of_some(docker: FakeDocker, more: tuple[str, ...]) -> None:
    result = invoke(docker, "logs", "agent", "--project", "mine", *more)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert {line.partition(" | ")[0] for line in lines} == {"agent-0", "agent-1"}
    assert lines.count("agent-1 | line 2") == 1


def test_logs_as_json(docker: FakeDocker) -> None:
    told = last_line(invoke(docker, "logs", "--project", "mine", "--json"))
    assert told["logs"]["coordinator"][1:] == ["line 1", "line 2"]
    assert len(told["logs"]) == 5
    both = invoke(docker, "logs", "--project", "mine", "--json", "--follow")
    assert both.exit_code == 2
    assert "leave one of them out" in both.stderr


def test_logs_of_whom_there_is_not(docker: FakeDocker) -> None:
    result = invoke(docker, "logs", "redis", "--project", "mine")
    assert result.exit_code == 2
    assert "has no redis" in result.stderr
