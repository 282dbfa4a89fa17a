"""A run whose disk gets full says so while it goes on, is well again when there is room, and names the first cause."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetpipe.values.conditions import ConditionKind
from tests.polling import wait_until
from tests.processes.harness import Train, write_job
from tests.processes.test_coordinator import SLOW

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

#: What is told of a disk that is full, as long as it is.
WHILE_FULL = {ConditionKind.CHECKPOINT_GIVEN_UP, ConditionKind.DISK_NEARLY_FULL, ConditionKind.DURABILITY_LOST}

#: Seconds from the moment in which a process notices to the line on the screen.
TOLD_WITHIN = 5.0


class SmallDisk:
    """A file system of a few MiB, at the place where `Train` looks for the folder of its run."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run-1"
        self.run_dir.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(self.run_dir)]
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
        if mounted.returncode:
            pytest.skip(f"NOT TESTED: a full disk, because no small one can be mounted here: {mounted.stderr.strip()}")

    def fill(self) -> None:
        with (self.run_dir / "filler").open("wb", buffering=0) as file:
            size = 1 << 20
            while size:
                try:
                    file.write(b"x" * size)
                except OSError:
                    size //= 2

    def make_room(self) -> None:
        (self.run_dir / "filler").unlink()

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", self.run_dir], check=True)


@pytest.fixture
def started(disk: SmallDisk) -> Iterator[Callable[..., Train]]:
    """Begins a run of one stage on the small disk."""
    trains: list[Train] = []

    def start(folder: Path, last_checkpoint_seconds: int = 1) -> Train:
        shape = {"count": 1, "stages": 1}
        patience = {"last_checkpoint": f"{last_checkpoint_seconds}s"}
        job = write_job(folder, **SLOW, epochs=100_000, workers=shape, patience=patience)
        trains.append(Train(folder, job))
        assert trains[-1].run_dir == disk.run_dir
        return trains[-1]

    yield start
    for train in trains:
        train.process.kill()
        train.process.communicate()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path)
    yield disk
    disk.unmount()


def told(train: Train, event: str) -> dict[str, float]:
    """The conditions that the screen has told of, and the second of the run in which it did first."""
    lines = re.findall(rf"^t=([\d.]+) event={event} condition=(\w+)", train.stderr(), flags=re.MULTILINE)
    return {condition: float(at) for at, condition in reversed(lines)}


def wait_until_told(train: Train, event: str, kinds: set[ConditionKind]) -> None:
    wait_until(
        lambda: kinds <= told(train, event).keys() or train.process.poll() is not None,
        timeout_seconds=60.0,
        what=f"{event} of {', '.join(sorted(kinds))}",
    )
    assert train.process.poll() is None, train.stderr()


def of_kind(status: dict[str, Any], kind: ConditionKind) -> dict[str, Any]:
    (found,) = (condition for condition in status["conditions"] if condition["kind"] == kind)
    assert isinstance(found, dict)
    return found


@pytest.mark.exhaustive
def test_a_full_disk_is_told_at_once_and_the_first_cause_stays_the_last_line(
    tmp_path: Path, disk: SmallDisk, started: Callable[..., Train]
) -> None:
    train = started(tmp_path)
    train.wait_for_checkpoint(120.0)

    disk.fill()
    wait_until_told(train, "condition_raised", WHILE_FULL | {ConditionKind.HISTORY_INCOMPLETE})
    wait_until(
        lambda: 'condition=history_incomplete who="stage 0 of virtual worker 0"' in train.stderr(),
        timeout_seconds=30.0,
        what="the stage's own history",
    )
    full = train.status()
    began = json_of(disk.run_dir / "run.json")["started_wall"]
    for kind, at in told(train, "condition_raised").items():
        first = min(one["since"] for one in full["conditions"] if one["kind"] == kind)
        assert began + at - first < TOLD_WITHIN, f"{kind} was told {began + at - first:.1f} s after it was noticed"
    given_up = of_kind(full, ConditionKind.CHECKPOINT_GIVEN_UP)
    assert given_up["cleared"] is None
    assert "No space left on device" in given_up["sentence"]
    assert str(disk.run_dir / "checkpoints") in given_up["sentence"]
    assert "free disk space there" in given_up["sentence"]
    assert f"the disk at {disk.run_dir}" in of_kind(full, ConditionKind.DISK_NEARLY_FULL)["who"]

    disk.make_room()
    wait_until_told(train, "condition_cleared", WHILE_FULL)
    well = train.status()
    assert all(of_kind(well, kind)["cleared"] >= of_kind(well, kind)["since"] for kind in WHILE_FULL)
    assert "checkpoints are written again at clock " in train.stderr()
    history = [one for one in well["conditions"] if one["kind"] == ConditionKind.HISTORY_INCOMPLETE]
    assert history, "lines that lack stay away"
    assert all(one["cleared"] is None for one in history)

    num_told = train.stderr().count("event=condition_raised")
    disk.fill()
    wait_until(
        lambda: train.stderr().count("event=condition_raised") >= num_told + len(WHILE_FULL),
        timeout_seconds=90.0,
        what="the disk to be full again",
    )
    train.process.send_signal(signal.SIGINT)
    outcome = train.finish()

    assert outcome.returncode != 0
    (error,) = outcome.result["errors"]
    assert outcome.stderr.strip().splitlines()[-1] == f"error: {error}"
    assert error.startswith("stage ")
    assert re.search(
        rf"; first cause: (the disk at {disk.run_dir}|the checkpoint at clock|parameter server 0 cannot persist)", error
    ), error
    assert "; resume with: hetpipe train --resume" in error
    met = {condition["kind"] for condition in outcome.result["conditions"]}
    assert met >= WHILE_FULL
    assert json_of(disk.run_dir / "result.json") == {
        "state": "failed",
        "error": "CheckpointNotWritten",
        **outcome.result,
    }


@pytest.mark.exhaustive
def test_a_run_that_ends_on_a_full_disk_waits_for_room(
    tmp_path: Path, disk: SmallDisk, started: Callable[..., Train]
) -> None:
    train = started(tmp_path, last_checkpoint_seconds=100)
    train.wait_for_checkpoint(120.0)

    disk.fill()
    wait_until_told(train, "condition_raised", {ConditionKind.DISK_NEARLY_FULL})
    train.process.send_signal(signal.SIGINT)
    wait_until(
        lambda: "for disk space for the checkpoint that ends the run" in train.stderr(),
        timeout_seconds=60.0,
        what="the stage to say that it waits",
    )
    disk.make_room()
    outcome = train.finish()

    assert json_of(disk.run_dir / "result.json")["state"] == "stopped", outcome.stderr


def json_of(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value
