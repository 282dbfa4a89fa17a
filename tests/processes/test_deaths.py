"""A process killed with -9: the run ends soon, with one sentence, no orphans, and a checkpoint to resume from."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hetpipe.clock import SYSTEM_CLOCK
from tests.polling import wait_until
from tests.processes.harness import Train, is_alive, kill, pids_of, write_job

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

#: The promise: a run ends this long after a death, at most.
ENDS_WITHIN_SECONDS = 15.0


@pytest.mark.parametrize(
    ("role", "named", "workers"),
    [
        ("coordinator", "coordinator", 1),
    ],
)
def test_a_killed_process_ends_the_run_and_is_named(tmp_path: Path, role: str, named: str, workers: int) -> None:
    checkpoint, shape = {"every_waves": 4, "keep": 2}, {"count": workers, "stages": 2}
    job = write_job(tmp_path, epochs=100_000, checkpoint=checkpoint, workers=shape)
    train = Train(tmp_path, job)
    train.wait_for_checkpoint()
    status = train.status()
    everyone = [process["pid"] for process in status["processes"]]
    assert status["state"] == "running"
    assert len(everyone) == 1 + 1 + 1 + 2 * workers

    killed_at = SYSTEM_CLOCK.monotonic()
    victim = pids_of(status, role)[-1]
    kill(victim)
    outcome = train.finish()

    assert SYSTEM_CLOCK.monotonic() - killed_at < ENDS_WITHIN_SECONDS
    assert outcome.returncode == 1
    (sentence,) = outcome.result["errors"]
    assert named in sentence
    assert "SIGKILL" in sentence or str(victim) in sentence, sentence
    wait_until(lambda: not any(map(is_alive, everyone)), timeout_seconds=5.0, what=f"end of {everyone}")

    more = train.minibatches_done() // workers + 40
    resumed = Train(tmp_path, "--resume", train.run_dir, "--set", f"minibatches={more}")
    again = resumed.finish()
    assert again.returncode == 0, again.stderr
    assert again.result["staleness"]["violations"] == 0


def newest_manifest(train: Train) -> str:
    """Of the checkpoint with the highest clock; checkpoints come and go."""
    return max(map(str, (train.run_dir / "checkpoints").glob("clock-*/manifest.json")), default="")


def test_parameter_servers_that_are_killed_are_started_again_and_the_run_goes_on(tmp_path: Path) -> None:
    checkpoint, shards = {"every_waves": 50, "keep": 2}, {"count": 2}
    job = write_job(tmp_path, epochs=100_000, checkpoint=checkpoint, parameter_servers=shards)
    train = Train(tmp_path, job)
    train.wait_for_checkpoint()
    status = train.status()
    victims = pids_of(status, "parameter_server")
    for victim in victims:
        kill(victim)
    wait_until(lambda: train.stderr().count("was started again") == 2, timeout_seconds=30.0, what="successors")
    before = newest_manifest(train)
    wait_until(lambda: newest_manifest(train) > before, timeout_seconds=60.0, what="later checkpoint")
    after = train.status()
    assert pids_of(after, "stage") == pids_of(status, "stage"), "nobody else was touched"
    train.process.send_signal(signal.SIGINT)
    outcome = train.finish()
    assert outcome.returncode == 130
    assert outcome.result["staleness"]["violations"] == 0
    assert all(f"(pid {victim}) was killed by SIGKILL; it was started again" in outcome.stderr for victim in victims)


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
