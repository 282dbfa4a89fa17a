"""`hetpipe debug` on a recorded run."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import hetpipe
from hetpipe.cli.app import app
from tests.docs.pages import ROOT
from tests.recorded.test_recorded_runs import FINISHED, HERE


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(ROOT)
    return Path(shutil.copytree(HERE / FINISHED, tmp_path / "run"))


def debug(run_dir: Path, *arguments: str, keys: str = "") -> Result:
    return CliRunner().invoke(app, ["debug", str(run_dir), *arguments], input=keys)


def test_loss_and_gradients_are_shown(run_dir: Path) -> None:
    shown = debug(run_dir, "--minibatch", "1", "--no-pdb", "--json")
    assert shown.exit_code == 0, shown.output
    told: dict[str, Any] = json.loads(shown.stdout.splitlines()[-1])
    assert (told["clock"], len(told["indices"])) == (0, 4)
    replayed = hetpipe.replay(run_dir, vw=0, p=1)
    assert told["loss"] == replayed.loss
    assert math.isfinite(replayed.loss)
    assert set(told["gradient_norms"]) == set(replayed.gradients)
    for_people = debug(run_dir, "--minibatch", "1", "--no-pdb").stdout
    assert f"loss {replayed.loss!r}" in for_people


def test_the_debugger_stops_before_the_forward(run_dir: Path) -> None:
    shown = debug(run_dir, "--minibatch", "1", keys="p batch.target.shape\nc\n")
    assert shown.exit_code == 0, shown.output
    assert "torch.Size([4])" in shown.stdout
    assert "norm of its gradient" in shown.stdout


def test_quitting_the_debugger_is_no_error_of_hetpipe(run_dir: Path) -> None:
    shown = debug(run_dir, "--minibatch", "1", keys="q\n")
    assert shown.exit_code == 2
    assert "the debugger was quit before the minibatch was computed" in shown.stderr


def test_what_cannot_be_replayed_is_a_mistake_of_the_user(run_dir: Path) -> None:
    shown = debug(run_dir, "--minibatch", "999")
    assert shown.exit_code == 2
    assert "virtual worker 0 has not committed minibatch 999 in this run; these can be replayed: 1" in shown.stderr
