"""What a newcomer meets first: the package's names, the command, its completion, and a clone called hetpipe."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hetpipe
from hetpipe import __version__
from tests.docs.pages import ROOT
from tests.processes.harness import HETPIPE


def test_the_job_of_the_readme_is_no_part_of_the_source() -> None:
    """Who follows it in a clone finds `make test` and `git status` as they were."""
    (name,) = set(re.findall(r"hetpipe init (\S+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert name in settings["tool"]["ruff"]["extend-exclude"]
    assert f"/{name}/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_the_names_are_there_to_be_found() -> None:
    """For people who look around in a notebook, and its completion."""
    assert set(hetpipe.__all__) <= set(dir(hetpipe))


def test_looking_around_imports_nothing() -> None:
    code = "import sys, hetpipe; dir(hetpipe); sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _python(folder: Path, code: str) -> str:
    """What a program in `folder` prints; nothing but the installation tells it where hetpipe is."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr


def test_hetpipe_is_imported_from_the_folder_above_a_clone(tmp_path: Path) -> None:
    """A clone that is called hetpipe is a folder `hetpipe` that holds no `__init__.py`."""
    (tmp_path / "hetpipe").symlink_to(ROOT)
    assert _python(tmp_path, "import hetpipe; print(hetpipe.__version__)") == __version__


def test_a_folder_services_of_the_users_own_is_imported(tmp_path: Path) -> None:
    """Also where a copy of the source is on the path behind it, and where the folder has no `__init__.py`."""
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "model.py").write_text("mine = 'mine'\n")
    assert _python(tmp_path, "import hetpipe, services.model; print(services.model.mine)") == "mine"


@pytest.mark.processes
def test_the_version_is_an_option(tmp_path: Path) -> None:
    done = subprocess.run([HETPIPE, "--version"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"hetpipe {__version__}\n"


@pytest.mark.processes
def test_the_shell_completes_commands(tmp_path: Path) -> None:
    asked = {"_HETPIPE_COMPLETE": "complete_bash", "COMP_WORDS": "hetpipe tr", "COMP_CWORD": "1"}
    done = subprocess.run([HETPIPE], env={**os.environ, **asked}, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["train"], done.stderr


def test_the_environment_is_activated_before_the_command_is_used() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = readme.partition("```sh\n")[2]
    typed = re.search(r"(?m)^hetpipe ", commands)
    assert typed is not None
    assert "\nsource .venv/bin/activate" in commands[: typed.start()]
    assert "source $(BIN)/activate" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_no_module_hides_a_public_name() -> None:
    """An imported module `hetpipe.check` would replace the function."""
    paths = [ROOT / "hetpipe" / name for name in hetpipe.__all__]
    assert not [path for path in paths if path.is_dir() or path.with_suffix(".py").exists()]
