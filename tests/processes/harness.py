"""Runs the real command line on small jobs, and finds and kills the processes behind a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from hetpipe.checkpoint.manifest import newest_checkpoint, read_manifest
from hetpipe.cli.app import app
from hetpipe.clock import SYSTEM_CLOCK
from tests.polling import wait_until

ROOT = Path(__file__).resolve().parents[2]
HETPIPE = Path(sys.executable).with_name("hetpipe")


@dataclass(frozen=True)
class Outcome:
    """How a finished command went."""

    returncode: int
    result: dict[str, Any]
    stderr: str
    seconds: float


def write_job(folder: Path, **values: Any) -> Path:
    """A job file with the small model of `tests.models`, changed by `values`."""
    job: dict[str, Any] = {
        "name": "small",
        "model": "tests.models:mlp32",
        "loss": "tests.models:loss",
        "data": {"train": "tests.models:data32", "eval": "tests.models:data32"},
        "batch_size": 4,
        "epochs": 2,
        "seed": 3,
        "optimizer": {"name": "SGD", "lr": 0.05, "momentum": 0.9},
        "workers": {"count": 2, "stages": 2},
        "sync": {"kind": "wsp", "D": 1, "minibatches_per_wave": 2},
        "parameter_servers": {"count": 1},
    }
    job.update(values)
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


class Train:
    """A `hetpipe train --json` under way."""

    def __init__(self, folder: Path, *arguments: str | Path, environment: dict[str, str] | None = None) -> None:
        """Start it; `environment` is added to that of this process."""
        self.run_dir = folder / f"run-{len(list(folder.glob('run-*')))}"
        self._started = SYSTEM_CLOCK.monotonic()
        self._stderr = (folder / f"{self.run_dir.name}.stderr").open("w+")
        command = [str(HETPIPE), "train", *map(str, arguments), "--json", "--run-dir", str(self.run_dir)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=os.environ | (environment or {}),
        )

    def finish(self, timeout_seconds: float = 90.0) -> Outcome:
        """Wait for the end; the JSON object is the last line of standard output."""
        try:
            stdout, _ = self.process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._stderr.close()
        lines = stdout.strip().splitlines()
        return Outcome(
            self.process.returncode,
            json.loads(lines[-1]) if lines else {},
            self.stderr(),
            SYSTEM_CLOCK.monotonic() - self._started,
        )

    def stderr(self) -> str:
        """What it has said so far."""
        return Path(self._stderr.name).read_text()

    def status(self) -> dict[str, Any]:
        """`hetpipe status --json` of this run, asked in this process: a program takes half a second to start."""
        found = CliRunner().invoke(app, ["status", str(self.run_dir), "--json"])
        status: dict[str, Any] = json.loads(found.stdout.strip().splitlines()[-1])
        return status

    def minibatches_done(self) -> int:
        """Minibatches of the whole run that its newest checkpoint contains."""
        manifest = read_manifest(newest_checkpoint(self.run_dir))
        return manifest.progress.minibatches

    def wait_for_checkpoint(self, timeout_seconds: float = 60.0) -> None:
        """Until the run is under way and has something to resume from."""
        manifests = self.run_dir / "checkpoints"
        wait_until(
            lambda: any(manifests.glob("*/manifest.json")) or self.process.poll() is not None,
            timeout_seconds=timeout_seconds,
            what=f"a checkpoint in {manifests}",
        )
        assert self.process.poll() is None, self.stderr()


def pids_of(status: Mapping[str, Any], role: str) -> list[int]:
    """The processes of one role."""
    return [process["pid"] for process in status["processes"] if process["role"] == role]


def kill(pid: int) -> None:
    """As a crash or the kernel would."""
    os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
