"""`hetpipe render compose` and `hetpipe render k8s`."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from hetpipe.cli.app import app
from hetpipe.job.file import load_job
from hetpipe.values.document import write_document
from tests.cli.fakes import FakeCoordinator, shell_with, small_job
from tests.deploy.deployments import plan, stage
from tests.deploy.rendered import why_no_kubectl

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    current = tmp_path / "job"
    current.mkdir()
    monkeypatch.chdir(current)
    write_job()


def write_job(**changes: object) -> None:
    job = small_job().model_dump(mode="json", exclude_none=True)
    Path("job.yaml").write_text(yaml.safe_dump({**job, "model": "mine.model:build", **changes}))


def render(*arguments: str) -> Result:
    shell = shell_with(FakeCoordinator(), Path.cwd())
    shell = replace(shell, environment={"XDG_STATE_HOME": str(Path.cwd().parent / "state")})
    return CliRunner().invoke(app, ["render", *arguments], obj=shell)


def test_a_compose_file_and_the_certificates_it_shows() -> None:
    result = render("compose", "job.yaml", "--cpu-devices", "2", "--port", "7777")
    assert result.exit_code == 0, result.output
    services = yaml.safe_load(Path("compose.yaml").read_text())["services"]
    assert list(services) == ["coordinator", "parameter-server-0", "agent-0", "agent-1", "submit"]
    assert services["submit"]["command"][:2] == ["submit", "job.yaml"]
    for service in services.values():
        for volume in service["volumes"]:
            assert Path(volume["source"]).is_dir()
    assert "docker compose -f compose.yaml up --detach" in result.stdout
    assert "--coordinator 127.0.0.1:7777 --tls" in result.stdout


def test_nothing_is_overwritten() -> None:
    Path("compose.yaml").write_text("mine")
    result = render("compose", "job.yaml", "--cpu-devices", "2")
    assert result.exit_code == 2
    assert "compose.yaml already exists" in result.stderr
    assert Path("compose.yaml").read_text() == "mine"


def test_a_job_that_was_changed_is_written_beside() -> None:
    write_job(workers={"stages": "auto"})
    write_document(plan([stage("x/0", "cpu", 0, 2)], [stage("x/1", "cpu", 0, 2)]), Path("p.json"))
    result = render("compose", "job.yaml", "--cpu-devices", "2", "--plan", "p.json", "--out", "c.yaml", "--json")
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["files"]) == 2
    command = yaml.safe_load(Path("c.yaml").read_text())["services"]["submit"]["command"]
    assert command[1] == "c.job.yaml"
    assert load_job(Path("c.job.yaml")).workers.stages == ((2,), (2,))


def test_services_alone() -> None:
    assert render("compose", "--cpu-devices", "1", "--insecure").exit_code == 0
    services = yaml.safe_load(Path("compose.yaml").read_text())["services"]
    assert list(services) == ["coordinator", "parameter-server-0", "agent-0"]


def manifests() -> None:
    Path("k8s/base").mkdir(parents=True)


def test_an_overlay_takes_the_modules_of_the_job_along() -> None:
    manifests()
    Path("mine").mkdir()
    for name in ("__init__", "model", "other"):
        Path(f"mine/{name}.py").write_text(f"# {name}\n")
    result = render(
        "k8s", "job.yaml", "--agents", "cpu=1x2", "--k8s", "k8s", "--out", "over/lay", "--code", "mine/other.py"
    )
    assert result.exit_code == 0, result.output
    assert Path("over/lay/job/mine/model.py").read_text() == "# model\n"
    assert {path.name for path in Path("over/lay/job/mine").iterdir()} == {"__init__.py", "model.py", "other.py"}
    whole = yaml.safe_load(Path("over/lay/kustomization.yaml").read_text())
    assert whole["resources"][0] == "../../k8s/base"
    assert "--allow-modules=mine.model" in str(whole["patches"])
    for peer in ("agent cpu-0", "parameter-server 0", "redis redis"):
        assert f"certs issue certs {peer}\n" in result.stdout
    namespace = result.stdout.index("kubectl apply -f k8s/base/namespace.yaml\n")
    secrets = result.stdout.index("kubernetes_secrets certs | kubectl apply --server-side -f -\n")
    assert namespace < secrets < result.stdout.index("kubectl apply -k over/lay\n")
    assert "is not empty" in render("k8s", "job.yaml", "--agents", "cpu=1x2", "--out", "over/lay").stderr


def test_an_overlay_without_tls_needs_no_certificates() -> None:
    manifests()
    result = render("k8s", "job.yaml", "--agents", "cpu=1x2", "--k8s", "k8s", "--out", "told", "--insecure")
    assert "hetpipe certs" not in result.stdout
    assert "kubernetes_secrets certs | kubectl apply --server-side -f -\n" in result.stdout, "the password of Redis"
    result = render("k8s", "job.yaml", "--agents", "cpu=1x2", "--k8s", "k8s", "--out", "over", "--insecure", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["files"] == ["cpu/kustomization.yaml", "job/job.yaml", "kustomization.yaml"]


def test_an_overlay_brings_the_manifests_that_come_with_hetpipe() -> None:
    result = render("k8s", "job.yaml", "--agents", "cpu=1x2", "--out", "over", "--insecure")
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(Path("over/kustomization.yaml").read_text())["resources"] == ["k8s/base", "cpu"]
    assert yaml.safe_load(Path("over/cpu/kustomization.yaml").read_text())["resources"] == ["../k8s/base/agents"]
    for path in ("base/kustomization.yaml", "base/agents/agents.yaml", "components/insecure/kustomization.yaml"):
        assert Path("over/k8s", path).read_text() == (ROOT / "k8s" / path).read_text()
    assert "kubectl apply -f over/k8s/base/namespace.yaml\n" in result.stdout
    if not why_no_kubectl():
        done = subprocess.run(["kubectl", "kustomize", "over"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_the_manifests_as_they_come() -> None:
    written = render("manifests", "all")
    assert written.exit_code == 0
    for path in ("all/k8s/overlays/cpu-demo", "all/k8s/chart", "all/docker-compose.yml"):
        assert path in written.stdout
        assert Path(path).exists()
    assert Path("all/docker-compose.yml").read_text() == (ROOT / "docker-compose.yml").read_text()
    assert Path("all/k8s/overlays/cpu-demo/kustomization.yaml").is_file()
    assert Path("all/deploy/compose/insecure.env").is_file()
    assert "all is not empty; name a new folder" in render("manifests", "all").stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--agents", "cpu=1x2", "--k8s", "none"), "there are no manifests in none"),
        (("--agents", "cpu=1x2", "--code", "/etc/hostname"), "is not below"),
        (("--agents", "cpu"), "is not PRODUCT=NODESxDEVICES"),
        (("--agents", "cpu=1x1"), "needs 2 devices"),
    ],
)
def test_what_cannot_be_rendered(arguments: tuple[str, ...], sentence: str) -> None:
    manifests()
    result = render("k8s", "job.yaml", "--out", "over", *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert not Path("over").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("compose", "job.yaml", "--cpu-devices", "2", "--insecure"),
        ("k8s", "job.yaml", "--agents", "cpu=1x2", "--k8s", "k8s", "--out", "x"),
    ],
)
def test_a_job_whose_variables_no_agent_would_pass_on_is_refused_when_it_is_rendered(
    arguments: tuple[str, ...],
) -> None:
    manifests()
    write_job(environment={"inherit": ["HF_HOME"], "set": {"WANDB_MODE": "offline"}})
    refused = render(*arguments)
    assert refused.exit_code == 2
    assert "environment.inherit: HF_HOME is not among any it passes on" in refused.stderr.replace("\n", " ")
    assert "`--allow-environment 'HF_HOME'`" in refused.stderr.replace("\n", " ")
    assert "--allow-environment is empty" in render(*arguments, "--allow-environment", "").stderr
    allowed = render(*arguments, "--allow-environment", "HF_HOME", "--allow-environment", "WANDB_*")
    assert allowed.exit_code == 0, allowed.output
