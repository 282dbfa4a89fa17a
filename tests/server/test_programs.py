"""The coordinator and the agent as programs of their own."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetpipe.client import Client
from hetpipe.server import SERVICES
from hetpipe.values.addresses import split_address
from hetpipe.values.members import Member
from tests.support.forked import run_forked

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]

Start = Callable[..., "Program"]


class Program:
    """One service and its pipes."""

    def __init__(self, name: str, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hetpipe", "serve", name, *options],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> dict[str, Any]:
        """The line it prints when it is."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> tuple[int, str, str]:
        """Exit status, what else was on standard output, and standard error."""
        output, errors = self.process.communicate(timeout=30.0)
        return self.process.returncode, output, errors


@pytest.fixture
def start() -> Iterator[Start]:
    programs: list[Program] = []

    def start(name: str, *options: str) -> Program:
        programs.append(Program(name, *options))
        return programs[-1]

    yield start
    for program in programs:
        program.process.kill()
        program.process.communicate()


def members_when(address: str, wanted: Callable[[tuple[Member, ...]], bool]) -> tuple[Member, ...]:
    with Client(address) as client:
        for _ in range(20_000):
            members = client.members()
            if wanted(members):
                return members
    pytest.fail(f"not so: {members}")


def test_a_cluster_of_programs(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "coordinator.log"
    coordinator = start("coordinator", "--metrics-port", "0", "--log", str(log))
    ready = coordinator.ready()
    assert ready == {"role": "coordinator", "address": ready["address"], "pid": coordinator.process.pid}
    agent = start(
        "agent",
        "--coordinator",
        ready["address"],
        "--node",
        "n0",
        "--cpu-devices",
        "3",
        "--log",
        str(tmp_path / "a.log"),
    )
    assert agent.ready() == {"role": "agent", "address": "127.0.0.1", "pid": agent.process.pid}
    [member] = members_when(ready["address"], bool)
    (port,) = [
        line["port"] for line in map(json.loads, log.read_text().splitlines()) if line["event"] == "metrics_served"
    ]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0) as answer:
        text = answer.read().decode()
    assert 'hetpipe_info{role="coordinator"' in text
    assert 'hetpipe_members{role="agent"} 1.0' in text
    assert (member.info.id, member.info.pid, len(member.info.devices)) == ("n0", agent.process.pid, 3)

    agent.process.send_signal(signal.SIGTERM)
    assert agent.end() == (0, "", "")
    assert members_when(ready["address"], lambda members: not members) == ()
    coordinator.process.send_signal(signal.SIGINT)
    assert coordinator.end() == (0, "", "")
    for line in log.read_text().splitlines():
        assert json.loads(line)["role"] == "coordinator"


@pytest.mark.parametrize("how", ["input", pytest.param("signal", marks=pytest.mark.exhaustive)])
def test_a_service_ends_with_its_parent(start: Start, how: str) -> None:
    coordinator = start("coordinator", "--exit-with-parent")
    coordinator.ready()
    if how == "input":
        assert coordinator.process.stdin is not None
        coordinator.process.stdin.close()
        coordinator.process.stdin = None
    else:
        coordinator.process.send_signal(signal.SIGTERM)

    assert coordinator.end()[0] == 0


def test_a_service_dies_with_a_parent_that_was_killed(start: Start) -> None:
    script = (
        "import subprocess, sys, signal\n"
        "child = subprocess.Popen([sys.executable, '-m', 'hetpipe', 'serve', 'coordinator', '--exit-with-parent'],"
        " stdin=subprocess.PIPE)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        json.loads(parent.stdout.readline())
        parent.kill()
        parent.wait()

        # The child holds the other end of the pipe until it is gone.
        assert parent.stdout.read() == ""


@pytest.mark.exhaustive
def test_a_taken_port_is_one_sentence(start: Start) -> None:
    port = split_address(start("coordinator").ready()["address"])[1]

    status, output, errors = start("coordinator", "--port", str(port), "--log", "/dev/null").end()

    assert (status, output) == (1, "")
    assert errors == f"address 127.0.0.1:{port} is in use; choose another with --port\n"


#: Name of the service, options, and the beginning of what it says.
BAD_OPTIONS = [
    ("coordinator", ("--store", "mysql://x"), "--store mysql://x is not a store"),
    ("coordinator", ("--store", "redis://127.0.0.1:1/0"), "Redis at 127.0.0.1:1/0 rejected a command"),
    ("coordinator", ("--log", "/dev/null/x"), "cannot write the log /dev/null/x"),
    ("agent", ("--coordinator", "nowhere"), "'nowhere' is not an address; write HOST:PORT"),
    ("agent", ("--coordinator", "h:1", "--cpu-devices", "0"), "--cpu-devices must be at least 1, not 0"),
    ("agent", ("--coordinator", "h:1", "--node", "a/b"), "--node 'a/b' must not contain a slash"),
]


def programs(*commands: tuple[str, ...]) -> list[subprocess.CompletedProcess[str]]:
    """Services that end by themselves, with these names and options."""
    codes = [f"import sys; sys.argv[1:] = {['serve', *command]}; main.main()" for command in commands]
    return run_forked(
        [f"from hetpipe.cli import main; {code}" for code in codes],
        imports=["hetpipe.cli.main", SERVICES["coordinator"], SERVICES["agent"]],
    )


def test_bad_options_are_one_sentence_and_help_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        sentence = f"address 127.0.0.1:{port} is in use; choose another with --metrics-port"
        refusals = [*BAD_OPTIONS, ("coordinator", ("--metrics-port", port), sentence)]
        assert_refused_and_helped(refusals)


def assert_refused_and_helped(refusals: list[tuple[str, tuple[str, ...], str]]) -> None:
    quiet = [(name, *options, *(() if "--log" in options else ("--log", "/dev/null"))) for name, options, _ in refusals]
    *refused, coordinator, agent = programs(*quiet, ("coordinator", "--help"), ("agent", "--help"))
    for done, (_, _, sentence) in zip(refused, refusals, strict=True):
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(sentence)
        assert done.stderr.count("\n") == 1
    for done in (coordinator, agent):
        assert done.returncode == 0
        assert "--exit-with-parent" in done.stdout
