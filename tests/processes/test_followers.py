"""`submit` does not own the job that it follows: it is told to end and comes again, and the run goes on meanwhile."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.polling import wait_until
from tests.processes.harness import HETPIPE, ROOT, write_job
from tests.services.test_programs import Program

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

#: A run that is under way until somebody stops it; and one that has an end.
ENDLESS, SHORT = {"epochs": 100_000}, {"epochs": 2}


class Services:
    """A coordinator, a shard, and an agent with two devices."""

    def __init__(self, folder: Path) -> None:
        self.programs = [Program("coordinator")]
        self.address: str = self.programs[0].ready()["address"]
        at = ("--coordinator", self.address)
        self.programs.append(Program("parameter_server", *at, "--index", "0", "--state", str(folder / "shard-0")))
        self.programs.append(Program("agent", *at, "--node", "n0", "--cpu-devices", "2", "--log", str(folder / "log")))
        for program in self.programs[1:]:
            program.ready()

    def close(self) -> None:
        for program in reversed(self.programs):
            program.process.kill()
            program.process.communicate()


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    services = Services(tmp_path_factory.mktemp("services"))
    yield services
    services.close()


class Submit:
    """A `hetpipe submit --json` under way."""

    def __init__(self, services: Services, run_dir: Path, *arguments: str | Path) -> None:
        self._stderr = run_dir.with_name(f"{run_dir.name}-{len(list(run_dir.parent.glob('*.stderr')))}.stderr")
        command = [str(HETPIPE), "submit", *map(str, arguments), "--coordinator", services.address, "--json"]
        with self._stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [*command, "--run-dir", str(run_dir)], cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True
            )

    def said(self) -> str:
        return self._stderr.read_text()

    def wait_for(self, words: str) -> None:
        wait_until(
            lambda: words in self.said() or self.process.poll() is not None, timeout_seconds=60.0, what=repr(words)
        )
        assert words in self.said(), self.said()

    def end(self) -> tuple[int, dict[str, Any]]:
        stdout, _ = self.process.communicate(timeout=60.0)
        lines = stdout.strip().splitlines()
        return self.process.returncode, json.loads(lines[-1]) if lines else {}


def ask(services: Services, command: str, *arguments: str) -> dict[str, Any]:
    """The answer of a command about a job of the cluster."""
    done = subprocess.run(
        [str(HETPIPE), command, "--coordinator", services.address, "--json", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def job_of(folder: Path, **values: Any) -> Path:
    return write_job(folder, workers={"count": 2, "stages": 1}, **values)


def test_submit_that_is_told_to_end_detaches_and_a_restarted_one_tells_the_result(
    services: Services, tmp_path: Path
) -> None:
    command = (tmp_path / "run", job_of(tmp_path, **ENDLESS))
    first = Submit(services, *command)
    first.wait_for("vw1.ahead=")
    first.process.send_signal(signal.SIGTERM)
    status, answer = first.end()
    assert (status, answer["detached"]) == (143, True), first.said()
    assert "stop" not in first.said()

    clock = ask(services, "status")["global_clock"]
    wait_until(lambda: ask(services, "status")["global_clock"] > clock, timeout_seconds=30.0, what="a newer clock")
    again = Submit(services, *command)
    again.wait_for("vw1.ahead=")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["job_id"] == answer["job_id"]
    again.process.kill()
    again.end()

    # Only who asks for it stops it. Who comes after that hears what came of it.
    stopped = ask(services, "stop", "--job", answer["job_id"])
    assert (stopped["job_id"], stopped["state"]) == (answer["job_id"], "stopped")
    last = Submit(services, tmp_path / "run")
    status, result = last.end()
    assert (status, result["staleness"]["violations"], result["rewinds"]) == (1, 0, 0)
    assert "the run was stopped by somebody else" in last.said()
    told = Submit(services, *command).end()
    assert told == (1, result), "it is told from the folder of the run"


def test_submit_that_is_killed_hands_nothing_in_twice(services: Services, tmp_path: Path) -> None:
    command = (tmp_path / "run", job_of(tmp_path, **SHORT))
    first = Submit(services, *command)
    first.wait_for("state=inspecting")
    first.process.kill()
    first.end()
    record = tmp_path / "run" / "run.json"
    job_id = json.loads(record.read_text())["job_id"]
    status, result = Submit(services, *command).end()
    assert (status, result["samples"], json.loads(record.read_text())["job_id"]) == (0, 2 * 46, job_id)
