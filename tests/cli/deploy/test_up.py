"""`hetpipe up`, with an engine that is played and a scripted coordinator."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from hetpipe.cli.app import app
from hetpipe.cli.deploy import deployment
from hetpipe.cli.deploy.deployment import modules_of
from hetpipe.cli.plan.profiling import Profiled
from hetpipe.errors import UserError
from hetpipe.job.file import load_job
from hetpipe.runs.run_folder import RunFolder
from hetpipe.values.document import document_of, write_document
from hetpipe.values.events import JobEnded, JobState
from hetpipe.values.profile import Profile
from hetpipe.wire.tls import Tls
from tests.cli.fakes import RESULT, FakeCoordinator, shell_with, small_job
from tests.deploy.deployments import plan, stage
from tests.deploy.fake_docker import FakeContainer, FakeDocker, api_error

LAYER = {
    "name": "0",
    "parameter_bytes": 400,
    "activation_bytes": 100,
    "output_bytes": 40,
    "forward_ms": {"cpu": 1.0},
    "backward_ms": {"cpu": 2.0},
}


class World:
    """What the command finds around it."""

    def __init__(self, coordinator: FakeCoordinator, current: Path) -> None:
        self.docker = FakeDocker()
        self.coordinator = coordinator
        #: With which certificates the coordinator was connected to.
        self.proofs: list[Tls | None] = []
        shell = shell_with(coordinator, current)
        state = {"XDG_STATE_HOME": str(current.parent / "state")}
        self.shell = replace(
            shell, environment=state, open_docker=lambda _: self.docker, open_coordinator=self._open_coordinator
        )

    def _open_coordinator(self, _address: str, tls: Tls | None) -> FakeCoordinator:
        self.proofs.append(tls)
        return self.coordinator

    def up(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["up", *arguments], obj=self.shell)

    def started(self) -> list[str]:
        return [event.removeprefix("start ") for event in self.docker.happened if event.startswith("start ")]

    @property
    def state(self) -> Path:
        return Path(self.shell.environment["XDG_STATE_HOME"]) / "hetpipe" / "hetpipe"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    current = tmp_path / "job"
    current.mkdir()
    monkeypatch.chdir(current)
    write_job()
    return World(FakeCoordinator(), current)


def write_job(**changes: Any) -> None:
    job = small_job().model_dump(mode="json", exclude_none=True)
    Path("job.yaml").write_text(yaml.safe_dump({**job, **changes}))


def last_line(result: Result) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return value


def test_a_job_from_start_to_end(world: World) -> None:
    result = world.up("job.yaml", "--cpu-devices", "2", "--json")
    assert result.exit_code == 0, result.output
    assert last_line(result) == RESULT
    order = ["coordinator", "parameter-server-0", "agent-0", "agent-1"]
    assert world.started() == [f"hetpipe-{name}" for name in order]
    assert len(world.coordinator.submissions) == 1
    assert "vw-0 with 1 CPU device, vw-1 with 1 CPU device" in result.stderr
    assert (world.docker.made, world.docker.nets, world.docker.closed) == ([], [], True)
    assert not world.state.exists()


def test_logs_of_the_containers_stay_with_the_run(world: World) -> None:
    assert world.up("job.yaml", "--cpu-devices", "2").exit_code == 0
    logs = RunFolder(Path("runs/latest").resolve()).logs
    for name in ("coordinator", "parameter-server-0", "agent-0", "agent-1"):
        assert "line 2" in (logs / f"{name}.log").read_text()


def test_the_operator_proves_itself(world: World) -> None:
    assert world.up("job.yaml", "--cpu-devices", "2").exit_code == 0
    folders = [proof.folder for proof in world.proofs if proof is not None]
    assert folders == [world.state / "certs" / "operator-submit"]


def test_insecure(world: World) -> None:
    assert world.up("job.yaml", "--cpu-devices", "2", "--insecure").exit_code == 0
    assert world.proofs == [None]


def test_a_run_that_fails_leaves_no_containers(world: World) -> None:
    world.coordinator = FakeCoordinator([JobEnded(JobState.FAILED, "stage 0 was killed by SIGKILL", "JobFailed")])
    result = world.up("job.yaml", "--cpu-devices", "2", "--json")
    assert result.exit_code == 1
    assert last_line(result) == {"errors": ["stage 0 was killed by SIGKILL"]}
    assert (world.docker.made, world.docker.nets) == ([], [])


@pytest.mark.parametrize("detached", [(), ("--detach",)])
def test_a_container_that_does_not_start_leaves_none_behind(world: World, detached: tuple[str, ...]) -> None:
    def refuses(container: FakeContainer) -> None:
        if container.name == "hetpipe-agent-0":
            raise api_error("no space left on device")

    world.docker.on_start = refuses
    result = world.up("job.yaml", "--cpu-devices", "2", *detached)
    assert result.exit_code == 1
    assert "agent-0 could not be started: no space left on device" in result.stderr
    assert "the logs of the containers are in " in result.stdout
    assert (world.docker.made, world.docker.nets) == ([], [])
    assert world.coordinator.submissions == []
    assert not world.state.exists()


def test_an_interrupt_while_containers_start(world: World) -> None:
    def interrupts(_: FakeContainer) -> None:
        raise KeyboardInterrupt

    world.docker.on_start = interrupts
    result = world.up("job.yaml", "--cpu-devices", "2")
    assert result.exit_code == 130
    assert (world.docker.made, world.docker.nets) == ([], [])


def test_detached_says_how_to_go_on(world: World) -> None:
    result = world.up("job.yaml", "--cpu-devices", "2", "--detach")
    assert result.exit_code == 0, result.output
    assert len(world.docker.made) == 4
    assert world.state.is_dir()
    assert "submitted as job" in result.stdout
    folder = world.state / "certs" / "operator-submit"
    assert f"hetpipe status --coordinator 127.0.0.1:7400 --tls {folder}" in result.stdout
    assert "remove the cluster with: hetpipe down\n" in result.stdout
    again = world.up("job.yaml", "--cpu-devices", "2", "--detach")
    assert again.exit_code == 2
    assert "hetpipe is already up" in again.stderr


def test_services_without_a_job(world: World) -> None:
    result = world.up("--cpu-devices", "3", "--shards", "2", "--project", "mine", "--json")
    assert result.exit_code == 0, result.output
    told = last_line(result)
    assert told["coordinator"] == "127.0.0.1:7400"
    names = [container["name"] for container in told["containers"]]
    assert names == ["agent-0", "coordinator", "parameter-server-0", "parameter-server-1"]
    assert "hetpipe down --project mine" not in result.stdout
    assert world.coordinator.submissions == []
    assert Path("runs").is_dir()
    command = world.docker.named("mine-agent-0").command
    assert command[command.index("--node") + 1] == "box"


def test_a_plan_decides_who_gets_what(world: World) -> None:
    write_job(workers={"stages": "auto"})
    here = socket.gethostname()
    planned = plan(
        [stage(f"{here}/2", "cpu", 0, 2), stage(f"{here}/0", "cpu", 2, 5)], [stage(f"{here}/1", "cpu", 0, 5)]
    )
    write_document(planned, Path("plan.json"))
    result = world.up("job.yaml", "--cpu-devices", "3", "--plan", "plan.json")
    assert result.exit_code == 0, result.output
    assert "vw-0 with 2 CPU devices, vw-1 with 1 CPU device" in result.stdout
    handed_in = load_job(json.loads(world.coordinator.submissions[0].job_json))
    assert handed_in.workers.stages == ((2, 3), (5,))
    assert handed_in.sync.minibatches_per_wave == 3


def test_an_open_job_is_planned_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    write_job(workers={"stages": "auto"})
    layers = [LAYER, {**LAYER, "name": "1"}]
    measured = {"version": 1, "model": "m", "batch_size": 4, "input_bytes": 16, "layers": layers}
    profile = document_of(Profile, measured, what="the test")
    monkeypatch.setattr(deployment, "profile_job", lambda *_: Profiled(profile, {}))
    result = world.up("job.yaml", "--cpu-devices", "2")
    assert result.exit_code == 0, result.output
    assert "planning it for this machine first" in result.stdout
    assert load_job(json.loads(world.coordinator.submissions[0].job_json)).is_planned


def test_a_run_dir_of_its_own_is_all_that_is_written_to(world: World) -> None:
    result = world.up("job.yaml", "--cpu-devices", "2", "--run-dir", "mine", "--detach")
    assert result.exit_code == 0, result.output
    mounts = world.docker.named("hetpipe-agent-0").options["mounts"]
    assert [mount["Source"] for mount in mounts if not mount["ReadOnly"]] == [str(Path.cwd() / "mine")]


def test_data_elsewhere_is_shown_read_only(world: World, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    result = world.up("job.yaml", "--cpu-devices", "2", "--data", str(tmp_path / "data"), "--detach")
    assert result.exit_code == 0, result.output
    mounts = world.docker.named("hetpipe-agent-0").options["mounts"]
    assert {"Source": str(tmp_path / "data"), "ReadOnly": True}.items() <= mounts[1].items()
    assert "--data nowhere: no such folder" in world.up("job.yaml", "--data", "nowhere").stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--set", "epochs=3"), "--set requires a job"),
        (("--plan", "p.json"), "--plan requires a job"),
        (("job.yaml", "--shards", "2"), "--set parameter_servers.count=2"),
        (("job.yaml", "--cpu-devices", "1"), "needs 2 devices"),
        (("job.yaml", "--project", "No/Good"), "is a prefix of containers' names"),
        (("job.yaml", "--cpu-devices", "2", "--plan", "none.json"), "none.json"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_starts(
    world: World, arguments: tuple[str, ...], sentence: str
) -> None:
    result = world.up(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert world.docker.happened == []
    assert not Path("runs").exists()


def test_no_engine_is_the_first_thing_said(world: World) -> None:
    def absent(_: object) -> FakeDocker:
        raise UserError("no Docker engine answers at unix:///x; start docker")

    world.shell = replace(world.shell, open_docker=absent)
    result = world.up("job.yaml", "--json")
    assert result.exit_code == 2
    assert last_line(result) == {"errors": ["no Docker engine answers at unix:///x; start docker"]}
    assert not Path("runs").exists()


def test_an_image_that_is_missing(world: World) -> None:
    world.docker.images_there = set()
    result = world.up("job.yaml", "--cpu-devices", "2")
    assert result.exit_code == 2
    assert "docker build --target cpu" in result.stderr
    assert not Path("runs").exists()


def test_the_modules_that_a_job_names() -> None:
    job = small_job(metrics={"accuracy": "hetpipe.pipeline.metrics:accuracy"})
    assert list(modules_of(job)) == ["tests.models", "hetpipe.pipeline.metrics"]
