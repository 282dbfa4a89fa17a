"""The programs of docs/migrating.md: hetpipe takes their jobs, and trains them."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hetpipe
from hetpipe.job.file import Job
from hetpipe.runs.requests import given_job
from hetpipe.runs.shell import Shell
from tests.docs.pages import Block, blocks

PAGE = "migrating.md"
PROGRAMS = [block for block in blocks("python") if block.page.name == PAGE and block.text.startswith("# with hetpipe")]
NAMES = ("ddp", "lightning", "trainer")


def written(block: Block, folder: Path) -> Path:
    path = folder / "train.py"
    path.write_text(block.text, encoding="utf-8")
    return path


def test_each_has_its_counterpart() -> None:
    assert len(PROGRAMS) == len(NAMES)
    assert len([block for block in blocks("python") if block.page.name == PAGE]) == 2 * len(NAMES)


@pytest.mark.parametrize("block", PROGRAMS, ids=NAMES)
def test_the_job_is_valid(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []

    class Trained(Exception):
        pass

    def train(**keys: Any) -> None:
        with given_job(None, keys, Shell()) as (job, shell):
            assert shell.current == tmp_path
            jobs.append(job)
        raise Trained

    monkeypatch.setattr(hetpipe, "train", train, raising=False)
    with pytest.raises(Trained):
        runpy.run_path(str(written(block, tmp_path)), run_name="__main__")
    (job,) = jobs
    assert job.model_dump()["model"] is not None


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.parametrize("block", PROGRAMS, ids=NAMES)
def test_the_program_trains(block: Block, tmp_path: Path) -> None:
    command = [sys.executable, str(written(block, tmp_path))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
    result = hetpipe.Run(run).result
    assert result is not None
    assert result.staleness.violations == 0
    assert result.loss.last is not None
