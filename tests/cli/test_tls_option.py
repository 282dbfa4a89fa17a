"""`--tls` and HETPIPE_TLS reach the coordinator of a cluster, and never the services of a local run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
import yaml
from typer.testing import CliRunner, Result

from hetpipe.cli.app import app
from hetpipe.runs import training
from hetpipe.runs.run_folder import RunFolder, RunRecord
from hetpipe.runs.shell import CoordinatorPort, Shell
from hetpipe.wire.tls import TLS_VARIABLE, Tls
from tests.certs.cluster import OPERATOR, cluster
from tests.cli.fakes import JOB_ID, FakeCoordinator, running_status, shell_with, small_job
from tests.server.coordinator.builders import model
from tests.support.fake_clock import FakeClock

CLUSTER = ("--coordinator", "coordinator.example:7300")


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(yaml.safe_dump(small_job().model_dump(mode="json", exclude_none=True)))


class World:
    """A scripted coordinator that notes with which certificates it is called."""

    def __init__(self) -> None:
        self.called_with: list[Path | None] = []

    def shell(self, environment: Mapping[str, str]) -> Shell:
        usual = shell_with(FakeCoordinator(status=running_status("x")), Path.cwd())
        return replace(usual, environment=environment, open_coordinator=self._open)

    def _open(self, address: str, tls: Tls | None) -> CoordinatorPort:
        self.called_with.append(None if tls is None else tls.folder)
        return FakeCoordinator(status=running_status("x"))

    def invoke(self, *arguments: str, environment: dict[str, str] | None = None) -> Result:
        result = CliRunner().invoke(app, arguments, obj=self.shell(environment or {}), env=environment)
        assert result.exit_code == 0, result.output
        return result


def folder() -> Path:
    return cluster().tls(OPERATOR).folder


def run_record(run_dir: Path, *, local: bool) -> None:
    RunFolder.create(run_dir, name="small", clock=FakeClock()).write_record(
        RunRecord(run_dir="x", name="small", host="h", started_wall=1.0, job_id=JOB_ID, coordinator="c:1", local=local)
    )


@pytest.mark.parametrize(
    "command",
    [
        ("train", "job.yaml", *CLUSTER),
        ("submit", "job.yaml", *CLUSTER),
        ("submit", "job.yaml", *CLUSTER, "--detach"),
        ("status", *CLUSTER),
        ("clocks", *CLUSTER),
        ("clocks", "--watch", *CLUSTER),
    ],
    ids=" ".join,
)
def test_a_coordinator_is_called_with_certificates(command: tuple[str, ...]) -> None:
    world = World()
    world.invoke(*command, "--tls", str(folder()))
    assert world.called_with == [folder()]


def test_the_environment_may_name_them() -> None:
    world = World()
    world.invoke("status", *CLUSTER, environment={TLS_VARIABLE: str(folder())})
    world.invoke("status", *CLUSTER, environment={TLS_VARIABLE: ""})
    world.invoke("status", *CLUSTER)
    assert world.called_with == [folder(), None, None]


@pytest.mark.parametrize("command", [("status",), ("clocks",), ("clocks", "--watch")], ids=" ".join)
def test_a_run_is_asked_of_the_coordinator_that_it_was_given_to(command: tuple[str, ...]) -> None:
    world = World()
    for local in (False, True):
        run_dir = Path(f"run-{local}")
        run_record(run_dir, local=local)
        world.invoke(*command, str(run_dir), environment={TLS_VARIABLE: str(folder())})
    assert world.called_with == [folder(), None]


def test_a_local_run_knows_no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    environments: list[Mapping[str, str]] = []

    class NoServices:
        pids: Mapping[str, int] = {}

        def __init__(self, _services: object, *, environment: Mapping[str, str], **_: object) -> None:
            environments.append(environment)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing is started."""

        def begin(self) -> None:
            """Nothing is started."""

        def wait_started(self) -> str:
            return "127.0.0.1:7300"

        def stop(self, **_: Any) -> None:
            """Nothing is started."""

    monkeypatch.setattr(training, "Supervisor", NoServices)
    monkeypatch.setattr(training, "inspect_locally", lambda *_, **__: model())
    world = World()
    world.invoke("train", "job.yaml", environment={TLS_VARIABLE: str(folder()), "OTHER": "1"})
    assert world.called_with == [None]
    assert environments == [{"OTHER": "1"}]


def test_an_unusable_folder_is_one_sentence() -> None:
    shell = World().shell({})
    result = CliRunner().invoke(app, ("status", *CLUSTER, "--tls", "/no/such/folder"), obj=shell)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("error: --tls /no/such/folder: cannot read /no/such/folder/ca.pem (No such file")
