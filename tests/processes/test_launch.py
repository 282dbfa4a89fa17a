"""`hetpipe launch` with a stand-in for ssh: a job on two hosts that are both this machine, under mutual TLS."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hetpipe.checker import check_run
from tests.docs.pages import ROOT
from tests.processes.harness import HETPIPE

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive, pytest.mark.timeout(180)]


def test_a_job_trains_on_two_hosts_and_leaves_no_process(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\necho "$1 $$" >> hosts\nshift\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    job = ["examples/digits/job.yaml", "--set", "epochs=1", "--run-dir", "my run"]
    hosts = ["--hosts", "localhost:2,127.0.0.1:2", "--advertise", "localhost", "--ssh", str(ssh)]
    done = subprocess.run(
        [HETPIPE, "launch", *job, *hosts, "--json"], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["samples"], result["staleness"]["violations"]) == (1442, 0)
    run_dir = tmp_path / "my run"
    assert check_run(run_dir, require_complete=True).ok
    assert not (run_dir / "certs").exists()
    started = dict(line.split() for line in (tmp_path / "hosts").read_text().splitlines())
    assert set(started) == {"localhost", "127.0.0.1"}
    assert not any(Path(f"/proc/{pid}").exists() for pid in started.values())
