"""A job whose code is on no node: it travels with the submission, and its agent runs it from a private folder."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hetpipe.checker import check_run
from hetpipe.cli.run.job_connection import is_over
from hetpipe.values.events import JobState
from hetpipe.wire.calls import GET_STATUS, GetStatusRequest
from hetpipe.wire.coordinator_client import CoordinatorClient
from tests.polling import wait_until
from tests.processes.harness import HETPIPE
from tests.server.test_programs import Program

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive, pytest.mark.timeout(180)]

MODEL = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from parts.layers import hidden


def build():
    return nn.Sequential(nn.Linear(5, 7), hidden(), nn.Linear(7, 3))


def data():
    return TensorDataset(torch.linspace(-1, 1, 200).view(40, 5), torch.arange(40) % 3)
"""

LAYERS = """
from torch import nn


def hidden():
    return nn.Tanh()
"""

JOB = {
    "name": "sent",
    "model": "model:build",
    "loss": "torch.nn.functional:cross_entropy",
    "data": {"train": "model:data"},
    "batch_size": 4,
    "epochs": 1,
    "optimizer": {"name": "SGD", "lr": 0.05},
    "workers": {"count": 1, "stages": 2},
    "parameter_servers": {"count": 1},
}


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    programs: list[Program] = []
    yield programs
    for program in reversed(programs):
        program.process.kill()
        program.process.communicate()


def test_code_travels_with_the_job_and_trains_where_its_folder_is_not(programs: list[Program], tmp_path: Path) -> None:
    """The job waits for devices until the folder of its code is gone."""
    source = tmp_path / "source"
    (source / "parts").mkdir(parents=True)
    (source / "model.py").write_text(MODEL)
    (source / "parts" / "layers.py").write_text(LAYERS)
    (source / "job.yaml").write_text(yaml.safe_dump(JOB))
    programs.append(Program("coordinator"))
    address = programs[0].ready()["address"]
    run_dir = tmp_path / "run"
    command = [str(HETPIPE), "submit", "job.yaml", "--coordinator", address, "--run-dir", str(run_dir)]
    subprocess.run([*command, "--send-code", "--detach"], cwd=source, check=True, capture_output=True)
    shutil.rmtree(source)

    at = ("--coordinator", address)
    programs.append(Program("parameter-server", *at, "--index", "0", "--state", str(tmp_path / "shard-0")))
    programs.append(Program("agent", *at, "--node", "n0", "--cpu-devices", "2", "--accept-code"))
    for program in programs[1:]:
        program.ready()
    client = CoordinatorClient(address)
    try:
        wait_until(
            lambda: is_over(client.invoke(GET_STATUS, GetStatusRequest())), timeout_seconds=120.0, what="end of the job"
        )
        status = client.invoke(GET_STATUS, GetStatusRequest())
    finally:
        client.close()
    assert status.state is JobState.FINISHED, status
    assert check_run(run_dir, require_complete=True).ok
