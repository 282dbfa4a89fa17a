"""A coordinator that is killed: training goes on without it, and the next one leads the job as if nothing had been."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hetpipe.checker import check_run
from hetpipe.checkpoint.manifest import newest_checkpoint
from hetpipe.decide.lifecycle.adoption import ADOPTED
from tests import models
from tests.polling import wait_until
from tests.processes.harness import Train, kill, pids_of, write_job
from tests.reference.executor import ReferenceRun, run_reference

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

#: A run that waits more than it computes, so that those who start find a free core.
SLOW: dict[str, Any] = {
    "checkpoint": {"every_waves": 10, "keep": 2},
    "cluster": {"devices": [{"slowdown": 30.0}]},
}


def wait_for(train: Train, text: str) -> None:
    """Until the run has said `text`."""
    wait_until(
        lambda: text in train.stderr() or train.process.poll() is not None, timeout_seconds=90.0, what=repr(text)
    )
    assert train.process.poll() is None, train.stderr()


@pytest.mark.exhaustive
def test_the_job_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    epochs = 30
    sync = {"kind": "wsp", "D": 1, "minibatches_per_wave": 2, "deterministic": True}
    optimizer = {"name": "SGD", "lr": 0.01}
    shape = {"count": 2, "stages": 1}
    train = Train(tmp_path, write_job(tmp_path, **SLOW, epochs=epochs, sync=sync, optimizer=optimizer, workers=shape))
    train.wait_for_checkpoint()
    status = train.status()
    kill(pids_of(status, "coordinator")[0])
    wait_for(train, ADOPTED)
    # The new coordinator has the processes as soon as their agents have told it of them.
    stages = pids_of(status, "stage")
    wait_until(lambda: pids_of(train.status(), "stage") == stages, timeout_seconds=30.0, what="the same stages")
    outcome = train.finish()

    assert outcome.returncode == 0, outcome.stderr
    assert outcome.result["deaths"] == {"0": 0, "1": 0}
    assert outcome.result["samples"] == epochs * 46
    assert outcome.stderr.count("state=finished") == 1
    assert check_run(train.run_dir, require_complete=True).ok
    reference = run_reference(
        ReferenceRun(
            model=models.mlp32,
            loss=models.loss,
            train=models.data32(),
            batch_size=4,
            seed=3,
            optimizer="SGD",
            arguments={"lr": 0.01},
            num_virtual_workers=2,
            minibatches_per_wave=2,
            staleness=1,
            epochs=epochs,
            checkpoint_every_waves=10,
        )
    )
    (file,) = newest_checkpoint(train.run_dir).glob("shard-*.safetensors")
    weights = load_file(file)
    for name, expected in reference.weights.items():
        assert torch.equal(weights[f"weights/{name}"], expected), name


@pytest.mark.exhaustive
def test_who_is_killed_while_there_is_none_comes_back(tmp_path: Path) -> None:
    train = Train(tmp_path, write_job(tmp_path, **SLOW, epochs=100_000))
    train.wait_for_checkpoint()
    status = train.status()
    coordinator, victim = pids_of(status, "coordinator")[0], pids_of(status, "stage")[3]
    kill(coordinator)
    kill(victim)
    wait_for(train, "event=worker_rejoined")
    train.process.send_signal(signal.SIGINT)
    outcome = train.finish()

    assert outcome.returncode == 130, outcome.stderr
    assert outcome.result["staleness"]["violations"] == 0
    assert outcome.result["deaths"] == {"0": 0, "1": 1}
    assert f"(pid {victim} on " in outcome.stderr
    assert f"the coordinator (pid {coordinator}) was killed by SIGKILL; it was restarted" in outcome.stderr
