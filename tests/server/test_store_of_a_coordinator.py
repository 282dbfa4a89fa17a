"""A coordinator and its Redis as programs: what a restart of both keeps, and numbers that nobody has given out."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.errors import ProtocolViolation
from hetpipe.storage import redis_keys
from hetpipe.storage.redis_acl import acl_lines
from hetpipe.values.bounds import MAX_COUNT
from hetpipe.values.events import JobState
from hetpipe.values.ids import Term
from hetpipe.wire.calls import GET_STATUS, REGISTER, SUBMIT_JOB, GetStatusRequest, RegisterRequest, SubmitJobRequest
from hetpipe.wire.coordinator_client import CoordinatorClient
from tests.server.coordinator.builders import job, shard_member, submission
from tests.server.test_programs import Program
from tests.storage.redis_server import Server, needs_redis

pytestmark = [pytest.mark.processes, needs_redis]

ADMIN = "admin"

Start = Callable[[], Program]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """With the rendered ACL and an append-only file; `admin` is the test's."""
    acl = tmp_path / "users.acl"
    acl.write_text("\n".join([*acl_lines("hetpipe", "secret"), f"user {ADMIN} on >{ADMIN} ~* &* +@all", ""]))
    (tmp_path / "password").write_text("secret")
    (tmp_path / "password").chmod(0o600)
    server = Server(tmp_path, "--aclfile", str(acl), "--appendonly", "yes", "--appendfsync", "always", user=ADMIN)
    yield server
    server.stop()


@pytest.fixture
def store(server: Server, tmp_path: Path) -> tuple[str, ...]:
    """As options."""
    return ("--store", f"unix://hetpipe@{server.socket}", "--store-password-file", str(tmp_path / "password"))


@pytest.fixture
def start(store: tuple[str, ...], tmp_path: Path) -> Iterator[Start]:
    programs: list[Program] = []

    def start() -> Program:
        programs.append(Program("coordinator", *store, "--leader-lease", "1", "--log", str(tmp_path / "log")))
        return programs[-1]

    yield start
    for program in programs:
        program.process.kill()
        program.process.communicate()


@pytest.mark.exhaustive
def test_a_job_that_was_handed_in_outlives_coordinator_and_redis(server: Server, start: Start, tmp_path: Path) -> None:
    coordinator = start()
    client = CoordinatorClient(coordinator.ready()["address"])
    job_id = client.invoke(SUBMIT_JOB, SubmitJobRequest(submission(job(), str(tmp_path / "run")))).job_id
    client.close()
    coordinator.process.kill()
    coordinator.process.communicate()

    server.restart(kill=True)

    client = CoordinatorClient(start().ready()["address"])
    status = client.invoke(GET_STATUS, GetStatusRequest(job_id))
    client.close()
    assert (status.state, status.run_dir) == (JobState.SUBMITTED, str(tmp_path / "run"))


@pytest.mark.exhaustive
def test_a_poisoned_registration_is_refused_with_a_sentence_and_a_line_in_the_log(
    server: Server, start: Start, tmp_path: Path
) -> None:
    coordinator = start()
    client = CoordinatorClient(coordinator.ready()["address"])
    for poison in ({"highest_fence": MAX_COUNT - 1}, {"highest_term": Term(MAX_COUNT - 1)}):
        with pytest.raises(ProtocolViolation, match=r"reports a (fence|term) of 9007199254740991; .*hetpipe repair"):
            client.invoke(REGISTER, RegisterRequest(replace(shard_member(9), **poison)))
    refused = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if "call_refused" in line]
    assert [(line["call"].rpartition("/")[2], "of 9007199254740991" in line["sentence"]) for line in refused] == [
        ("Register", True)
    ] * 2

    lease = client.invoke(REGISTER, RegisterRequest(shard_member(0)))
    assert lease.fence == int(server.redis.get(redis_keys.FENCE) or 0) == 1
    client.invoke(SUBMIT_JOB, SubmitJobRequest(submission(job(), str(tmp_path / "run"))))
    client.close()
    coordinator.process.send_signal(signal.SIGTERM)
    assert coordinator.end()[0] == 0
    start().ready()


def test_a_poisoned_store_is_named_and_recovered(
    server: Server, start: Start, store: tuple[str, ...], tmp_path: Path
) -> None:
    server.redis.set(redis_keys.FENCE, MAX_COUNT)
    status, output, errors = start().end()
    assert (status, output) == (1, "")
    assert "no fence is left; stop every coordinator and repair it with `hetpipe repair store" in errors

    result = CliRunner().invoke(app, ["repair", "store", *store])

    assert result.exit_code == 0, result.output
    client = CoordinatorClient(start().ready()["address"])
    assert client.invoke(REGISTER, RegisterRequest(replace(shard_member(0), highest_fence=4))).fence == 5
    client.close()
