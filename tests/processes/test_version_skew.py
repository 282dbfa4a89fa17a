"""Services and commands of two versions at once: each is refused with a sentence, and nothing of a run is lost.

The other versions are real: the sources of the last commit whose calls are those of 0.1, from the history of this
repository, and a copy of this one that calls itself differently. `PYTHONPATH` puts them before the installed one.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hetpipe import __version__
from hetpipe.checker import check_run
from tests.processes.harness import ROOT

#: The last commit before the calls of `hetpipe.proto.v2`.
OLD_COMMIT = "c04db1f7f5a4862407fe711c4c122e1f6c7136aa"
NEXT_VERSION = "999.0.0"

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive, pytest.mark.timeout(240)]


def hetpipe(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hetpipe", *arguments]


def environment_of(source: Path | None) -> dict[str, str]:
    return {**os.environ, **({} if source is None else {"PYTHONPATH": str(source)})}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources of 0.1."""
    made = subprocess.run(["git", "archive", OLD_COMMIT, "hetpipe"], cwd=ROOT, capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"NOT TESTED: services of 0.1, because commit {OLD_COMMIT[:8]} is not in this copy of the history")
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This source with another version."""
    folder = tmp_path_factory.mktemp("newer")
    shutil.copytree(ROOT / "hetpipe", folder / "hetpipe", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "hetpipe" / "__init__.py"
    text = path.read_text().replace(f'__version__ = "{__version__}"', f'__version__ = "{NEXT_VERSION}"')
    assert NEXT_VERSION in text
    path.write_text(text)
    return folder


class Services:
    """Services of a test, which end with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()

    def start(self, *arguments: str, source: Path | None = None) -> str:
        """Start a service; returns its address."""
        log = self._stack.enter_context((self._folder / f"{arguments[0]}.log").open("ab"))
        process = subprocess.Popen(
            hetpipe("serve", *arguments),
            cwd=self._folder,
            env=environment_of(source),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        self._stack.callback(process.communicate)
        self._stack.callback(process.terminate)
        assert process.stdout is not None
        return str(json.loads(process.stdout.readline())["address"])

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    services = Services(tmp_path)
    yield services
    services.close()


def refusal(*arguments: str, source: Path | None = None) -> str:
    """What a program says that must end by itself, with a failure."""
    done = subprocess.run(
        hetpipe(*arguments),
        cwd=source,  # else the folder of the tests would come before it
        env=environment_of(source),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_a_run_goes_on_while_services_and_commands_of_other_versions_come(
    services: Services, old: Path, newer: Path, tmp_path: Path
) -> None:
    coordinator = services.start("coordinator", "--port", "0")
    services.start("parameter-server", "--coordinator", coordinator, "--index", "0", "--port", "0")
    services.start("agent", "--coordinator", coordinator, "--cpu-devices", "2")
    run = tmp_path / "run"
    changes = ("epochs=40", "workers.count=1", "parameter_servers.count=1")
    options = [part for change in changes for part in ("--set", change)]
    following = subprocess.Popen(
        hetpipe("submit", "examples/digits/job.yaml", *options, "--coordinator", coordinator, "--run-dir", str(run)),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    at = ("--coordinator", coordinator)
    told = "is it another program, or another version?"
    assert told in refusal("serve", "agent", *at, "--cpu-devices", "2", source=old)
    assert told in refusal("serve", "parameter-server", *at, "--index", "1", source=old)
    assert told in refusal("status", *at, source=old)
    assert f"runs hetpipe {NEXT_VERSION}, and the coordinator hetpipe {__version__}; run the same version" in refusal(
        "serve", "agent", *at, "--node", "another", "--cpu-devices", "2", source=newer
    )
    said, _ = following.communicate(timeout=200)
    assert following.returncode == 0, said
    assert check_run(run, require_complete=True).ok


def test_a_coordinator_of_another_version_takes_nobody_in(services: Services, old: Path, newer: Path) -> None:
    former = ("--coordinator", services.start("coordinator", "--port", "0", source=old))
    told = refusal("serve", "agent", *former, "--cpu-devices", "1")
    assert "does not implement Register; it may be another program or another version" in told
    assert told.endswith(f"this is hetpipe {__version__}")
    assert "does not implement GetStatus" in refusal("status", *former)
    later = ("--coordinator", services.start("coordinator", "--port", "0", source=newer))
    assert f"runs hetpipe {__version__}, and the coordinator hetpipe {NEXT_VERSION}" in refusal(
        "serve", "agent", *later, "--cpu-devices", "1"
    )
