"""Data workers of real stages that are killed, and such stages: every sample counts once, and nobody stays behind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetpipe.checker import check_run
from tests.polling import wait_until
from tests.processes.harness import Train, is_alive, kill, pids_of, write_job

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def children_of(pid: int) -> list[int]:
    """The child processes of all threads of a process."""
    found = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in listing.read_text().split()]
    return found


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files that no other test uses; the path of a socket in it must be short."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("victim", "reads"),
    [
        ("data worker", {"train": "tests.models:flipped32"}),
        ("stage", {"train": "tests.models:flipped32"}),
        ("data worker", {"train": "tests.models:flipped_stream32", "shuffle": False, "length": 46}),
        ("stage", {"train": "tests.models:flipped_stream32", "shuffle": False, "length": 46}),
    ],
    ids=["data worker", "stage", "data worker of a stream", "stage with a stream"],
)
def test_every_sample_counts_once_and_nobody_stays_behind(
    victim: str, reads: dict[str, Any], tmp_path: Path, temporary: Path
) -> None:
    values: dict[str, Any] = {
        "data": {"eval": "tests.models:data32", "num_workers": 2} | reads,
        "checkpoint": {"every_waves": 10, "keep": 2},
        "cluster": {"devices": [{"slowdown": 30.0}]},
        "epochs": 30,
    }
    train = Train(tmp_path, write_job(tmp_path, **values), environment={"TMPDIR": str(temporary)})
    train.wait_for_checkpoint()
    stages = pids_of(train.status(), "stage")
    workers = [children_of(stage) for stage in stages]
    assert [len(each) for each in workers] == [2] * 4
    kill(workers[0][0] if victim == "data worker" else stages[0])
    wait_until(lambda: not any(map(is_alive, workers[0])), timeout_seconds=10.0, what="the end of the other worker")
    outcome = train.finish(120.0)

    assert outcome.returncode == 0, outcome.stderr
    assert sum(outcome.result["deaths"].values()) == 1
    assert outcome.result["samples"] == 30 * 46
    if victim == "data worker":
        assert f"the data worker with process id {workers[0][0]} was killed by SIGKILL; if the memory" in outcome.stderr
    assert check_run(train.run_dir, require_complete=True).ok
    assert not any(is_alive(worker) for each in workers for worker in each)
    left = [path.name for path in temporary.glob("hetpipe-data-*")]
    # The folder of a killed stage is removed by the next one, its successor.
    assert left == []
