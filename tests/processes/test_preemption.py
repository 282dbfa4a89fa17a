"""A notice of preemption: SIGTERM to agents. What they trained is in a checkpoint, they end well, and the job waits."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetpipe.checkpoint.manifest import newest_checkpoint, read_manifest
from hetpipe.values.events import JobState
from hetpipe.wire.calls import GET_CLOCKS, GET_STATUS, GetClocksRequest, GetStatusRequest
from hetpipe.wire.coordinator_client import CoordinatorClient
from tests.histories import history_lines
from tests.polling import wait_until
from tests.processes.harness import Train, write_job
from tests.processes.test_lives import ENDLESS, stop
from tests.server.test_programs import Program

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


class Cluster:
    """A coordinator, a shard, and two agents with a device each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._programs = [Program("coordinator", "--log", str(folder / "coordinator.log"))]
        self.address: str = self._programs[0].ready()["address"]
        self._at = ("--coordinator", self.address)
        shard = Program("parameter-server", *self._at, "--index", "0", "--state", str(folder / "s"))
        self._programs.append(shard)
        self.agents = self.start_agents()
        shard.ready()
        self.client = CoordinatorClient(self.address)

    def start_agents(self) -> list[Program]:
        options = ("--cpu-devices", "1", "--drain-seconds", "60", "--log", str(self._folder / "agents.log"))
        agents = [Program("agent", *self._at, "--node", f"n{index}", *options) for index in range(2)]
        self._programs += agents
        for agent in agents:
            agent.ready()
        return agents

    def close(self) -> None:
        self.client.close()
        for program in reversed(self._programs):
            program.process.kill()
            program.process.communicate()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param({"workers": {"count": 2, "stages": 1}}, marks=pytest.mark.exhaustive),
        pytest.param(
            {"workers": {"count": 1, "stages": 2}, "sync": {"kind": "none", "minibatches_per_wave": 2}},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["wsp", "none"],
)
def test_the_whole_cluster_is_preempted(cluster: Cluster, tmp_path: Path, kind: dict[str, Any]) -> None:
    """No checkpoint is due for hours: the one there is afterwards is that of the notice."""
    job = write_job(tmp_path, **{**ENDLESS, "checkpoint": {}, "survive": {"absence": "3s"}, **kind})
    train = Train(tmp_path, job, "--coordinator", cluster.address)
    wait_until(lambda: "samples_per_second=" in train.stderr(), timeout_seconds=180.0, what="progress")
    clocks = cluster.client.invoke(GET_CLOCKS, GetClocksRequest()).clocks
    assert clocks is not None
    for agent in cluster.agents:
        agent.process.send_signal(signal.SIGTERM)
    for agent in cluster.agents:
        assert agent.end() == (0, "", "")

    manifest = read_manifest(newest_checkpoint(train.run_dir))
    published = [line["clock"] for line in history_lines(train.run_dir, "publish")]
    assert manifest.progress.clock >= clocks.global_clock
    assert manifest.progress.clock == published[-1], "nothing that was committed is lost"
    # Which of the two is named depends on which registered first.
    wait_until(
        lambda: re.search(r"waits for .*\bn[01]\b", train.stderr()) is not None,
        timeout_seconds=60.0,
        what="a notice of the wait",
    )
    assert train.process.poll() is None, train.stderr()

    cluster.agents = cluster.start_agents()
    wait_until(
        lambda: (
            cluster.client.invoke(GET_STATUS, GetStatusRequest()).state is JobState.RUNNING
            and (now := cluster.client.invoke(GET_CLOCKS, GetClocksRequest()).clocks) is not None
            and now.global_clock > manifest.progress.clock
        ),
        timeout_seconds=180.0,
        what="training that goes on",
    )
    outcome = stop(train)
    assert set(outcome.result["deaths"].values()) == {0}
