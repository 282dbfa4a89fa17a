"""`hetpipe.check`, `export` and `compare` from a Python program."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hetpipe
from hetpipe import api
from hetpipe.comparison.record import TrialRecord
from hetpipe.comparison.trials import Trial
from hetpipe.errors import CheckpointError, JobError, UserError
from hetpipe.report.view import View
from hetpipe.runs.shell import Shell
from tests.cli.fakes import small_job
from tests.comparison.comparisons import record
from tests.models import mlp32
from tests.recorded.test_recorded_runs import FINISHED, HERE


def test_a_run_is_checked_and_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = Path(shutil.copytree(HERE / FINISHED, tmp_path / "runs" / "one"))
    for run in (run_dir, hetpipe.Run(run_dir)):
        assert [report.ok for report in hetpipe.check(run).values()] == [True]
        written = hetpipe.export(run, "weights.safetensors")
        assert written.clock == 6
        mlp32().load_state_dict(load_file("weights.safetensors"))
    assert torch.equal(load_file("weights.safetensors")["0.weight"], hetpipe.Run(run_dir).weights().tensors["0.weight"])
    with pytest.raises(UserError, match="folder"):
        hetpipe.export(run_dir, tmp_path)
    with pytest.raises(UserError, match="to hf reads the folder of a run"):
        hetpipe.export("s3://bucket/run", "out", to="hf")
    shutil.rmtree(run_dir / "checkpoints")
    with pytest.raises(CheckpointError):
        hetpipe.export(run_dir, "weights.safetensors")


def test_policies_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained: list[Trial] = []

    def train(trial: Trial, run_dir: Path, shell: Shell, view: View) -> TrialRecord:
        del shell, view
        trained.append(trial)
        run_dir.mkdir()
        made = record(trial.weights, trial.seed)
        return replace(made, job_digest=trial.job_digest, run_dir=run_dir.name)

    monkeypatch.setattr(api, "train_trial", train)
    keys: dict[str, Any] = {
        "weights": ["wave", "flush"], "seeds": 2, "only_for": {"flush": {"optimizer": {"lr": 0.5}}}, "epochs": 3,
        "run_dir": "both",
    }  # fmt: skip
    compared = hetpipe.compare(small_job(), **keys)

    assert [(trial.weights, trial.seed) for trial in trained] == [("wave", 0), ("flush", 0), ("wave", 1), ("flush", 1)]
    assert {trial.job.epochs for trial in trained} == {3}
    assert {(trial.weights, trial.job.optimizer.arguments["lr"]) for trial in trained} == {
        ("wave", 0.1),
        ("flush", 0.5),
    }
    assert [(one.weights, one.finished) for one in compared.policies] == [("wave", 2), ("flush", 2)]
    assert (compared.path, len(compared.runs)) == (tmp_path / "both", 4)
    assert hetpipe.compare(small_job(), **keys).runs == compared.runs
    assert len(trained) == 4
    with pytest.raises(UserError, match="weights 'waves' is unknown; did you mean"):
        hetpipe.compare(small_job(), weights=["waves"])  # type: ignore[list-item]
    with pytest.raises(UserError, match="seeds is 0"):
        hetpipe.compare(small_job(), seeds=0)
    with pytest.raises(JobError, match="epochs"):
        hetpipe.compare(small_job(), epochs=-1)
