"""What is lost with a disk, or with the only copy of the weights, is trained again: the run ends as if nothing was."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hetpipe.checker import check_run
from hetpipe.checkpoint.manifest import newest_checkpoint
from tests.numerics.compare import ADAMW, MOMENTUM, Case
from tests.polling import wait_until
from tests.processes.harness import Outcome, Train, kill, pids_of, write_job
from tests.reference.executor import run_reference

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

#: A run that waits more than it computes, and is not over before something can be done to it.
SLOW: dict[str, Any] = {"cluster": {"devices": [{"slowdown": 60.0}]}}


def begin(folder: Path, case: Case) -> tuple[Train, dict[str, Any]]:
    """Train until there is something to go back to; the run, and its status a little before."""
    job = case.job().model_dump(mode="json", exclude_defaults=True)
    train = Train(folder, write_job(folder, **{"epochs": None, **job, **SLOW}))
    wait_until(
        lambda: "state=running" in train.stderr() or train.process.poll() is not None,
        timeout_seconds=90.0,
        what="the beginning of the run",
    )
    status = train.status()
    train.wait_for_checkpoint()
    return train, status


def check(case: Case, train: Train, outcome: Outcome) -> None:
    """It has gone back once, has ended, and no weight tells of it."""
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.result["rewinds"] == 1
    assert outcome.result["staleness"]["violations"] == 0
    assert outcome.stderr.count("event=rewound") == 1
    assert newest_checkpoint(train.run_dir).is_relative_to(train.run_dir / "rewind-1")
    found: dict[str, torch.Tensor] = {}
    for file in newest_checkpoint(train.run_dir).glob("*.safetensors"):
        found.update(load_file(file))
    for weight, expected in run_reference(case.reference()).weights.items():
        assert torch.equal(found[f"weights/{weight}"], expected), weight


@pytest.mark.exhaustive
def test_a_parameter_server_without_its_disk(tmp_path: Path) -> None:
    case = Case(
        weights="stash", workers=2, servers=2, every_waves=4, optimizer=MOMENTUM, batch_size=4, minibatches=60, wave=2
    )
    train, status = begin(tmp_path, case)
    shutil.rmtree(train.run_dir / "state" / "shard-1")
    kill(pids_of(status, "parameter_server")[1])

    check(case, train, train.finish(120.0))


@pytest.mark.exhaustive
def test_the_coordinator_and_the_clock_shard_without_its_disk_at_once(tmp_path: Path) -> None:
    case = Case(
        weights="stash", workers=2, servers=2, every_waves=4, optimizer=MOMENTUM, batch_size=4, minibatches=60, wave=2
    )
    train, status = begin(tmp_path, case)
    coordinator, (clock_shard, _) = pids_of(status, "coordinator")[0], pids_of(status, "parameter_server")
    kill(coordinator)
    kill(clock_shard)
    shutil.rmtree(train.run_dir / "state" / "shard-0")
    outcome = train.finish(120.0)

    check(case, train, outcome)
    assert f"(pid {coordinator}) was killed by SIGKILL; it was restarted" in outcome.stderr
    assert "has lost its state of the job" in outcome.stderr
    assert check_run(train.run_dir / "rewind-1", require_complete=True).ok


@pytest.mark.exhaustive
def test_a_stage_that_held_the_only_copy_of_its_weights(tmp_path: Path) -> None:
    case = Case(
        weights="flush", kind="allreduce", workers=2, every_waves=4, optimizer=ADAMW, batch_size=4, minibatches=60
    )
    train, status = begin(tmp_path, case)
    kill(pids_of(status, "stage")[3])

    check(case, train, train.finish(120.0))
