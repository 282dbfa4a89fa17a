"""`submit` does not own the job that it follows: it is told to end and comes again, and the run goes on meanwhile."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetpipe.cli.run.job_connection import is_over
from hetpipe.values.events import JobState, JobStatus, StopMode
from hetpipe.values.ids import JobId
from hetpipe.wire.calls import GET_CLOCKS, GET_STATUS, STOP_JOB, GetClocksRequest, GetStatusRequest, StopJobRequest
from hetpipe.wire.coordinator_client import CoordinatorClient
from tests.polling import wait_until
from tests.processes.harness import HETPIPE, ROOT, write_job
from tests.processes.test_lives import ENDLESS
from tests.server.test_programs import Program

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes, pytest.mark.timeout(180)]

#: A run with an end.
SHORT = {"epochs": 2}


class Services:
    """A coordinator, a shard, and an agent with two devices."""

    def __init__(self, folder: Path) -> None:
        self.programs = [Program("coordinator")]
        self.address: str = self.programs[0].ready()["address"]
        at = ("--coordinator", self.address)
        self.programs.append(Program("parameter-server", *at, "--index", "0", "--state", str(folder / "shard-0")))
        self.programs.append(Program("agent", *at, "--node", "n0", "--cpu-devices", "2", "--log", str(folder / "log")))
        for program in self.programs[1:]:
            program.ready()
        self.client = CoordinatorClient(self.address)

    def stop(self, job_id: str | None) -> JobStatus:
        """Stop a job as `hetpipe stop` does, and wait until it has."""
        assert job_id is not None
        self.client.invoke(STOP_JOB, StopJobRequest(StopMode.CHECKPOINT, JobId(job_id)))
        wait_until(
            lambda: is_over(self.client.invoke(GET_STATUS, GetStatusRequest(JobId(job_id)))),
            timeout_seconds=60.0,
            what=f"end of {job_id}",
        )
        return self.client.invoke(GET_STATUS, GetStatusRequest(JobId(job_id)))

    def close(self) -> None:
        self.client.close()
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


def job_of(folder: Path, **values: Any) -> Path:
    return write_job(folder, workers={"count": 2, "stages": 1}, **values)


def test_submit_that_is_told_to_end_detaches_and_a_restarted_one_tells_the_result(
    services: Services, tmp_path: Path
) -> None:
    command = (tmp_path / "run", job_of(tmp_path, **ENDLESS))
    killed = Submit(services, *command)
    killed.wait_for("state=inspecting")
    killed.process.kill()
    killed.end()
    job_id = json.loads((tmp_path / "run" / "run.json").read_text())["job_id"]
    first = Submit(services, *command)
    first.wait_for("vw1.ahead=")
    first.process.send_signal(signal.SIGTERM)
    status, answer = first.end()
    assert (status, answer["detached"], answer["job_id"]) == (143, True, job_id), first.said()
    assert "stop" not in first.said()

    clocks = services.client.invoke(GET_CLOCKS, GetClocksRequest()).clocks
    assert clocks is not None
    wait_until(
        lambda: services.client.invoke(GET_CLOCKS, GetClocksRequest()).clocks != clocks,
        timeout_seconds=30.0,
        what="newer clocks",
    )
    again = Submit(services, *command)
    again.wait_for("vw1.ahead=")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["job_id"] == answer["job_id"]
    again.process.kill()
    again.end()

    # Only who asks for it stops it. Who comes after that hears what came of it.
    assert services.stop(answer["job_id"]).state is JobState.STOPPED
    last = Submit(services, tmp_path / "run")
    status, result = last.end()
    assert (status, result["staleness"]["violations"], result["rewinds"]) == (1, 0, 0)
    assert "the run was stopped by another user" in last.said()
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


def test_a_job_without_room_is_pending_until_there_is_and_can_be_cancelled(services: Services, tmp_path: Path) -> None:
    endless, short = ((tmp_path / name) for name in ("endless", "short"))
    for folder in (endless, short):
        folder.mkdir()
    first = Submit(services, tmp_path / "first", job_of(endless, **ENDLESS))
    first.wait_for("vw1.ahead=")
    holder = services.client.invoke(GET_STATUS, GetStatusRequest()).job_id
    second = Submit(services, tmp_path / "second", job_of(short, **SHORT))
    second.wait_for("state=pending")
    needs = f"needs 2 devices, one per stage, and 0 of 2 are free (job {holder} holds 2)"
    assert f"1st in the queue, priority 0; {needs}" in second.said()
    third = Submit(services, tmp_path / "third", job_of(short, **SHORT))
    third.wait_for("2nd in the queue")
    waiting = services.client.invoke(GET_STATUS, GetStatusRequest())
    assert waiting.queue is not None
    assert (waiting.state, waiting.queue.position) == (JobState.PENDING, 2)
    assert "goes first" in waiting.queue.reason

    assert services.stop(waiting.job_id).state is JobState.STOPPED
    assert third.end()[0] == 1
    services.stop(holder)
    status, result = second.end()
    assert (status, result["samples"], first.end()[0]) == (0, 2 * 46, 1), second.said()
