"""What is in the wheel, and that commands find it there; `make wheel-test` installs it and walks through them."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.supply.wheel import build, strangers

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_hetpipe_and_nothing_else(wheel: Path) -> None:
    assert strangers(wheel) == []


def test_what_it_needs_is_what_it_asks_for(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    wanted = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: ")]
    needed = {requirement.name for requirement in wanted if requirement.marker is None}
    assert needed == {
        *("torch", "grpcio", "grpcio-health-checking", "protobuf", "redis", "pydantic", "structlog", "docker"),
        *("PyYAML", "safetensors", "typer", "rich", "xxhash", "jinja2", "fsspec", "numpy"),
    }
    assert {"Provides-Extra: cli", "Provides-Extra: examples"} <= set(lines), "old install commands work"
    of_models = {each.name for each in wanted if each.marker and each.marker.evaluate({"extra": "models"})}
    assert of_models == {"transformers", "timm", "torchvision", "peft"}


@pytest.mark.exhaustive
def test_an_overlay_is_written_without_the_source(wheel: Path, tmp_path: Path) -> None:
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    # Before everything that the environment of these tests has.
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    for arguments in (
        ["init"],
        ["render", "k8s", "job.yaml", "--agents", "cpu=1x4", "--out", "overlay", "--insecure"],
        ["render", "schedule", "--svg", "schedule.svg"],
    ):
        command = [sys.executable, "-P", "-m", "hetpipe", *arguments]
        done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert (empty / "overlay" / "k8s" / "base" / "coordinator.yaml").is_file()
    where = "import hetpipe, hetpipe.bundled; print(hetpipe.bundled.bundled_root())"
    command = [sys.executable, "-P", "-c", where]
    found = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=True).stdout
    assert found.strip() == str(installed / "hetpipe" / "bundled_files")
