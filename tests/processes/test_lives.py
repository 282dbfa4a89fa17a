"""Virtual workers that are killed or hang come back, nobody else stops, and the history is in order.

So does a coordinator, in the same run: starting one costs more than all that is done to it. And the fork server of the
run is looked at there: it has what its processes would import, and no thread that they would lack.
"""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hetpipe.checker import check_run
from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.decide.lifecycle.adoption import ADOPTED
from tests.histories import history_lines
from tests.polling import wait_until
from tests.processes.harness import Outcome, Train, kill, pids_of, write_job

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

#: The promise: the others never stop for longer than the lease and half a second.
LONGEST_STOP_SECONDS = 5.5


#: A run that waits more than it computes, so that those who start find a free core.
ENDLESS: dict[str, Any] = {
    "epochs": 100_000,
    "checkpoint": {"every_waves": 20, "keep": 2},
    "cluster": {"devices": [{"slowdown": 30.0}]},
}


def wait_for_lives(train: Train, count: int) -> None:
    """Until virtual workers have come back `count` times in all."""
    wait_until(
        lambda: train.stderr().count("event=worker_rejoined") >= count or train.process.poll() is not None,
        timeout_seconds=90.0,
        what=f"{count} returns",
    )
    assert train.process.poll() is None, train.stderr()


def waves(train: Train, vw: int, life: int) -> list[float]:
    """When a life of a virtual worker has committed its waves, in monotonic seconds."""
    commits = history_lines(train.run_dir, "commit")
    return [line["t"] for line in commits if (line["vw"], line["incarnation"]) == (vw, life)]


def fork_server_of(pid: int) -> Path:
    """Its folder in /proc."""
    children = [
        Path("/proc", child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]
    (found,) = (child for child in children if b"hetpipe.fork_server" in (child / "cmdline").read_bytes())
    return found


def stop(train: Train) -> Outcome:
    train.process.send_signal(signal.SIGINT)
    outcome = train.finish()
    assert outcome.returncode == 130, outcome.stderr
    assert outcome.result["staleness"]["violations"] == 0
    return outcome


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_stage_that_is_killed_one_that_hangs_and_a_coordinator_that_is_killed(
    num_stages: int, tmp_path: Path
) -> None:
    job = write_job(tmp_path, **ENDLESS, survive={"stall": "8s"}, workers={"count": 2, "stages": num_stages})
    train = Train(tmp_path, job)
    train.wait_for_checkpoint()
    fork_server = fork_server_of(train.process.pid)
    assert len(list((fork_server / "task").iterdir())) == 1, "whom it forks would lack its threads"
    mapped = (fork_server / "maps").read_text()
    assert ("libtorch_cpu" in mapped, "cygrpc" in mapped) == (True, True)
    stages = pids_of(train.status(), "stage")
    killed_at = SYSTEM_CLOCK.monotonic()
    kill(stages[-1])
    wait_for_lives(train, 1)
    wait_until(lambda: len(waves(train, 1, 1)) > 10, timeout_seconds=30.0, what="waves of the second life")

    hung_at = SYSTEM_CLOCK.monotonic()
    os.kill(stages[0], signal.SIGSTOP)
    wait_for_lives(train, 2)
    wait_until(lambda: len(waves(train, 0, 1)) > 10, timeout_seconds=30.0, what="waves of the second life")

    before = train.status()
    kill(pids_of(before, "coordinator")[0])
    wait_until(lambda: ADOPTED in train.stderr(), timeout_seconds=90.0, what="a coordinator that adopts the job")
    so_far = len(waves(train, 0, 1))
    wait_until(lambda: len(waves(train, 0, 1)) > so_far + 10, timeout_seconds=30.0, what="waves under the next one")
    assert pids_of(train.status(), "stage") == pids_of(before, "stage"), "nobody else was touched"
    outcome = stop(train)

    assert outcome.result["deaths"] == {"0": 1, "1": 1}
    assert f"stage {num_stages - 1} of virtual worker 1" in outcome.stderr
    assert "was killed by SIGKILL" in outcome.stderr
    assert "stage 0 of virtual worker 0" in outcome.stderr
    assert "hangs: it has reported nothing for" in outcome.stderr
    of_survivor = [moment for moment in waves(train, 0, 0) if killed_at - 1.0 < moment < hung_at]
    assert max(later - earlier for earlier, later in pairwise(of_survivor)) < LONGEST_STOP_SECONDS
    assert max(waves(train, 1, 0)) - killed_at < 1.0


@pytest.mark.exhaustive
def test_an_agent_that_is_killed_comes_back_with_all_its_virtual_workers(tmp_path: Path) -> None:
    job = write_job(tmp_path, **ENDLESS, workers={"count": 2, "stages": 1})
    train = Train(tmp_path, job)
    train.wait_for_checkpoint()
    (agent,) = pids_of(train.status(), "agent")
    kill(agent)
    wait_for_lives(train, 2)
    for vw in (0, 1):
        wait_until(lambda vw=vw: len(waves(train, vw, 1)) > 10, timeout_seconds=30.0, what="waves of the second lives")  # type: ignore[misc]
    outcome = stop(train)

    assert outcome.result["deaths"] == {"0": 1, "1": 1}
    assert f"(pid {agent} on 127.0.0.1) was replaced by" in outcome.stderr


@pytest.mark.exhaustive
def test_stages_do_without_an_agent_that_is_stopped_and_lose_no_record(tmp_path: Path) -> None:
    job = write_job(tmp_path, **ENDLESS, workers={"count": 2, "stages": 2})
    train = Train(tmp_path, job)
    train.wait_for_checkpoint()
    assert sources(train) == {("agent",)}, "one stream for all four stages"
    (agent,) = pids_of(train.status(), "agent")
    os.kill(agent, signal.SIGSTOP)
    wait_until(lambda: sources(train) == {("agent", "clock shard")}, timeout_seconds=20.0, what="streams of stages")
    os.kill(agent, signal.SIGCONT)  # before its lease is over
    back = {("agent", "clock shard", "agent")}
    wait_until(lambda: sources(train) == back, timeout_seconds=60.0, what="the agent is used again")
    outcome = stop(train)

    assert outcome.result["deaths"] == {"0": 0, "1": 0}
    assert check_run(train.run_dir).ok


def sources(train: Train) -> set[tuple[str, ...]]:
    """From whom each stage had its decision log, one after the other."""
    logs = [path.read_text() for path in sorted((train.run_dir / "logs").glob("vw-*.log"))]
    return {tuple(json.loads(line)["source"] for line in log.splitlines() if "log_followed" in line) for log in logs}
