"""An agent of a running job is told to end: it does so in time, nothing is lost, and its virtual workers come back."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetpipe.clock import SYSTEM_CLOCK
from tests.histories import history_lines, whole_lines_of
from tests.polling import wait_until
from tests.processes.harness import Train, write_job
from tests.processes.test_lives import ENDLESS, stop, wait_for_lives, waves
from tests.server.test_programs import Program

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive, pytest.mark.timeout(180)]

#: From SIGTERM to the end, whatever happens.
LONGEST_END_SECONDS = 10.0


class Cluster:
    """A coordinator, a shard, and two agents with a device each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._programs = [Program("coordinator")]
        self.address: str = self._programs[0].ready()["address"]
        shard = Program("parameter-server", "--coordinator", self.address, "--index", "0", "--state", str(folder / "s"))
        self._programs.append(shard)
        shard.ready()
        self.agents = [self.start_agent(f"n{index}") for index in range(2)]

    def start_agent(self, node: str) -> Program:
        log = str(self._folder / f"{node}-{len(self._programs)}.log")
        options = ("--coordinator", self.address, "--node", node, "--cpu-devices", "1", "--log", log)
        self._programs.append(Program("agent", *options))
        self._programs[-1].ready()
        return self._programs[-1]

    def logged(self, event: str) -> list[dict[str, Any]]:
        lines = (line for path in self._folder.glob("n*.log") for line in whole_lines_of(path.read_bytes()))
        return [line for line in lines if line["event"] == event]

    def close(self) -> None:
        for program in reversed(self._programs):
            program.process.kill()
            program.process.communicate()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def test_its_virtual_worker_leaves_and_comes_back_with_it(cluster: Cluster, tmp_path: Path) -> None:
    job = write_job(tmp_path, **ENDLESS, workers={"count": 2, "stages": 1})
    train = Train(tmp_path, job, "--coordinator", cluster.address)
    train.wait_for_checkpoint()
    told_at = SYSTEM_CLOCK.monotonic()
    cluster.agents[1].process.send_signal(signal.SIGTERM)
    assert cluster.agents[1].end() == (0, "", "")
    assert SYSTEM_CLOCK.monotonic() - told_at < LONGEST_END_SECONDS
    assert [line["count"] for line in cluster.logged("stages_to_leave")] == [1]

    (left,) = history_lines(train.run_dir, "leave")
    assert not history_lines(train.run_dir, "evict")
    so_far, vw = len(waves(train, 1 - left["vw"], 0)), left["vw"]
    wait_until(lambda: len(waves(train, 1 - vw, 0)) > so_far + 5, timeout_seconds=30.0, what="waves of who stays")

    cluster.start_agent("n1")
    wait_for_lives(train, 1)
    wait_until(lambda: len(waves(train, vw, 1)) > 5, timeout_seconds=30.0, what="waves of the second life")
    assert stop(train).result["deaths"] == {"0": 0, "1": 0}
