"""An agent joins the cluster of a running job, and a new virtual worker the run: every sample of every epoch counts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hetpipe.cli.app import app
from tests.polling import wait_until
from tests.processes.harness import Train, write_job
from tests.processes.test_departure import Cluster
from tests.processes.test_elastic import lines_of, states, workers
from tests.processes.test_lives import ENDLESS, stop, wait_for_lives, waves

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive, pytest.mark.timeout(180)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def used_in_epochs(train: Train) -> list[list[int]]:
    """The samples that each epoch has used, but for the newest."""
    used: dict[int, list[int]] = defaultdict(list)
    for line in lines_of(train, "used"):
        used[line["epoch"]] += line["indices"]
    return [sorted(used[epoch]) for epoch in sorted(used)[:-1]]


def checked(train: Train) -> dict[str, Any]:
    said = CliRunner().invoke(app, ["check", str(train.run_dir), "--json"])
    assert said.exit_code == 0, said.output
    value: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    return value


def test_a_third_virtual_worker_joins_on_a_new_agent(cluster: Cluster, tmp_path: Path) -> None:
    job = write_job(tmp_path, **ENDLESS, workers={"count": 2, "stages": 1})
    train = Train(tmp_path, job, "--coordinator", cluster.address)
    train.wait_for_checkpoint()
    refused = CliRunner().invoke(app, ["workers", "add", "--run-dir", str(train.run_dir)])
    assert "no device is free for another one; start an agent" in refused.stderr

    cluster.start_agent("n2")
    (told,) = workers(train, "add")["workers"]
    assert (told["vw"], told["devices"]) == (2, ["n2/0"])
    wait_for_lives(train, 1)
    wait_until(lambda: len(waves(train, 2, 1)) > 10, timeout_seconds=60.0, what="waves of the new virtual worker")
    assert states(train) == ["ready"] * 3
    assert len(used_in_epochs(train)) > 2
    outcome = stop(train)

    epochs = used_in_epochs(train)
    assert all(epoch == list(range(len(epoch))) for epoch in epochs)
    assert {len(epoch) for epoch in epochs} == {len(epochs[0])}
    joined = [line for line in lines_of(train, "join") if line["vw"] == 2]
    assert [(line["incarnation"], line["num_stages"]) for line in joined] == [(1, 1)]
    assert outcome.result["deaths"] == {"0": 0, "1": 0, "2": 0}
    assert (lines_of(train, "evict"), outcome.result["staleness"]["violations"]) == ([], 0)
    checked(train)
    plan = json.loads((train.run_dir / "plans" / "vw-2-life-1.json").read_text())
    assert [stage["agent"] for stage in plan["virtual_workers"][2]["stages"]] == ["n2"]
    assert len(json.loads((train.run_dir / "plan.json").read_text())["virtual_workers"]) == 2
