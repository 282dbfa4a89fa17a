"""A planned job on a cluster measures the links that nobody knows; its plan says of each where its figures are from."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.profiler.link_cache import LinkCache, NodeLinks
from hetpipe.values.link_measurement import MeasuredLinks
from tests.decide.lifecycle.test_known_links import link
from tests.processes.harness import HETPIPE, ROOT, Train, write_job
from tests.processes.test_departure import Cluster

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive, pytest.mark.timeout(240)]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two agents on a machine whose own links were measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine = socket.gethostname()
    measured = replace(link(machine, machine, 7e8), measured_at=SYSTEM_CLOCK.wall())
    LinkCache(os.environ, machine=machine, device_types=["cpu"]).keep(MeasuredLinks(links=(measured,)))
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def test_a_plan_is_made_with_the_link_that_two_agents_have_measured(cluster: Cluster, tmp_path: Path) -> None:
    job = write_job(tmp_path, epochs=1, workers={}, sync={"D": 1})
    outcome = Train(tmp_path, job, "--coordinator", cluster.address).finish()
    assert outcome.returncode == 0, outcome.stderr
    assert "links: measured within n0, within n1, between n0 and n1" in outcome.stderr
    found = json.loads((tmp_path / "run-0" / "forecast.json").read_text())["links"]
    told = {tuple(each["between"]): each for each in found}
    assert {each["source"] for each in found} == {"measured"}
    assert told["n0", "n0"]["bytes_per_second"] == 7e8
    between = told["n0", "n1"]
    assert between["bytes_per_second"] not in {7e8, 1.25e9}
    assert 0.0 <= SYSTEM_CLOCK.wall() - between["measured_at"] < 120.0
    for node in ("n0", "n1"):
        kept = NodeLinks(os.environ, machine=socket.gethostname(), node=node, device_types=["cpu"])
        links = {each.between: each for each in kept.find(now=SYSTEM_CLOCK.wall()).links}
        assert links["n0", "n1"].measured_at == between["measured_at"], f"the agent of {node} remembers it"

    command = [str(HETPIPE), "profile", "--links", "--coordinator", cluster.address, "--fresh", "--json"]
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert again.returncode == 0, again.stderr
    answer = json.loads(again.stdout.splitlines()[-1])
    (newer,) = [each for each in answer["measured"]["links"] if each["between"] == ["n0", "n1"]]
    assert newer["measured_at"] > between["measured_at"], "an operator has it measured without a job"
    assert answer["remark"] == ""
