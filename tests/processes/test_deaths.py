"""Services that are killed with -9 are started again, and the run goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.polling import wait_until
from tests.processes.harness import Train, is_alive, kill, pids_of, write_job

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def newest_manifest(train: Train) -> str:
    """Of the checkpoint with the highest clock; checkpoints come and go."""
    return max(map(str, (train.run_dir / "checkpoints").glob("clock-*/manifest.json")), default="")


@pytest.mark.exhaustive
def test_parameter_servers_that_are_killed_are_started_again_and_the_run_goes_on(tmp_path: Path) -> None:
    checkpoint, shards = {"every_waves": 50, "keep": 2}, {"count": 2}
    job = write_job(tmp_path, epochs=100_000, checkpoint=checkpoint, parameter_servers=shards)
    train = Train(tmp_path, job)
    train.wait_for_checkpoint()
    status = train.status()
    victims = pids_of(status, "parameter_server")
    for victim in victims:
        kill(victim)
    wait_until(lambda: train.stderr().count("was restarted") == 2, timeout_seconds=30.0, what="successors")
    before = newest_manifest(train)
    wait_until(lambda: newest_manifest(train) > before, timeout_seconds=60.0, what="later checkpoint")
    after = train.status()
    assert pids_of(after, "stage") == pids_of(status, "stage"), "nobody else was touched"
    train.process.send_signal(signal.SIGINT)
    outcome = train.finish()
    assert outcome.returncode == 130
    assert outcome.result["staleness"]["violations"] == 0
    assert all(f"(pid {victim}) was killed by SIGKILL; it was restarted" in outcome.stderr for victim in victims)


@pytest.mark.exhaustive
def test_ctrl_c_checkpoints_and_a_resume_goes_on(tmp_path: Path) -> None:
    checkpoint, shape = {"every_waves": 50, "keep": 1}, {"count": 2, "stages": 1}
    job = write_job(tmp_path, epochs=100_000, checkpoint=checkpoint, workers=shape)
    train = Train(tmp_path, job)
    train.wait_for_checkpoint()
    everyone = [process["pid"] for process in train.status()["processes"]]
    train.process.send_signal(signal.SIGINT)
    outcome = train.finish()
    assert outcome.returncode == 130
    assert not any(map(is_alive, everyone))
    history = (train.run_dir / "history" / "shard-0.jsonl").read_text()
    assert '"stop"' in history or "+stop" in history, "it stopped at a barrier of its own"
    assert outcome.result["staleness"]["violations"] == 0


@pytest.mark.exhaustive
def test_a_second_ctrl_c_stops_now(tmp_path: Path) -> None:
    checkpoint, shape = {"every_waves": 4, "keep": 1}, {"count": 1, "stages": 2}
    job = write_job(tmp_path, epochs=100_000, checkpoint=checkpoint, workers=shape)
    train = Train(tmp_path, job)
    train.wait_for_checkpoint()
    everyone = [process["pid"] for process in train.status()["processes"]]
    train.process.send_signal(signal.SIGINT)
    train.process.send_signal(signal.SIGINT)
    assert train.finish(20.0).returncode == 130
    wait_until(lambda: not any(map(is_alive, everyone)), timeout_seconds=5.0, what="end of every process")
