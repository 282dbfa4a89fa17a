"""Jobs that name a cluster and a profile: to be planned for it, or to play it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetpipe.errors import JobError
from hetpipe.job.file import Job, load_job

CLUSTER: dict[str, Any] = {
    "device_types": {"fast": {"memory_bytes": 1 << 30}, "slow": {"memory_bytes": 1 << 29}},
    "nodes": [{"name": "n0", "devices": ["fast", "slow"]}, {"name": "n1", "devices": ["slow"]}],
    "links": {
        "intra_node": {"bandwidth_bytes_per_second": 8e9},
        "inter_node": {"bandwidth_bytes_per_second": 1e9, "latency_seconds": 0.001},
    },
}
LAYER = {
    "name": "0",
    "parameter_bytes": 400,
    "activation_bytes": 100,
    "output_bytes": 40,
    "forward_ms": {"fast": 1.0, "slow": 2.5},
    "backward_ms": {"fast": 2.0, "slow": 5.0},
}
LAYERS = [LAYER, {**LAYER, "name": "1"}]
PROFILE: dict[str, Any] = {"version": 1, "model": "m", "batch_size": 4, "input_bytes": 16, "layers": LAYERS}
MINIMAL: dict[str, Any] = {
    "model": "model:build",
    "loss": "model:loss",
    "data": {"train": "model:data"},
    "optimizer": {"name": "SGD"},
    "epochs": 1,
    "batch_size": 4,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    return tmp_path


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, **changes}))
    return path


NAMED = {"file": "cluster.yaml", "profile": "profile.json"}


def test_files_beside_the_job_become_part_of_it(folder: Path) -> None:
    job = load_job(write(folder, workers={"stages": "auto"}, cluster={**NAMED, "emulate": True}))
    assert job.cluster.file is not None
    assert job.cluster.profile is not None
    assert list(job.cluster.file.devices) == ["n0/0", "n0/1", "n1/0"]
    assert job.cluster.profile.layers[1].forward_ms["slow"] == 2.5
    assert Job.model_validate(job.model_dump(mode="json")) == job
    assert Job.model_validate(json.loads(job.model_dump_json())) == job


def test_their_content_may_stand_in_the_job(folder: Path) -> None:
    named = load_job(write(folder, cluster=NAMED))
    assert Job(**MINIMAL, cluster={"file": CLUSTER, "profile": PROFILE}) == named


def test_a_plan_takes_the_place_of_auto() -> None:
    job = Job(**MINIMAL, workers={"stages": "auto", "allocation": "ED"})
    assert not job.is_planned
    with pytest.raises(JobError, match="unknown before the run is planned"):
        _ = job.num_devices
    planned = job.with_plan([[1, 1], [2]], minibatches_per_wave=8, staleness=0)
    assert planned.is_planned
    assert (planned.num_workers, planned.num_devices, planned.layer_counts(0)) == (2, 3, (1, 1))  # type: ignore[arg-type]
    assert planned.sync.minibatches_per_wave == 8


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"cluster": {"emulate": True}}, "cluster.emulate: needs `cluster.file`"),
        ({"cluster": {"file": CLUSTER, "emulate_links": True}}, "cluster.emulate_links: needs `emulate: true`"),
        ({"cluster": {"file": CLUSTER, "stragglers": {"n0/0": 2.0}}}, "cluster.stragglers: need `emulate: true`"),
        (
            {"cluster": {"file": CLUSTER, "profile": PROFILE, "emulate": True, "stragglers": {"n0/7": 2.0}}},
            "cluster.stragglers: name the text 'n0/7'",
        ),
        (
            {"cluster": {"devices": [{}], "file": CLUSTER, "profile": PROFILE, "emulate": True}},
            "cluster.emulate: and `devices` exclude each other",
        ),
        (
            {"cluster": {"slowdown": 2.0}},
            "cluster: slows devices down, which planning does not take into account; give",
        ),
        (
            {"precision": "bf16", "cluster": {"file": CLUSTER, "profile": PROFILE}},
            "cluster.profile: was measured in fp32, but `precision` is bf16, with other times and bytes; measure",
        ),
        ({"workers": {"allocation": "NP", "count": 2}}, "workers.count: is 2, but `stages: auto` plans"),
        ({"workers": {"stages": "auto", "count": 2}}, "workers.count: is 2, but `stages: auto` plans"),
        ({"workers": {"stages": 2, "allocation": "NP"}}, "workers.allocation: is NP, but `stages` already assigns"),
        ({"workers": {"stages": 2, "devices": [["n0/0"]]}}, "workers.devices: is given, but `stages` already assigns"),
        (
            {"workers": {"stages": "auto", "allocation": "NP", "devices": [["n0/0"]]}},
            "workers.devices: is given beside `allocation`",
        ),
    ],
)
def test_contradictions_are_one_problem_each(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(JobError) as caught:
        load_job({**MINIMAL, **changes})
    assert len(caught.value.problems) == 1, caught.value.problems
    assert caught.value.problems[0].startswith(expected), caught.value.problems


def test_mistakes_in_the_files_are_told_with_their_paths(folder: Path) -> None:
    broken = {**PROFILE, "batch_size": -1, "layers": [{**LAYER, "output_bytes": -5}]}
    (folder / "profile.json").write_text(json.dumps(broken))
    with pytest.raises(JobError) as caught:
        load_job(write(folder, cluster={"file": "nowhere.yaml", "profile": "profile.json"}))
    told = "\n".join(caught.value.problems)
    assert "cluster.file" in told
    assert "nowhere.yaml" in told
    assert "batch_size: must be at least 1, not -1" in told
    assert "layers[0].output_bytes: must be at least 0, not -5" in told
