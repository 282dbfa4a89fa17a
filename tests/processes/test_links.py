"""A planned job on a cluster: its plan says of each link whether it was measured or is assumed."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.profiler.link_cache import LinkCache
from hetpipe.spec.link_measurement import MeasuredLinks
from tests.coordinator.test_known_links import link
from tests.processes.harness import Train, write_job
from tests.processes.test_departure import Cluster

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine = socket.gethostname()
    measured = replace(link(machine, machine, 7e8), measured_at=SYSTEM_CLOCK.wall())
    LinkCache(os.environ, machine=machine, device_types=["cpu"]).keep(MeasuredLinks(links=(measured,)))
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def test_a_plan_says_which_links_were_measured(cluster: Cluster, tmp_path: Path) -> None:
    job = write_job(tmp_path, epochs=1, workers={}, sync={"D": 1})
    outcome = Train(tmp_path, job, "--coordinator", cluster.address).finish()
    assert outcome.returncode == 0, outcome.stderr
    assert "links: measured within n0, within n1; assumed between n0 and n1" in outcome.stderr
    found = json.loads((tmp_path / "run-0" / "forecast.json").read_text())["links"]
    told = {tuple(link["between"]): (link["source"], link["bytes_per_second"]) for link in found}
    assert told[("n0", "n0")] == ("measured", 7e8)
    assert told[("n0", "n1")] == ("assumed", 1.25e9)
