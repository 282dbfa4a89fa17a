"""`python -m tests.supply.wheel`: the wheel stands alone.

Builds it, installs it into a clean environment with what its metadata asks for, in the locked versions and without
extras, and runs the first commands of a user in an empty folder, where the source is out of sight.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from hetpipe.bundled import BUNDLED
from tests.supply.lock import LOCK, ROOT, locked_versions, parse

_BUILD_SECONDS, _INSTALL_SECONDS, _COMMAND_SECONDS = 300, 1800, 300

#: Of the source, what no wheel is made of: anywhere, and at its top.
_LEFT_OUT = ("__pycache__", "*.egg-info")
_LEFT_OUT_AT_TOP = (".git", ".venv", ".*_cache", ".hypothesis", "build", "dist", "runs")

#: What is typed, each in the folder that the one before has left: the first quarter of an hour.
COMMANDS = (
    "hetpipe version",
    "hetpipe doctor",
    "hetpipe demo --set epochs=4",
    "hetpipe check",
    "hetpipe export digits.safetensors",
    "hetpipe debug --minibatch 1 --no-pdb",
    "hetpipe train --resume runs/latest --set epochs=5",
    "hetpipe init my-job",
    "cd my-job",
    "hetpipe train job.yaml --set epochs=2",
    "hetpipe profile job.yaml --out profile.json",
    "hetpipe cluster show > cluster.yaml",
    "hetpipe plan --profile profile.json --cluster cluster.yaml --why --html plan.html",
    "hetpipe render schedule",
    "hetpipe render compose job.yaml --cpu-devices 4 --insecure",
    "hetpipe render k8s job.yaml --agents cpu=1x4 --out overlay --insecure",
    "hetpipe render manifests manifests",
)


class WheelError(Exception):
    """It does not stand alone."""


def build(folder: Path) -> Path:
    """Make the wheel in `folder`, of a copy of the source, so that no earlier build gets into it."""
    source = folder / "source"
    anywhere, at_top = shutil.ignore_patterns(*_LEFT_OUT), shutil.ignore_patterns(*_LEFT_OUT_AT_TOP)

    def left_out(path: str, names: list[str]) -> set[str]:
        return anywhere(path, names) | (at_top(path, names) if Path(path) == ROOT else set())

    shutil.copytree(ROOT, source, ignore=left_out, symlinks=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    _run([*command, "--no-build-isolation", "--wheel-dir", str(folder), str(source)], folder, seconds=_BUILD_SECONDS)
    shutil.rmtree(source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def strangers(wheel: Path) -> list[str]:
    """What is in the wheel and should not be, and what should be and is not."""
    names = zipfile.ZipFile(wheel).namelist()
    found = [name for name in names if not re.match(r"hetpipe(-[^/]*\.dist-info)?/", name)]
    found += [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    for path in BUNDLED:
        files = [path] if (ROOT / path).is_file() else _files_below(path)
        found += [f"no {file}" for file in files if f"hetpipe/bundled_files/{file}" not in names]
    return found


def _files_below(path: str) -> list[str]:
    files = (file for file in (ROOT / path).rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return [file.relative_to(ROOT).as_posix() for file in files]


def install(wheel: Path, folder: Path) -> Path:
    """A clean environment with the wheel and what it asks for; its programs."""
    venv.create(folder, with_pip=True)
    pins = [f"{entry.name}=={entry.version}" for entry in parse((ROOT / LOCK).read_text(encoding="utf-8"))]
    pins += [f"{name}=={version}" for name, version in locked_versions().items()]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pins), encoding="utf-8")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    wanted = ["install", "--quiet", "--only-binary=:all:", "--constraint", str(constraints), str(wheel)]
    _run([*pip, *wanted], folder, seconds=_INSTALL_SECONDS, PIP_CONSTRAINT=os.devnull)
    _run([*pip, "check"], folder, seconds=_COMMAND_SECONDS)
    return folder / "bin"


def walk(programs: Path, folder: Path, commands: Iterable[str] = COMMANDS) -> None:
    """Type `commands` in `folder`, which is empty."""
    home = folder.parent / "home"
    home.mkdir()
    for command in commands:
        typed, _, file = command.partition(" > ")
        word, *arguments = typed.split()
        if word == "cd":
            folder = folder / arguments[0]
            continue
        began = time.monotonic()
        environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(home), "PYTHONPATH": ""}
        said = _run([str(programs / word), *arguments], folder, seconds=_COMMAND_SECONDS, **environment)
        if file:
            (folder / file).write_text(said, encoding="utf-8")
        sys.stdout.write(f"{time.monotonic() - began:6.1f} s  {command}\n")
        sys.stdout.flush()


def _run(command: Sequence[str], folder: Path, *, seconds: float, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if done.returncode:
        said = f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
        raise WheelError(f"{said}\n{' '.join(command)}: exit status {done.returncode}")
    return done.stdout


def _check(wheel: Path) -> None:
    if wrong := strangers(wheel):
        raise WheelError(f"{wheel.name}: {', '.join(wrong)}")


def main() -> int:
    """Build, install, walk; the exit status."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hetpipe-wheel-") as name:
        folder = Path(name)
        try:
            wheel = build(folder)
            _check(wheel)
            sys.stdout.write(f"{time.monotonic() - began:6.1f} s  {wheel.name}: {wheel.stat().st_size} bytes\n")
            began_installing = time.monotonic()
            programs = install(wheel, folder / "environment")
            sys.stdout.write(f"{time.monotonic() - began_installing:6.1f} s  installed into a clean environment\n")
            (folder / "empty").mkdir()
            walk(programs, folder / "empty")
        except (WheelError, subprocess.TimeoutExpired) as error:
            sys.stderr.write(f"{error}\n")
            return 1
    sys.stdout.write(f"the wheel stands alone ({time.monotonic() - began:.0f} s)\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
