"""A Redis that stops answering under a real coordinator: whoever follows a job reads so, and when it is over."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.polling import wait_until
from tests.processes.harness import HETPIPE, ROOT, write_job
from tests.server.test_programs import Program
from tests.server.test_two_coordinators import free_port
from tests.storage.redis_server import Server, needs_redis

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes, needs_redis, pytest.mark.timeout(120)]

#: From the moment in which the lead runs out to the line on the screen.
TOLD_WITHIN = 5.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server._process.send_signal(signal.SIGCONT)
    server.stop()


def metric(port: int, series: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0) as answer:
        text = answer.read().decode()
    (value,) = re.findall(rf"^{re.escape(series)} (\S+)$", text, flags=re.MULTILINE)
    return str(value)


def test_the_screen_of_a_follower_says_so_and_when_it_is_back(server: Server, tmp_path: Path) -> None:
    metrics = free_port()
    options = ("--store", server.url, "--leader-lease", "1", "--metrics-port", str(metrics))
    coordinator = Program("coordinator", *options, "--log", str(tmp_path / "coordinator.log"))
    follower = None
    try:
        address = coordinator.ready()["address"]
        screen = tmp_path / "screen"
        command = [HETPIPE, "submit", write_job(tmp_path), "--coordinator", address, "--run-dir", tmp_path / "run"]
        with screen.open("w") as stream:
            follower = subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=stream)

        def await_line(text: str) -> None:
            wait_until(lambda: text in screen.read_text(), timeout_seconds=60.0, what=f"{text} on the screen")

        await_line("state=pending")
        assert metric(metrics, "hetpipe_store_unreachable") == "0.0"
        server._process.send_signal(signal.SIGSTOP)
        await_line("event=condition_raised condition=store_unreachable who=Redis")
        assert metric(metrics, "hetpipe_store_unreachable") == "1.0"
        (line,) = (line for line in screen.read_text().splitlines() if "condition_raised" in line)
        assert "Redis is unreachable (the store has not renewed its lead for 0.9 s" in line
        assert "restart Redis, or repair the network to it" in line

        told = subprocess.run(
            [HETPIPE, "status", "--coordinator", address, "--json"],
            cwd=ROOT,
            capture_output=True,
            check=True,
            timeout=60,
        )
        (condition,) = json.loads(told.stdout)["conditions"]
        assert (condition["kind"], condition["cleared"]) == ("store_unreachable", None)
        began = json.loads((tmp_path / "run" / "run.json").read_text())["started_wall"]
        at = float(line.split()[0].removeprefix("t="))
        assert began + at - condition["since"] < TOLD_WITHIN

        server._process.send_signal(signal.SIGCONT)
        await_line("event=condition_cleared condition=store_unreachable")
        assert metric(metrics, "hetpipe_store_unreachable") == "0.0"
    finally:
        coordinator.process.kill()
        coordinator.process.communicate()
        if follower is not None:
            follower.kill()
            follower.communicate()
