"""The locked packages: what pyproject.toml wants, with hashes, and installed no other way."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.supply import lock
from tests.supply.lock import (
    BUILD,
    BY_VERSION,
    DEVELOPMENT,
    MODELS,
    RUN,
    Entry,
    Project,
    Resolution,
    closure,
    disagreements,
    parse,
    targets,
)

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
VERSIONS = lock.locked_versions()
PROJECT = Project.of((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DIGEST = "0" * 64


def test_lock_and_project_agree() -> None:
    assert disagreements(PROJECT, parse(LOCK), VERSIONS) == []


def test_every_package_but_torch_and_torchvision_has_a_hash_for_every_wheel() -> None:
    entries = parse(LOCK)
    assert {entry.name for entry in entries if not entry.hashes} == set()
    assert not BY_VERSION.keys() & {entry.name for entry in entries}
    assert max(len(entry.hashes) for entry in entries) > 10, "those of other platforms and Pythons, too"
    assert lock.render(entries, LOCK[: LOCK.index("# [")].rstrip("\n")).split() == LOCK.split()


def test_what_the_wheels_of_torch_need_everywhere_is_locked_with_hashes() -> None:
    names = {entry.name for entry in parse(LOCK) if entry.section in {BUILD, RUN}}
    assert names >= {"filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy", "typing-extensions"}


def test_no_index_and_no_place_of_one_machine_is_named() -> None:
    for name in ("requirements.lock", *BY_VERSION.values()):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"://|--(extra-)?index-url|--find-links|\bfile:|@", text)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"wanted": "typer>=99"}, "pyproject.toml (run) wants typer>=99, and 1.0 is locked"),
        ({"wanted": "pastel"}, "pyproject.toml (run) wants pastel, which is not locked"),
        ({"torch": "1.13.0"}, "pyproject.toml (run) wants torch>=2, and 1.13.0 is locked"),
        ({"hashes": ()}, "typer has no hash"),
        ({"hashes": ("feed",)}, "typer: feed is no SHA-256"),
        ({"name": "torch"}, "torch is in requirements.lock"),
        ({"name": "torchvision"}, "torchvision is in requirements.lock"),
        ({"section": DEVELOPMENT}, "typer is wanted for run, and locked under development"),
    ],
)
def test_a_difference_is_told(change: dict[str, str], sentence: str) -> None:
    project = Project({RUN: (Requirement("torch>=2"), Requirement(change.pop("wanted", "typer")))})
    versions = {"torch": change.pop("torch", "2.13.0")}
    entry = dataclasses.replace(Entry("typer", "1.0", RUN, (DIGEST,)), **change)  # type: ignore[arg-type]
    assert any(told.startswith(sentence) for told in disagreements(project, [entry], versions))


def test_what_an_installed_package_asks_for_beyond_the_lock_is_told() -> None:
    """Package pytest asks for pluggy, and both are installed in the locked versions."""
    entries = [entry for entry in parse(LOCK) if entry.name != "pluggy"]
    (told,) = disagreements(PROJECT, entries, VERSIONS)
    assert told.startswith("pytest wants pluggy")


@pytest.mark.parametrize("name", BY_VERSION)
def test_torch_and_torchvision_are_pinned_by_version_alone(name: str) -> None:
    for text in (f"{name}==2.13.0+cpu\n", f"{name}>=2\n", f"{name}==2.13.0\nnumpy==2\n", "numpy==2\n", ""):
        with pytest.raises(ValueError, match=f"one line {name}==VERSION"):
            lock.version_in(text, name)


def test_the_locked_torchvision_is_the_one_for_the_locked_torch() -> None:
    """It is installed without what it asks for, so nobody else would notice."""
    (wanted,) = [
        need
        for name, needs in lock.installed([], VERSIONS)
        if name == "torchvision"
        for need in needs
        if need.name == "torch"
    ]
    assert wanted.specifier.contains(VERSIONS["torch"])


@pytest.mark.processes
def test_the_stand_in_for_torch_is_what_pip_takes_for_it(tmp_path: Path) -> None:
    """So that resolving what needs torch never downloads it."""
    constraints, report = tmp_path / "pins.txt", tmp_path / "report.json"
    constraints.write_text(lock.stand_in("torch==2.13.0", tmp_path))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--dry-run", "--ignore-installed"]
    command += ["--constraint", str(constraints), "--report", str(report), "torch>=2.9"]
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull, "PIP_FIND_LINKS": ""}
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=60)
    (install,) = json.loads(report.read_text())["install"]
    assert install["metadata"]["version"] == "2.13.0"
    assert install["download_info"]["url"].startswith("file:")


def test_what_models_brings_is_no_part_of_what_runs() -> None:
    """Neither the image nor `pip install hetpipe` has it; `make setup` has."""
    of = {entry.name: entry.section for entry in parse(LOCK)}
    assert {of[name] for name in ("transformers", "timm", "peft")} == {MODELS}
    wanted = {requirement.name for requirement in PROJECT.sections[MODELS]}
    assert wanted == {"transformers", "timm", "torchvision", "peft"}
    assert not wanted & {requirement.name for requirement in PROJECT.sections[RUN]}


def test_what_only_another_python_or_platform_needs_is_found_with_its_marker() -> None:
    resolution = Resolution(
        versions={"a": "1", "b": "1"},
        needs={"a": [Requirement("b; python_version < '3.12'"), Requirement("c; sys_platform == 'darwin'")], "b": []},
    )
    found = closure([Requirement("a")], resolution, [environment for environment, _ in targets().values()])
    assert found.everywhere == {"a"}
    assert found.reached["b"] == {'python_version < "3.12"'}
    assert list(found.missing) == ["c"]


def test_the_lock_holds_what_every_target_needs() -> None:
    """Of what is installed here, the needs in every other environment, too: redis wants async-timeout before 3.11.3."""
    entries = {entry.name: entry for entry in parse(LOCK)}
    environments = [environment for environment, _ in targets().values()]
    needs = [
        (name, need) for name, wanted in lock.installed(entries.values(), VERSIONS) for need in wanted if need.marker
    ]
    for name, need in needs:
        for environment in environments:
            if need.marker and need.marker.evaluate({**environment, "extra": ""}):
                marker = entries[canonicalize_name(need.name)].marker
                assert not marker or Marker(marker).evaluate(environment), f"{name}: {need}"
    assert entries["async-timeout"].marker == 'python_full_version < "3.11.3"'


def installs(text: str) -> list[str]:
    """The commands that install with pip, continued lines joined."""
    joined = re.sub(r"\\\n", " ", text)
    return [match[0] for match in re.finditer(r"(?:pip install|\$\(PIP\)) [^\n&]*", joined)]


@pytest.mark.parametrize("file", ["Makefile", "Dockerfile"])
def test_nothing_is_installed_without_hashes_but_torch_torchvision_and_hetpipe(file: str) -> None:
    """And hetpipe is built by what the lock holds, not by what an index has today."""
    found = installs((ROOT / file).read_text(encoding="utf-8"))
    kinds = set()
    for command in found:
        if "--require-hashes" in command:
            kinds.add("hashed")
            assert file == "Dockerfile" or "--no-deps" in command, "what needs torch would bring another one"
        elif "requirements-torchvision.lock" in command:
            assert "--no-deps" in command, "it would bring another torch"
        elif "--no-deps" in command:
            assert "--no-build-isolation" in command
            assert command.rstrip().endswith(" .")
            kinds.add("hetpipe")
        else:
            assert re.search(r'(--requirement requirements-torch\.lock|--upgrade "torch[^"]*")\s*$', command), command
            kinds.add("torch")
    assert kinds == {"hashed", "hetpipe", "torch"}


def test_the_image_takes_its_sections_of_the_lock() -> None:
    command = [sys.executable, "deploy/image/locked", "requirements.lock"]
    done = subprocess.run([*command, BUILD, RUN], cwd=ROOT, capture_output=True, text=True, check=True)
    names = {entry.name for entry in parse(done.stdout)}
    assert names == {entry.name for entry in parse(LOCK) if entry.section in {BUILD, RUN}}
    assert {"grpcio", "typer", "prometheus-client", "cryptography"} <= names
    assert not {"pytest", "mypy"} & names
    unknown = subprocess.run([*command, "runn"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "build, run, models, development" in unknown.stderr


@pytest.mark.processes
def test_a_constraint_file_of_pips_configuration_does_not_hold_up_the_installation(tmp_path: Path) -> None:
    """It may be out of reach, or contradict the lock: nobody reads it."""
    configuration = tmp_path / "pip.conf"
    configuration.write_text(f"[global]\nconstraint = {tmp_path}/not-there.txt\n")
    (version,) = (entry.version for entry in parse(LOCK) if entry.name == "packaging")
    done = subprocess.run(
        [
            "make",
            f"BIN={Path(sys.executable).parent}",
            "--eval",
            f"try:\n\t@$(PIP) --no-index --dry-run packaging=={version}",
            "try",
        ],
        cwd=ROOT,
        env={**os.environ, "PIP_CONFIG_FILE": str(configuration)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert "PIP_CONSTRAINT=/dev/null" in dockerfile[: dockerfile.index("pip install")]
