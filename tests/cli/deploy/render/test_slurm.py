"""`hetpipe render slurm`: a script for sbatch. `tests/processes/test_slurm.py` submits it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetpipe.cli.app import app

JOB = Path(__file__).parents[4] / "examples" / "digits" / "job.yaml"


def test_devices_are_requested_and_offered() -> None:
    arguments = ["render", "slurm", str(JOB), "--nodes", "3"]
    with_gpus = CliRunner().invoke(app, [*arguments, "--gpus", "2"]).stdout
    assert "#SBATCH --job-name=digits\n#SBATCH --nodes=3\n" in with_gpus
    assert "#SBATCH --gpus-per-node=2\n" in with_gpus
    assert 'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)' in with_gpus
    with_cpus = (
        CliRunner()
        .invoke(app, [*arguments, "--cpu-devices", "4", "--set", "name=other", "--set", "epochs= 2", "--insecure"])
        .stdout
    )
    assert "#SBATCH --job-name=other\n" in with_cpus
    assert "#SBATCH --cpus-per-task=4\n" in with_cpus
    assert "| sed 's/$/:4/' | paste" in with_cpus
    assert f"hetpipe launch {JOB} --set name=other --set 'epochs= 2' --insecure --hosts" in with_cpus


@pytest.mark.parametrize("devices", [[], ["--gpus", "1", "--cpu-devices", "1"]])
def test_devices_are_named_once(devices: list[str]) -> None:
    result = CliRunner().invoke(app, ["render", "slurm", str(JOB), *devices])
    assert result.exit_code == 2
    assert "either --gpus N or --cpu-devices N" in result.stderr
