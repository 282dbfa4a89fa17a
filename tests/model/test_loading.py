"""What a stage does with the user's code before it is connected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from hetpipe.decide.planner.partition import plan_job
from hetpipe.job.file import Job
from hetpipe.server.agent import stage_assembly
from hetpipe.server.agent.stage_assembly import load_user_code
from hetpipe.values.ids import AgentId, Incarnation, JobId, StageIndex, Term, VirtualWorkerIndex
from hetpipe.values.rewinds import MODEL_FILE, rewind_folder
from hetpipe.values.run import AgentDevice, AgentInfo, DeviceConfig, StageConfig
from tests.model.test_runs import job_of
from tests.numerics.compare import ROOT
from tests.support.inspection import inspect_job

Configured = tuple[Job, StageConfig]


@pytest.fixture
def middle(tmp_path: Path) -> Configured:
    """The second of three stages."""
    job = job_of("u_net", stages=3, workers=1)
    devices = tuple(AgentDevice(f"n0/{index}", "cpu", 0, "cpu") for index in range(3))
    agent = AgentInfo(AgentId("n0"), "127.0.0.1", 0, devices)
    plan = plan_job(job, inspect_job(job, ROOT, run_folder=tmp_path), [agent], Term(1), JobId("loading"))
    return job, StageConfig(
        job=job.model_dump(mode="json"),
        plan=plan,
        vw=VirtualWorkerIndex(0),
        stage=StageIndex(1),
        incarnation=Incarnation(0),
        device=DeviceConfig("cpu"),
        shard_addresses=(),
        run_dir=str(tmp_path),
        import_path=str(ROOT),
        host="127.0.0.1",
    )


def refuse(what: str) -> Callable[..., Any]:
    def refusing(*_: object, **__: object) -> Any:
        raise AssertionError(what)

    return refusing


def test_a_stage_neither_records_the_model_nor_reads_data_to_cut_it(
    middle: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_assembly, "layers_of_job", refuse("recorded"))
    monkeypatch.setattr(stage_assembly, "build_datasets", refuse("data is read"))
    stage = middle[1].plan.stage(VirtualWorkerIndex(0), StageIndex(1))
    assert len(load_user_code(*middle).layers) == stage.last_layer - stage.first_layer


def test_a_job_that_went_back_to_a_checkpoint_still_has_the_file_of_its_inspection(
    middle: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_assembly, "layers_of_job", refuse("recorded"))
    job, config = middle
    folder = rewind_folder(config.run_dir, 2)
    Path(folder).mkdir()
    assert load_user_code(job, replace(config, run_dir=folder)).layers


def test_without_the_file_a_stage_finds_the_same_layers_for_itself_and_says_so(middle: Configured) -> None:
    job, config = middle
    expected = load_user_code(job, config).layers
    (Path(config.run_dir) / MODEL_FILE).unlink()
    with structlog.testing.capture_logs() as logs:
        found = load_user_code(job, config).layers
    assert [layer.name for layer in found] == [layer.name for layer in expected]
    assert [layer.parameters for layer in found] == [layer.parameters for layer in expected]
    assert [log["event"] for log in logs] == ["model_file_unusable"]
