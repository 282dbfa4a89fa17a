"""`hetpipe launch`: a job on two hosts that are both this machine, under mutual TLS.

With a stand-in for ssh, and with a server of OpenSSH where there is one.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetpipe.checker import check_run
from tests.docs.pages import ROOT
from tests.polling import wait_until
from tests.processes.harness import HETPIPE

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive, pytest.mark.timeout(180)]

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")

#: Addresses of every Linux machine for itself.
FIRST, SECOND = "127.0.0.2", "127.0.0.3"

SERVER = """\
Port {port}
ListenAddress {first}
ListenAddress {second}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
"""

CLIENT = """\
Host *
Port {port}
IdentityFile {folder}/user
IdentitiesOnly yes
UserKnownHostsFile {folder}/known
StrictHostKeyChecking accept-new
"""


def launch(folder: Path, hosts: str, ssh: str, *more: str) -> subprocess.CompletedProcess[str]:
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    job = ["examples/digits/job.yaml", "--set", "epochs=1", "--run-dir", "my run"]
    command = [
        str(HETPIPE),
        "launch",
        *job,
        "--hosts",
        hosts,
        "--advertise",
        "localhost",
        "--ssh",
        ssh,
        "--json",
        *more,
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def check_trained(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    """The whole epoch, on all devices, with a history that is in order; nothing secret is left."""
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["samples"], result["staleness"]["violations"]) == (1442, 0)
    assert check_run(folder / "my run", require_complete=True).ok
    assert not (folder / "my run" / "certs").exists()


def test_a_job_trains_on_two_hosts_and_leaves_no_process(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\necho "$1 $$" >> hosts\nshift\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    check_trained(tmp_path, launch(tmp_path, "localhost:2,127.0.0.1:2", str(ssh)))
    started = dict(line.split() for line in (tmp_path / "hosts").read_text().splitlines())
    assert set(started) == {"localhost", "127.0.0.1"}
    assert not any(Path(f"/proc/{pid}").exists() for pid in started.values())


@pytest.fixture
def real_ssh(tmp_path: Path) -> Iterator[str]:
    """A value of `--ssh`: an OpenSSH server of its own listens on two addresses of this machine."""
    if SSHD is None:
        pytest.skip("NOT TESTED: ssh, because sshd is missing (apt-get install openssh-server)")
    folder = tmp_path / "sshd"
    folder.mkdir()
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    with socket.create_server((FIRST, 0)) as taken:
        port = taken.getsockname()[1]
    for name, text in (("server", SERVER), ("client", CLIENT)):
        (folder / name).write_text(text.format(port=port, folder=folder, first=FIRST, second=SECOND))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # which a server of root's wants
    server = subprocess.Popen([SSHD, "-D", "-f", folder / "server", "-E", folder / "log"])
    try:
        log = folder / "log"
        wait_until(lambda: log.exists() and "listening" in log.read_text(), timeout_seconds=10, what="listening sshd")
        yield shlex.join(["ssh", "-F", str(folder / "client"), "-o", "BatchMode=yes"])
    finally:
        server.terminate()
        server.wait()


def test_through_a_real_ssh(tmp_path: Path, real_ssh: str) -> None:
    done = launch(tmp_path, f"{FIRST}:2,127.0.0.9:2", real_ssh)
    assert done.returncode == 2
    assert "host 127.0.0.9 cannot be reached: ssh: connect to host 127.0.0.9 port" in done.stderr
    assert not (tmp_path / "my run").exists()
    done = launch(tmp_path, f"{FIRST}:2,{SECOND}:2", real_ssh, "--python", "/usr/bin/env")
    assert f"/usr/bin/env on host {FIRST} ended with exit code" in done.stderr
    check_trained(tmp_path, launch(tmp_path, f"{FIRST}:2,{SECOND}:2", real_ssh))
