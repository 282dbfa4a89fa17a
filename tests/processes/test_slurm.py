"""The script of `hetpipe render slurm` on a real Slurm: two nodes, both this machine, started for the test."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetpipe.checker import check_run
from hetpipe.checkpoint.manifest import newest_checkpoint
from tests.polling import wait_until
from tests.processes.harness import HETPIPE, ROOT

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
PATH = f"{HETPIPE.parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
MISSING = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]

pytestmark = [
    pytest.mark.processes,
    pytest.mark.exhaustive,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(MISSING), reason=f"NOT TESTED: Slurm, because {', '.join(MISSING)} is missing"),
]

#: Both resolve to this machine, as the run needs. The host's own name must come first in the configuration.
NODES = list(dict.fromkeys((socket.gethostname(), "localhost")))

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
"""


@dataclass(frozen=True)
class Slurm:
    """A cluster of `NODES`."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, cwd: Path | None = None) -> str:
        done = subprocess.run(
            command, cwd=cwd, env=self.environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def submit(self, script: str, folder: Path) -> str:
        (folder / "train.sbatch").write_text(script)
        return self.run("sbatch", "--parsable", "--output=said", "train.sbatch", cwd=folder).strip()

    def fact(self, job: str, name: str) -> str:
        found = re.search(rf"\b{name}=(\S+)", self.run("scontrol", "show", "job", job))
        assert found is not None
        return found[1]

    def end_of(self, job: str) -> tuple[str, str]:
        """State and exit status of a job, once it has ended."""
        running = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}
        wait_until(lambda: self.fact(job, "JobState") not in running, timeout_seconds=240, what=f"end of job {job}")
        return self.fact(job, "JobState"), self.fact(job, "ExitCode")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if len(NODES) < 2:
        pytest.skip("NOT TESTED: Slurm, because this machine has no other name than localhost")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    ports = _free_ports(1 + len(NODES))
    host, user = socket.gethostname(), subprocess.check_output(["id", "-un"], text=True).strip()
    lines = [CONFIGURATION.format(host=host, ports=ports, user=user, folder=folder)]
    for node, port in zip(NODES, ports[1:], strict=True):
        (folder / f"spool-{node}").mkdir()
        lines.append(f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2\n")
    lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n")
    (folder / "slurm.conf").write_text("".join(lines))
    cluster = Slurm(folder)
    files = {"socket": "munge.sock", "key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    munge = [f"--{option}={folder / name}" for option, name in (files | {"log-file": "munge.log"}).items()]
    commands = [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D", "-i", "-c"],
        *(["slurmd", "-D", "-N", node] for node in NODES),
    ]
    daemons: list[subprocess.Popen[bytes]] = []
    with (folder / "output").open("wb") as said:
        try:
            for command in commands:
                daemons.append(subprocess.Popen(command, env=cluster.environment, stdout=said, stderr=said))
                if command[0] == "munged":
                    wait_until((folder / "munge.sock").exists, timeout_seconds=30, what="socket of munged")
            wait_until(lambda: _idle(cluster) == set(NODES), timeout_seconds=60, what="idle nodes")
            yield cluster
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
            for daemon in daemons:
                daemon.wait(timeout=30)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def _idle(cluster: Slurm) -> set[str]:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"],
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return set(done.stdout.split())


def rendered(*options: str, job: str = "examples/digits/job.yaml") -> str:
    command = [str(HETPIPE), "render", "slurm", job, "--nodes", "2", "--cpu-devices", "2", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def test_a_run_on_two_nodes_to_its_end(slurm: Slurm, folder: Path) -> None:
    job = slurm.submit(rendered("--set", "epochs=1"), folder)
    assert slurm.end_of(job) == ("COMPLETED", "0:0"), (folder / "said").read_text()
    said = (folder / "said").read_text()
    assert any(f"an agent on each of {one}, {other}" in said for one, other in (NODES, NODES[::-1]))
    assert check_run((folder / "runs" / "latest").resolve(), require_complete=True).ok


def test_a_signal_stops_the_run_at_a_barrier_with_a_checkpoint(slurm: Slurm, folder: Path) -> None:
    job = slurm.submit(rendered("--set", "epochs=10000", "--set", "checkpoint.every_waves=10000"), folder)
    said = folder / "said"
    wait_until(lambda: said.exists() and "global_clock=" in said.read_text(), timeout_seconds=240, what="training")
    slurm.run("scancel", "--batch", "--signal=INT", job)
    assert slurm.end_of(job) == ("FAILED", "130:0"), said.read_text()
    assert newest_checkpoint((folder / "runs" / "latest").resolve()).is_dir()


def test_a_run_that_fails_is_a_job_that_fails(slurm: Slurm, folder: Path) -> None:
    job = slurm.submit(rendered().replace("examples/digits/job.yaml", "no.yaml"), folder)
    assert slurm.end_of(job) == ("FAILED", "2:0")
    assert "no.yaml" in (folder / "said").read_text()
