"""What a coordinator tells Prometheus."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.observe.metric_names import families_of
from hetpipe.observe.readings import Distribution, sorted_by_family
from hetpipe.server.coordinator.readings import readings
from hetpipe.values.commands import KeyedStageReport
from hetpipe.values.events import JobState
from hetpipe.values.freezing import FrozenSince
from hetpipe.values.ids import Clock, Term
from hetpipe.values.utilisation import ModelSpeed
from tests.server.coordinator.builders import JOB_ID, STAGES, clocks, job, progress, submission
from tests.server.coordinator.fakes import Cluster

FROZEN = (FrozenSince(Clock(1), 1, 1), FrozenSince(Clock(2), 2, 3))


def read(cluster: Cluster) -> dict[tuple[object, ...], float]:
    """Name and labels → value."""
    found: dict[tuple[object, ...], float] = {}
    for reading in readings(cluster.coordinator):
        assert not isinstance(reading.value, Distribution)
        assert (reading.name, *reading.labels) not in found, "a series comes once"
        found[reading.name.removeprefix("hetpipe_"), *reading.labels] = reading.value
    return found


def training(folder: Path) -> Cluster:
    cluster = Cluster(folder / "run").usual()
    cluster.coordinator.submit_job(submission(job(), str(cluster.run_dir)))
    cluster.train()
    for vw, stage in STAGES:
        key = next(key for key in cluster.stages(f"n{vw}", JOB_ID) if (key.vw, key.stage) == (vw, stage))
        report = progress(samples=40, clock=5, loss=0.5, waiting_seconds=1.0, weight_bytes=300, activation_bytes=20)
        report = replace(report, losses={"main": 0.4, "aux": 0.2})
        cluster.tell(f"n{vw}", KeyedStageReport(key, report))
    told = replace(clocks(6, 4, samples=80, minibatches=20), term=Term(3), frozen=FROZEN)
    cluster.beat("ps0", clocks={JOB_ID: told})
    cluster.wait(4.0)
    return cluster


def test_a_cluster_without_a_job(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run").usual()
    cluster.wait(5.0, silent=("n1",))
    cluster.clock.advance(1.0)
    found = read(cluster)
    assert (found["members", "agent"], found["members", "parameter_server"], found["members", "worker"]) == (1, 2, 0)
    assert (found["leases_expired_total", "agent"], found["leases_expired_total", "parameter_server"]) == (1, 0)
    assert (found["lease_seconds",], found["lease_seconds_left", "agent"]) == (5.0, 4.0)
    assert ("lease_seconds_left", "worker") not in found
    assert [found["jobs", state.value] for state in JobState] == [0] * 10


def test_a_running_job(tmp_path: Path) -> None:
    found = read(training(tmp_path))
    assert found["jobs", "running"] == 1
    expected = {
        "job_term": 3,
        "job_global_clock": 4,
        "job_published_clock": 4,
        "job_barrier_clock": 10,
        "job_clock_distance": 2,
        "job_clock_distance_bound": 1,
        "job_epoch": 0,
        "job_minibatches_total": 20,
        "job_samples_total": 80,
        "job_frozen_layers": 3,
    }
    assert {name: found[name, JOB_ID] for name in expected} == expected
    assert [found["vw_clock", JOB_ID, vw] for vw in (0, 1)] == [6, 4]
    assert [found["vw_clock_distance", JOB_ID, vw] for vw in (0, 1)] == [2, 0]
    assert found["vw_loss", JOB_ID, 0] == 0.5
    assert (found["vw_loss_by_name", JOB_ID, 0, "main"], found["vw_loss_by_name", JOB_ID, 0, "aux"]) == (0.4, 0.2)
    assert found["vw_memory_bytes", JOB_ID, 1] == 640
    assert 0.0 < found["vw_waiting_ratio", JOB_ID, 0] < 1.0
    assert found["job_running_seconds", JOB_ID] > 0.0
    assert found["job_events_total", JOB_ID, "state_changed"] == 4
    assert found["job_events_total", JOB_ID, "rewound"] == 0, "told before the first, which would be no increase"


def test_every_metric_of_the_list_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speed = ModelSpeed(1280.0, 0.2, None)
    monkeypatch.setattr("hetpipe.decide.lifecycle.training.speed_of", lambda *_: speed)
    told = sorted_by_family(readings(training(tmp_path).coordinator), "coordinator")
    elsewhere = {"hetpipe_info", "hetpipe_rpc_handled_total", "hetpipe_rpc_refused_total", "hetpipe_rpc_seconds"}
    assert {family.name for family in told} == {family.name for family in families_of("coordinator")} - elsewhere


def test_an_ended_job_leaves_only_its_events(tmp_path: Path) -> None:
    cluster = training(tmp_path)
    cluster.finish(JOB_ID)
    cluster.executor.run_all()
    found = read(cluster)
    assert (found["jobs", "running"], found["jobs", "finished"]) == (0, 1)
    assert found["job_events_total", JOB_ID, "ended"] == 1
    assert {series[0] for series in found if JOB_ID in series} == {"job_events_total"}
