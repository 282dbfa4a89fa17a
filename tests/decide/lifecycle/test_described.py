"""What a run is planned by: what the job names, else what was measured and registered."""

from __future__ import annotations

from typing import Any

import pytest

from hetpipe.decide.lifecycle.inspections import Inspected
from hetpipe.decide.lifecycle.known_cluster import cluster_of, describe
from hetpipe.errors import PlanError, UserError
from hetpipe.job.file import Job
from tests.decide.lifecycle.test_known_links import NOW
from tests.job.test_job_cluster import CLUSTER, PROFILE
from tests.server.coordinator.builders import BASE, agent_info, measured, model

AGENTS = (agent_info("n0", devices=2),)
TWO = Inspected(model(2), (measured("cpu", 2),))
GPUS: dict[str, Any] = {
    **CLUSTER,
    "device_types": {"T4": {}, "RTX_2060": {}},
    "nodes": [{"name": "a", "devices": ["T4", "RTX_2060"]}],
}


def job(**cluster: Any) -> Job:
    return Job(**{**BASE, "workers": {}, "cluster": cluster})


def test_what_the_job_names_comes_first() -> None:
    of = job(file=CLUSTER, profile=PROFILE)
    described = describe(of, Inspected(model(2)), AGENTS, now=NOW)
    assert (described.profile, described.cluster) == (of.cluster.profile, of.cluster.file)
    assert described.known.sources == ("stated",)


def test_without_either_it_is_what_is_there() -> None:
    described = describe(job(), TWO, AGENTS, now=NOW)
    assert described.cluster == cluster_of(AGENTS)
    assert described.known.sources == ("assumed",)
    assert described.profile.device_types == ("cpu",)
    assert [layer.name for layer in described.profile.layers] == ["layer0", "layer1"]
    assert (described.profile.batch_size, described.profile.estimated) == (4, ())


def test_types_of_the_file_that_nobody_has_are_estimated() -> None:
    described = describe(job(file=GPUS), TWO, AGENTS, now=NOW)
    assert described.profile.device_types == ("RTX_2060", "T4", "cpu")
    assert described.profile.estimated == ("T4", "RTX_2060")


def test_a_type_that_nobody_knows_is_refused() -> None:
    told = r"device type fast is not among those here \(cpu\), and is not in the catalogue"
    with pytest.raises(UserError, match=told):
        describe(job(file=CLUSTER), TWO, AGENTS, now=NOW)


def test_other_code_on_another_node_is_refused() -> None:
    found = Inspected(model(2), (measured("cpu", 2), measured("T4", 3)))
    with pytest.raises(PlanError, match=r"measured on T4 has other layers \(3\) than the one that was inspected \(2\)"):
        describe(job(), found, AGENTS, now=NOW)
