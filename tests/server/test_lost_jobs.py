"""Jobs that a coordinator overlooked, and whose clock shard is without its disk: whoever asks is answered, and soon."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetpipe.decide.lifecycle.job_machine import ENDS_AT_CHECKPOINT
from hetpipe.storage import redis_keys
from hetpipe.storage.store import JobRecord
from hetpipe.storage.stores import open_store
from hetpipe.values.events import JobEnded, JobState, StopMode
from hetpipe.values.ids import JobId
from hetpipe.values.members import MemberId
from hetpipe.wire.calls import GET_STATUS, STOP_JOB, GetStatusRequest, StopJobRequest
from hetpipe.wire.coordinator_client import CoordinatorClient
from tests.processes.harness import HETPIPE
from tests.server.test_programs import Program
from tests.storage.redis_server import Server, needs_redis

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive, needs_redis]

#: Killed while it ran; one that nobody can send back, as the store does not know what was handed in.
LOST, STOPPED = JobId("digits-111111111111"), JobId("digits-222222222222")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    store = open_store(server.url)
    for job_id in (LOST, STOPPED):
        store.create_job(
            JobRecord(
                job_id=job_id,
                name="digits",
                state=JobState.RUNNING,
                run_dir=str(tmp_path / "run"),
                submitted_wall=1.0,
                shards=(MemberId("parameter-server-0"),),
            )
        )
    store.close()
    # What Redis has lost of them is which jobs there are.
    server.redis.delete(redis_keys.JOBS)
    yield server
    server.stop()


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    programs: list[Program] = []
    yield programs
    for program in programs:
        program.process.kill()
        program.process.communicate()


def stop(address: str, job_id: JobId, *options: str) -> tuple[int, str, str]:
    """`hetpipe stop`: exit status, standard output, standard error."""
    command = [str(HETPIPE), "stop", "--coordinator", address, "--job", job_id, "--timeout", "60", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    return done.returncode, done.stdout, done.stderr


def test_one_that_no_index_names_ends_for_all_who_ask(server: Server, tmp_path: Path, programs: list[Program]) -> None:
    programs.append(Program("coordinator", "--store", server.url, "--log", str(tmp_path / "coordinator.log")))
    address = programs[0].ready()["address"]
    client = CoordinatorClient(address)
    client.invoke(
        STOP_JOB, StopJobRequest(StopMode.CHECKPOINT, LOST)
    )  # before a parameter server says that it knows nothing of it
    shard = ("--coordinator", address, "--index", "0", "--state", str(tmp_path / "state"))
    programs.append(Program("parameter-server", *shard, "--log", str(tmp_path / "shard.log")))
    assert stop(address, STOPPED, "--now")[:2] == (0, f"digits (job {STOPPED}) has stopped\n")

    status, told, _ = stop(address, LOST)
    assert status == 0
    assert told.startswith(
        f"digits (job {LOST}) has stopped: job {LOST} was running when its coordinator ended, and parameter server "
        "parameter-server-0 "
    )
    assert f"; {ENDS_AT_CHECKPOINT}" in told
    assert client.invoke(GET_STATUS, GetStatusRequest(LOST)).state is JobState.STOPPED
    last = list(client.watch_job(LOST))[-1].event
    client.close()
    assert isinstance(last, JobEnded)
    assert last.sentence in told
